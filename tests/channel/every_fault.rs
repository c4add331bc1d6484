//! Every combination of what can fail while a channel is stopped, for every kind of operation in flight.
//!
//! Stopping (`src/channel/stop.rs`) moves the queue pair to ERR and polls the flushed completions; else moves it to RESET;
//! else destroys it; else aborts. Here each step works or fails, on its own. After each combination:
//!
//!  - no buffer is given back while the device has it: no request is outstanding, and what the peer sends
//!    later does not reach the buffer;
//!  - there is a way out: the channel can be reset and carries data again, or it says that it is closed and
//!    another one can be built, or the process has aborted (in a child), which happens in no other case.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::time::Duration;

use ibverbs::channel::ScopeError;
use ibverbs::{ReceiveWorkRequest, TransportError};
use ibverbs_function_device::FunctionDevice;

use crate::pair::{ModelPair as Pair, peek, queue, soon};

/// How polling works while the channel is stopped.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Polls {
    Work,
    Fail,
    /// The flushed completions do not come.
    FindNothing,
}

/// The operation in flight when the channel is stopped.
#[derive(Clone, Copy, PartialEq, Debug)]
enum InFlight {
    /// A blocking receive whose deadline passes.
    Blocking,
    /// A blocking read that is queued although its post fails.
    FailedRead,
    /// A blocking send that is queued although its post fails: the device does not write its buffer.
    FailedSend,
    /// A receive of a scope, whose handle is forgotten.
    Scope,
    /// An unpolled receive, whose channel is dropped.
    Unpolled,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    in_flight: InFlight,
    polls: Polls,
    error_fails: bool,
    reset_fails: bool,
    destroy_fails: bool,
    /// Completions of a queue pair stay in the queue when it is reset.
    stale: bool,
}

fn cases() -> Vec<Case> {
    use InFlight as I;

    let mut cases = Vec::new();
    for in_flight in [I::Blocking, I::FailedRead, I::FailedSend, I::Scope, I::Unpolled] {
        for polls in [Polls::Work, Polls::Fail, Polls::FindNothing] {
            for bits in 0..16 {
                let [error_fails, reset_fails, destroy_fails, stale] =
                    [1, 2, 4, 8].map(|bit| bits & bit != 0);
                cases.push(Case {
                    in_flight,
                    polls,
                    error_fails,
                    reset_fails,
                    destroy_fails,
                    stale,
                });
            }
        }
    }
    cases
}

impl Case {
    fn flush_fails(self) -> bool {
        self.error_fails || self.polls != Polls::Work
    }

    /// Whether nothing shows that the device is done with a buffer that it writes and the program owns.
    fn aborts(self) -> bool {
        let is_written = self.in_flight != InFlight::FailedSend;
        is_written && self.flush_fails() && self.reset_fails && self.destroy_fails
    }

    fn inject(self, pair: &Pair) {
        let fail = |verb, fails| {
            if fails {
                pair.device.fail(verb).errno(libc::EIO).always();
            }
        };
        fail("modify_to_err", self.error_fails);
        fail("modify_to_reset", self.reset_fails);
        fail("destroy_qp", self.destroy_fails);
        fail("poll_cq", self.polls == Polls::Fail);
        if self.polls == Polls::FindNothing {
            pair.device.hold_completions(queue(&pair.one), 0, true);
        }
    }

    fn run(self) {
        let device = FunctionDevice::model();
        device.stale_translation(true);
        device.keep_stale_completions(self.stale);
        // The flushed completion is found by the first poll, so this is waited for only if it never comes.
        let pair = Pair::with(device, |builder| builder.settle_timeout(Duration::from_millis(5)));
        match self.in_flight {
            InFlight::Unpolled => self.drop_channel(pair),
            _ => self.stop_channel(pair),
        }
    }

