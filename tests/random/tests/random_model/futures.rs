//! Random programs of futures: polled, dropped and forgotten at any moment, beside a reactor; verbs that fail, false
//! completions, and channels and reactors that end.

use std::future::Future;
use std::mem::forget;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use ibverbs::channel::OwnedResult;
use ibverbs::future::{Local, Locked, Share};
use ibverbs::{
    AccessFlags, AsyncChannel, Channel, PooledBuffer, ProtectionDomain, Reactor,
    SharedMemoryRegion, TransportError, ffi, settings::MaxRnrRetries,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::TestCaseError;

use crate::ledger::{LEN, Ledger};
use crate::model::Model;
use crate::property_tests;

#[derive(Clone, Debug)]
enum Step {
    Send(usize),
    Read(usize),
    Receive(usize),
    PostReceive(usize),
    Poll(Index),
    Drop(Index),
    Forget(Index),
    Turn,
    Run,
    Stranger(usize, u8),
    Fail(&'static str, u32),
    Shutdown(usize),
    /// The channels end, and others take their places.
    Replace([How; 2]),
    /// The reactor and its channels end, and others take their places.
    ReplaceReactor,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum How {
    Drop,
    Fail,
    Forget,
}

/// Programs with failing destroy verbs, forgotten channels and futures, or without.
fn program(leaking: bool) -> impl Strategy<Value = Vec<Step>> {
    let side = || 0..2_usize;
    let at = any::<Index>;
    let how = move || match leaking {
        true => prop_oneof![Just(How::Drop), Just(How::Fail), Just(How::Forget)].boxed(),
        false => Just(How::Drop).boxed(),
    };
    let verb = prop::sample::select(vec!["poll_cq", "modify_qp"]);
    let step = prop_oneof![
        10 => side().prop_map(Step::Send),
        3 => side().prop_map(Step::Read),
        10 => side().prop_map(Step::Receive),
        2 => side().prop_map(Step::PostReceive),
        8 => at().prop_map(Step::Poll),
        4 => at().prop_map(Step::Drop),
        1 => at().prop_map(move |at| if leaking { Step::Forget(at) } else { Step::Drop(at) }),
        8 => Just(Step::Turn),
        6 => Just(Step::Run),
        3 => (side(), any::<u8>()).prop_map(|(side, which)| Step::Stranger(side, which)),
        1 => (verb, 1..3_u32).prop_map(|(verb, times)| Step::Fail(verb, times)),
        1 => side().prop_map(Step::Shutdown),
        2 => [how(), how()].prop_map(Step::Replace),
        1 => Just(Step::ReplaceReactor),
    ];
    vec(step, 1..80)
}

type Operation = Pin<Box<dyn Future<Output = OwnedResult<PooledBuffer>>>>;

fn poll<F: Future + ?Sized>(future: &mut Pin<Box<F>>) -> Option<F::Output> {
    match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    }
}

struct World<S: Share + 'static> {
    /// The channels are leaked boxes, since the futures borrow them. [`World::drop_channel`] drops them.
    channels: Vec<&'static AsyncChannel<S>>,
    futures: Vec<Operation>,
    reactor: Option<Reactor<S>>,
    /// The reactor's.
    queue: *mut ffi::ibv_cq,
    target: SharedMemoryRegion<'static, u8>,
    domain: Arc<ProtectionDomain<'static>>,
    ledger: Ledger,
}

impl<S: Share<Buffer = PooledBuffer> + 'static> World<S> {
    fn reactor(&self) -> &Reactor<S> {
        self.reactor.as_ref().expect("it is there between steps")
    }

    fn connect(&mut self) {
        let prepared = [(); 2].map(|()| {
            let builder = Channel::builder(&self.domain).max_send_wr(4).max_recv_wr(4);
            let builder = builder.access(AccessFlags::REMOTE_READ);
            self.reactor().prepare(builder.max_rnr_retries(MaxRnrRetries::UNLIMITED)).unwrap()
        });
        let created = self.ledger.device.last_call("create_qp").unwrap();
        self.queue = created.qp_init_attr.send_cq;
        let [one, two] = prepared;
        let (to_one, to_two) = (one.endpoint(), two.endpoint());
        let channels = [one.handshake(to_two).unwrap(), two.handshake(to_one).unwrap()];
        self.channels = channels.map(|channel| &*Box::leak(Box::new(channel))).into();
        self.channels.iter().for_each(|channel| self.ledger.add(channel.number()));
    }

    fn begin(&mut self, make: impl FnOnce(&Self, PooledBuffer) -> Operation) {
        let Some(buffer) = self.ledger.buffer() else { return };
        let mut future = make(self, buffer);
        if poll(&mut future).is_none() {
            self.futures.push(future);
        }
    }

    fn pick(&self, at: &Index) -> Option<usize> {
        (!self.futures.is_empty()).then(|| at.index(self.futures.len()))
    }

    fn step(&mut self, step: &Step) -> Result<(), TestCaseError> {
        match *step {
            Step::Send(side) => {
                self.begin(|world, buffer| Box::pin(world.channels[side].send(buffer)));
            }
            Step::Read(side) => self.begin(|world, buffer| {
                let remote = world.target.remote();
                Box::pin(world.channels[side].read(buffer, remote))
            }),
            Step::Receive(side) => {
                self.begin(|world, buffer| Box::pin(world.channels[side].receive(buffer)));
            }
            Step::PostReceive(side) => {
                if let Some(buffer) = self.ledger.buffer() {
                    let _ = self.channels[side].post_receive(buffer);
                }
            }
            Step::Poll(ref at) => {
                let Some(at) = self.pick(at) else { return Ok(()) };
                match poll(&mut self.futures[at]) {
                    None => return Ok(()),
                    Some(Ok((buffer, _))) => Ledger::check_message(&buffer)?,
                    Some(Err(failed)) => {
                        prop_assert_ne!(failed.error, TransportError::UnknownWork);
                    }
                }
                drop(self.futures.swap_remove(at));
            }
            Step::Drop(ref at) => {
                let future = self.pick(at).map(|at| self.futures.swap_remove(at));
                drop(future);
            }
            Step::Forget(ref at) => {
                let future = self.pick(at).map(|at| self.futures.swap_remove(at));
                forget(future);
            }
            Step::Turn => _ = self.reactor().turn(),
            Step::Run => _ = self.ledger.device.run(),
            Step::Stranger(side, which) => {
                let number = self.channels[side].number();
                self.ledger.inject_stranger(self.queue, number, which);
            }
            Step::Fail(verb, times) => {
                self.ledger.device.fail(verb).errno(libc::EIO).times(times);
            }
            Step::Shutdown(side) => _ = poll(&mut Box::pin(self.channels[side].shutdown())),
            Step::Replace(how) => {
                self.end_futures(how.contains(&How::Forget));
                for (channel, how) in std::mem::take(&mut self.channels).into_iter().zip(how) {
                    match how {
                        How::Drop => Self::drop_channel(channel),
                        How::Fail => {
                            for verb in ["modify_qp", "destroy_qp"] {
                                self.ledger.device.fail(verb).errno(libc::EIO).always();
                            }
                            Self::drop_channel(channel);
                            _ = self.reactor().turn();
                            self.ledger.device.clear_faults();
                        }
                        How::Forget => {}
                    }
                    self.ledger.check()?;
                }
                self.settle();
                self.make_room();
                self.connect();
            }
            Step::ReplaceReactor => {
                self.settle();
                drop(self.reactor.take());
                self.ledger.check()?;
                self.make_room();
                self.clear_channels();
                self.connect();
            }
        }
        Ok(())
    }

    /// Ends all futures, before their channels end.
    fn end_futures(&mut self, forgotten: bool) {
        let futures = std::mem::take(&mut self.futures);
        if forgotten {
            forget(futures);
        }
    }

    fn drop_channel(channel: &'static AsyncChannel<S>) {
        // SAFETY: it came from a box, in `connect`. Its futures have ended, or are forgotten.
        drop(unsafe { Box::from_raw(std::ptr::from_ref(channel).cast_mut()) });
    }

    fn clear_channels(&mut self) {
        self.end_futures(false);
        std::mem::take(&mut self.channels).into_iter().for_each(Self::drop_channel);
    }

    /// The reactor ends what was dropped, and takes what was made up from the queue.
    fn settle(&mut self) {
        self.ledger.device.clear_faults();
        while self.reactor().turn().is_ok_and(|served| served > 0) {}
    }

    /// Channels that are left, and futures of others, may have taken up the queue of the reactor.
    fn make_room(&mut self) {
        if self.reactor.as_ref().is_none_or(|reactor| reactor.capacity().1 < 16) {
            self.reactor = Some(Reactor::with_share(self.domain.context_parent(), 128).unwrap());
        }
    }
}

