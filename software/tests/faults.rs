//! Faults of devices: verbs that fail, completions that are held, dropped or made up, a device that is removed,
//! queues that overrun, and memory that runs out.

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use ibverbs::completion::CompletionFields;
use ibverbs::device::{AsyncEventKind, AsyncEvents};
use ibverbs::domain::ThreadDomain;
use ibverbs::memory::{MemoryWindowType, NullMemoryRegion};
use ibverbs::{
    CompletionChannel, CompletionQueue, Context, Error, MemoryRegion, ProtectionDomain, QueuePair,
    QueuePairState, Rc, Ud, WorkCompletion, WorkStatus,
};
use ibverbs_software::{Device, MadeUpCompletion, Network, Verb, When};

/// A limit in virtual time.
const LONG: Duration = Duration::from_secs(1000);

/// Two connected queue pairs with a completion queue each.
struct Pair<'a> {
    queues: &'a [CompletionQueue<'a>; 2],
    ends: [QueuePair<'a>; 2],
}

fn queue_pairs<'a>(
    domains: &'a [ProtectionDomain<'a>; 2],
    queues: &'a [CompletionQueue<'a>; 2],
) -> Pair<'a> {
    let prepare = |i: usize| {
        let kind = Rc;
        let builder = domains[i].create_qp(&queues[i], &queues[i], kind);
        builder.max_send_wr(32).max_recv_wr(32).build().unwrap()
    };
    let (one, other) = (prepare(0), prepare(1));
    let endpoints = [one.endpoint(), other.endpoint()];
    let ends = [one.handshake(endpoints[1]).unwrap(), other.handshake(endpoints[0]).unwrap()];
    Pair { queues, ends }
}

impl Pair<'_> {
    fn post(&mut self, from: &MemoryRegion<'_, u8>, id: u64) -> ibverbs::Result<()> {
        // SAFETY: nobody writes to the region.
        unsafe { self.ends[0].post_send(from, .., id) }.map(|_| ())
    }

    fn receive(&mut self, to: &mut MemoryRegion<'_, u8>, id: u64) {
        // SAFETY: nobody touches the region while the network runs.
        unsafe { self.ends[1].post_receive(to, .., id).unwrap() };
    }

    /// The completions that are there.
    fn ids(&self, side: usize) -> Vec<u64> {
        poll(&self.queues[side]).iter().map(WorkCompletion::wr_id).collect()
    }
}

fn poll(queue: &CompletionQueue<'_>) -> Vec<WorkCompletion> {
    let mut room = [WorkCompletion::default(); 64];
    queue.poll(&mut room).unwrap().to_vec()
}

/// Devices on a network where time passes by `run_until_idle` alone.
struct World {
    network: Network,
    devices: [Device; 2],
    contexts: [Context<'static>; 2],
}

impl World {
    fn new() -> Self {
        let network = Network::builder().manual().build();
        let devices = [(); 2].map(|()| network.device().unwrap());
        let contexts = devices.each_ref().map(|device| device.open().unwrap());
        Self { network, devices, contexts }
    }

    fn run(&self) {
        assert!(self.network.run_until_idle(LONG));
    }

    fn domains(&self) -> [ProtectionDomain<'_>; 2] {
        self.contexts.each_ref().map(|context| context.alloc_pd().unwrap())
    }

