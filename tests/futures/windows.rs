//! Windows as futures: several requests with one doorbell and one completion.

use std::sync::Arc;

use ibverbs::channel::{AnyBuffer, PreparedWindow};
use ibverbs::future::{AsyncOperation, Local, Locked, Share};
use ibverbs::{
    AccessFlags, BufferPool, PooledBuffer, SendWorkRequest, TransportError, WorkErrorClass,
};
use ibverbs_function_device::FunctionDevice;

use crate::rig::{Count, LEN, Rig, both, completions, poll, poll_in, posted};

type Window = PreparedWindow<Vec<PooledBuffer>>;

/// A window of messages of these bytes.
fn window<S: Share>(rig: &Rig<S>, bytes: &[u8]) -> Window {
    let messages = bytes.iter().map(|&byte| SendWorkRequest::new(rig.buffer(byte)));
    PreparedWindow::new(messages.collect::<Vec<_>>()).unwrap()
}

/// The bytes of a window that came back.
#[track_caller]
fn bytes(window: AnyBuffer) -> Vec<u8> {
    let window: Window = window.downcast().unwrap();
    window.into_buffers().iter().map(|buffer| buffer[0]).collect()
}

/// The peer posts receives for messages of these lengths.
fn receive<S: Share<Buffer = AnyBuffer>>(rig: &Rig<S>, lengths: &[usize]) {
    for &len in lengths {
        let short;
        let pool = if len == LEN {
            &rig.pool
        } else {
            short = BufferPool::new(&rig.domain, len, 1, AccessFlags::empty()).unwrap();
            &short
        };
        rig.two.post_receive(pool.take().unwrap()).unwrap();
    }
}

/// A window of three that is posted, and whose first request has failed, while the others are to come.
fn failing<S: Share<Buffer = AnyBuffer>>(rig: &Rig<S>) -> AsyncOperation<'_, Window, S> {
    let queue = completions(&rig.device);
    let future = posted(rig.one.run(window(rig, &[1, 2, 3])));
    rig.device.hold_completions(queue, 0, true);
    rig.device.break_qp(rig.one.number());
    assert_eq!(rig.device.held(queue), 3);
    rig.device.release(queue, 0);
    while rig.reactor.turn().unwrap() > 0 {}
    future
}

fn release(device: &FunctionDevice) {
    let queue = completions(device);
    device.hold_completions(queue, 0, false);
    device.release_all(queue);
}

