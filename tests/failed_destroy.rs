//! After a destroy verb has failed, the crate neither uses nor destroys the object again, and destroys none of
//! its parents. The function device counts each of these as a violation.

use std::sync::Arc;

use ibverbs::device::AsyncEventSubject;
use ibverbs::domain::{ThreadDomain, XrcDomain, XrcDomainScope};
use ibverbs::flow::{Counters, EspAction, EspParameters};
use ibverbs::memory::{
    BorrowedMemoryRegion, DeviceMemory, DeviceMemoryRegion, MemoryWindow, MemoryWindowType,
    NullMemoryRegion, ReadOnlyMemoryRegion,
};
use ibverbs::queue_pair::AddressVector;
use ibverbs::queue_pair::XrcReceive;
use ibverbs::work_queue::{
    Flags, IndirectionTable, ReceiveHash, ReceiveHashFields, ReceiveScalingQueuePair, WorkQueue,
};
use ibverbs::*;
use ibverbs_function_device::FunctionDevice;

/// The parents of a context's resources: each shared, so that it would be destroyed with its last child.
struct Parents {
    context: Arc<Context<'static>>,
    domain: Arc<ProtectionDomain<'static>>,
    channel: Arc<CompletionChannel<'static>>,
    queue: Arc<CompletionQueue<'static>>,
    receives: Arc<SharedReceiveQueue<'static>>,
    xrc_domain: Arc<XrcDomain<'static>>,
    thread: Arc<ThreadDomain<'static>>,
    memory: Arc<DeviceMemory<'static>>,
}

impl Parents {
    fn new(device: &FunctionDevice) -> Self {
        let context = Arc::new(device.context());
        let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
        let channel = Arc::new(CompletionChannel::new(&context).unwrap());
        let queue = CompletionQueue::builder(&context, 16).channel(&channel).build().unwrap();
        Self {
            receives: Arc::new(SharedReceiveQueue::new(&domain, 4, 1).unwrap()),
            xrc_domain: Arc::new(XrcDomain::open(&context, XrcDomainScope::Private).unwrap()),
            thread: Arc::new(ThreadDomain::new(&context).unwrap()),
            memory: Arc::new(DeviceMemory::new(&context, 64).unwrap()),
            queue: Arc::new(queue),
            channel,
            domain,
            context,
        }
    }

    fn queue_pair(&self) -> QueuePair<'static> {
        let Self { domain, queue, receives, .. } = self;
        QueuePair::builder(domain, queue, queue, Rc)
            .srq(receives)
            .build()
            .unwrap()
            .into_queue_pair()
    }
}

/// A resource, ended in one of two ways.
type End = Box<dyn FnOnce(bool) -> Result<()>>;