    fn queues(&self) -> [CompletionQueue<'_>; 2] {
        self.contexts.each_ref().map(|context| context.create_cq(64).unwrap())
    }
}

fn errno<T>(result: Result<T, Error>) -> Option<i32> {
    result.err().and_then(|error| error.raw_os_error())
}

/// Calls a verb, and returns the errno with which it failed.
type Check<'a> = Box<dyn FnMut() -> Option<i32> + 'a>;

/// Each verb fails before it took effect, with the errno of the test, and works the next time.
#[test]
fn any_verb_fails_with_any_errno() {
    let world = World::new();
    let (device, context) = (&world.devices[0], &world.contexts[0]);
    let domain = context.alloc_pd().unwrap();
    let (domains, queues) = (world.domains(), world.queues());
    let mut pair = queue_pairs(&domains, &queues);
    let from = domains[0].allocate::<u8>(8).unwrap();
    let path =
        ibverbs::queue_pair::AddressVector::new(1, 0).global(pair.ends[1].endpoint().gid(), 0);
    let queue = CompletionQueue::builder(context, 4).own_channel().build().unwrap();
    let kind = Ud;
    let other_end = domain.create_qp(&queue, &queue, kind).build().unwrap().activate().unwrap();
    let mut datagrams = domain.create_qp(&queue, &queue, kind).build().unwrap().activate().unwrap();
    let group = "ff0e::ffff:e000:0105".parse().unwrap();

    let mut checks: Vec<(Verb, Check<'_>)> = vec![
        (Verb::OpenDevice, Box::new(|| errno(device.open()))),
        (Verb::QueryDevice, Box::new(|| errno(context.query_device()))),
        (Verb::QueryPort, Box::new(|| errno(context.query_port(1)))),
        (Verb::QueryGid, Box::new(|| errno(context.query_gid(1, 0)))),
        (Verb::QueryRtValues, Box::new(|| errno(context.query_raw_clock()))),
        (Verb::AllocPd, Box::new(|| errno(context.alloc_pd()))),
        (Verb::AllocTd, Box::new(|| errno(ThreadDomain::new(context)))),
        (Verb::RegMr, Box::new(|| errno(domain.allocate::<u8>(8)))),
        (Verb::AllocNullMr, Box::new(|| errno(NullMemoryRegion::new(&domain)))),
        (Verb::AllocMw, Box::new(|| errno(domain.alloc_mw(MemoryWindowType::Type1)))),
        (Verb::CreateCompChannel, Box::new(|| errno(CompletionChannel::new(context)))),
        (Verb::CreateCq, Box::new(|| errno(context.create_cq(4)))),
        (
            Verb::ReqNotifyCq,
            Box::new(|| errno(queue.poll_or_arm(&mut [WorkCompletion::default()]))),
        ),
        (Verb::PollCq, Box::new(|| errno(queue.poll(&mut [WorkCompletion::default()])))),
        (Verb::CreateSrq, Box::new(|| errno(domain.create_srq(4, 1)))),
        (Verb::CreateQp, Box::new(|| errno(domain.create_qp(&queue, &queue, kind).build()))),
        (
            Verb::ModifyQp,
            Box::new(|| {
                let prepared = domain.create_qp(&queue, &queue, kind).build().unwrap();
                errno(prepared.activate().map_err(Error::from))
            }),
        ),
        (
            Verb::QueryQp,
            Box::new(|| {
                errno(other_end.query_attributes(ibverbs::queue_pair::AttributeMask::STATE))
            }),
        ),
        (Verb::PostSend, Box::new(|| errno(pair.post(&from, 1)))),
        (Verb::CreateAh, Box::new(|| errno(domain.create_ah(&path)))),
        (Verb::AttachMcast, Box::new(|| errno(datagrams.attach_multicast(group, 0)))),
    ];
    for (i, (verb, check)) in checks.iter_mut().enumerate() {
        let wanted = [libc::EIO, libc::ENOMEM, libc::EPERM, 123][i % 4];
        device.fail(*verb, wanted, When::Before, 1);
        assert_eq!(check(), Some(wanted), "{verb:?}");
        assert_eq!(check(), None, "{verb:?} once");
    }
    device.fail(Verb::AllocPd, libc::EIO, When::Before, u32::MAX);
    assert_eq!(errno(context.alloc_pd()), Some(libc::EIO));
    device.clear_failures();
    assert_eq!(errno(context.alloc_pd()), None);
}

#[test]
fn a_post_that_fails_may_have_been_queued() {
    let world = World::new();
    let (domains, queues) = (world.domains(), world.queues());
    let mut pair = queue_pairs(&domains, &queues);
    let from = domains[0].allocate::<u8>(8).unwrap();
    let mut to = domains[1].allocate::<u8>(8).unwrap();
    for id in 0..3 {
        pair.receive(&mut to, id);
    }
    world.devices[0].fail(Verb::PostSend, libc::EIO, When::Before, 1);
    world.devices[0].fail(Verb::PostSend, libc::EIO, When::After, 1);
    assert_eq!(errno(pair.post(&from, 10)), Some(libc::EIO));
    assert_eq!(errno(pair.post(&from, 11)), Some(libc::EIO));
    pair.post(&from, 12).unwrap();
    world.run();
    assert_eq!(pair.ids(0), [11, 12], "the first was refused, the second carried out");
    assert_eq!(pair.ids(1), [0, 1]);
}

#[test]
fn what_took_effect_stays_although_the_verb_failed() {
    let device = Device::builder().network(&Network::new()).max_pd(2).max_mr(1).build().unwrap();
    let context = device.open().unwrap();
    let domain = context.alloc_pd().unwrap();
    device.fail(Verb::AllocPd, libc::EIO, When::After, 1);
    assert_eq!(errno(context.alloc_pd()), Some(libc::EIO));
    assert_eq!(errno(context.alloc_pd()), Some(libc::ENOMEM), "the device has two by now");

    let region = domain.allocate::<u8>(8).unwrap();
    assert_eq!(errno(domain.allocate::<u8>(8)), Some(libc::ENOMEM));
    device.fail(Verb::DeregMr, libc::EIO, When::After, 1);
    assert_eq!(errno(region.close()), Some(libc::EIO));
    let region = domain.allocate::<u8>(8).expect("its place is free");
    device.fail(Verb::DeregMr, libc::EIO, When::Before, 1);
    assert_eq!(errno(region.close()), Some(libc::EIO));
    assert_eq!(errno(domain.allocate::<u8>(8)), Some(libc::ENOMEM), "its place is taken");
}

#[test]
fn no_errno_makes_a_success_of_what_was_not_done() {
    let device = Device::builder().network(&Network::new()).build().unwrap();
    let context = device.open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(1).unwrap();
    for none in [0, -1, i32::MIN] {
        device.fail(Verb::DeregMr, none, When::Before, 1);
        let region = domain.allocate::<u8>(8).unwrap();
        assert_eq!(errno(region.close()), Some(libc::EIO));
        device.fail(Verb::PollCq, none, When::Before, 1);
        assert_eq!(errno(queue.poll(&mut [WorkCompletion::default()])), Some(libc::EIO));
    }
}

/// The program frees the memory of such a region, and closes the file of such a queue.
#[test]
fn regions_and_queues_whose_verb_fails_late_are_taken_back() {
    let device = Device::builder().network(&Network::new()).max_mr(1).build().unwrap();
    let context = device.open().unwrap();
    let domain = context.alloc_pd().unwrap();
    device.fail(Verb::RegMr, libc::ENOMEM, When::After, 1);
    assert_eq!(errno(domain.allocate::<u8>(8)), Some(libc::ENOMEM));
    domain.allocate::<u8>(8).expect("its place is free");
    device.fail(Verb::CreateCq, libc::ENOMEM, When::After, 2);
    let builder = || CompletionQueue::builder(&context, 1).own_channel();
    assert_eq!(errno(builder().build()), Some(libc::ENOMEM));
    assert_eq!(errno(builder().extended(CompletionFields::empty()).build()), Some(libc::ENOMEM));
    let mut pairs = [(); 4].map(|()| UnixStream::pair().unwrap());
    device.remove();
    for (one, other) in &mut pairs {
        one.write_all(b"x").and_then(|()| other.write_all(b"x")).unwrap();
    }
}

#[test]
fn a_poll_that_fails_late_loses_completions() {
    let world = World::new();
    let (domains, queues) = (world.domains(), world.queues());
    let mut pair = queue_pairs(&domains, &queues);
    let from = domains[0].allocate::<u8>(8).unwrap();
    let mut to = domains[1].allocate::<u8>(8).unwrap();
    pair.receive(&mut to, 1);
    pair.post(&from, 2).unwrap();
    world.run();
    world.devices[1].fail(Verb::PollCq, libc::EIO, When::Before, 1);
    world.devices[0].fail(Verb::PollCq, libc::EIO, When::After, 1);
    for queue in &queues {
        assert!(queue.poll(&mut [WorkCompletion::default()]).is_err());
    }
    assert_eq!(pair.ids(1), [1]);
    assert!(pair.ids(0).is_empty());
}

#[test]
fn completions_are_held_shuffled_and_dropped() {
    let world = World::new();
    let (domains, queues) = (world.domains(), world.queues());
    // Two queue pairs on the same completion queues.
    let mut pairs = [queue_pairs(&domains, &queues), queue_pairs(&domains, &queues)];
    let from = domains[0].allocate::<u8>(8).unwrap();
    let mut to = domains[1].allocate::<u8>(8).unwrap();
    let mut go = |from_id: u64| {
        for i in from_id..from_id + 8 {
            let pair = &mut pairs[i as usize % 2];
            pair.receive(&mut to, 100 + i);
            pair.post(&from, i).unwrap();
        }
        world.run();
    };
    let ids = || -> Vec<u64> { poll(&queues[0]).iter().map(WorkCompletion::wr_id).collect() };

    world.devices[0].hold_completions();
    go(0);
    assert!(ids().is_empty());
    assert_eq!(poll(&queues[1]).len(), 8, "the other device holds none");
    world.devices[0].release_completions();
    assert_eq!(ids(), [0, 1, 2, 3, 4, 5, 6, 7]);

    world.devices[0].hold_completions();
    go(10);
    world.devices[0].shuffle_completions(3);
    let shuffled = ids();
    assert_ne!(shuffled, [10, 11, 12, 13, 14, 15, 16, 17]);
    for parity in 0..2 {
        let one: Vec<_> = shuffled.iter().filter(|&&id| id % 2 == parity).collect();
        assert!(one.len() == 4 && one.is_sorted(), "{shuffled:?}");
    }
    go(20);
    assert_eq!(ids().len(), 8, "nothing is held any more");

    world.devices[0].drop_completions(3);
    go(30);
    assert_eq!(ids(), [33, 34, 35, 36, 37]);
}

/// The completions of a queue pair that is gone never come, even if they were held.
#[test]
fn held_completions_go_with_their_queue_pair() {
    let world = World::new();
    let (domains, queues) = (world.domains(), world.queues());
    let mut pair = queue_pairs(&domains, &queues);
    let from = domains[0].allocate::<u8>(8).unwrap();
    let mut to = domains[1].allocate::<u8>(8).unwrap();
    world.devices[0].hold_completions();
    pair.receive(&mut to, 1);
    pair.post(&from, 2).unwrap();
    world.run();
    drop(pair);
    world.devices[0].release_completions();
    assert!(poll(&queues[0]).is_empty());
}

#[test]
fn a_completion_is_made_up() {
    let world = World::new();
    let (domains, queues) = (world.domains(), world.queues());
    let pair = queue_pairs(&domains, &queues);
    let made_up = MadeUpCompletion {
        wr_id: 77,
        status: WorkStatus::RemoteAccess,
        ..MadeUpCompletion::of_queue_pair(pair.ends[0].number())
    };
    // SAFETY: nothing is in flight.
    unsafe {
        world.devices[0].make_up_completion(made_up).unwrap();
        let stranger = MadeUpCompletion::of_queue_pair(0xbeef);
        assert!(world.devices[0].make_up_completion(stranger).is_err());
    }
    let seen = poll(&queues[0]);
    assert_eq!((seen.len(), seen[0].wr_id()), (1, 77));
    let error = seen[0].result().unwrap_err();
    assert_eq!(error.status(), WorkStatus::RemoteAccess);
}

#[test]
fn a_removed_device_answers_eio_and_touches_nothing() {
    let world = World::new();
    let (domains, queues) = (world.domains(), world.queues());
    let mut pair = queue_pairs(&domains, &queues);
    let own = CompletionQueue::builder(&world.contexts[1], 4).own_channel().build().unwrap();
    let events = AsyncEvents::new(&world.contexts[1]).unwrap();
    let from = domains[0].allocate::<u8>(8).unwrap();
    let mut to = domains[1].allocate::<u8>(8).unwrap();
    let quiet = domains[1].allocate::<u8>(8).unwrap();
    pair.receive(&mut to, 1);
    pair.receive(&mut to, 2);
    pair.post(&from, 3).unwrap();
    world.run();
    pair.post(&from, 4).unwrap();

    world.devices[1].remove();
    world.devices[1].remove();
    assert_eq!(events.next_event().unwrap().unwrap().kind(), AsyncEventKind::DeviceFatal);
    assert!(events.next_event().unwrap().is_none());
    world.run();
    let context = &world.contexts[1];
    assert_eq!(errno(context.query_device()), Some(libc::EIO));
    assert_eq!(errno(context.alloc_pd()), Some(libc::EIO));
    assert_eq!(errno(world.devices[1].open()), Some(libc::EIO));
    assert_eq!(
        errno(pair.ends[1].query_attributes(ibverbs::queue_pair::AttributeMask::STATE)),
        Some(libc::EIO)
    );
    assert_eq!(errno(quiet.close()), Some(libc::EIO), "it is leaked");
    let mut room = [WorkCompletion::default()];
    assert!(own.wait(&mut room).is_err(), "nobody sleeps for ever");
    assert_eq!(pair.ids(1), [1], "what had completed is still there");
    // The peer notices by its retries.
    let seen = poll(&queues[0]);
    assert!(seen[0].is_success());
    let error = seen[1].result().unwrap_err();
    assert_eq!(error.status(), WorkStatus::RetryExceeded);
    assert_eq!(world.devices[1].counters().packets_sent, 1, "the acknowledgement of the first");
}

#[test]
fn a_completion_queue_overruns() {
    let world = World::new();
    let domains = world.domains();
    let small = CompletionQueue::builder(&world.contexts[0], 1).token(9).build().unwrap();
    let queues = [small, world.contexts[1].create_cq(64).unwrap()];
    let mut pair = queue_pairs(&domains, &queues);
    let events = AsyncEvents::new(&world.contexts[0]).unwrap();
    let from = domains[0].allocate::<u8>(8).unwrap();
    let mut to = domains[1].allocate::<u8>(8).unwrap();
    let depth = queues[0].capacity() as u64;
    for id in 0..=depth {
        pair.receive(&mut to, id);
        pair.post(&from, id).unwrap();
    }
    world.run();
    let kinds = [(); 2].map(|()| events.next_event().unwrap().unwrap().kind());
    assert_eq!(kinds, [AsyncEventKind::CompletionQueueError, AsyncEventKind::QueuePairFatal]);
    assert_eq!(pair.ends[0].state().unwrap(), QueuePairState::Error);
}

#[test]
fn registered_memory_has_a_limit() {
    let network = Network::new();
    let device = Device::builder().network(&network).max_registered_memory(10_000).build().unwrap();
    let context = device.open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let first = domain.allocate::<u8>(6_000).unwrap();
    assert_eq!(errno(domain.allocate::<u8>(6_000)), Some(libc::ENOMEM));
    let second = domain.allocate::<u8>(4_000).unwrap();
    let _null = NullMemoryRegion::new(&domain).unwrap();
    drop(first);
    domain.allocate::<u8>(6_000).unwrap();
    drop(second);
}
