//! Windows of loops: several requests with one doorbell and one completion.

use ibverbs::channel::{AnyBuffer, PreparedWindow, WindowError};
use ibverbs::{
    AccessFlags, BufferPool, ChannelId, Ended, PooledBuffer, ReceiveWorkRequest, SendWorkRequest,
    TransportError, WorkErrorClass, ffi,
};
use ibverbs_function_device::{FunctionDevice, Progress};

use crate::loops::{Loops, next};
use crate::pair::TestDevice;

fn manual() -> FunctionDevice {
    let device = FunctionDevice::make();
    device.progress(Progress::Manual);
    device
}

/// The first bytes of the buffers of a window.
#[track_caller]
fn bytes<const N: usize>(ended: Ended<AnyBuffer>) -> [u8; N] {
    let window = ended.buffer.downcast::<PreparedWindow<[PooledBuffer; N]>>().unwrap();
    window.into_buffers().map(|buffer| buffer[0])
}

type Refused<const N: usize> = WindowError<PreparedWindow<[PooledBuffer; N]>>;

fn try_window<D: TestDevice, const N: usize>(
    loops: &mut Loops<D, AnyBuffer>,
    channel: ChannelId,
) -> Result<(), Refused<N>> {
    let window = [(); N].map(|()| SendWorkRequest::new(loops.filled(0)));
    loops.here.post_window(channel, PreparedWindow::new(window).unwrap(), 0)
}

#[test]
fn a_window_ends_with_one_completion_and_in_its_order() {
    let mut loops = Loops::with_windows(manual());
    let (channel, peer) = loops.connect();
    let requests = [1, 2, 3].map(|n| SendWorkRequest::new(loops.filled(n)).immediate(n.into()));
    let mut window = PreparedWindow::new(requests).unwrap();
    for round in 0..10 {
        for n in 0..4 {
            loops.receive(peer, n);
        }
        // Other bytes, in the buffers that it has and in another one.
        window.bytes_mut(0).unwrap().fill(10 + round);
        let other = SendWorkRequest::new(loops.filled(20 + round)).immediate(7);
        let buffer = window.set(1, other).unwrap();
        assert_eq!(buffer[0], if round == 0 { 2 } else { 19 + round });
        drop(buffer);
        loops.here.post_window(channel, window, 7).unwrap();
        loops.send(channel, 4, 8);
        assert_eq!(loops.here.in_flight(channel), 2);
        let (device, polls) = (&loops.device, loops.device.calls("poll_cq"));
        assert_eq!(device.posted(1).unwrap().send.send_flags & 2, 2, "the last one is signaled");
        device.run();
        let ended = next(&mut loops.here);
        assert_eq!((ended.channel, ended.token, ended.request()), (channel, 7, None));
        assert!(ended.result().is_ok());
        let of_type = ended.buffer.downcast::<PreparedWindow<[PooledBuffer; 3]>>();
        window = of_type.unwrap();
        assert_eq!(next(&mut loops.here).token, 8);
        // Two completions, in one poll.
        assert_eq!(loops.device.calls("poll_cq") - polls, 1);
        let received: Vec<_> = (0..4).map(|_| next(&mut loops.peers)).collect();
        let bytes: Vec<_> = received.iter().map(|ended| ended.buffer[0]).collect();
        assert_eq!(bytes, [10 + round, 20 + round, 3, 4]);
        let numbers = received.iter().map(|ended| ended.result().unwrap().immediate());
        assert_eq!(numbers.collect::<Vec<_>>(), [Some(1), Some(7), Some(3), None]);
    }
    assert!(window.bytes_mut(3).is_none());
    let refused = window.set(3, SendWorkRequest::new(loops.filled(5))).unwrap_err();
    assert_eq!(refused.buffer.unwrap()[0], 5);
    assert!(refused.error.to_string().contains("and must be within 0..=2"), "{}", refused.error);
    drop(window);
    loops.finish();
}

