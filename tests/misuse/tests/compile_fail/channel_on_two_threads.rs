use ibverbs::{Channel, Inline};

pub fn case(channel: &mut Channel<'_>) {
    std::thread::scope(|threads| {
        threads.spawn(|| channel.send(Inline(b"one")));
        threads.spawn(|| channel.send(Inline(b"two")));
    });
}

fn main() {}
