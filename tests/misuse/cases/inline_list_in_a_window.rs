use std::io::IoSlice; //~ ERROR
//~ ERROR
use ibverbs::channel::PreparedWindow;
use ibverbs::memory::InlineList; //~ ERROR
use ibverbs::SendWorkRequest; //~ ERROR
use ibverbs::{Inline, SendWorkRequest}; //~ RIGHT

pub fn case(bytes: &[u8]) {
    let _ = PreparedWindow::new([SendWorkRequest::new(InlineList(&[IoSlice::new(bytes)]))]); //~ ERROR
    let _ = PreparedWindow::new([SendWorkRequest::new(Inline(bytes))]); //~ RIGHT
}
