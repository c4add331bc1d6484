//! The events of feature `tracing`, on a device of software.

#[path = "support/software.rs"]
mod software;

use std::fmt::{self, Write as _};
use std::sync::{Arc, Mutex};

use ibverbs::{Channel, TransportError};
use ibverbs_software::Verb;
use software::Software;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Keeps the events as text, or panics at each if told to.
#[derive(Clone, Default)]
struct Events {
    lines: Arc<Mutex<Vec<(Level, String)>>>,
    panics: bool,
}

/// The payload of a broken subscriber's panic. The crate must forget it: dropping it panics again.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("the payload of a panic was dropped");
    }
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        write!(self.0, " {field}={value:?}").unwrap();
    }
}

impl Subscriber for Events {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "ibverbs"
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(String::new());
        event.record(&mut line);
        self.lines.lock().unwrap().push((*event.metadata().level(), line.0));
        if self.panics {
            std::panic::panic_any(Bomb);
        }
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

impl Events {
    /// The events since the last call.
    fn take(&self) -> Vec<(Level, String)> {
        std::mem::take(&mut self.lines.lock().unwrap())
    }
}

/// A channel that is connected to itself, a message that fails, and the events of that.
fn life_of_a_channel(events: &Events) -> [Vec<(Level, String)>; 4] {
    let device = Software::new();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let mut sent = domain.allocate::<u8>(8).unwrap();
    let mut received = domain.allocate::<u8>(8).unwrap();
    let prepared = Channel::builder(&domain).build().unwrap();
    let endpoint = prepared.endpoint();
    let mut channel = prepared.handshake(endpoint).unwrap();
    let connected = events.take();

    channel
        .scope(|scope| -> Result<(), TransportError> {
            let receive = scope.post_receive(received.slice_mut(..).unwrap())?;
            scope.post_send(sent.slice(..).unwrap())?.wait()?;
            receive.wait()?;
            Ok(())
        })
        .unwrap();
    let moved = events.take();

    device.fail_next(Verb::PollCq, libc::EIO);
    sent.fill(1);
    assert!(channel.send(sent.slice(..).unwrap()).is_err());
    let failed = events.take();

    let prepared = channel.reset().unwrap();
    device.fail_next(Verb::DestroyQp, libc::EIO);
    assert!(prepared.close().is_err());
    [connected, moved, failed, events.take()]
}

#[test]
fn state_changes_stops_reconnects_and_errors_are_told() {
    let events = Events::default();
    tracing::subscriber::with_default(events.clone(), || {
        let [connected, moved, failed, ended] = life_of_a_channel(&events);
        let has = |lines: &[(Level, String)], level: Level, words: &[&str]| {
            let found = lines
                .iter()
                .any(|(one, line)| *one == level && words.iter().all(|word| line.contains(word)));
            assert!(found, "no {level} event with {words:?} in {lines:#?}");
        };
        has(&connected, Level::DEBUG, &["state changed", "from=Reset", "to=Init"]);
        has(&connected, Level::DEBUG, &["to=ReadyToSend"]);
        has(&connected, Level::INFO, &["channel connected", "remote="]);
        assert!(moved.is_empty(), "there is nothing to tell of the data path: {moved:#?}");
        has(&failed, Level::WARN, &["channel stopped", "outstanding=1"]);
        has(&ended, Level::INFO, &["channel reset"]);
        has(&ended, Level::ERROR, &["ibv_destroy_qp", "leaked"]);
    });
}

#[cfg(feature = "async")]
#[test]
fn a_reactor_that_does_not_run_is_told() {
    use std::future::Future;
    use std::pin::Pin;
    use std::task::{Context, Poll, Waker};

    use ibverbs::{AccessFlags, BufferPool, ProtectionDomain, Reactor};

    let device = Software::new();
    let context = Arc::new(device.context());
    let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
    let pool = BufferPool::new(&domain, 64, 4, AccessFlags::empty()).unwrap();
    let reactor = Reactor::new(&context, 64).unwrap();
    let prepared = reactor.prepare(Channel::builder(&domain)).unwrap();
    let endpoint = prepared.endpoint();
    let channel = prepared.handshake(endpoint).unwrap();
    let mut cx = Context::from_waker(Waker::noop());
    let events = Events::default();
    tracing::subscriber::with_default(events.clone(), || {
        let mut give_up = || {
            let mut receive = channel.receive(pool.take().unwrap());
            assert!(Pin::new(&mut receive).poll(&mut cx).is_pending());
            events.take();
            drop(receive);
            events.take()
        };
        let told = give_up();
        assert!(
            matches!(&told[..], [(Level::WARN, line)] if line.contains("never run")),
            "{told:?}"
        );
        let mut run = Box::pin(reactor.run(|_| Poll::Pending));
        assert!(run.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        assert!(give_up().is_empty(), "it has run");
        // The receive is in flight still.
        drop(run);
        let told = events.take();
        let dropped = |line: &str| line.contains("its task was dropped");
        assert!(matches!(&told[..], [(Level::WARN, line)] if dropped(line)), "{told:?}");
        // A reactor that was stopped has no tasks that wait.
        let mut run = Box::pin(reactor.run(|_| Poll::Pending));
        assert!(run.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        reactor.stop(TransportError::Stopped);
        events.take();
        drop(run);
        assert_eq!(events.take(), []);
    });
}

#[test]
fn a_subscriber_that_panics_does_no_harm() {
    let events = Events { panics: true, ..Events::default() };
    tracing::subscriber::with_default(events.clone(), || {
        let told = life_of_a_channel(&events);
        assert!(!told[0].is_empty() && !told[2].is_empty() && !told[3].is_empty(), "{told:#?}");
    });
}
