use std::sync::{Arc, Mutex};

use ibverbs::{Channel, Inline};

pub fn case(channel: Arc<Mutex<Channel<'static>>>) {
    let send = move || channel.lock().unwrap().send(Inline(b"mine")).map(drop);
    std::thread::spawn(send).join().unwrap().unwrap();
}
