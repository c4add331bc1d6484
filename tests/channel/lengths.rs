//! The lengths of pooled buffers: a send has what was written, and nothing of the chunk's earlier users; a receive has room
//! for the whole chunk, and its buffer is as long as the message, on every layer.

use std::io::Write as _;

use ibverbs::channel::AnyBuffer;
use ibverbs::{
    AccessFlags, BufferPool, Inline, Loop, PooledBuffer, ReadWorkRequest, ReceiveWorkRequest,
    SendWorkRequest, TransportError, TransportResult, WriteWorkRequest,
};
use ibverbs_function_device::{FunctionDevice, Progress};
use ibverbs_software::{Verb, When};

use crate::loops::{Loops, next};
use crate::pair::Pair;
use crate::software::Software;

const CHUNK: usize = 64;

/// Each chunk is full of another client's bytes.
fn used(pair: &Pair, chunks: usize) -> BufferPool {
    let pool = BufferPool::new(&pair.domain, CHUNK, chunks, AccessFlags::empty()).unwrap();
    let all: Vec<_> =
        (0..chunks).map(|_| pool.take_from(b"secret!!".repeat(8).as_slice()).unwrap()).collect();
    assert!(all.iter().all(|buffer| buffer.as_ref().unwrap().len() == CHUNK));
    drop(all);
    pool
}

#[test]
fn a_send_has_the_bytes_that_were_written_and_no_others() {
    let mut pair = Pair::new();
    let pool = used(&pair, 4);
    let mut room = pair.region(CHUNK, 0);
    room.fill(0x55);
    let Pair { one, two, .. } = &mut pair;
    let mut written = pool.take().unwrap();
    write!(written, "hello, ").unwrap();
    written.extend_from_slice(b"you").unwrap();
    let mut by_hand = pool.take().unwrap();
    by_hand.spare_capacity_mut()[..2].copy_from_slice(b"hi");
    by_hand.set_len(2).unwrap();
    let mut again = pool.take_from(b"something longer").unwrap().unwrap();
    again.clear();
    again.extend_from_slice(b"new").unwrap();
    let all = [
        (written, &b"hello, you"[..]),
        (by_hand, b"hi"),
        (again, b"new"),
        (pool.take().unwrap(), b""),
    ];
    for (buffer, expected) in all {
        let mut receive = two.scope(|s| -> TransportResult<_> {
            let receive = s.post_receive(room.slice_mut(..)?)?;
            one.send(&buffer)?;
            Ok(receive.wait()?.1)
        });
        assert_eq!(receive.as_mut().unwrap().byte_len() as usize, expected.len());
        assert_eq!(room[..expected.len()], *expected);
        assert!(room[expected.len()..].iter().all(|&byte| byte == 0x55), "{:?}", &room[..]);
        room.fill(0x55);
    }
    let mut full = pool.take_from(&[1; CHUNK - 1]).unwrap().unwrap();
    assert_eq!(full.write(&[2; 3]).unwrap(), 1);
    assert_eq!((full.write(&[3]).unwrap(), full[CHUNK - 1], full.len()), (0, 2, CHUNK));
    drop((full, pool, room));
    pair.finish();
}

/// A write to the peer, too; and a read asks for as much as the buffer has.
#[test]
fn a_write_and_a_read_have_the_length_of_the_buffer() {
    let mut pair = Pair::new();
    let (pool, target) = (used(&pair, 2), pair.shared(8));
    target.write(0, &[7; 8]).unwrap();
    let one = &mut pair.one;
    let buffer = pool.take_from(b"12345678").unwrap().unwrap();
    one.run(WriteWorkRequest::new(&buffer, target.remote())).unwrap();
    assert_eq!(target.to_vec()[1..], [7; 7]);
    let mut read = pool.take_from(&[0; 3]).unwrap().unwrap();
    one.read(&mut read, target.remote()).unwrap();
    assert_eq!(read[..], *b"123");
    drop((buffer, read));
    let empty = one.run(ReadWorkRequest::new(&mut pool.take().unwrap(), target.remote()));
    let error = empty.unwrap_err().to_string();
    assert!(error.contains("the buffer is empty") && error.contains("set_len"), "{error}");
    drop((pool, target));
    pair.finish();
}