both! {
    of AnyBuffer;

    fn a_window_is_one_operation_that_comes_back() -> Rig {
        let rig = Rig::<S>::new();
        let mut next = window(&rig, &[1, 2, 3]);
        for round in 0..5 {
            receive(&rig, &[LEN; 3]);
            next.bytes_mut(1).unwrap().fill(10 + round);
            let count = Arc::new(Count::default());
            let mut future = rig.one.run(next);
            assert!(poll_in(&mut future, &count).is_none());
            rig.serve();
            assert_eq!(count.get(), 1, "it is woken once");
            let (window, _) = poll(&mut future).unwrap().unwrap();
            next = window.downcast().unwrap();
            for byte in [1, 10 + round, 3] {
                let (message, _) = poll(&mut Box::pin(rig.two.next_message())).unwrap().unwrap();
                assert_eq!(message.downcast::<PooledBuffer>().unwrap()[..], [byte; LEN]);
            }
            assert_eq!(poll(&mut future).unwrap().unwrap_err().error, TransportError::UnknownWork);
        }
        drop(next);
        rig.finish();
    }

    fn the_error_names_the_request_and_has_the_window() -> Rig {
        for short in 0..3 {
            let rig = Rig::<S>::new();
            receive(&rig, &[0, 1, 2].map(|n| if n == short { 3 } else { LEN }));
            let mut future = rig.one.submit(window(&rig, &[1, 2, 3])).unwrap();
            rig.serve();
            let failed = poll(&mut future).unwrap().unwrap_err();
            assert!(!failed.error.is_consequence(), "{failed}");
            assert_eq!(failed.request, (short < 2).then_some(short), "{failed}");
            assert_eq!(bytes(failed.buffers.unwrap()), [1, 2, 3]);
            drop(future);
            rig.finish();
        }
    }

    fn a_failed_window_ends_with_its_last_request() -> Rig {
        let rig = Rig::<S>::new();
        let mut future = failing(&rig);
        // Another task waits for it now.
        let count = Arc::new(Count::default());
        assert!(poll_in(&mut future, &count).is_none(), "the last one is to come");
        release(&rig.device);
        rig.serve();
        assert_eq!(count.get(), 1);
        let failed = poll(&mut future).unwrap().unwrap_err();
        assert_eq!(failed.error.work_error().unwrap().class(), WorkErrorClass::Flushed);
        assert_eq!(failed.request, Some(0));
        assert_eq!(bytes(failed.buffers.unwrap()), [1, 2, 3]);
        drop(future);
        rig.finish();
    }

    fn the_window_of_a_future_that_was_dropped_comes_back_to_the_pool() -> Rig {
        for has_failed in [false, true] {
            let rig = Rig::<S>::new();
            if has_failed {
                drop(failing(&rig));
            } else {
                drop(posted(rig.one.run(window(&rig, &[1, 2, 3]))));
                rig.device.hold_completions(completions(&rig.device), 0, true);
                receive(&rig, &[LEN; 3]);
                rig.device.run();
            }
            let waiting = if has_failed { 0 } else { 3 };
            assert_eq!(rig.out(), 3 + waiting, "the device has them");
            release(&rig.device);
            rig.serve();
            assert_eq!(rig.out(), waiting);
            rig.finish();
        }
    }

    fn a_window_waits_for_all_its_places() -> Rig {
        let rig = Rig::<S>::new();
        receive(&rig, &[LEN; 4]);
        let mut sends = [1, 2].map(|byte| posted(rig.one.run(SendWorkRequest::new(rig.buffer(byte)))));
        let mut waits = posted(rig.one.run(window(&rig, &[3, 4, 5])));
        let refused = rig.one.submit(window(&rig, &[6])).map(drop).unwrap_err();
        assert_eq!((refused.error, bytes(refused.buffers.unwrap())), (TransportError::QueueFull, vec![6]));
        rig.serve();
        sends.iter_mut().for_each(|send| drop(poll(send).unwrap().unwrap()));
        assert!(poll(&mut waits).is_none());
        let messages = || poll(&mut Box::pin(rig.two.next_message()));
        while messages().is_some() {}
        receive(&rig, &[LEN; 1]);
        rig.serve();
        assert_eq!(bytes(poll(&mut waits).unwrap().unwrap().0), [3, 4, 5]);
        // A window that is longer than the queue would wait for ever.
        let refused = poll(&mut rig.one.run(window(&rig, &[0; 5]))).unwrap().unwrap_err();
        let text = refused.to_string();
        assert!(text.contains("the requests of a window") && text.contains("1..=4"), "{text}");
        assert_eq!(bytes(refused.buffers.unwrap()), [0; 5]);
        drop((sends, waits));
        while messages().is_some() {}
        rig.finish();
    }

    fn a_window_that_is_posted_in_part_ends_as_a_whole() -> Rig {
        for skip in 0..3 {
            let rig = Rig::<S>::new();
            rig.device.fail("post_send").skip(skip).errno(libc::EINVAL).times(1);
            let failed = poll(&mut rig.one.run(window(&rig, &[1, 2, 3]))).unwrap().unwrap_err();
            assert!(matches!(failed.error, TransportError::Verbs(_)));
            assert_eq!((failed.request, failed.buffers.is_none()), (Some(skip as usize), skip > 0));
            drop(failed);
            rig.serve();
            assert_eq!(rig.out(), 0);
            rig.finish();
        }
    }

    /// The provider queues all requests but fails to tell the kernel, as rxe and siw may.
    fn a_window_that_may_be_posted_ends() -> Rig {
        let rig = Rig::<S>::new();
        rig.device.fail("ring_doorbell").errno(libc::EACCES).times(1);
        let failed = rig.one.submit(window(&rig, &[1, 2])).map(drop).unwrap_err();
        assert_eq!((failed.request, failed.buffers.is_none()), (None, true));
        rig.serve();
        assert_eq!(rig.out(), 0);
        rig.finish();
    }

    fn the_end_of_a_channel_ends_its_windows() -> Rig {
        for has_failed in [false, true] {
            let rig = Rig::<S>::new();
            let mut future = match has_failed {
                true => failing(&rig),
                false => posted(rig.one.run(window(&rig, &[1, 2, 3]))),
            };
            rig.reactor.stop(TransportError::ReactorGone);
            let failed = poll(&mut future).unwrap().unwrap_err();
            assert_eq!(failed.error, TransportError::ReactorGone);
            assert_eq!(bytes(failed.buffers.unwrap()), [1, 2, 3]);
            drop(future);
            if has_failed {
                release(&rig.device);
            }
            rig.finish();
        }
    }
}