/// Places that are in use, in any order of windows of all lengths and single sends.
#[test]
fn a_queue_has_no_more_requests_than_places() {
    let mut loops = Loops::with_windows(manual());
    let (channel, peer) = loops.connect();
    let number = loops.here.endpoint(channel).unwrap().num();
    let mut state = 1_u32;
    for _ in 0..2_000 {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let before = loops.device.outstanding(number).0;
        let room = 4 - before;
        let (posted, refused) = match state >> 29 {
            0 => {
                (1, try_window::<_, 1>(&mut loops, channel).map_err(|refused| refused.error).err())
            }
            1 => {
                (2, try_window::<_, 2>(&mut loops, channel).map_err(|refused| refused.error).err())
            }
            2 => {
                (3, try_window::<_, 3>(&mut loops, channel).map_err(|refused| refused.error).err())
            }
            3 => {
                (4, try_window::<_, 4>(&mut loops, channel).map_err(|refused| refused.error).err())
            }
            4 | 5 => {
                let message = SendWorkRequest::new(loops.filled(0));
                (1, loops.here.post(channel, message, 0).map_err(|refused| refused.error).err())
            }
            _ => {
                (0..before).for_each(|n| loops.receive(peer, n.into()));
                loops.device.run();
                while loops.here.next_ended().unwrap().is_some() {}
                while loops.peers.next_ended().unwrap().is_some() {}
                continue;
            }
        };
        let expected = (posted > room).then_some(TransportError::QueueFull);
        assert_eq!(refused, expected, "{posted} of {room}");
        let now = loops.device.outstanding(number).0;
        assert_eq!(now, before + if refused.is_none() { posted } else { 0 });
    }
    loops.finish();
}

/// One of four messages is too long for its receive.
#[test]
fn the_request_of_a_window_that_fails_has_the_error() {
    for failing in 0..4 {
        let mut loops = Loops::with_windows(FunctionDevice::make());
        let (channel, peer) = loops.connect();
        let short = BufferPool::new(&loops.domain, 3, 1, AccessFlags::empty()).unwrap();
        for n in 0..4 {
            let pool = if n == failing { &short } else { &loops.pool };
            let buffer = pool.take().unwrap();
            loops.peers.post(peer, ReceiveWorkRequest::new(buffer), 0).unwrap();
        }
        loops.window(channel, [1, 2, 3, 4], 7);
        let ended = next(&mut loops.here);
        let error = ended.result().unwrap_err();
        assert!(!error.is_consequence(), "{error}");
        assert_eq!(ended.request(), (failing < 3).then_some(failing), "{error}");
        assert_eq!(bytes(ended), [1, 2, 3, 4]);
        assert!(loops.here.next_ended().unwrap().is_none());
        while loops.peers.next_ended().unwrap().is_some() {}
        drop(short);
        loops.finish();
    }
}

/// The completions of a window that is flushed come in any order with those of others.
#[test]
fn a_flushed_window_ends_when_its_last_request_does() {
    for last_first in [false, true] {
        let mut loops = Loops::with_windows(manual());
        let (channel, _peer) = loops.connect();
        let queue = loops.here.as_raw();
        loops.window(channel, [1, 2, 3], 7);
        loops.send(channel, 4, 8);
        loops.device.hold_completions(queue, 0, true);
        let endpoint = loops.here.endpoint(channel).unwrap();
        loops.device.break_qp(endpoint.num());
        assert_eq!(loops.device.held(queue), 4);
        // The single send, or two of the window.
        if last_first {
            loops.device.release(queue, 3);
            assert_eq!(next(&mut loops.here).token, 8);
        }
        loops.device.release(queue, 0);
        loops.device.release(queue, 0);
        for _ in 0..3 {
            assert!(loops.here.next_ended().unwrap().is_none(), "the last one is to come");
        }
        assert_eq!(loops.out(), if last_first { 3 } else { 4 });
        loops.device.hold_completions(queue, 0, false);
        loops.device.release_all(queue);
        let ended = next(&mut loops.here);
        let error = ended.result().unwrap_err().work_error().unwrap();
        assert_eq!((ended.token, ended.request()), (7, Some(0)));
        assert_eq!(error.class(), WorkErrorClass::Flushed);
        assert_eq!(bytes(ended), [1, 2, 3]);
        if !last_first {
            assert_eq!(next(&mut loops.here).token, 8);
        }
        loops.finish();
    }
}