/// A short buffer takes a longer message; a long one is shortened.
#[test]
fn a_blocking_receive_sets_the_length() {
    let mut pair = Pair::new();
    let (pool, target) = (used(&pair, 2), pair.shared(8));
    let Pair { one, two, .. } = &mut pair;
    let mut buffer = pool.take().unwrap();
    for message in [&b"a"[..], b"longer", &[9; CHUNK], b"", b"short"] {
        let sent = pool.take_from(message).unwrap().unwrap();
        one.scope(|s| -> TransportResult<()> {
            let send = s.post_send(&sent)?;
            two.receive(&mut buffer)?;
            send.wait().map(drop)
        })
        .unwrap();
        assert_eq!(buffer[..], *message);
        // A write that tells that it is there leaves the buffer of the receive as it was.
        one.scope(|s| -> TransportResult<()> {
            let write =
                s.post(WriteWorkRequest::new(Inline(b"8 bytes."), target.remote()).immediate(1))?;
            two.receive(&mut buffer)?;
            write.wait().map(drop)
        })
        .unwrap();
        assert_eq!(buffer[..], *message);
    }
    drop((buffer, pool, target));
    pair.finish();
}

/// The handle was waited for, or was dropped before the message came, or after it.
#[test]
fn a_scope_sets_the_length_whoever_asks_for_the_result() {
    let mut pair = Pair::new();
    let pool = used(&pair, 3);
    let Pair { one, two, .. } = &mut pair;
    let mut buffers = [(); 3].map(|()| pool.take_from(b"it was longer").unwrap().unwrap());
    let [waited, dropped, late] = &mut buffers;
    two.scope(|s| -> TransportResult<()> {
        let (waited, _, late) =
            (s.post_receive(waited)?, s.post_receive(dropped)?, s.post_receive(late)?);
        for message in [&b"one"[..], b"two", b"three"] {
            one.send(Inline(message))?;
        }
        let (waited, _) = waited.wait()?;
        assert_eq!(waited[..], *b"one");
        let mut late = late;
        while late.poll().is_none() {}
        drop(late);
        Ok(())
    })
    .unwrap();
    assert_eq!(buffers.each_ref().map(|buffer| &buffer[..]), [&b"one"[..], b"two", b"three"]);
    // Reset with one in flight: it stays as it is, and the device does not touch it any more.
    let [first, ..] = &mut buffers;
    let failed = two.scope(|s| -> TransportResult<()> {
        drop(s.post_receive(first)?);
        Err(ibverbs::TransportError::Cancelled)
    });
    assert!(failed.is_err());
    assert_eq!(buffers[0][..], *b"one");
    drop((buffers, pool));
    pair.finish();
}

/// A message that goes to several buffers, one after the other.
#[test]
fn the_buffers_of_one_receive_have_its_parts() {
    let mut pair = Pair::new();
    let pool = used(&pair, 3);
    let (source, mut header) = (pair.region(4 + CHUNK + 5, 0), pair.region(4, 99));
    let Pair { one, two, .. } = &mut pair;
    let [mut first, mut second] = [(); 2].map(|()| pool.take().unwrap());
    for len in [source.len(), 4 + CHUNK, 4 + 7, 4, 2] {
        let message = source.slice(..len).unwrap();
        let send = |one: &mut ibverbs::Channel<'_>| one.send(message).map(drop);
        let is_right = |first: &PooledBuffer, second: &PooledBuffer| {
            let parts: Vec<u8> = first.iter().chain(&second[..]).copied().collect();
            assert_eq!(parts, source[4.min(len)..len]);
        };
        two.scope(|s| -> TransportResult<()> {
            let room = (header.slice_mut(..)?, &mut first, &mut second);
            let receive = s.post_receive(room)?;
            send(one)?;
            receive.wait().map(drop)
        })
        .unwrap();
        is_right(&first, &second);
        first.clear();
        two.scope(|s| -> TransportResult<()> {
            let receive = s.post_receive(vec![&mut first, &mut second])?;
            send(one)?;
            receive.wait().map(drop)
        })
        .unwrap();
        assert_eq!(first[..], source[..len.min(CHUNK)]);
        assert_eq!(second[..], source[len.min(CHUNK)..len]);
        let mut both = [first, second];
        two.scope(|s| -> TransportResult<()> {
            let receive = s.post_receive(&mut both)?;
            send(one)?;
            receive.wait().map(drop)
        })
        .unwrap();
        [first, second] = both;
        assert_eq!(second[..], source[len.min(CHUNK)..len]);
    }
    drop((first, second, pool, source, header));
    pair.finish();
}

