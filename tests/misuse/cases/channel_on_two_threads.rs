use ibverbs::{Channel, Inline};

pub fn case(channel: &mut Channel<'_>) {
    std::thread::scope(|threads| {
        threads.spawn(|| channel.send(Inline(b"one")));
    }); //~ RIGHT
    std::thread::scope(|threads| { //~ RIGHT
        threads.spawn(|| channel.send(Inline(b"two")));
    });
}
