use ibverbs::Channel;

pub fn case(channel: &mut Channel<'_>) {
    std::thread::scope(|threads| {
        threads.spawn(|| channel.send_inline(b"one"));
    });
    std::thread::scope(|threads| {
        threads.spawn(|| channel.send_inline(b"two"));
    });
}