/// The program does not learn the length of a message that comes after the handle was dropped. Its buffers are then empty, and not
/// as long as an earlier message. A buffer that is sent keeps its length.
#[test]
fn the_buffers_of_a_dropped_handle_have_no_earlier_length() {
    let mut pair = Pair::new();
    let pool = used(&pair, 4);
    let Pair { one, two, .. } = &mut pair;
    let take = || pool.take_from(b"it was longer").unwrap().unwrap();
    let mut early = [take(), take()];
    two.scope(|s| -> TransportResult<()> {
        drop(s.post_receive(&mut early)?);
        one.send(Inline(b"early")).map(drop)
    })
    .unwrap();
    assert!(early.iter().all(|buffer| buffer.is_empty()), "{early:?}");
    // This message comes before the handle is dropped.
    let mut come = early.map(|mut buffer| {
        buffer.extend_from_slice(b"it was longer").unwrap();
        buffer
    });
    two.scope(|s| -> TransportResult<()> {
        let mut receive = s.post_receive(&mut come)?;
        one.send(Inline(b"come"))?;
        while receive.poll().is_none() {}
        drop(receive);
        Ok(())
    })
    .unwrap();
    assert_eq!([&come[0][..], &come[1][..]], [&b"come"[..], b""]);
    // A buffer that is sent keeps its contents.
    let mut room = pool.take().unwrap();
    two.scope(|s| -> TransportResult<()> {
        let receive = s.post_receive(&mut room)?;
        one.scope(|s| s.post_send([&come[0], &come[0]]).map(drop))?;
        receive.wait().map(drop)
    })
    .unwrap();
    assert_eq!((&come[0][..], &room[..]), (&b"come"[..], &b"comecome"[..]));
    drop((come, room, pool));
    pair.finish();
}

/// A message, and a write that tells that it is there.
#[test]
fn a_loop_sets_the_length_of_what_it_gives_back() {
    let mut loops = Loops::on(Software::new());
    let (channel, peer) = loops.connect();
    let mut any = Loop::<AnyBuffer>::new(loops.domain.context_parent(), 64).unwrap();
    let (one, two) = crate::pair::connect(loops.prepare(&any), loops.prepare(&any));
    let (one, two) = (any.add(one).unwrap(), any.add(two).unwrap());
    let target =
        ibverbs::SharedMemoryRegion::<u64>::new(&loops.domain, 2, crate::pair::ALL).unwrap();
    let mut buffer = loops.filled(0xee);
    for message in [&b"a"[..], b"longer", &[9; 16], b"", b"short"] {
        let sent = loops.pool.take_from(message).unwrap().unwrap();
        loops.peers.post(peer, ReceiveWorkRequest::new(buffer), 1).unwrap();
        loops.here.post(channel, SendWorkRequest::new(sent), 2).unwrap();
        let sent = next(&mut loops.here).buffer;
        assert_eq!(sent[..], *message);
        buffer = next(&mut loops.peers).buffer;
        assert_eq!(buffer[..], *message);
        loops.peers.post(peer, ReceiveWorkRequest::new(buffer), 3).unwrap();
        let write = WriteWorkRequest::new(sent, target.remote()).immediate(4);
        loops.here.post(channel, write, 5).unwrap();
        let sent = next(&mut loops.here).buffer;
        let told = next(&mut loops.peers);
        assert_eq!(told.result().unwrap().immediate(), Some(4));
        assert_eq!(told.buffer[..], *message, "a write leaves the buffer of the receive as it was");
        any.post(two, ReceiveWorkRequest::new(told.buffer), 6).unwrap();
        any.post(one, SendWorkRequest::new(Inline(b"any")), 7).unwrap();
        let mut ended = [next(&mut any), next(&mut any)];
        ended.sort_by_key(|ended| ended.token);
        let [received, _] = ended;
        buffer = received.buffer.downcast().unwrap();
        assert_eq!(buffer[..], *b"any");
        drop(sent);
    }
    // A buffer whose receive ends with the channel keeps its length, whether or not a part of a
    // message has come.
    loops.peers.post(peer, ReceiveWorkRequest::new(buffer), 8).unwrap();
    loops.peers.remove(peer).unwrap();
    assert_eq!(next(&mut loops.peers).buffer[..], *b"any");
    drop((any, target));
    loops.finish();
}

/// Completions that are polled together, of which one has failed, take another way.
#[test]
fn a_loop_sets_the_lengths_of_what_it_polls_with_a_failure() {
    let mut loops = Loops::on(Software::new());
    let (channel, peer) = loops.connect();
    for token in 0..3 {
        loops.receive(peer, token);
    }
    for message in [&b"one"[..], b"two"] {
        let sent = loops.pool.take_from(message).unwrap().unwrap();
        loops.here.post(channel, SendWorkRequest::new(sent), 0).unwrap();
        next(&mut loops.here).result().unwrap();
    }
    loops.peers.remove(peer).unwrap();
    let all: Vec<_> = (0..3).map(|_| next(&mut loops.peers)).collect();
    assert_eq!(all[0].buffer[..], *b"one");
    assert_eq!(all[1].buffer[..], *b"two");
    assert!(all[2].result().is_err());
    assert_eq!(all[2].buffer[..], [0; crate::loops::LEN]);
    drop(all);
    loops.finish();
}

