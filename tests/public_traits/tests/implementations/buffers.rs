//! Buffers that own memory which a program has registered itself.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ibverbs::channel::{AnyBuffer, OwnedBuffer};
use ibverbs::future::Locked;
use ibverbs::memory::{BorrowedBuffer, GatherBuffer, KeptLength, RawMemoryRegion, ScatterBuffer};
use ibverbs::{
    AccessFlags, Channel, ChannelBuilder, ChannelId, Ended, Inline, Loop, ProtectionDomain,
    Reactor, ReceiveWorkRequest, Result, SendWorkRequest, TransportError, ffi,
    settings::MaxRnrRetries,
};

use crate::by_hand::poll;
use crate::software::Software;

const LEN: usize = 24;

/// Memory of the allocator's, freed when it is deregistered.
struct Memory(NonNull<[u8; LEN]>);

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: it came from a box, and the region, which is dropped before, was the last to use it.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

/// How the buffer misbehaves, as far as its contract lets it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mood {
    Good,
    Refuses,
    PanicsWhenAsked,
    PanicsWhenDropped,
}

/// The parts of a buffer. Fields are dropped in order.
struct Parts {
    region: RawMemoryRegion<'static>,
    memory: Memory,
    mood: Mood,
    dropped: Arc<AtomicUsize>,
}

/// A buffer of one word.
struct Own(Box<Parts>);

// SAFETY: it owns the memory, which may be used on any thread.
unsafe impl Send for Own {}
// SAFETY: as above; a shared reference only reads.
unsafe impl Sync for Own {}

impl Own {
    fn new(rig: &Rig, byte: u8) -> Self {
        let memory = Memory(NonNull::from(Box::leak(Box::new([byte; LEN]))));
        // SAFETY: the memory is freed after the region is dropped, and no reference to it exists while a request is posted.
        let region = unsafe {
            RawMemoryRegion::new(
                &rig.domain,
                memory.0.as_ptr().cast(),
                LEN,
                AccessFlags::LOCAL_WRITE,
            )
        };
        let (region, dropped) = (region.unwrap(), rig.dropped.clone());
        Self(Box::new(Parts { region, memory, mood: Mood::Good, dropped }))
    }

    fn with(rig: &Rig, mood: Mood) -> Self {
        let mut own = Self::new(rig, 1);
        own.0.mood = mood;
        own
    }

    fn bytes(&self) -> [u8; LEN] {
        // SAFETY: no request is posted while the program has the buffer.
        unsafe { *self.0.memory.0.as_ptr() }
    }
}

impl fmt::Debug for Own {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Own")
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        self.0.dropped.fetch_add(1, Ordering::SeqCst);
        assert!(self.0.mood != Mood::PanicsWhenDropped, "the buffer");
    }
}

// SAFETY: the memory stays registered at its own address, and valid, until the value is dropped; only this value gives access
// to it, and `gather` always names all of it.
unsafe impl GatherBuffer for Own {
    type List = [ffi::ibv_sge; 1];
    type Kept = Self;

    fn gather(&self) -> Result<Self::List> {
        match self.0.mood {
            Mood::Refuses => return Err(self.0.region.gather_element(LEN + 1..).unwrap_err()),
            Mood::PanicsWhenAsked => panic!("the buffer"),
            Mood::Good | Mood::PanicsWhenDropped => {}
        }
        let addr = self.0.memory.0.as_ptr() as u64;
        Ok([ffi::ibv_sge { addr, length: LEN as u32, lkey: self.0.region.lkey() }])
    }
}

// SAFETY: as above. It is registered for local writes, and any bytes are valid.
unsafe impl ScatterBuffer for Own {
    fn scatter(&mut self) -> Result<Self::List> {
        self.gather()
    }
}

// SAFETY: nothing but a drop ends what it promises.
unsafe impl OwnedBuffer for Own {}

/// A buffer that keeps a length, in memory that stays where it is when the buffer moves.
struct Counted {
    own: Own,
    len: NonNull<KeptLength>,
}

