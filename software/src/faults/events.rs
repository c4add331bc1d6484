//! Asynchronous events that are made up.

use std::io;

use ibverbs::device::AsyncEventKind;

use crate::device::Device;
use crate::ffi::{ibv_cq, ibv_event_type, ibv_srq};
use crate::transport::Engine;

/// The subject of a made-up event: see [`Device::make_up_event`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EventSubject {
    /// The queue pair with this number.
    QueuePair(u32),
    /// A completion queue: its `as_raw()`, which is compared, and not followed.
    CompletionQueue(*mut ibv_cq),
    /// A shared receive queue: its `as_raw()`, likewise.
    SharedReceiveQueue(*mut ibv_srq),
    /// A port, which need not exist.
    Port(u32),
    /// The device.
    Device,
    /// Any number, for an event that the standard does not have.
    Other(u64),
}

fn error(kind: io::ErrorKind, reason: &str) -> io::Error {
    io::Error::new(kind, reason)
}

/// Whether events of that kind are about such a subject. A program follows the pointers in events.
fn fits(event: ibv_event_type, subject: EventSubject) -> bool {
    type E = ibv_event_type;
    match event {
        E::IBV_EVENT_CQ_ERR => matches!(subject, EventSubject::CompletionQueue(_)),
        E::IBV_EVENT_SRQ_ERR | E::IBV_EVENT_SRQ_LIMIT_REACHED => {
            matches!(subject, EventSubject::SharedReceiveQueue(_))
        }
        E::IBV_EVENT_QP_FATAL
        | E::IBV_EVENT_QP_REQ_ERR
        | E::IBV_EVENT_QP_ACCESS_ERR
        | E::IBV_EVENT_COMM_EST
        | E::IBV_EVENT_SQ_DRAINED
        | E::IBV_EVENT_PATH_MIG
        | E::IBV_EVENT_PATH_MIG_ERR
        | E::IBV_EVENT_QP_LAST_WQE_REACHED => matches!(subject, EventSubject::QueuePair(_)),
        E::IBV_EVENT_PORT_ACTIVE
        | E::IBV_EVENT_PORT_ERR
        | E::IBV_EVENT_LID_CHANGE
        | E::IBV_EVENT_PKEY_CHANGE
        | E::IBV_EVENT_SM_CHANGE
        | E::IBV_EVENT_CLIENT_REREGISTER
        | E::IBV_EVENT_GID_CHANGE => matches!(subject, EventSubject::Port(_)),
        E::IBV_EVENT_DEVICE_FATAL | E::IBV_EVENT_DEVICE_SPEED_CHANGE => {
            subject == EventSubject::Device
        }
        // The device has no work queues.
        E::IBV_EVENT_WQ_FATAL => false,
        _ => matches!(subject, EventSubject::Other(_)),
    }
}

impl Device {
    /// Raises an asynchronous event that has no cause: in all contexts, or in those of its subject. Nothing else
    /// happens: after [`AsyncEventKind::DeviceFatal`] the device works as before.
    ///
    /// ```
    /// use ibverbs::device::AsyncEventKind;
    /// use ibverbs_software::{Device, EventSubject};
    ///
    /// let device = Device::new()?;
    /// let context = device.open()?;
    /// device.make_up_event(AsyncEventKind::LidChange, EventSubject::Port(1))?;
    /// assert_eq!(context.async_events()?.wait()?.kind(), AsyncEventKind::LidChange);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// - [`InvalidInput`](io::ErrorKind::InvalidInput): events of this kind are about something else.
    /// - [`NotFound`](io::ErrorKind::NotFound): the device has no such queue pair or queue.
    pub fn make_up_event(&self, kind: AsyncEventKind, subject: EventSubject) -> io::Result<()> {
        let event = ibv_event_type::from(kind);
        if !fits(event, subject) {
            let reason = "events of this kind are about something else";
            return Err(error(io::ErrorKind::InvalidInput, reason));
        }
        let engine = &mut *self.lock();
        let found = match subject {
            EventSubject::QueuePair(number) => engine.event_of_queue_pair(event, number),
            EventSubject::CompletionQueue(queue) => engine.event_of_queue(event, queue as u64),
            EventSubject::SharedReceiveQueue(queue) => {
                engine.event_of_receives(event, queue as u64)
            }
            EventSubject::Port(port) => engine.event_everywhere(event, port.into()),
            EventSubject::Device => engine.event_everywhere(event, 0),
            EventSubject::Other(number) => engine.event_everywhere(event, number),
        };
        found.ok_or_else(|| error(io::ErrorKind::NotFound, "the device has no such object"))
    }
}

/// Each returns `None` if there is no such object.
impl Engine {
    fn event_of_queue_pair(&mut self, event: ibv_event_type, number: u32) -> Option<()> {
        let qp = self.qps.get_mut(number)?;
        qp.raise(&mut self.core, event);
        Some(())
    }

    fn event_of_queue(&mut self, event: ibv_event_type, handle: u64) -> Option<()> {
        let cq = self.core.cqs.iter_mut().find(|cq| cq.handle == handle)?;
        cq.async_events += 1;
        let context = cq.context;
        self.core.raise(context, event, handle);
        Some(())
    }

    fn event_of_receives(&mut self, event: ibv_event_type, handle: u64) -> Option<()> {
        let srq = self.core.srqs.iter_mut().find(|srq| srq.handle == handle)?;
        srq.async_events += 1;
        let context = srq.context;
        self.core.raise(context, event, handle);
        Some(())
    }

    fn event_everywhere(&mut self, event: ibv_event_type, element: u64) -> Option<()> {
        self.core.raise_in_all_contexts(event, element);
        Some(())
    }
}