/// The device names one of four: it has those before it.
#[test]
fn a_window_that_is_posted_in_part_ends_as_a_whole() {
    for (skip, removed) in [(0, false), (1, true), (2, true), (3, true), (1, false), (3, false)] {
        let mut loops = Loops::with_windows(manual());
        let (channel, _peer) = loops.connect();
        loops.device.fail("post_send").skip(skip).errno(libc::EINVAL).times(1);
        let window = [1, 2, 3, 4].map(|n| SendWorkRequest::new(loops.filled(n)));
        let window = PreparedWindow::new(window).unwrap();
        let failed = loops.here.post_window(channel, window, 7).unwrap_err();
        assert!(matches!(failed.error, TransportError::Verbs(_)));
        assert_eq!(failed.request, Some(skip as usize));
        if skip == 0 {
            let bytes = failed.buffers.unwrap().into_buffers().map(|buffer| buffer[0]);
            assert_eq!(bytes, [1, 2, 3, 4]);
            // Nothing was posted: it can be tried again.
            loops.window(channel, [5, 6, 7, 8], 0);
            loops.here.remove(channel).unwrap();
            assert_eq!(bytes_of_next(&mut loops), [5, 6, 7, 8]);
        } else {
            assert!(failed.buffers.is_none());
            if removed {
                loops.here.remove(channel).unwrap();
            }
            // If the channel stays, the posted requests are flushed, and that is enough.
            let ended = next(&mut loops.here);
            assert_eq!((ended.token, ended.request()), (7, None));
            assert_eq!(ended.result().unwrap_err(), TransportError::Stopped);
            assert_eq!(bytes(ended), [1, 2, 3, 4]);
        }
        assert!(loops.here.next_ended().unwrap().is_none());
        assert_eq!(loops.out(), 0);
        loops.finish();
    }
}

#[track_caller]
fn bytes_of_next<D: TestDevice>(loops: &mut Loops<D, AnyBuffer>) -> [u8; 4] {
    bytes(next(&mut loops.here))
}

/// The provider queues all requests but fails to tell the kernel, as rxe and siw may.
#[test]
fn a_window_that_may_be_posted_ends() {
    let mut loops = Loops::with_windows(manual());
    let (channel, _peer) = loops.connect();
    loops.device.fail("ring_doorbell").errno(libc::EACCES).times(1);
    let window = [1, 2].map(|n| SendWorkRequest::new(loops.filled(n)));
    let window = PreparedWindow::new(window).unwrap();
    let failed = loops.here.post_window(channel, window, 7).unwrap_err();
    assert_eq!((failed.request, failed.buffers.is_none()), (None, true));
    let ended = next(&mut loops.here);
    assert!(ended.result().unwrap_err().is_consequence());
    assert_eq!(bytes(ended), [1, 2]);
    loops.finish();
}

/// The queue pair cannot be destroyed: the device may use the buffers for ever.
#[test]
fn a_window_whose_channel_cannot_be_destroyed_is_leaked() {
    let mut loops = Loops::with_windows(manual());
    let (channel, _peer) = loops.connect();
    loops.window(channel, [1, 2], 7);
    loops.device.fail("modify_to_err").errno(libc::EIO).always();
    loops.device.fail("modify_to_reset").errno(libc::EIO).always();
    loops.device.fail("destroy_qp").errno(libc::EIO).always();
    loops.here.remove(channel).unwrap_err();
    assert!(loops.here.next_ended().unwrap().is_none());
    assert_eq!(loops.out(), 2);
    loops.device.clear_faults();
    let Loops { here, peers, pool, .. } = loops;
    drop((here, peers));
    assert_eq!(pool.chunks() - pool.available(), 2);
}