impl Counted {
    fn new(rig: &Rig) -> Self {
        let len = Box::leak(Box::new(KeptLength::new(LEN as u32)));
        Self { own: Own::new(rig, 0), len: len.into() }
    }

    fn text(&self) -> Vec<u8> {
        // SAFETY: it is there until the buffer is dropped.
        self.own.bytes()[..unsafe { self.len.as_ref() }.get() as usize].to_vec()
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        // SAFETY: it came from a box, and nothing uses it any more.
        drop(unsafe { Box::from_raw(self.len.as_ptr()) });
    }
}

// SAFETY: it owns what it points to.
unsafe impl Send for Counted {}

// SAFETY: as for `Own`, of which it names the part that is in use.
unsafe impl GatherBuffer for Counted {
    type List = [ffi::ibv_sge; 1];
    type Kept = Self;

    const KEEPS_LENGTH: bool = true;

    fn gather(&self) -> Result<Self::List> {
        // SAFETY: it is there until the buffer is dropped.
        let length = unsafe { self.len.as_ref() }.get();
        Ok(self.own.gather()?.map(|piece| ffi::ibv_sge { length, ..piece }))
    }

    fn kept_length(&mut self) -> Option<NonNull<KeptLength>> {
        Some(self.len)
    }
}

// SAFETY: as for `Own`.
unsafe impl ScatterBuffer for Counted {
    fn scatter(&mut self) -> Result<Self::List> {
        self.gather()
    }

    fn begin_receive(&mut self) -> Result<Self::List> {
        self.own.scatter()
    }
}

// SAFETY: nothing but a drop ends what it promises.
unsafe impl OwnedBuffer for Counted {}

/// A borrowed buffer, which is lent to a scope by value.
struct Lent<'a>(&'a mut Own);

// SAFETY: as for what it borrows, for the lifetime of the borrow.
unsafe impl GatherBuffer for Lent<'_> {
    type List = [ffi::ibv_sge; 1];
    type Kept = Self;

    fn gather(&self) -> Result<Self::List> {
        self.0.gather()
    }
}

// SAFETY: as above; the borrow is exclusive.
unsafe impl ScatterBuffer for Lent<'_> {
    fn scatter(&mut self) -> Result<Self::List> {
        self.0.scatter()
    }
}

// SAFETY: what it names is borrowed for the lifetime of the type, and dropping it does nothing.
unsafe impl BorrowedBuffer for Lent<'_> {}

struct Rig {
    domain: Arc<ProtectionDomain<'static>>,
    dropped: Arc<AtomicUsize>,
    device: Software,
}

impl Rig {
    fn new() -> Self {
        let device = Software::new();
        let domain = Arc::new(ProtectionDomain::new(Arc::new(device.context())).unwrap());
        Self { domain, dropped: Arc::default(), device }
    }

