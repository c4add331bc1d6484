use std::sync::Arc;

use ibverbs::{Channel, Inline};

pub fn case(channel: Arc<Channel<'static>>) {
    std::thread::spawn(move || channel.send(Inline(b"mine?")).map(drop)).join().unwrap();
}

fn main() {}
