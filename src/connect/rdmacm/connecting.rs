//! A connection that is being made.

use std::fmt;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd};
#[cfg(feature = "tokio")]
use std::thread;
use std::time::{Duration, Instant};

use super::connectable::sealed::Connected as _;
use super::connectable::{Connected, advance, check, sealed, watch};
use super::connection::{Connection, ConnectionControl};
use super::error::ConnectionError;
use super::event::{ConnectionEventKind, Copied};
use super::id::Id;
use super::private_data::{Message, PrivateData};
use super::{Connectable, Step, WAIT};
use crate::base::{QueuePairState, Result, debug, ffi};
use crate::connect::handshake::Handshake;
use crate::verbs::device::event_file;
use crate::verbs::memory::RemoteMemoryRegion;

#[derive(Clone, Copy, Debug)]
pub(super) struct Offer {
    /// The peer's reads and atomics that we answer at a time.
    pub(super) responder_resources: u8,
    /// Our reads and atomics in flight.
    pub(super) initiator_depth: u8,
    /// Where the peer counts its receives, with flow control.
    pub(super) credit_word: Option<RemoteMemoryRegion>,
}

/// A queue pair or channel in INIT, about to be connected. Receives can be posted through
/// [`queue_pair`](Self::queue_pair).
///
/// On iWARP a message that finds no receive ends the connection: the side that gets the first message posts
/// its receives here.
#[must_use]
pub struct PendingConnection<Q> {
    object: Q,
    id: Id,
    iwarp: bool,
    /// `None` on the side that connects.
    offer: Option<Offer>,
}

impl<Q: sealed::Connected> PendingConnection<Q> {
    /// A failure changes nothing.
    pub(super) fn new<P: Connectable + Handshake<Connected = Q>>(
        mut id: Id,
        mut prepared: P,
        offer: Option<Offer>,
    ) -> Result<Self, (Id, P, ConnectionError)> {
        if let Err(error) = check(&id, &prepared) {
            return Err((id, prepared, error));
        }
        if let Some(offer) = &offer
            && let Err(error) = prepared.agree(offer.credit_word)
        {
            return Err((id, prepared, error.into()));
        }
        if let Err(error) = advance(&mut id, &mut prepared, QueuePairState::Init) {
            return Err((id, prepared, error.into()));
        }
        let iwarp = id.is_iwarp();
        Ok(Self { object: prepared.into_connected(), id, iwarp, offer })
    }

    /// The queue pair or channel, for posting receives.
    pub fn queue_pair(&mut self) -> &mut Q {
        &mut self.object
    }

    /// `rdma_connect` or `rdma_accept`: sends the request or the answer.
    ///
    /// The private data have up to 56 bytes in a request and 196 in an answer (252 on iWARP; 24 less [with
    /// flow control](PrivateData)).
    ///
    /// # Errors
    ///
    ///  - [`Verbs`](ConnectionError::Verbs): the private data are too long (`EINVAL`), the queue pair had to
    ///    be destroyed, or the peer has given up. The connection is then gone.
    #[doc(alias = "rdma_connect")]
    #[doc(alias = "rdma_accept")]
    pub fn start(mut self, private_data: &[u8]) -> Result<Connecting<Q>, ConnectionError> {
        let (message, verb) = match self.offer {
            None => (Message::Request, "rdma_connect"),
            Some(_) => (Message::Reply, "rdma_accept"),
        };
        let settings = self.object.settings();
        let data = message.compose(verb, settings.credit_word, private_data, self.iwarp)?;
        let ours = settings.reads();
        // The peer cannot use more than it asked for.
        let (responder_resources, initiator_depth) = self.offer.map_or(ours, |theirs| {
            (ours.0.min(theirs.responder_resources), ours.1.min(theirs.initiator_depth))
        });
        let mut parameters = ffi::rdma_conn_param {
            private_data: data.as_ptr().cast(),
            private_data_len: data.len() as u8, // 255 at most
            responder_resources,
            initiator_depth,
            flow_control: 1,
            retry_count: settings.connection.max_ack_retries.value(),
            rnr_retry_count: settings.connection.max_rnr_retries.value(),
            srq: settings.shared_receives.into(),
            qp_num: settings.number,
        };
        if self.offer.is_none() {
            self.id.connect(&mut parameters).map_err(|error| {
                // iWARP may report the refusal at once.
                if error.errno() == libc::ECONNREFUSED {
                    return ConnectionError::refused();
                }
                error.into()
            })?;
        } else {
            if !self.iwarp {
                // The peer may send as soon as it has our answer.
                make_ready(&mut self.id, &mut self.object)?;
            }
            self.id.accept(&mut parameters)?;
        }
        let attempt = Attempt::new(self.object, self.id, self.iwarp);
        Ok(Connecting { attempt, active: self.offer.is_none() })
    }
}