/// Makes a resource. The second name is the verb that destroys it, the list those that destroy its parents.
type Case = (&'static str, fn(&Parents) -> End, &'static [&'static str]);

macro_rules! end {
    ($resource:expr) => {{
        let resource = $resource;
        Box::new(move |closed| if closed { resource.close() } else { Ok(drop(resource)) })
    }};
}

const CASES: &[Case] = &[
    ("dealloc_pd", |p| end!(ProtectionDomain::new(&p.context).unwrap()), &[]),
    (
        "dealloc_pd",
        // SAFETY: nothing is made with it.
        |p| unsafe {
            let thread = Some(Parent::from(&p.thread));
            end!(ProtectionDomain::parent_domain(&p.domain, thread).unwrap())
        },
        &["dealloc_pd", "dealloc_td"],
    ),
    ("dealloc_td", |p| end!(ThreadDomain::new(&p.context).unwrap()), &[]),
    ("destroy_cq", |p| end!(CompletionQueue::new(&p.context, 4).unwrap()), &[]),
    (
        "destroy_cq",
        |p| {
            let queue = CompletionQueue::builder(&p.context, 4).channel(&p.channel);
            end!(queue.build().unwrap())
        },
        &[],
    ),
    ("destroy_srq", |p| end!(SharedReceiveQueue::new(&p.domain, 4, 1).unwrap()), &["dealloc_pd"]),
    (
        "destroy_srq",
        |p| {
            let Parents { domain, xrc_domain, queue, .. } = p;
            end!(SharedReceiveQueue::extended(domain, xrc_domain, queue, 4, 1).unwrap())
        },
        &["dealloc_pd", "close_xrcd", "destroy_cq"],
    ),
    ("destroy_qp", |p| end!(p.queue_pair()), &["dealloc_pd", "destroy_cq", "destroy_srq"]),
    (
        "destroy_qp",
        |p| {
            let Parents { domain, queue, .. } = p;
            let builder = QueuePair::builder(domain, queue, queue, XrcReceive);
            end!(builder.xrc_domain(&p.xrc_domain).build().unwrap())
        },
        &["close_xrcd", "dealloc_pd", "destroy_cq"],
    ),
    (
        "destroy_ah",
        |p| {
            let path = AddressVector::new(1, 0).global("fe80::1".parse().unwrap(), 0);
            end!(AddressHandle::new(&p.domain, &path).unwrap())
        },
        &["dealloc_pd"],
    ),
    (
        "dealloc_mw",
        |p| end!(MemoryWindow::new(&p.domain, MemoryWindowType::Type2).unwrap()),
        &["dealloc_pd"],
    ),
    ("dereg_mr", |p| end!(MemoryRegion::<u64>::new(&p.domain, 8).unwrap()), &["dealloc_pd"]),
    (
        "dereg_mr",
        |p| {
            let access = AccessFlags::REMOTE_READ;
            end!(SharedMemoryRegion::<u64>::new(&p.domain, 8, access).unwrap())
        },
        &["dealloc_pd"],
    ),
    (
        "dereg_mr",
        |p| {
            let memory = Box::leak(Box::new([0_u8; 64]));
            end!(BorrowedMemoryRegion::new(&p.domain, memory).unwrap())
        },
        &["dealloc_pd"],
    ),
    (
        "dereg_mr",
        |p| end!(ReadOnlyMemoryRegion::new(&p.domain, b"to be sent").unwrap()),
        &["dealloc_pd"],
    ),
    ("dereg_mr", |p| end!(NullMemoryRegion::new(&p.domain).unwrap()), &["dealloc_pd"]),
    (
        "dereg_mr",
        |p| {
            let access = AccessFlags::REMOTE_READ;
            end!(DeviceMemoryRegion::new(&p.domain, &p.memory, .., access).unwrap())
        },
        &["dealloc_pd", "free_dm"],
    ),
    ("free_dm", |p| end!(DeviceMemory::new(&p.context, 64).unwrap()), &[]),
    ("destroy_wq", |p| end!(work_queue(p)), &["dealloc_pd", "destroy_cq"]),
    (
        "destroy_rwq_ind_table",
        |p| end!(IndirectionTable::new([work_queue(p)]).unwrap()),
        &["destroy_wq", "dealloc_pd", "destroy_cq"],
    ),
    (
        "destroy_qp",
        |p| {
            let table = IndirectionTable::new([work_queue(p)]).unwrap();
            let hash = ReceiveHash::toeplitz([1; 40], ReceiveHashFields::SOURCE_IPV4).unwrap();
            let kind = QueuePairType::RawPacket;
            end!(ReceiveScalingQueuePair::new(&p.domain, table, kind, &hash).unwrap())
        },
        &["destroy_rwq_ind_table", "destroy_wq", "dealloc_pd", "destroy_cq"],
    ),
    ("destroy_counters", |p| end!(Counters::new(&p.context).unwrap()), &[]),
    (
        "destroy_flow_action",
        |p| {
            let parameters = EspParameters::aes_gcm(&[1; 16], 0, 0).unwrap();
            end!(EspAction::new(&p.context, &parameters).unwrap())
        },
        &[],
    ),
];

fn work_queue(p: &Parents) -> WorkQueue<'static> {
    WorkQueue::new(&p.domain, &p.queue, 4, 1, Flags::empty()).unwrap()
}

/// All verbs that destroy.
const VERBS: [&str; 15] = [
    "destroy_qp",
    "destroy_srq",
    "destroy_cq",
    "dealloc_pd",
    "dealloc_td",
    "close_xrcd",
    "destroy_ah",
    "dealloc_mw",
    "dereg_mr",
    "free_dm",
    "destroy_wq",
    "destroy_rwq_ind_table",
    "destroy_counters",
    "destroy_flow_action",
    "free_context",
];

#[test]
fn what_cannot_be_destroyed_is_leaked_with_its_shared_parents() {
    for (case, &(verb, make, parents)) in CASES.iter().enumerate() {
        for closed in [true, false] {
            let device = FunctionDevice::model();
            let all = Parents::new(&device);
            let resource = make(&all);
            let before = VERBS.map(|verb| device.calls(verb));
            device.fail(verb).errno(libc::EIO).times(1);
            match resource(closed) {
                Ok(()) => assert!(!closed, "case {case}: closing {verb} hides the failure"),
                Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EIO)),
            }
            drop(all);
            let called = |name: &str| {
                let at = VERBS.iter().position(|verb| *verb == name).unwrap();
                device.calls(name) - before[at]
            };
            // The context is never closed. Objects that are not parents of the leaked resource are destroyed.
            assert_eq!(called("free_context"), 0, "case {case}: {verb}");
            let ordinary = |name| u64::from(!parents.contains(&name));
            for name in ["destroy_srq", "destroy_cq", "dealloc_pd", "dealloc_td", "close_xrcd"] {
                // A shared receive queue that is leaked leaks its protection domain, and so on.
                let expected = ordinary(name) + u64::from(name == verb);
                assert_eq!(called(name), expected, "case {case}: {name} after {verb}");
            }
            assert_eq!(device.violations().0, 0, "case {case}: {}", device.violations().1);
        }
    }
}

