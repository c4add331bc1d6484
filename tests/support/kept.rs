//! Unpolled operations that keep their buffers: for tests that need some in flight beside scopes and blocking calls.

use std::time::{Duration, Instant};

use ibverbs::channel::{PendingWork, WorkRequest};
use ibverbs::completion::WorkSuccess;
use ibverbs::memory::{GatherBuffer, ScatterBuffer};
use ibverbs::{Channel, ReceiveWorkRequest, SendWorkRequest, TransportError, TransportResult};

/// An unpolled operation with its buffer, which is leaked unless the operation was seen to end.
#[must_use]
pub(crate) struct Kept<B: 'static> {
    work: PendingWork,
    buffer: Option<&'static mut B>,
}

/// Posts a request of this buffer, which is dropped if it is refused.
pub(crate) fn post<B, R: WorkRequest>(
    channel: &mut Channel<'_>,
    buffer: B,
    request: impl FnOnce(&'static mut B) -> R,
) -> TransportResult<Kept<B>> {
    let buffer = Box::into_raw(Box::new(buffer));
    // SAFETY: nothing else refers to it until the operation has ended.
    let request = request(unsafe { &mut *buffer });
    // SAFETY: it is freed when the operation has ended, or never.
    let posted = unsafe { channel.post_unpolled(request) };
    // SAFETY: the request is gone, and this is used when the operation has ended.
    let mut buffer = Some(unsafe { &mut *buffer });
    match posted {
        Ok(work) => Ok(Kept { work, buffer }),
        Err(error) => {
            take(&mut buffer);
            Err(error)
        }
    }
}

#[allow(dead_code, reason = "not every test receives")]
pub(crate) fn receive<B>(channel: &mut Channel<'_>, buffer: B) -> TransportResult<Kept<B>>
where
    &'static mut B: ScatterBuffer,
{
    post(channel, buffer, ReceiveWorkRequest::new)
}

#[allow(dead_code, reason = "not every test sends")]
pub(crate) fn send<B>(channel: &mut Channel<'_>, buffer: B) -> TransportResult<Kept<B>>
where
    &'static B: GatherBuffer,
{
    post(channel, buffer, |buffer| SendWorkRequest::new(&*buffer))
}

fn take<B>(buffer: &mut Option<&'static mut B>) -> B {
    // SAFETY: it was made by `Box::into_raw` in `post`.
    *unsafe { Box::from_raw(buffer.take().expect("it was taken once")) }
}

impl<B> Kept<B> {
    /// Polls once. `None`: it is still in flight.
    pub(crate) fn poll(
        &mut self,
        channel: &mut Channel<'_>,
    ) -> TransportResult<Option<(B, WorkSuccess)>> {
        match self.work.poll(channel) {
            None => Ok(None),
            Some(Ok(success)) => Ok(Some((take(&mut self.buffer), success))),
            Some(Err(error)) => {
                use TransportError as E;
                if matches!(error, E::Work(_) | E::Stopped | E::Closed) && self.buffer.is_some() {
                    take(&mut self.buffer);
                }
                Err(error)
            }
        }
    }

    /// Polls until it has ended, or polling fails.
    pub(crate) fn wait(&mut self, channel: &mut Channel<'_>) -> TransportResult<(B, WorkSuccess)> {
        let end = Instant::now() + Duration::from_secs(120);
        loop {
            if let Some(ended) = self.poll(channel)? {
                return Ok(ended);
            }
            assert!(Instant::now() < end, "it does not end");
        }
    }
}
