use ibverbs::channel::PreparedWindow;
use ibverbs::{Inline, SendWorkRequest};

pub fn case(bytes: &[u8]) {
    let _ = PreparedWindow::new([SendWorkRequest::new(Inline(bytes))]);
}