#[test]
fn what_cannot_be_destroyed_is_leaked_with_its_borrowed_parents() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(4).unwrap();
    let spared = context.create_cq(4).unwrap();
    let kind = Rc;
    let pair = domain.create_qp(&queue, &queue, kind).build().unwrap();
    let other = domain.create_qp(&queue, &spared, kind).build().unwrap();
    device.fail("destroy_qp").errno(libc::EBUSY).times(1);
    drop(pair);
    // Other holders of the parents can still use them.
    assert!(queue.poll(&mut [WorkCompletion::default()]).unwrap().is_empty());
    domain.allocate::<u8>(64).unwrap().close().unwrap();
    let endpoint = other.endpoint();
    other.handshake(endpoint).unwrap().close().unwrap();
    spared.close().unwrap();
    for error in
        [queue.close().unwrap_err(), domain.close().unwrap_err(), context.close().unwrap_err()]
    {
        assert_eq!(error.kind(), ErrorKind::Busy);
        assert!(error.to_string().contains("could not be destroyed"), "{error}");
    }
    let calls = ["destroy_qp", "destroy_cq", "dealloc_pd", "free_context"];
    assert_eq!(calls.map(|verb| device.calls(verb)), [2, 1, 0, 0]);
    assert_eq!(device.violations().0, 0, "{}", device.violations().1);
}

/// ocrdma frees a queue pair even if its destroy verb fails, and the kernel may raise events about it later.
#[test]
fn events_about_what_could_not_be_destroyed_are_dropped() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(4).unwrap();
    let events = context.async_events().unwrap();
    let kind = Rc;
    let new = || {
        let pair = domain.create_qp(&queue, &queue, kind).build().unwrap();
        let endpoint = pair.endpoint();
        pair.handshake(endpoint).unwrap()
    };
    let (leaked, live) = (new(), new());
    let (raw, number) = (leaked.as_raw(), live.number());
    device.fail("destroy_qp").errno(libc::EIO).times(1);
    drop(leaked);
    for subject in [raw, live.as_raw(), raw] {
        // SAFETY: this device keeps a queue pair whose destroy verb fails.
        unsafe {
            device.raise_about(context.as_raw(), ffi::ibv_event_type::IBV_EVENT_QP_FATAL, subject)
        };
    }
    let event = events.next_event().unwrap().unwrap();
    assert_eq!(event.subject(), AsyncEventSubject::QueuePair(number));
    assert!(events.next_event().unwrap().is_none());
    // SAFETY: the device keeps it, and nothing else has its pointer.
    assert_eq!(unsafe { (*raw).events_completed }, 0, "the dropped events were acknowledged");
    assert_eq!(device.violations().0, 0, "{}", device.violations().1);
}

/// A parent that is forgotten leaks its own parents too.
#[test]
fn a_forgotten_parent_does_not_hide_the_failure() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let region = domain.allocate::<u8>(64).unwrap();
    device.fail("dereg_mr").errno(libc::EIO).times(1);
    drop(region);
    std::mem::forget(domain);
    assert_eq!(context.close().unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!((device.calls("free_context"), device.violations().0), (0, 0));
}

/// Channels destroy their queue pairs themselves.
#[test]
fn a_channel_that_cannot_be_destroyed_is_leaked() {
    for closed in [true, false] {
        let device = FunctionDevice::model();
        let context = Arc::new(device.context());
        let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
        let new = || Channel::builder(&domain).build().unwrap();
        let (one, two) = (new(), new());
        let (to_one, to_two) = (one.endpoint(), two.endpoint());
        let (one, mut two) = (one.handshake(to_two).unwrap(), two.handshake(to_one).unwrap());
        device.fail("destroy_qp").errno(libc::EIO).times(1);
        if closed {
            assert_eq!(one.close().unwrap_err().raw_os_error(), Some(libc::EIO));
        } else {
            drop(one);
        }
        // The other channel still works.
        assert!(two.write(Inline(&[]), RemoteMemoryRegion::new(0, 0, 0).unwrap()).is_ok());
        drop((two, domain, context));
        let calls = ["destroy_qp", "destroy_cq", "dealloc_pd", "free_context"];
        // The completion queue is that of the other channel.
        assert_eq!(calls.map(|verb| device.calls(verb)), [2, 1, 0, 0], "{closed}");
        assert_eq!(device.violations().0, 0, "{}", device.violations().1);
    }
}