/// A completion that no request of the window has ends nothing.
#[test]
fn made_up_completions_of_windows_end_nothing() {
    let mut loops = Loops::with_windows(manual());
    let (channel, peer) = loops.connect();
    let number = loops.here.endpoint(channel).unwrap().num();
    let queue = loops.here.as_raw();
    let flushed = ffi::ibv_wc_status::IBV_WC_WR_FLUSH_ERR;
    let success = ffi::ibv_wc_status::IBV_WC_SUCCESS;
    let made_up = |loops: &Loops<FunctionDevice, AnyBuffer>, wr_id, qp_num, status| {
        let completion = ffi::ibv_wc { wr_id, qp_num, status, ..Default::default() };
        loops.device.inject(queue, &completion);
    };
    let window = |loops: &mut Loops<FunctionDevice, AnyBuffer>| {
        (0..3).for_each(|n| loops.receive(peer, n));
        loops.window(channel, [1, 2, 3], 7);
        loops.device.posted(1).unwrap().wr_id
    };
    // Places 0 to 2, then 3, so that the next one is where the first was.
    let earlier = window(&mut loops);
    loops.device.run();
    drop(next(&mut loops.here));
    loops.receive(peer, 3);
    loops.send(channel, 1, 0);
    loops.device.run();
    drop(next(&mut loops.here));
    while loops.peers.next_ended().unwrap().is_some() {}
    let member = window(&mut loops);
    assert_ne!(earlier, member);
    // Completions of an earlier window, of requests behind the last one, of another place and of
    // another window are unknown.
    for wr_id in
        [earlier, member + 1, member | 0x7fff, member + (1 << 32), member ^ 1 << 53, u64::MAX]
    {
        for status in [flushed, success] {
            made_up(&loops, wr_id, number, status);
            let unknown = TransportError::UnknownCompletion { queue_pair: number, wr_id };
            assert_eq!(loops.here.next_ended().unwrap_err(), unknown, "{wr_id:x} {member:x}");
        }
    }
    // A completion of a queue pair that is not the loop's ends nothing, nor does the success of a
    // request that is not the last.
    made_up(&loops, member, number + 1000, flushed);
    made_up(&loops, member, number, success);
    assert!(loops.here.next_ended().unwrap().is_none());
    assert_eq!(loops.out(), 6);
    // A failure counts, though the device then says that the last one has succeeded.
    made_up(&loops, member, number, flushed);
    made_up(&loops, member, number, success);
    assert!(loops.here.next_ended().unwrap().is_none());
    loops.device.run();
    let ended = next(&mut loops.here);
    assert_eq!((ended.request(), ended.result().is_err()), (Some(1), true));
    assert_eq!(bytes(ended), [1, 2, 3]);
    // A window's number for a single operation is unknown. One of a channel that was removed is late.
    loops.send(channel, 1, 0);
    made_up(&loops, member & !0xffff_ffff | 3 << 30 | 3 << 32, number, flushed);
    assert!(loops.here.next_ended().is_err());
    loops.here.remove(channel).unwrap();
    drop(next(&mut loops.here));
    made_up(&loops, member, number, flushed);
    assert!(loops.here.next_ended().unwrap().is_none());
    loops.finish();
}

#[test]
fn a_channel_that_was_removed_posts_no_window() {
    let mut loops = Loops::with_windows(manual());
    let (channel, _peer) = loops.connect();
    loops.here.remove(channel).unwrap();
    let refused = try_window::<_, 2>(&mut loops, channel).unwrap_err();
    assert_eq!((refused.error, refused.request), (TransportError::Closed, None));
    assert!(refused.buffers.is_some());
    drop(refused);
    loops.finish();
}

