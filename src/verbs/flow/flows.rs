use std::sync::atomic::{AtomicU64, Ordering};

use super::rule::{Counter, Counters, Held, Rule, VERB};
use crate::base::{Error, Handle, Leak, Parent, QueuePairType, Result, ffi, object};
use crate::verbs::device::Context;

object!(ibv_flow, ibv_destroy_flow);

/// `struct ibv_flow`: names a flow, which its queue pair owns.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[doc(alias = "ibv_flow")]
pub struct FlowId(u64);

/// The queue pair destroys them before itself.
#[derive(Default)]
pub(crate) struct Flows<'res> {
    flows: Vec<Flow<'res>>,
}

struct Flow<'res> {
    id: FlowId,
    raw: Handle<ffi::ibv_flow>,
    held: Vec<Held<'res>>,
}

impl Flow<'_> {
    /// If it fails, the queue pair must not be destroyed either.
    fn destroy(mut self, queue_pair: &Handle<ffi::ibv_qp>, parents: &impl Leak) -> Result<()> {
        self.raw.destroy().inspect_err(|_| {
            self.held.iter().for_each(Held::leak);
            queue_pair.leak();
            parents.leak();
        })
    }
}

// SAFETY: libibverbs allows every verb on a flow from any thread.
unsafe impl Send for Flow<'_> {}
// SAFETY: as above.
unsafe impl Sync for Flow<'_> {}

impl<'res> Flows<'res> {
    /// # Safety
    ///
    /// The queue pair is live, of that type and on that context. Its owner calls
    /// [`destroy_all`](Self::destroy_all) before it destroys it.
    pub(crate) unsafe fn create(
        &mut self,
        queue_pair: *mut ffi::ibv_qp,
        kind: QueuePairType,
        context: &Context<'_>,
        rule: &Rule<'res>,
    ) -> Result<FlowId> {
        static NEXT: AtomicU64 = AtomicU64::new(1);

        if !matches!(kind, QueuePairType::RawPacket | QueuePairType::UnreliableDatagram) {
            let reason = "only raw packet and UD queue pairs have flows";
            return Err(Error::invalid(VERB, reason));
        }
        let mut raw_rule = rule.to_raw(context)?;
        if self.flows.try_reserve(1).is_err() {
            return Err(Error::new(VERB, libc::ENOMEM));
        }
        let held = rule.held.clone();
        // SAFETY: the caller vouches for the queue pair; the rule is well-formed, and `held` keeps what it names;
        // the flow is ours alone.
        let raw =
            unsafe { Handle::new(VERB, ffi::ibv_create_flow(queue_pair, raw_rule.as_mut_ptr())) }?;
        let id = FlowId(NEXT.fetch_add(1, Ordering::Relaxed));
        self.flows.push(Flow { id, raw, held });
        Ok(id)
    }

    pub(crate) fn destroy(
        &mut self,
        id: FlowId,
        queue_pair: &Handle<ffi::ibv_qp>,
        parents: &impl Leak,
    ) -> Result<()> {
        let Some(at) = self.flows.iter().position(|flow| flow.id == id) else {
            return Err(Error::invalid("ibv_destroy_flow", "the queue pair has no such flow"));
        };
        self.flows.swap_remove(at).destroy(queue_pair, parents)
    }

    pub(crate) fn destroy_all(&mut self, queue_pair: &Handle<ffi::ibv_qp>, parents: &impl Leak) {
        for flow in self.flows.drain(..) {
            let _ = flow.destroy(queue_pair, parents);
        }
    }

    pub(crate) fn attach(
        &mut self,
        id: FlowId,
        counters: Parent<'res, Counters<'res>>,
        counter: Counter,
        index: u32,
    ) -> Result<()> {
        const VERB: &str = "ibv_attach_counters_point_flow";
        let Some(flow) = self.flows.iter_mut().find(|flow| flow.id == id) else {
            return Err(Error::invalid(VERB, "the queue pair has no such flow"));
        };
        if flow.held.try_reserve(1).is_err() {
            return Err(Error::new(VERB, libc::ENOMEM));
        }
        // SAFETY: both are live and stay so: the flow keeps the counters even after a failure, which may have
        // taken effect.
        let returned = unsafe { counters.attach_raw(counter, index, flow.raw.as_ptr()) };
        flow.held.push(Held::Counters(counters));
        returned
    }
}
