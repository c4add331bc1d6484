//! Many peers at once: each gets its message, and one that fails fails alone.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::pair::{break_queue_pair, builder, connect, domain, outstanding};
use crate::software::Software;
use ibverbs::channel::ChannelSet;
use ibverbs::{
    Channel, Inline, MemoryRegion, ProtectionDomain, SendWorkRequest, TransportError,
    completion::WorkErrorClass,
};

const PEERS: usize = 3;

/// Our ends, and those of the peers.
struct Rig {
    set: ChannelSet<'static>,
    peers: Vec<Channel<'static>>,
    domain: Arc<ProtectionDomain<'static>>,
    device: Software,
}

impl Rig {
    fn new() -> Self {
        let device = Software::new();
        let domain = domain(&device);
        let pairs = (0..PEERS).map(|_| connect(builder(&domain), builder(&domain)));
        let (ours, peers): (Vec<_>, Vec<_>) = pairs.unzip();
        Self { set: ChannelSet::new(ours), peers, domain, device }
    }

    fn region(&self, len: usize) -> MemoryRegion<'static, u8> {
        let mut region = MemoryRegion::new(&self.domain, len).unwrap();
        region.iter_mut().zip(1..).for_each(|(byte, n)| *byte = n);
        region
    }

    fn finish(self) {
        let Self { set, peers, domain, device } = self;
        drop((set, peers, domain));
        device.assert_clean();
    }
}

/// Cuts a region into one room for each peer.
fn rooms<'a>(
    region: &'a mut MemoryRegion<'static, u8>,
) -> Vec<ibverbs::memory::MemorySliceMut<'a, u8>> {
    let (one, rest) = region.slice_mut(..).unwrap().split_at(4).unwrap();
    let (two, three) = rest.split_at(4).unwrap();
    vec![one, two, three]
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn late() -> Instant {
    Instant::now() + Duration::from_millis(20)
}

