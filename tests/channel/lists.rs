//! Lists of buffers that operations own: each list is one message.

use std::sync::Arc;

use ibverbs::channel::{AnyBuffer, OwnedBuffer};
use ibverbs::memory::SharedMemoryRange;
use ibverbs::{
    AccessFlags, BufferPool, ChannelId, Loop, PooledBuffer, ReadWorkRequest, ReceiveWorkRequest,
    SendWorkRequest, SharedMemoryRegion, WriteWorkRequest,
};

use crate::loops::next;
use crate::pair::{ALL, Pair, connect};

const CHUNK: usize = 8;

/// Two channels of a loop, with room for `pieces` pieces a request.
fn both<B>(pair: &Pair, pieces: u32) -> (Loop<'static, B>, ChannelId, ChannelId) {
    let mut event_loop = Loop::new(pair.domain.context_parent(), 64).unwrap();
    let side = || {
        let channel = event_loop.create_channel(&pair.domain).access(ALL);
        channel.max_send_sge(pieces).max_recv_sge(pieces)
    };
    let (one, two) = connect(side(), side());
    let [one, two] = [one, two].map(|channel| event_loop.add(channel).unwrap());
    (event_loop, one, two)
}

fn with(pool: &BufferPool, bytes: &[u8]) -> PooledBuffer {
    pool.take_from(bytes).unwrap().unwrap()
}

fn text(buffers: &[PooledBuffer]) -> Vec<&[u8]> {
    buffers.iter().map(|buffer| &buffer[..]).collect()
}

#[test]
fn a_message_of_several_buffers_fills_several_and_sets_their_lengths() {
    let pair = Pair::new();
    let pool = BufferPool::new(&pair.domain, CHUNK, 16, AccessFlags::empty()).unwrap();
    let (mut event_loop, one, two) = both::<Vec<PooledBuffer>>(&pair, 3);
    for message in [&b""[..], b"one", b"eight by", b"eight by eight", b"twenty-four bytes in all"] {
        let filled: Vec<_> = (0..3).map(|_| with(&pool, b"before")).collect();
        event_loop.post(two, ReceiveWorkRequest::new(filled), 2).unwrap();
        // As many buffers as the message needs, which only the run tells.
        let sent: Vec<_> = message.chunks(CHUNK).map(|chunk| with(&pool, chunk)).collect();
        event_loop.post(one, SendWorkRequest::new(sent), 1).unwrap();
        let mut ended = [next(&mut event_loop), next(&mut event_loop)];
        ended.sort_by_key(|ended| ended.token);
        let [sent, received] = ended;
        assert_eq!(
            sent.result().and(received.result()).unwrap().byte_len() as usize,
            message.len()
        );
        assert_eq!(text(&sent.buffer).concat(), message);
        let mut expected: Vec<_> = message.chunks(CHUNK).collect();
        expected.resize(3, b"");
        assert_eq!(text(&received.buffer), expected);
    }
    assert_eq!(pool.available(), 16);
    drop((event_loop, pool));
    pair.finish();
}

/// Posts both, and returns the receive's buffer.
#[track_caller]
fn message<S, R>(
    event_loop: &mut Loop<'static, AnyBuffer>,
    [one, two]: [ChannelId; 2],
    sent: S,
    room: R,
) -> R
where
    S: OwnedBuffer,
    R: OwnedBuffer,
{
    event_loop.post(two, ReceiveWorkRequest::new(room), 2).unwrap();
    event_loop.post(one, SendWorkRequest::new(sent), 1).unwrap();
    let mut ended = [next(event_loop), next(event_loop)];
    ended.sort_by_key(|ended| ended.token);
    let [sent, received] = ended;
    sent.result().and(received.result()).unwrap();
    sent.buffer.downcast::<S>().unwrap();
    received.buffer.downcast::<R>().unwrap()
}