/// The device carries out what was posted before the queue pair is in ERR: nothing is left to be flushed.
#[test]
fn a_part_of_a_window_that_was_carried_out_ends() {
    for skip in [1, 3] {
        let mut loops = Loops::with_windows(manual());
        run_after_posts(&loops);
        let (channel, peer) = loops.connect();
        (0..4).for_each(|n| loops.receive(peer, n));
        let window = [1, 2, 3, 4].map(|n| SendWorkRequest::new(loops.filled(n)));
        let window = PreparedWindow::new(window).unwrap();
        loops.device.fail("post_send").skip(skip).errno(libc::EINVAL).times(1);
        DEVICE.set(Some(loops.device.clone()));
        let failed = loops.here.post_window(channel, window, 7).unwrap_err();
        DEVICE.set(None);
        assert_eq!((failed.request, failed.buffers.is_none()), (Some(skip as usize), true));
        for n in 0..skip {
            assert_eq!(next(&mut loops.peers).buffer[0], n as u8 + 1, "it has arrived");
        }
        let ended = next(&mut loops.here);
        assert_eq!((ended.token, ended.request()), (7, None));
        assert_eq!(ended.result().unwrap_err(), TransportError::Stopped);
        assert_eq!(bytes(ended), [1, 2, 3, 4]);
        assert_eq!(loops.here.in_flight(channel), 0);
        loops.finish();
    }
}

type Post = unsafe extern "C" fn(
    *mut ffi::ibv_qp,
    *mut ffi::ibv_send_wr,
    *mut *mut ffi::ibv_send_wr,
) -> std::ffi::c_int;

static REAL: std::sync::OnceLock<Post> = std::sync::OnceLock::new();

thread_local! {
    static DEVICE: std::cell::RefCell<Option<FunctionDevice>> = const { std::cell::RefCell::new(None) };
}

/// Makes the device in `DEVICE`, if any, carry out what this thread posts within the post.
fn run_after_posts<B>(loops: &Loops<FunctionDevice, B>) {
    let context = loops.domain.context_parent().as_raw();
    // SAFETY: the context is live, and nothing posts yet.
    let real = unsafe { (*context).ops.post_send.replace(post_and_run) }.unwrap();
    REAL.get_or_init(|| real);
}

unsafe extern "C" fn post_and_run(
    queue_pair: *mut ffi::ibv_qp,
    request: *mut ffi::ibv_send_wr,
    bad: *mut *mut ffi::ibv_send_wr,
) -> std::ffi::c_int {
    let real = REAL.get().expect("it was set before this function");
    // SAFETY: it is called as the real one is.
    let returned = unsafe { real(queue_pair, request, bad) };
    DEVICE.with_borrow(|device| device.iter().for_each(|device| _ = device.run()));
    returned
}

/// A channel without depths has no place of its own in the table.
#[test]
fn a_channel_without_depths_hides_no_failure_of_another() {
    let mut loops = Loops::with_windows(manual());
    let empty = loops.here.create_channel(&loops.domain).max_send_wr(0).max_recv_wr(0);
    let peer = loops.peers.create_channel(&loops.domain).max_send_wr(0).max_recv_wr(0);
    let (empty, kept) = crate::pair::connect(empty, peer);
    let number = empty.number();
    let empty = loops.here.add(empty).unwrap();
    // The channel itself has no requests that these completions could end.
    let status = ffi::ibv_wc_status::IBV_WC_WR_FLUSH_ERR;
    for wr_id in [0, 1 << 32, 1 << 31, 3 << 30 | 1 << 32, u64::MAX] {
        let made_up = ffi::ibv_wc { wr_id, qp_num: number, status, ..Default::default() };
        loops.device.inject(loops.here.as_raw(), &made_up);
        let _ = loops.here.next_ended();
    }
    let (channel, _peer) = loops.connect();
    loops.window(channel, [1, 2, 3], 7);
    let number = loops.here.endpoint(channel).unwrap().num();
    loops.device.break_qp(number);
    let ended = next(&mut loops.here);
    assert_eq!((ended.token, ended.request()), (7, Some(0)));
    drop(ended);
    loops.here.remove(empty).unwrap();
    drop(kept);
    loops.finish();
}