/// A receive whose handle was dropped, into a pooled buffer, ends with a reset, which has no completion. The device has no room
/// for another queue pair, so the channel goes on with the same one, and its slots.
#[test]
fn a_receive_after_a_reset_leaves_the_buffers_before_it() {
    let mut pair = Pair::new();
    let pool = used(&pair, 4);
    let mut pooled = [(); 4].map(|()| pool.take_from(b"it was longer").unwrap().unwrap());
    let mut plain = pair.region(12, 0);
    pair.device.fail_next(Verb::ModifyQp, libc::EIO);
    let stopped = pair.two.scope(|s| -> TransportResult<()> {
        for buffer in &mut pooled {
            drop(s.post_receive(buffer)?);
        }
        Err(TransportError::Cancelled)
    });
    assert!(stopped.is_err());
    pair.device.fail(Verb::CreateQp, libc::ENOMEM, When::Before, 2);
    let mut pair = pair.reconnect();
    let Pair { one, two, .. } = &mut pair;
    let (first, rest) = plain.slice_mut(..).unwrap().split_at(4).unwrap();
    let (second, third) = rest.split_at(4).unwrap();
    // All are polled by the wait for the last: the first has its result in its slot then, and the second has none that asks.
    two.scope(|s| -> TransportResult<()> {
        let first = s.post_receive(first)?;
        drop(s.post_receive(second)?);
        let third = s.post_receive(third)?;
        for message in [b"1st", b"2nd", b"3rd"] {
            one.send(Inline(message))?;
        }
        third.wait()?;
        first.wait().map(drop)
    })
    .unwrap();
    assert_eq!([&plain[..3], &plain[4..7], &plain[8..11]], [b"1st", b"2nd", b"3rd"]);
    assert!(pooled.iter().all(|buffer| buffer[..] == *b"it was longer"), "{pooled:?}");
    drop((pooled, pool, plain));
    pair.finish();
}

/// The slots of a channel's receives are those of a later channel's sends, one of which the device completes as a receive.
#[test]
fn a_send_in_the_slot_of_a_receive_leaves_the_buffer_of_that() {
    let device = FunctionDevice::model();
    device.progress(Progress::Manual);
    let mut loops = Loops::on(device);
    let prepare = |loops: &Loops<_>, of: &Loop<'static, _>, sends, receives| {
        loops.prepare(of).max_send_wr(sends).max_recv_wr(receives)
    };
    let (one, two) = crate::pair::connect(
        prepare(&loops, &loops.here, 1, 3),
        prepare(&loops, &loops.peers, 3, 3),
    );
    let (first, peer) = (loops.here.add(one).unwrap(), loops.peers.add(two).unwrap());
    for token in 0..3 {
        let buffer = loops.filled(7);
        loops.here.post(first, ReceiveWorkRequest::new(buffer), token).unwrap();
    }
    loops.here.remove(first).unwrap();
    loops.peers.remove(peer).unwrap();
    let received = [(); 3].map(|()| next(&mut loops.here).buffer);
    let (one, two) = crate::pair::connect(
        prepare(&loops, &loops.here, 3, 1),
        prepare(&loops, &loops.peers, 3, 3),
    );
    let (second, peer) = (loops.here.add(one).unwrap(), loops.peers.add(two).unwrap());
    let qp_num = loops.here.endpoint(second).unwrap().num();
    for token in 0..3 {
        loops.send(second, 1, token);
        let wr_id = loops.device.posted(0).unwrap().wr_id;
        let opcode = ibverbs::ffi::ibv_wc_opcode::IBV_WC_RECV;
        let made_up =
            ibverbs::ffi::ibv_wc { wr_id, qp_num, opcode, byte_len: 3, ..Default::default() };
        loops.device.inject(loops.here.as_raw(), &made_up);
        assert_eq!(next(&mut loops.here).token, token);
    }
    assert!(received.iter().all(|buffer| buffer[..] == [7; crate::loops::LEN]), "{received:?}");
    loops.here.remove(second).unwrap();
    loops.peers.remove(peer).unwrap();
    drop(received);
    loops.finish();
}
