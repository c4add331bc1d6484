use std::io::IoSlice;

use ibverbs::{InlineList, PreparedWindow, SendWorkRequest};

pub fn case(bytes: &[u8]) {
    let _ = PreparedWindow::new([SendWorkRequest::new(InlineList(&[IoSlice::new(bytes)]))]);
}

fn main() {}
