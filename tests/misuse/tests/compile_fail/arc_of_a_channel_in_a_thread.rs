use std::sync::Arc;

use ibverbs::Channel;

pub fn case(channel: Arc<Channel<'static>>) {
    std::thread::spawn(move || channel.send_inline(b"mine?").map(drop)).join().unwrap();
}

fn main() {}
