//! One descriptor that is readable when there is something to do.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};
use slotmap::{Key, KeyData};

use crate::event::PeerId;

/// No peer has this number.
const NO_PEER: u64 = 0;

/// Devices, the peers' streams, and a timer.
#[derive(Debug)]
pub(crate) struct Readiness {
    epoll: OwnedFd,
    timer: OwnedFd,
}

/// The readiness that a peer's stream is watched for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Interest {
    pub(crate) reads: bool,
    pub(crate) writes: bool,
}

impl Interest {
    fn flags(self) -> EventFlags {
        let flag = |is_set, flag| if is_set { flag } else { EventFlags::empty() };
        flag(self.reads, EventFlags::IN) | flag(self.writes, EventFlags::OUT)
    }
}

impl Readiness {
    pub(crate) fn new() -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        epoll::add(&epoll, &timer, EventData::new_u64(NO_PEER), EventFlags::IN)?;
        Ok(Self { epoll, timer })
    }

    /// Watches a device's file.
    pub(crate) fn add(&self, device: BorrowedFd<'_>) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, device, EventData::new_u64(NO_PEER), EventFlags::IN)?)
    }

    /// Watches a peer's stream, or does not, in another way than `before`.
    pub(crate) fn watch(
        &self,
        peer: PeerId,
        stream: BorrowedFd<'_>,
        interest: Option<Interest>,
        before: Option<Interest>,
    ) -> io::Result<()> {
        let data = EventData::new_u64(peer.data().as_ffi());
        match (before, interest) {
            _ if before == interest => {}
            (Some(_), Some(it)) => epoll::modify(&self.epoll, stream, data, it.flags())?,
            (None, Some(it)) => epoll::add(&self.epoll, stream, data, it.flags())?,
            (_, None) => self.forget(stream),
        }
        Ok(())
    }

    pub(crate) fn forget(&self, file: BorrowedFd<'_>) {
        // If this fails, closing the file ends the watch.
        let _ = epoll::delete(&self.epoll, file);
    }

    /// The peers whose streams are ready now, or some of them.
    pub(crate) fn peers(&self) -> impl Iterator<Item = PeerId> {
        let mut events = [const { std::mem::MaybeUninit::<Event>::uninit() }; 64];
        // Without an answer, they are asked for again.
        let ready = epoll::wait(&self.epoll, &mut events, Some(&Timespec::default()));
        let ready = ready.map_or(Vec::new(), |(events, _)| events.to_vec());
        let numbers = ready.into_iter().map(|event| event.data.u64());
        numbers.filter(|&number| number != NO_PEER).map(|number| KeyData::from_ffi(number).into())
    }

    /// The descriptor becomes readable then, if not before.
    pub(crate) fn wake_at(&self, at: Option<Instant>) -> io::Result<()> {
        let it_interval = Timespec::default();
        let it_value = at.map_or(Ok(Timespec::default()), |at| duration_until(at).try_into());
        let it_value = it_value.unwrap_or(Timespec { tv_sec: i64::MAX, tv_nsec: 0 });
        let value = Itimerspec { it_interval, it_value };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &value)?;
        Ok(())
    }

    /// Sleeps until there is something to do, or `other` is readable, or the time has come.
    pub(crate) fn sleep(&self, other: Option<BorrowedFd<'_>>, until: Instant) -> io::Result<()> {
        let one = [PollFd::new(&self.epoll, PollFlags::IN)];
        let others = other.iter().map(|file| PollFd::from_borrowed_fd(*file, PollFlags::IN));
        let mut files: Vec<_> = one.into_iter().chain(others).collect();
        match poll(&mut files, Timespec::try_from(duration_until(until)).ok().as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// Not zero, which would be no time at all; and rounded up, or the last of it would be spent in short sleeps.
fn duration_until(at: Instant) -> Duration {
    at.saturating_duration_since(Instant::now()) + Duration::from_micros(1)
}

impl AsFd for Readiness {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}
