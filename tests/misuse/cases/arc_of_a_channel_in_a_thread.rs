use std::sync::Arc; //~ ERROR
use std::sync::{Arc, Mutex}; //~ RIGHT

use ibverbs::{Channel, Inline};

pub fn case(channel: Arc<Channel<'static>>) { //~ ERROR
    std::thread::spawn(move || channel.send(Inline(b"mine?")).map(drop)).join().unwrap(); //~ ERROR
pub fn case(channel: Arc<Mutex<Channel<'static>>>) { //~ RIGHT
    let send = move || channel.lock().unwrap().send(Inline(b"mine")).map(drop); //~ RIGHT
    std::thread::spawn(send).join().unwrap().unwrap(); //~ RIGHT
}
