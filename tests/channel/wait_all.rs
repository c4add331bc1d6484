//! Waiting for all operations of a scope at once.

use std::time::Instant;

use ibverbs::channel::ScopeError;
use ibverbs::{Inline, ReceiveWorkRequest, TransportError, WorkStatus, settings::MaxRnrRetries};
use ibverbs_software::Verb;

use crate::pair::{ModelPair, Pair, soon};
use crate::software::Software;

#[test]
fn all_have_ended_and_handles_have_their_results() {
    let mut pair = Pair::with(Software::new(), |builder| builder.max_send_wr(4));
    let target = pair.shared(4);
    let region = pair.region(8, 7);
    // Not of the scope.
    // SAFETY: there is no memory.
    let receive = unsafe { pair.one.post_unpolled(ReceiveWorkRequest::new(())) }.unwrap();
    pair.one
        .scope(|s| {
            s.wait_all()?;
            // The scope posts more than twice as many as there is room for.
            for round in 0..3 {
                let at = |index: u64| target.remote().sub_region(index * 8, 8);
                let kept = s.post_write(region.slice(..)?, at(0)?)?;
                for index in 1..4 {
                    s.post_write(region.slice(..)?, at(index)?)?;
                }
                assert!(!s.can_post_send(), "{round}");
                s.wait_all()?;
                assert!(s.can_post_send(), "{round}");
                s.wait_all_until(Instant::now())?;
                kept.wait()?;
                let expected = u64::from_ne_bytes(region[..].try_into().unwrap());
                assert_eq!(target.to_vec(), [expected; 4]);
                target.fill(0);
            }
            Ok::<_, TransportError>(())
        })
        .unwrap();
    pair.two.send(()).unwrap();
    receive.wait(&mut pair.one).unwrap();
    pair.exchange();
    drop((target, region));
    pair.finish();
}

#[test]
fn a_failure_is_told_once() {
    let rules =
        |builder: ibverbs::ChannelBuilder<'static>| builder.max_rnr_retries(MaxRnrRetries::NONE);
    let mut pair = Pair::with(Software::new(), rules);
    let result = pair.one.scope(|s| {
        let kept = s.post_write(Inline(&[]), ibverbs::RemoteMemoryRegion::new(0, 0, 0)?)?;
        s.post_send(())?;
        s.post_send(())?;
        let error = s.wait_all().unwrap_err().work_error().unwrap();
        assert_eq!(error.status(), WorkStatus::RnrRetryExceeded);
        s.wait_all()?;
        kept.wait()?;
        Ok::<_, TransportError>(())
    });
    assert_eq!(result, Ok(()));
    pair.finish();
}

#[test]
fn a_deadline_stops_the_channel() {
    let mut pair = ModelPair::new();
    let mut region = pair.region(8, 0);
    let result = pair.one.scope(|s| {
        let (first, second) = region.slice_mut(..)?.split_at(4)?;
        s.post_receive(first)?;
        let kept = s.post_receive(second)?;
        assert_eq!(s.wait_all_until(soon()), Err(TransportError::TimedOut));
        let flushed = kept.wait().unwrap_err().work_error().unwrap();
        assert_eq!(flushed.status(), WorkStatus::Flushed);
        let dropped = s.wait_all().unwrap_err().work_error().unwrap();
        assert_eq!(dropped.status(), WorkStatus::Flushed);
        assert_eq!(s.post_send(()).unwrap_err(), TransportError::Stopped);
        Ok::<_, TransportError>(())
    });
    assert_eq!(result, Ok(()));
    drop(region);
    pair.reconnect().finish();
}

#[test]
fn a_manual_scope_has_seen_what_it_has_waited_for() {
    let mut pair = Pair::new();
    let target = pair.shared(1);
    let done = pair.one.manual_scope(|s| {
        s.post_write(Inline(&[1; 8]), target.remote())?;
        s.wait_all()
    });
    assert_eq!(done, Ok(()));
    drop(target);
    pair.finish();
}

/// The queue pair is reset, and not flushed: no completion tells of the operations that it had.
#[test]
fn what_a_reset_has_ended_is_told_though_its_handle_is_dropped() {
    for waits in [false, true] {
        let mut pair = Pair::with(Software::manual(), |builder| builder);
        let result = pair.one.scope(|s| {
            s.post_send(())?;
            pair.device.fail_next(Verb::ModifyQp, libc::EIO);
            let late = s.post_receive(())?.wait_until(Instant::now());
            assert_eq!(late.unwrap_err(), TransportError::TimedOut);
            if waits {
                assert_eq!(s.wait_all(), Err(TransportError::Stopped));
            }
            Ok::<_, TransportError>(())
        });
        match result {
            Ok(()) => assert!(waits),
            Err(error) => {
                assert_eq!((error, waits), (ScopeError::Exit(TransportError::Stopped), false));
            }
        }
        pair.reconnect().finish();
    }
}