    fn set(builder: ChannelBuilder<'static>) -> ChannelBuilder<'static> {
        builder
            .max_send_wr(4)
            .max_recv_wr(4)
            .max_inline_data(32)
            .max_rnr_retries(MaxRnrRetries::UNLIMITED)
    }

    fn loops<B>(&self) -> (Loop<'static, B>, [ChannelId; 2]) {
        let mut all = Loop::new(self.domain.context_parent(), 64).unwrap();
        let prepare =
            |of: &Loop<'static, B>| Self::set(of.create_channel(&self.domain)).build().unwrap();
        let (one, two) = (prepare(&all), prepare(&all));
        let (to_one, to_two) = (one.endpoint(), two.endpoint());
        let channels = [(one, to_two), (two, to_one)].map(|(one, to)| one.handshake(to).unwrap());
        let ids = channels.map(|channel| all.add(channel).unwrap());
        (all, ids)
    }

    fn dropped(&self) -> usize {
        self.dropped.swap(0, Ordering::SeqCst)
    }

    #[track_caller]
    fn finish(self) {
        let Self { domain, device, .. } = self;
        drop(domain);
        device.assert_clean();
    }
}

#[track_caller]
fn next<B>(of: &mut Loop<'static, B>) -> Ended<B> {
    for _ in 0..100_000 {
        if let Some(ended) = of.next_ended().unwrap() {
            return ended;
        }
    }
    panic!("nothing ends")
}

#[test]
fn a_loop_owns_a_programs_buffers() {
    let rig = Rig::new();
    let (mut all, [one, two]) = rig.loops::<Own>();
    for byte in 1..20 {
        all.post(two, ReceiveWorkRequest::new(Own::new(&rig, 0)), 1).unwrap();
        all.post(one, SendWorkRequest::new(Own::new(&rig, byte)), 2).unwrap();
        let mut ended = [next(&mut all), next(&mut all)];
        ended.sort_by_key(|ended| ended.token);
        assert!(
            ended.iter().all(|ended| ended.result().is_ok() && ended.buffer.bytes() == [byte; LEN])
        );
        assert_eq!(rig.dropped(), 0);
        drop(ended);
        assert_eq!(rig.dropped(), 2);
    }
    // A receive in flight ends with the loop.
    all.post(two, ReceiveWorkRequest::new(Own::new(&rig, 0)), 1).unwrap();
    drop(all);
    assert_eq!(rig.dropped(), 1);
    rig.finish();
}

#[test]
fn a_programs_buffer_may_keep_a_length() {
    let rig = Rig::new();
    let (mut all, [one, two]) = rig.loops::<Counted>();
    let (mut from, mut to) = (Counted::new(&rig), Counted::new(&rig));
    let prepare = || Rig::set(Channel::builder(&rig.domain)).build().unwrap();
    let (first, second) = (prepare(), prepare());
    let (to_first, to_second) = (first.endpoint(), second.endpoint());
    let mut first = first.handshake(to_second).unwrap();
    let mut second = second.handshake(to_first).unwrap();
    for text in [&b"a"[..], b"longer", b"", b"short"] {
        second
            .scope(|scope| {
                scope.post_receive(&mut from)?;
                first.send(Inline(text)).map(drop)
            })
            .unwrap();
        assert_eq!(from.text(), text);
        all.post(two, ReceiveWorkRequest::new(to), 1).unwrap();
        all.post(one, SendWorkRequest::new(from), 2).unwrap();
        let mut ended = [next(&mut all), next(&mut all)];
        ended.sort_by_key(|ended| ended.token);
        let [received, sent] = ended.map(|ended| ended.buffer);
        assert_eq!(received.text(), text);
        (from, to) = (sent, received);
    }
    drop((all, first, second, from, to));
    rig.finish();
}

#[test]
fn a_loop_of_any_buffers_keeps_them() {
    let rig = Rig::new();
    let (mut all, [one, two]) = rig.loops::<AnyBuffer>();
    all.post(two, ReceiveWorkRequest::new(Own::new(&rig, 0)), 1).unwrap();
    all.post(one, SendWorkRequest::new(Own::new(&rig, 5)), 2).unwrap();
    for _ in 0..2 {
        assert_eq!(next(&mut all).buffer.downcast::<Own>().unwrap().bytes(), [5; LEN]);
    }
    drop(all);
    assert_eq!(rig.dropped(), 2);
    rig.finish();
}

#[test]
fn channels_and_scopes_borrow_a_programs_buffers() {
    let rig = Rig::new();
    let prepare = || Rig::set(Channel::builder(&rig.domain)).build().unwrap();
    let (one, two) = (prepare(), prepare());
    let (to_one, to_two) = (one.endpoint(), two.endpoint());
    let (mut one, mut two) = (one.handshake(to_two).unwrap(), two.handshake(to_one).unwrap());
    let [mut from, mut first, mut second] = [7, 0, 0].map(|byte| Own::new(&rig, byte));
    two.scope(|two| {
        let by_value = two.post_receive(Lent(&mut first))?;
        let by_reference = two.post_receive(&mut second)?;
        one.send(&from)?;
        one.scope(|one| one.post_send(Lent(&mut from))?.wait().map(drop)).unwrap();
        by_value.wait()?;
        by_reference.wait()?;
        Ok::<_, TransportError>(())
    })
    .unwrap();
    assert_eq!([first.bytes(), second.bytes()], [[7; LEN]; 2]);
    drop((one, two, from, first, second));
    rig.finish();
}

#[test]
fn futures_own_a_programs_buffers() {
    let rig = Rig::new();
    let reactor = Reactor::<Locked<Own>>::with_share(rig.domain.context_parent(), 64).unwrap();
    let prepare = || reactor.prepare(Rig::set(Channel::builder(&rig.domain))).unwrap();
    let (one, two) = (prepare(), prepare());
    let (to_one, to_two) = (one.endpoint(), two.endpoint());
    let (one, two) = (one.handshake(to_two).unwrap(), two.handshake(to_one).unwrap());
    let (mut receive, mut send) = (two.receive(Own::new(&rig, 0)), one.send(Own::new(&rig, 9)));
    assert!(poll(&mut receive).is_none() && poll(&mut send).is_none());
    let message = loop {
        reactor.turn().unwrap();
        if let Some(message) = poll(&mut receive) {
            break message.unwrap().0;
        }
    };
    assert_eq!(message.bytes(), [9; LEN]);
    while poll(&mut send).is_none() {
        reactor.turn().unwrap();
    }
    // An operation ends after its future, and its buffer panics where it is dropped: others are not harmed.
    for _ in 0..2 {
        let mut dropped = one.send(Own::with(&rig, Mood::PanicsWhenDropped));
        assert!(poll(&mut dropped).is_none());
    }
    // A buffer panics while it is posted.
    let mut panics = one.send(Own::with(&rig, Mood::PanicsWhenAsked));
    assert!(catch_unwind(AssertUnwindSafe(|| poll(&mut panics))).is_err());
    let refused = poll(&mut one.send(Own::with(&rig, Mood::Refuses))).unwrap().unwrap_err();
    assert!(refused.buffer.is_some());
    let mut ended = 0;
    drop((message, send, receive, panics, refused));
    rig.dropped();
    for _ in 0..3 {
        let mut receive = two.receive(Own::new(&rig, 0));
        let _ = poll(&mut receive);
        for _ in 0..1000 {
            let _ = catch_unwind(AssertUnwindSafe(|| reactor.turn()));
        }
        ended += rig.dropped();
    }
    assert!(ended >= 2, "{ended}");
    let _ = catch_unwind(AssertUnwindSafe(|| drop((one, two))));
    drop(reactor);
    drop(rig.domain);
}

#[test]
fn what_a_buffer_does_when_it_is_asked_or_dropped_harms_no_loop() {
    let rig = Rig::new();
    let (mut all, [one, two]) = rig.loops::<Own>();
    for _ in 0..8 {
        let panics = SendWorkRequest::new(Own::with(&rig, Mood::PanicsWhenAsked));
        assert!(catch_unwind(AssertUnwindSafe(|| all.post(one, panics, 0))).is_err());
        let refuses = SendWorkRequest::new(Own::with(&rig, Mood::Refuses));
        let refused = all.post(one, refuses, 0).unwrap_err();
        assert!(refused.buffer.is_some());
    }
    assert_eq!((all.in_flight(one), rig.dropped()), (0, 8));
    // All are dropped with the loop, whatever some of them do; and during a panic, too.
    for moods in [Mood::PanicsWhenDropped, Mood::Good, Mood::PanicsWhenDropped, Mood::Good] {
        all.post(two, ReceiveWorkRequest::new(Own::with(&rig, moods)), 0).unwrap();
    }
    let during_a_panic = catch_unwind(AssertUnwindSafe(|| {
        let _all = all;
        panic!("the program");
    }));
    let thrown = during_a_panic.unwrap_err();
    assert_eq!(thrown.downcast_ref::<&str>(), Some(&"the program"));
    assert_eq!(rig.dropped(), 4);
}