#[test]
fn arrays_tuples_and_vectors_are_told_their_lengths_by_a_loop_of_any_buffers() {
    let pair = Pair::new();
    let pool = BufferPool::new(&pair.domain, CHUNK, 16, AccessFlags::empty()).unwrap();
    let region = Arc::new(SharedMemoryRegion::<u8>::new(&pair.domain, 64, ALL).unwrap());
    let range = |range| SharedMemoryRange::new(region.clone(), range).unwrap();
    let new = |bytes: &[u8]| with(&pool, bytes);
    let (mut event_loop, one, two) = both::<AnyBuffer>(&pair, 4);
    let ids = [one, two];

    // The second buffer gets what the range has no room for.
    let (_, tail) =
        message(&mut event_loop, ids, [new(b"abcd"), new(b"efg")], (range(8..12), new(b"before")));
    assert_eq!((&region.to_vec()[8..12], &tail[..]), (&b"abcd"[..], &b"efg"[..]));
    let room = || [new(b"before"), new(b"before")];
    let both = message(&mut event_loop, ids, (range(8..10), new(b"c")), room());
    assert_eq!(text(&both), [b"abc", &b""[..]]);
    let more = message(&mut event_loop, ids, vec![range(8..12); 3], Vec::from(room()));
    assert_eq!(text(&more), [b"abcdabcd", &b"abcd"[..]]);
    // A buffer of one piece in the same places of the same loop.
    let one_piece = message(&mut event_loop, ids, new(b"one"), new(b"before"));
    assert_eq!(one_piece[..], *b"one");

    let target = SharedMemoryRegion::<u8>::new(&pair.domain, 8, ALL).unwrap();
    let write = WriteWorkRequest::new(vec![range(10..12), range(8..10)], target.remote());
    event_loop.post(one, write, 3).unwrap();
    next(&mut event_loop).result().unwrap();
    assert_eq!(target.to_vec(), b"cdab\0\0\0\0");
    let read = ReadWorkRequest::new(vec![range(0..1), range(63..64)], target.remote());
    event_loop.post(one, read, 4).unwrap();
    next(&mut event_loop).result().unwrap();
    assert_eq!((region.read_one(0), region.read_one(63)), (Ok(b'c'), Ok(b'd')));

    // A receive that fails: nothing was received.
    event_loop.post(two, ReceiveWorkRequest::new(room()), 5).unwrap();
    event_loop.remove(two).unwrap();
    let failed = next(&mut event_loop);
    assert!(failed.result().is_err());
    assert_eq!(text(&failed.buffer.downcast::<[PooledBuffer; 2]>().unwrap()), [b"", b""]);
    drop((event_loop, both, more, one_piece, tail, pool, region, target));
    pair.finish();
}

#[test]
fn empty_pieces_are_left_out_and_the_others_counted() {
    let pair = Pair::new();
    let region = Arc::new(SharedMemoryRegion::<u8>::new(&pair.domain, 64, ALL).unwrap());
    let range = |range| SharedMemoryRange::new(region.clone(), range).unwrap();
    let (mut event_loop, one, two) = both::<AnyBuffer>(&pair, 1);
    region.write(0, b"12345678").unwrap();
    let room = [range(0..0), range(32..40), range(63..63), range(64..64)];
    message(
        &mut event_loop,
        [one, two],
        vec![range(8..8), range(0..8), range(0..0)],
        Vec::from(room),
    );
    assert_eq!(region.to_vec()[32..40], *b"12345678");
    let read = ReadWorkRequest::new(vec![range(16..16), range(48..56)], range(0..8).remote());
    event_loop.post(one, read, 3).unwrap();
    next(&mut event_loop).result().unwrap();
    assert_eq!(region.to_vec()[48..56], *b"12345678");
    let two_pieces = SendWorkRequest::new(vec![range(0..1), range(0..0), range(1..2)]);
    let refused = event_loop.post(one, two_pieces, 4).unwrap_err();
    assert!(refused.error.to_string().contains("the number of pieces is 2"), "{}", refused.error);
    drop((event_loop, refused, region));
    pair.finish();
}
