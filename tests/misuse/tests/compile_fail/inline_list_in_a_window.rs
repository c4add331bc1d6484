use std::io::IoSlice;

use ibverbs::channel::PreparedWindow;
use ibverbs::memory::InlineList;
use ibverbs::SendWorkRequest;

pub fn case(bytes: &[u8]) {
    let _ = PreparedWindow::new([SendWorkRequest::new(InlineList(&[IoSlice::new(bytes)]))]);
}

fn main() {}