/// The answer to a peer, separate from the queue pair or channel: see
/// [`ConnectionRequest::prepare_parts`](crate::rdmacm::ConnectionRequest::prepare_parts). Dropping it rejects
/// the peer.
#[must_use = "dropping it rejects the peer"]
pub struct PendingAccept {
    pending: PendingConnection<Separate>,
}

impl PendingAccept {
    #[expect(clippy::type_complexity, reason = "what is given back is simply all there was")]
    pub(super) fn new<P: Connectable>(
        id: Id,
        prepared: P,
        offer: Offer,
    ) -> Result<(Connected<P>, Self), (Id, Option<P>, ConnectionError)> {
        let pending = PendingConnection::new(id, prepared, Some(offer))
            .map_err(|(id, prepared, error)| (id, Some(prepared), error))?;
        let PendingConnection { mut object, mut id, iwarp, offer } = pending;
        if iwarp {
            // The kernel makes it ready after our answer; the object is elsewhere by then.
            object.established();
        } else if let Err(error) =
            make_ready(&mut id, &mut object).and_then(|()| watch(&mut object, &mut id, iwarp))
        {
            return Err((id, None, error.into()));
        }
        let separate = Separate(sealed::Object::settings(&object));
        Ok((object, Self { pending: PendingConnection { object: separate, id, iwarp, offer } }))
    }

    /// `rdma_accept`: [`ConnectionRequest::accept`](crate::rdmacm::ConnectionRequest::accept), with the queue
    /// pair or channel elsewhere.
    ///
    /// # Errors
    ///
    /// Those of that method. The peer is then rejected; what was posted ends when the queue pair is stopped
    /// or dropped.
    #[doc(alias = "rdma_accept")]
    pub fn accept(
        self,
        private_data: &[u8],
        deadline: Instant,
    ) -> Result<ConnectionControl, ConnectionError> {
        let connection = self.start(private_data)?.finish(deadline)?;
        Ok(connection.into_parts().1)
    }

    /// [`accept`](Self::accept) in steps, for event loops. Take the [control part](Connection::into_parts) of
    /// the resulting connection.
    ///
    /// # Errors
    ///
    /// Those of [`PendingConnection::start`].
    pub fn start(self, private_data: &[u8]) -> Result<Connecting<Separate>, ConnectionError> {
        self.pending.start(private_data)
    }
}

debug! { PendingAccept, self, pending: self.pending }

/// Stands for a queue pair or channel that the program holds: see [`PendingAccept::start`].
#[derive(Debug)]
pub struct Separate(sealed::Settings);

impl sealed::Object for Separate {
    fn settings(&self) -> sealed::Settings {
        self.0
    }

    fn agree(&self, _: Option<RemoteMemoryRegion>) -> Result<()> {
        Ok(())
    }

    fn modify(&mut self, _: &mut ffi::ibv_qp_attr, _: u32) -> Result<()> {
        Ok(())
    }
}

impl sealed::Connected for Separate {
    fn established(&mut self) {}

    fn end(&mut self) {}
}

fn make_ready(id: &mut Id, object: &mut impl sealed::Connected) -> Result<()> {
    advance(id, object, QueuePairState::ReadyToReceive)?;
    advance(id, object, QueuePairState::ReadyToSend)?;
    object.established();
    Ok(())
}

debug! { impl[Q: fmt::Debug] PendingConnection<Q>, self, object: self.object, .. }

/// A connection in the making, for event loops. Dropping it gives up, and tells the peer if possible.
///
/// On iWARP the drop waits until the peer has answered, or the kernel's time is up (10 s with Soft-iWARP).
/// For an [`AsyncChannel`](crate::AsyncChannel), whose buffers come back then, another thread waits.
#[must_use]
pub struct Connecting<Q: sealed::Connected> {
    pub(super) attempt: Attempt<Q>,
    active: bool,
}

impl<Q: sealed::Connected> Connecting<Q> {
    /// The queue pair or channel, for posting receives.
    pub fn queue_pair(&mut self) -> &mut Q {
        &mut self.attempt.object
    }

    /// Proceeds without waiting. Call it when the file is readable.
    ///
    /// # Errors
    ///
    /// Those of [`Route::connect`](crate::rdmacm::Route::connect) but `TimedOut`.
    pub fn step(mut self) -> Result<Step<Connection<Q>, Self>, ConnectionError> {
        while let Some(event) = self.attempt.id.next()? {
            if self.is_done_by(&event)? {
                return Ok(Step::Done(self.established(&event)?));
            }
        }
        Ok(Step::Pending(self))
    }

