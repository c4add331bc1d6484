//! Windows of loops: several requests with one doorbell and one completion.

use ibverbs::{ReceiveWorkRequest, SendWorkRequest, TransportError};
use ibverbs_function_device::{FunctionDevice, Progress};

use crate::loops::{LEN, Loops, next};
use crate::pair::TestDevice;

#[test]
fn a_window_ends_with_one_completion_and_in_its_order() {
    let device = FunctionDevice::make();
    device.progress(Progress::Manual);
    let mut loops = Loops::on(device);
    let (channel, peer) = loops.connect();
    for round in 0..10 {
        for n in 0..4 {
            loops.receive(peer, n);
        }
        let window = [1, 2, 3].map(|n| SendWorkRequest::new(loops.filled(n)).immediate(n.into()));
        loops.here.post_window(channel, window, 7).unwrap();
        loops.send(channel, 4, 8);
        let (device, polls) = (&loops.device, loops.device.calls("poll_cq"));
        assert_eq!(device.posted(1).unwrap().send.send_flags & 2, 2, "the last one is signaled");
        device.run();
        let ended: Vec<_> = (0..4).map(|_| next(&mut loops.here)).collect();
        assert_eq!(ended.iter().map(|ended| ended.token).collect::<Vec<_>>(), [7, 7, 7, 8]);
        let bytes: Vec<_> = ended.iter().map(|ended| ended.buffer[0]).collect();
        assert_eq!(bytes, [1, 2, 3, 4], "{round}");
        assert!(ended.iter().all(|ended| ended.result().is_ok()));
        // Two completions, in one poll.
        assert_eq!(loops.device.calls("poll_cq") - polls, 1);
        let received: Vec<_> = (0..4).map(|_| next(&mut loops.peers)).collect();
        assert_eq!(received.iter().map(|ended| ended.buffer[0]).collect::<Vec<_>>(), bytes);
        assert_eq!(received[2].result().unwrap().immediate(), Some(3));
    }
    let window = [(); 5].map(|()| SendWorkRequest::new(loops.filled(0)));
    let refused = loops.here.post_window(channel, window, 0).unwrap_err();
    assert_eq!(refused.error, TransportError::QueueFull);
    assert_eq!(refused.buffers.map(|buffers| buffers.len()), Some(5));
    loops.send(channel, 0, 0);
    let window = [(); 4].map(|()| SendWorkRequest::new(loops.filled(0)));
    let refused = loops.here.post_window(channel, window, 0).unwrap_err();
    assert_eq!(refused.error, TransportError::QueueFull);
    drop(refused);
    loops.finish();
}

/// The third of four messages is too long for its receive.
#[test]
fn the_request_of_a_window_that_fails_has_the_error() {
    let mut loops = Loops::on(FunctionDevice::make());
    let (channel, peer) = loops.connect();
    for len in [LEN, LEN, 3, LEN] {
        let mut buffer = loops.filled(0);
        buffer.set_len(len).unwrap();
        loops.peers.post(peer, ReceiveWorkRequest::new(buffer), 0).unwrap();
    }
    let window = [1, 2, 3, 4].map(|n| SendWorkRequest::new(loops.filled(n)));
    loops.here.post_window(channel, window, 7).unwrap();
    let ended: Vec<_> = (0..4).map(|_| next(&mut loops.here)).collect();
    assert_eq!(ended.iter().map(|ended| ended.buffer[0]).collect::<Vec<_>>(), [1, 2, 3, 4]);
    assert!(ended[0].result().is_ok() && ended[1].result().is_ok());
    let error = ended[2].result().unwrap_err();
    assert!(!error.is_consequence(), "{error}");
    assert!(ended[3].result().unwrap_err().is_consequence());
    drop(ended);
    loops.finish();
}

/// The device names the third of four: it has the first two.
#[test]
fn a_window_that_is_posted_in_part_ends_as_a_whole() {
    for (skip, errno) in [(2, libc::ENOMEM), (0, libc::EINVAL)] {
        let mut loops = Loops::on(FunctionDevice::make());
        let (channel, _peer) = loops.connect();
        loops.device.fail("post_send").skip(skip).errno(errno).times(1);
        let window = [1, 2, 3, 4].map(|n| SendWorkRequest::new(loops.filled(n)));
        let failed = loops.here.post_window(channel, window, 7).unwrap_err();
        assert!(matches!(failed.error, TransportError::Verbs(_)));
        assert_eq!(failed.request, Some(skip as usize));
        if skip == 0 {
            let bytes = failed.buffers.as_ref().unwrap().iter().map(|buffer| buffer[0]);
            assert_eq!(bytes.collect::<Vec<_>>(), [1, 2, 3, 4]);
            drop(failed);
            assert!(loops.here.next_ended().unwrap().is_none());
        } else {
            assert!(failed.buffers.is_none());
            loops.here.remove(channel).unwrap();
            let mut bytes: Vec<_> = (0..4)
                .map(|_| next(&mut loops.here))
                .inspect(|ended| assert!(ended.result().is_err()))
                .map(|ended| ended.buffer[0])
                .collect();
            bytes.sort_unstable();
            assert_eq!(bytes, [1, 2, 3, 4]);
        }
        assert_eq!(loops.out(), 0);
        loops.finish();
    }
}