/// Posts a receive of 4 bytes at each peer, calls `ours`, and returns what the peers have received.
fn received(rig: &mut Rig, ours: impl FnOnce(&mut ChannelSet<'static>)) -> Vec<u8> {
    let mut inbox = MemoryRegion::<u8>::new(&rig.domain, 4 * PEERS).unwrap();
    let mut peers = ChannelSet::new(rig.peers.drain(..));
    let mut rooms = rooms(&mut inbox).into_iter();
    let (_, ended) = peers
        .scope(Some(soon()), |scope| {
            for peer in scope.peers() {
                peer.post_receive(rooms.next().unwrap())?;
            }
            ours(&mut rig.set);
            Ok::<_, TransportError>(())
        })
        .unwrap();
    assert!(ended.iter().all(Result::is_ok), "{ended:?}");
    rig.peers = peers.into_channels();
    inbox.to_vec()
}

#[test]
fn each_peer_gets_its_part_or_all_the_same() {
    let mut rig = Rig::new();
    let parts = rig.region(4 * PEERS);
    let scattered = received(&mut rig, |set| {
        let parts = (0..PEERS).map(|peer| parts.slice(4 * peer..4 * peer + 4).unwrap());
        let sent = set.scatter(parts, soon());
        assert!(sent.len() == PEERS && sent.iter().all(Result::is_ok), "{sent:?}");
    });
    assert_eq!(scattered[..], parts[..]);
    let same = received(&mut rig, |set| {
        let sent = set.broadcast(parts.slice(..4).unwrap(), soon());
        assert!(sent.len() == PEERS && sent.iter().all(Result::is_ok), "{sent:?}");
    });
    assert_eq!(same[..], [1, 2, 3, 4].repeat(PEERS)[..]);
    drop(parts);
    rig.finish();
}

#[test]
fn gathered_messages_are_in_the_order_of_the_peers() {
    let mut rig = Rig::new();
    let mut inbox = rig.region(4 * PEERS);
    std::thread::scope(|threads| {
        // The last peer sends first.
        threads.spawn(|| {
            for (peer, number) in rig.peers.iter_mut().zip(1..=3).rev() {
                peer.until(soon()).send(Inline(&[number; 4][..number.into()])).unwrap();
            }
        });
        let came = rig.set.gather(rooms(&mut inbox), soon());
        let lengths: Vec<_> = came.into_iter().map(|came| came.unwrap().byte_len()).collect();
        assert_eq!(lengths, [1, 2, 3]);
    });
    assert_eq!(inbox[..], [1, 2, 3, 4, 2, 2, 7, 8, 3, 3, 3, 12]);
    drop(inbox);
    rig.finish();
}

#[test]
fn a_peer_that_fails_fails_alone() {
    let mut rig = Rig::new();
    let message = rig.region(4);
    break_queue_pair(&rig.set.channels()[1]);
    let sent = rig.set.broadcast(message.slice(..0).unwrap(), late());
    // No peer receives: the other sends wait until the deadline, and each is stopped.
    let classes = sent.map_errors();
    assert_eq!(classes, [None, Some(WorkErrorClass::Flushed), None]);
    drop(message);
    rig.finish();

    // The others receive: only the broken one has not sent.
    let mut rig = Rig::new();
    let broken = rig.set.remove(1).unwrap();
    assert_eq!((rig.set.len(), rig.set.remove(2).is_none()), (2, true));
    let peer = rig.peers.remove(1);
    break_queue_pair(&broken);
    let mut set = ChannelSet::new([broken]);
    set.push(rig.set.remove(0).unwrap());
    let message = rig.region(4);
    let mut room = rig.region(4);
    rig.peers[0]
        .scope(|scope| {
            let receive = scope.post_receive(room.slice_mut(..)?)?;
            let sent = set.broadcast(message.slice(..)?, soon());
            assert!(sent[0].is_err() && sent[1].is_ok(), "{sent:?}");
            receive.wait()?;
            Ok::<_, TransportError>(())
        })
        .unwrap();
    assert!(set.channels()[1].until(late()).send(()).is_err(), "it was not stopped before");
    drop((set, peer, message, room));
    rig.finish();
}

trait MapErrors {
    fn map_errors(self) -> Vec<Option<WorkErrorClass>>;
}

impl<T: std::fmt::Debug> MapErrors for ibverbs::channel::PeerResults<T> {
    /// The class of each failed operation; `None` for a deadline that has passed.
    fn map_errors(self) -> Vec<Option<WorkErrorClass>> {
        let class = |result: Result<T, TransportError>| match result.unwrap_err() {
            TransportError::TimedOut => None,
            error => Some(error.work_error().unwrap().class()),
        };
        self.into_iter().map(class).collect()
    }
}

#[test]
fn a_deadline_stops_those_whose_message_did_not_come() {
    let mut rig = Rig::new();
    let mut inbox = rig.region(4 * PEERS);
    let numbers: Vec<_> = rig.set.channels().iter().map(Channel::number).collect();
    let here = rig.region(4);
    // SAFETY: the region is not touched before the work has ended.
    let sent = unsafe { rig.peers[2].post_unpolled(SendWorkRequest::new(here.slice(..).unwrap())) }
        .unwrap();
    let until = Instant::now() + Duration::from_millis(300);
    let came = rig.set.gather(rooms(&mut inbox), until);
    assert_eq!(came[0].unwrap_err(), TransportError::TimedOut);
    assert_eq!(came[1].unwrap_err(), TransportError::TimedOut);
    assert_eq!(came[2].unwrap().byte_len(), 4);
    sent.wait(&mut rig.peers[2]).unwrap();
    for number in numbers {
        assert_eq!(rig.device.outstanding(number), Some((0, 0)));
    }
    let mut channels = rig.set.into_channels();
    assert_eq!(channels[0].send(()).unwrap_err(), TransportError::Stopped);
    assert!(channels[2].until(late()).send(()).unwrap_err() != TransportError::Stopped);
    rig.set = ChannelSet::from_iter(channels);
    drop((inbox, here));
    rig.finish();
}

/// After an error or a panic, no operation of any channel is in flight.
#[test]
fn an_error_or_a_panic_ends_what_is_in_flight() {
    for panics in [false, true] {
        let mut rig = Rig::new();
        let mut inbox = rig.region(4 * PEERS);
        let numbers: Vec<_> = rig.set.channels().iter().map(Channel::number).collect();
        let mut rooms = rooms(&mut inbox).into_iter();
        let result = catch_unwind(AssertUnwindSafe(|| {
            rig.set.scope(None, |scope| {
                for peer in [0, 2] {
                    // Forgetting the handle changes nothing.
                    let receive = scope.peer(peer).unwrap().post_receive(rooms.next().unwrap());
                    std::mem::forget(receive.unwrap());
                }
                assert!(scope.peer(PEERS).is_none());
                if panics { panic!("as it should") } else { Err::<(), _>("an error") }
            })
        }));
        assert_eq!(result.is_err(), panics);
        if let Ok(result) = result {
            assert_eq!(result.unwrap_err(), "an error");
        }
        for &number in &numbers {
            assert_eq!(rig.device.outstanding(number), Some((0, 0)));
        }
        drop(rooms);
        inbox.fill(9);
        // The one that had nothing in flight goes on.
        let channels = rig.set.channels();
        assert_eq!(channels[0].send(()).unwrap_err(), TransportError::Stopped);
        assert_eq!(outstanding(&rig.device, &channels[1]), (0, 0));
        assert_eq!(channels[1].until(late()).send(()).unwrap_err(), TransportError::TimedOut);
        drop(inbox);
        rig.finish();
    }
}

#[test]
fn a_set_may_be_empty() {
    let rig = Rig::new();
    let message = rig.region(4);
    let mut empty = ChannelSet::default();
    assert!(empty.is_empty() && empty.broadcast(message.slice(..).unwrap(), late()).is_empty());
    drop((empty, message));
    rig.finish();
}