    /// Waits until the connection is established, not after `deadline`.
    ///
    /// # Errors
    ///
    /// Those of [`Route::connect`](crate::rdmacm::Route::connect).
    pub fn finish(mut self, deadline: Instant) -> Result<Connection<Q>, ConnectionError> {
        loop {
            let event = self.attempt.id.next_before(Some(deadline))?;
            if self.is_done_by(&event)? {
                return self.established(&event);
            }
        }
    }

    fn is_done_by(&mut self, event: &Copied) -> Result<bool, ConnectionError> {
        use ConnectionEventKind as Kind;

        let Attempt { object, id, iwarp, .. } = &mut self.attempt;
        if self.active && matches!(event.kind(), Kind::Established | Kind::ConnectResponse) {
            object.agree(event.public.private_data.split().0)?;
        }
        match event.kind() {
            Kind::Established => {
                object.established();
                Ok(true)
            }
            Kind::ConnectResponse if self.active => {
                if !*iwarp {
                    make_ready(id, &mut **object)?;
                }
                id.establish()?;
                Ok(true)
            }
            Kind::AddressChanged | Kind::TimeWaitExit | Kind::Unknown(_) => Ok(false),
            Kind::DeviceRemoved => {
                object.end();
                Err(event.error())
            }
            _ => Err(event.error()),
        }
    }

    fn established(mut self, event: &Copied) -> Result<Connection<Q>, ConnectionError> {
        // The side that accepts has it in the request.
        let private_data =
            if self.active { event.public.private_data.split().1 } else { PrivateData::EMPTY };
        let Attempt { object, id, iwarp, .. } = &mut self.attempt;
        watch(&mut **object, id, *iwarp)?;
        let iwarp = *iwarp;
        let (object, id) = self.attempt.into_parts();
        Ok(Connection::new(object, id, iwarp, private_data))
    }
}

impl<Q: sealed::Connected> AsFd for Connecting<Q> {
    /// Readable when [`step`](Self::step) has work.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.attempt.id.as_fd()
    }
}

debug! {
    impl[Q: sealed::Connected + fmt::Debug] Connecting<Q>, self,
    object: *self.attempt.object, active: self.active, ..
}

pub(super) fn connect<P: Connectable>(
    id: Id,
    prepared: P,
    offer: Option<Offer>,
    private_data: &[u8],
    deadline: Instant,
) -> Result<Connection<Connected<P>>, ConnectionError> {
    let pending = PendingConnection::new(id, prepared, offer).map_err(|(.., error)| error)?;
    pending.start(private_data)?.finish(deadline)
}

/// For the kernel's time-outs.
pub(super) fn time_left(deadline: Instant) -> Result<Duration, ConnectionError> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(event_file::timed_out(WAIT).into()) } else { Ok(left) }
}

/// On iWARP, destroying either may wait for the peer.
#[derive(Debug)]
pub(super) struct Attempt<Q: sealed::Connected> {
    pub(super) object: ManuallyDrop<Q>,
    pub(super) id: ManuallyDrop<Id>,
    pub(super) iwarp: bool,
    /// Drops both on iWARP.
    give_up: fn(Q, Id),
}

/// For callers and reactors that must not wait for the peer.
#[cfg(feature = "tokio")]
fn in_a_thread<Q: Send + 'static, I: Send + 'static>(object: Q, id: I) {
    let in_this_order = (id, object);
    // Without a new thread, this one waits.
    let _ = thread::Builder::new().name("give up".into()).spawn(move || drop(in_this_order));
}

impl<Q: sealed::Connected> Attempt<Q> {
    pub(super) fn new(object: Q, id: Id, iwarp: bool) -> Self {
        let (object, id) = (ManuallyDrop::new(object), ManuallyDrop::new(id));
        Self { object, id, iwarp, give_up: Q::give_up }
    }

    #[cfg(feature = "tokio")]
    pub(super) fn give_up_elsewhere(&mut self)
    where
        Q: Send + 'static,
    {
        self.give_up = in_a_thread;
    }

    pub(super) fn into_parts(self) -> (Q, Id) {
        // SAFETY: it is forgotten, and not used again.
        unsafe { ManuallyDrop::new(self).take() }
    }

    /// # Safety
    ///
    /// Neither is used again.
    unsafe fn take(&mut self) -> (Q, Id) {
        // SAFETY: the caller promises that they are taken once.
        unsafe { (ManuallyDrop::take(&mut self.object), ManuallyDrop::take(&mut self.id)) }
    }
}

impl<Q: sealed::Connected> Drop for Attempt<Q> {
    fn drop(&mut self) {
        // SAFETY: it is being dropped, so this is the last use.
        let (object, id) = unsafe { self.take() };
        if self.iwarp {
            return (self.give_up)(object, id);
        }
        drop((object, id));
    }
}