    /// The channel is stopped, and remains.
    fn stop_channel(self, mut pair: Pair) {
        let (target, mut region) = (pair.shared(1), pair.region(8, 1));
        let address = region.as_ptr();
        self.inject(&pair);
        let failed_post = || pair.device.fail("ring_doorbell").errno(libc::EACCES).times(1);
        let one = &mut pair.one;
        let result = match self.in_flight {
            InFlight::Blocking => {
                one.until(soon()).receive(region.slice_mut(..).unwrap()).map(drop)
            }
            InFlight::FailedRead => {
                failed_post();
                one.read(&mut region.slice_mut(..).unwrap(), target.remote()).map(drop)
            }
            InFlight::FailedSend => {
                failed_post();
                one.send(region.slice(..).unwrap()).map(drop)
            }
            InFlight::Scope => one
                .scope(|s| {
                    std::mem::forget(s.post_receive(region.slice_mut(..)?)?);
                    Err::<(), _>(TransportError::TimedOut)
                })
                .map_err(|error| match error {
                    ScopeError::Closure(error) | ScopeError::Exit(error) => error,
                }),
            InFlight::Unpolled => unreachable!("they drop the channel"),
        };
        result.unwrap_err();
        // The operation has ended, so the region is the program's again.
        region.fill(0xee);
        let (sends, receives) = match pair.one.as_raw().is_null() {
            true => (0, 0),
            false => pair.device.outstanding(pair.one.number()),
        };
        // Only what the device reads may still be there.
        let left = self.in_flight == InFlight::FailedSend && self.flush_fails() && self.reset_fails;
        assert_eq!((sends, receives), (u32::from(left), 0));
        pair.device.clear_faults();
        if !pair.one.as_raw().is_null() {
            pair.device.hold_completions(queue(&pair.one), 0, false);
        }
        let refused = pair.one.send(()).unwrap_err();
        // A message of the peer does not reach the buffer.
        let text = pair.region(8, 0x55);
        let sent = pair.two.until(soon()).send(text.slice(..).unwrap());
        assert!(sent.is_err(), "nothing receives it");
        drop(text);
        pair.device.run();
        assert_eq!(peek(address, 8), [0xee; 8], "written after it was given back");
        assert_eq!(pair.device.violations().0, 0, "{}", pair.device.violations().1);
        match refused {
            TransportError::Stopped => pair = pair.reconnect(),
            TransportError::Closed => {
                let Pair { one, two, domain, device } = pair;
                assert!(one.reset().is_err());
                drop(two);
                let (one, two) = crate::pair::connect(
                    crate::pair::builder(&domain),
                    crate::pair::builder(&domain),
                );
                pair = Pair { one, two, domain, device };
            }
            other => panic!("{other:?}"),
        }
        // A send that nothing has taken back ended with the reset, and names the region until then.
        drop((region, target));
        pair.exchange();
        pair.finish();
    }

    /// The channel is dropped with work in flight.
    fn drop_channel(self, mut pair: Pair) {
        let mut region = pair.region(8, 1);
        let address = region.as_ptr();
        // SAFETY: the region outlives the channel, or else the process does not.
        let work = unsafe {
            pair.one.post_unpolled(ReceiveWorkRequest::new(region.slice_mut(..).unwrap()))
        };
        drop(work.unwrap());
        self.inject(&pair);
        let Pair { one, mut two, domain, device } = pair;
        drop(one);
        region.fill(0xee);
        device.clear_faults();
        assert!(two.until(soon()).send(()).is_err(), "nothing receives it");
        device.run();
        assert_eq!(peek(address, 8), [0xee; 8], "written after it was given back");
        assert_eq!(device.violations().0, 0, "{}", device.violations().1);
        drop((region, two));
        // The program can go on: other channels of the domain work.
        let (one, two) =
            crate::pair::connect(crate::pair::builder(&domain), crate::pair::builder(&domain));
        let mut pair = Pair { one, two, domain, device };
        pair.exchange();
        if self.destroy_fails {
            drop(pair);
        } else {
            pair.finish();
        }
    }
}

const CASE: &str = "CHANNEL_TEST_CASE";
const NAME: &str = "every_fault::a_channel_lets_go_of_its_buffers_or_the_process_aborts";

#[test]
fn a_channel_lets_go_of_its_buffers_or_the_process_aborts() {
    let cases = cases();
    if let Some(case) = std::env::var_os(CASE) {
        let index: usize = case.to_str().unwrap().parse().unwrap();
        cases[index].run();
        eprintln!("still here");
        return;
    }
    let mut aborted = 0;
    for (index, case) in cases.into_iter().enumerate() {
        if !case.aborts() {
            eprintln!("{case:?}");
            case.run();
            continue;
        }
        let output = Command::new(std::env::current_exe().unwrap())
            .args([NAME, "--exact", "--nocapture", "--test-threads=1"])
            .env(CASE, index.to_string())
            .output()
            .unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{case:?}: {error}");
        assert!(
            error.contains("could be neither flushed, reset nor destroyed"),
            "{case:?}: {error}"
        );
        aborted += 1;
    }
    assert_eq!(aborted, 4 * 5 * 2);
}