/// Runs the program, on one thread without a lock (`local`) or not. Returns the number of buffers that came back.
fn run(steps: &[Step], bed: &Model, local: bool) -> Result<usize, TestCaseError> {
    match local {
        true => run_on::<Local<PooledBuffer>>(steps, bed),
        false => run_on::<Locked<PooledBuffer>>(steps, bed),
    }
}

fn run_on<S>(steps: &[Step], bed: &Model) -> Result<usize, TestCaseError>
where
    S: Share<Buffer = PooledBuffer> + 'static,
{
    let domain = Arc::new(ProtectionDomain::new(Arc::new(bed.device.context())).unwrap());
    let ledger = Ledger::new(&bed.device, &domain);
    let target = SharedMemoryRegion::new(&domain, LEN, AccessFlags::REMOTE_READ).unwrap();
    target.fill(200);
    let queue = std::ptr::null_mut();
    let (channels, futures, reactor) = (vec![], vec![], None);
    let mut world = World::<S> { channels, futures, reactor, queue, target, domain, ledger };
    world.make_room();
    world.connect();
    for step in steps {
        world.step(step)?;
        world.ledger.check()?;
    }
    world.settle();
    world.clear_channels();
    world.settle();
    world.ledger.check()?;
    world.reactor = None;
    world.ledger.device.run();
    world.ledger.check()?;
    Ok(world.ledger.away())
}

proptest! {
    #![proptest_config(property_tests::config(75))]

    #[test]
    fn futures_in_any_order(steps in program(false), stale: bool, local: bool) {
        let bed = Model::new(stale);
        prop_assert_eq!(run(&steps, &bed, local)?, 0);
        bed.device.assert_clean();
    }

    /// A reactor leaks what is forgotten or cannot be destroyed, with what the device may use.
    #[test]
    fn forgotten_futures_in_any_order(steps in program(true), stale: bool, local: bool) {
        run(&steps, &Model::new(stale), local)?;
    }
}
