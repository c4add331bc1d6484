//! Lets a test ask a device for its objects, the calls of its verbs, the requests that it still has, and whether
//! memory was deregistered too early.

use crate::device::Device;
use crate::faults::Verb;
use crate::transport::Engine;
use crate::transport::work::{Data, Operation, Posted, Sge};

/// How many objects of each kind a device has: made, and not destroyed.
///
/// A default value has none: `device.live_objects() == LiveObjects::default()` holds when everything was given back.
/// Completion channels are not counted, because libibverbs closes them without the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LiveObjects {
    /// Open contexts.
    pub contexts: u32,
    /// Protection domains, without parent domains.
    pub protection_domains: u32,
    /// Parent domains.
    pub parent_domains: u32,
    /// Thread domains.
    pub thread_domains: u32,
    /// Memory regions of any kind.
    pub memory_regions: u32,
    /// Memory windows.
    pub memory_windows: u32,
    /// Completion queues.
    pub completion_queues: u32,
    /// Shared receive queues.
    pub shared_receive_queues: u32,
    /// Queue pairs. One that was also opened by its number counts once.
    pub queue_pairs: u32,
    /// Address handles.
    pub address_handles: u32,
    /// Pieces of device memory.
    pub device_memory: u32,
    /// XRC domains.
    pub xrc_domains: u32,
}

/// For tests: what the program has left behind, and what it did.
impl Device {
    /// How many objects of each kind there are.
    ///
    /// ```
    /// use ibverbs_software::{Device, LiveObjects};
    ///
    /// let device = Device::new()?;
    /// let context = device.open()?;
    /// let domain = context.alloc_pd()?;
    /// assert_eq!(device.live_objects().protection_domains, 1);
    /// drop(domain);
    /// drop(context);
    /// assert_eq!(device.live_objects(), LiveObjects::default());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn live_objects(&self) -> LiveObjects {
        let engine = self.lock();
        let core = &engine.core;
        // Each table has at most 2^24 objects.
        let of = |len: usize| len as u32;
        LiveObjects {
            contexts: of(core.contexts.len()),
            protection_domains: of(core.pds.len()),
            parent_domains: core.parent_domains,
            thread_domains: core.thread_domains,
            memory_regions: of(core.keys.0.len()) - core.windows,
            memory_windows: core.windows,
            completion_queues: of(core.cqs.len()),
            shared_receive_queues: of(core.srqs.len()),
            queue_pairs: of(engine.program_queue_pairs()),
            address_handles: core.address_handles,
            device_memory: of(core.device_memory.count()),
            xrc_domains: of(core.xrc_domains.count()),
        }
    }

    /// Counts [calls](Self::calls) and [early deregistrations](Self::early_deregistrations) from now on.
    pub fn observe(&self) {
        self.shared().failures().observe();
        self.lock().core.is_observed = true;
    }

    /// How many calls of a verb came in since [`observe`](Self::observe), failed ones too.
    ///
    /// ```
    /// use ibverbs_software::{Device, Verb};
    ///
    /// let device = Device::new()?;
    /// device.observe();
    /// let context = device.open()?;
    /// drop((context.alloc_pd()?, context.alloc_pd()?));
    /// assert_eq!((device.calls(Verb::AllocPd), device.calls(Verb::RegMr)), (2, 0));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn calls(&self, verb: Verb) -> u64 {
        self.shared().failures().calls(verb)
    }

    /// How many regions were deregistered since [`observe`](Self::observe) while a request that names them had not
    /// been carried out. Such a request fails on this device; hardware may have been using the memory at that moment.
    pub fn early_deregistrations(&self) -> u64 {
        self.lock().core.early_deregistrations
    }

    /// The places of its queues that the requests of a queue pair occupy: sends, and receives. A place becomes free when
    /// a completion that covers it is polled. `None`: the device has no such queue pair.
    pub fn outstanding(&self, queue_pair: u32) -> Option<(u32, u32)> {
        self.lock().qps.get(queue_pair).map(|qp| (qp.sq.used, qp.rq_used))
    }
}

impl Engine {
    /// Whether a request that was not carried out yet names the region with this key.
    pub(crate) fn is_named(&self, key: u32) -> bool {
        // Elements of length 0 name no memory.
        let names = |list: &[Sge]| list.iter().any(|sge| sge.lkey == key && sge.length > 0);
        let sends = |posted: &Posted| match (&posted.request.operation, &posted.request.data) {
            _ if posted.done => false,
            (Operation::Bind(bind), _) => bind.region == key,
            (_, Data::List(list)) => names(list),
            (_, Data::Inline(_)) => false,
        };
        self.qps.iter().any(|(_, qp)| {
            let current = qp.responder.receive.iter();
            qp.sq.posted.iter().any(sends) || qp.rq.iter().chain(current).any(|r| names(&r.list))
        }) || self.core.srqs.iter().any(|(_, srq)| srq.receives.iter().any(|r| names(&r.list)))
    }
}
