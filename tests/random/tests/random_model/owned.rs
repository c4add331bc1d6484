//! Random programs of operations that own their buffers: handles that are asked, dropped, forgotten or replaced by
//! tokens; verbs that fail, false completions, and channels that end at any moment.

use std::mem::forget;
use std::sync::Arc;
use std::time::Instant;

use ibverbs::channel::OwnedWork;
use ibverbs::{
    Channel, MaxRnrRetries, PooledBuffer, ProtectionDomain, ReceiveWorkRequest, SendWorkRequest,
    TransportError, ffi,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::TestCaseError;

use crate::ledger::{CHUNKS, Ledger};
use crate::model::Model;
use crate::property_tests;

type Outcome = Result<(), TestCaseError>;

#[derive(Clone, Debug)]
enum Step {
    Send(usize),
    Receive(usize),
    Poll(Index),
    Wait(Index),
    PollAll(usize),
    Drop(Index),
    Forget(Index),
    Run,
    Stranger(usize, u8),
    Fail(&'static str, u32),
    /// A blocking operation stops the channel.
    Stop(usize),
    Reset,
    Replace([How; 2]),
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum How {
    Drop,
    Fail,
    Forget,
}

/// With failing destroy verbs and forgotten channels, or without.
fn program(leaking: bool) -> impl Strategy<Value = Vec<Step>> {
    let side = || 0..2_usize;
    let at = any::<Index>;
    let how = move || match leaking {
        true => prop_oneof![Just(How::Drop), Just(How::Fail), Just(How::Forget)].boxed(),
        false => Just(How::Drop).boxed(),
    };
    let verb = prop::sample::select(vec!["poll_cq", "modify_qp", "post_send", "post_recv"]);
    let step = prop_oneof![
        12 => side().prop_map(Step::Send),
        12 => side().prop_map(Step::Receive),
        6 => at().prop_map(Step::Poll),
        3 => at().prop_map(Step::Wait),
        6 => side().prop_map(Step::PollAll),
        4 => at().prop_map(Step::Drop),
        1 => at().prop_map(move |at| if leaking { Step::Forget(at) } else { Step::Drop(at) }),
        4 => Just(Step::Run),
        4 => (side(), any::<u8>()).prop_map(|(side, which)| Step::Stranger(side, which)),
        1 => (verb, 1..3_u32).prop_map(|(verb, times)| Step::Fail(verb, times)),
        1 => side().prop_map(Step::Stop),
        2 => Just(Step::Reset),
        1 => [how(), how()].prop_map(Step::Replace),
    ];
    vec(step, 1..80)
}

struct World {
    channels: [Option<Channel<'static>>; 2],
    /// Those whose results nobody has taken, with the sides that they are of.
    works: Vec<(usize, OwnedWork<PooledBuffer>, bool)>,
    domain: Arc<ProtectionDomain<'static>>,
    ledger: Ledger,
}

impl World {
    fn connect(&mut self) {
        let prepared = [(); 2].map(|()| {
            let builder = Channel::builder(&self.domain).max_send_wr(4).max_recv_wr(4);
            builder.max_rnr_retries(MaxRnrRetries::UNLIMITED).build().unwrap()
        });
        self.handshake(prepared);
    }

    fn handshake(&mut self, prepared: [ibverbs::PreparedChannel<'static>; 2]) {
        let [one, two] = prepared;
        let (to_one, to_two) = (one.endpoint(), two.endpoint());
        let channels = [one.handshake(to_two).unwrap(), two.handshake(to_one).unwrap()];
        channels.iter().for_each(|channel| self.ledger.add(channel.number()));
        self.channels = channels.map(Some);
    }

    fn channel(&mut self, side: usize) -> &mut Channel<'static> {
        self.channels[side].as_mut().expect("it is there between steps")
    }

    fn step(&mut self, step: &Step) -> Outcome {
        match *step {
            Step::Send(side) | Step::Receive(side) => {
                let Some(buffer) = self.ledger.buffer() else { return Ok(()) };
                let is_send = matches!(step, Step::Send(_));
                let channel = self.channel(side);
                let posted = match is_send {
                    true => channel.post_owned(SendWorkRequest::new(buffer)),
                    false => channel.post_owned(ReceiveWorkRequest::new(buffer)),
                };
                self.works.extend(posted.ok().map(|work| (side, work, is_send)));
            }
            Step::Poll(ref at) | Step::Wait(ref at) if !self.works.is_empty() => {
                let Self { works, channels, .. } = self;
                let at = at.index(works.len());
                let (side, work, is_send) = &mut works[at];
                let channel = channels[*side].as_mut().expect("it is there between steps");
                let result = match step {
                    Step::Poll(_) => work.poll(channel),
                    _ => work.wait_until(channel, Instant::now()),
                };
                match result {
                    Ok(None) => return Ok(()),
                    Ok(Some((buffer, _))) if !*is_send => Ledger::check_message(&buffer)?,
                    Ok(Some(_)) => {}
                    // Polling has failed, and it is still in flight.
                    Err(failed)
                        if failed.buffer.is_none()
                            && !matches!(
                                failed.error,
                                TransportError::Stopped | TransportError::UnknownWork
                            ) =>
                    {
                        return Ok(());
                    }
                    Err(_) => {}
                }
                drop(works.swap_remove(at));
            }
            // If it fails, everything stays in flight.
            Step::PollAll(side) => _ = self.channel(side).poll(),
            Step::Drop(ref at) if !self.works.is_empty() => {
                drop(self.works.swap_remove(at.index(self.works.len())));
            }
            Step::Forget(ref at) if !self.works.is_empty() => {
                forget(self.works.swap_remove(at.index(self.works.len())));
            }
            Step::Poll(_) | Step::Wait(_) | Step::Drop(_) | Step::Forget(_) => {}
            Step::Run => _ = self.ledger.device.run(),
            Step::Stranger(side, which) => {
                let raw = self.channel(side).as_raw();
                if !raw.is_null() {
                    // SAFETY: the queue pair is live.
                    let ffi::ibv_qp { send_cq, qp_num, .. } = unsafe { *raw };
                    self.ledger.inject_stranger(send_cq, qp_num, which);
                }
            }
            Step::Fail(verb, times) => {
                self.ledger.device.fail(verb).errno(libc::EIO).times(times);
            }
            Step::Stop(side) => {
                // A message may be there at once.
                let _ = self.channel(side).until(Instant::now()).receive(());
            }
            Step::Reset => {
                self.ledger.device.clear_faults();
                let prepared = [0, 1].map(|side| {
                    let channel = self.channels[side].take().expect("it is there between steps");
                    channel.reset().ok()
                });
                match prepared {
                    [Some(one), Some(two)] => self.handshake([one, two]),
                    // A queue pair had to be destroyed.
                    _ => self.connect(),
                }
            }
            Step::Replace(how) => {
                self.end(how)?;
                self.connect();
            }
        }
        Ok(())
    }

    fn end(&mut self, how: [How; 2]) -> Outcome {
        for (side, how) in how.into_iter().enumerate() {
            let channel = self.channels[side].take().expect("it is there between steps");
            match how {
                How::Drop => drop(channel),
                How::Fail => {
                    for verb in ["modify_qp", "destroy_qp"] {
                        self.ledger.device.fail(verb).errno(libc::EIO).always();
                    }
                    drop(channel);
                    self.ledger.device.clear_faults();
                }
                How::Forget => forget(channel),
            }
            self.ledger.check()?;
        }
        self.ledger.device.clear_faults();
        Ok(())
    }
}

/// Runs the program. Returns the number of buffers that came back.
fn run(steps: &[Step], bed: &Model) -> Result<usize, TestCaseError> {
    let domain = Arc::new(ProtectionDomain::new(Arc::new(bed.device.context())).unwrap());
    let ledger = Ledger::new(&bed.device, &domain);
    let mut world = World { channels: [None, None], works: vec![], domain, ledger };
    world.connect();
    for step in steps {
        world.step(step)?;
        world.ledger.check()?;
    }
    world.end([How::Drop; 2])?;
    world.ledger.device.run();
    world.ledger.check()?;
    Ok(world.ledger.pool.available())
}

proptest! {
    #![proptest_config(property_tests::config(150))]

    #[test]
    fn owned_operations_in_any_order(steps in program(false), stale: bool) {
        let bed = Model::new(stale);
        prop_assert_eq!(run(&steps, &bed)?, CHUNKS);
        bed.device.assert_clean();
    }

    /// What is forgotten, or cannot be destroyed, is leaked with what the device may use.
    #[test]
    fn forgotten_owned_operations_in_any_order(steps in program(true), stale: bool) {
        run(&steps, &Model::new(stale))?;
    }
}
