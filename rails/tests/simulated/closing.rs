//! A side that closes at once: what its peer's device has acknowledged reaches the peer's program before the end.

use std::io::{self, Read, Write};
use std::mem;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ibverbs::AccessFlags;
use ibverbs_rails::{ControlStream, Event, PeerId, RailMemory, Rails, Transfer};
use ibverbs_software::Network;

use super::network;
use super::support::{Pipe, World};

/// The side that sends and closes.
struct Sender {
    rails: Rails,
    network: Network,
    began: Instant,
    memory: RailMemory,
}

/// Messages in their order, and numbers of notified writes, that the sender was told have arrived.
type Arrived = (Vec<Vec<u8>>, Vec<u16>);

impl Sender {
    fn now(&self) -> Instant {
        self.began + self.network.now()
    }

    /// Sends, waits until the last has ended, and closes. The other side does nothing meanwhile.
    fn send_and_close(
        &mut self,
        peer: PeerId,
        theirs: &RailMemory,
        random: &mut fastrand::Rng,
    ) -> Arrived {
        let mut posted = Vec::new();
        let mut messages = Vec::new();
        for _ in 0..random.usize(..=32) {
            let bytes: Vec<u8> = (0..random.usize(..200)).map(|_| random.u8(..)).collect();
            posted.push(self.rails.send(peer, bytes.clone()).unwrap());
            messages.push(bytes);
        }
        // Each part takes a request of its own.
        let tags: Vec<u16> = (0..random.u16(..48)).collect();
        for &tag in &tags {
            let parts = (0..random.usize(1..=9)).map(|part| {
                (
                    self.memory.slice(part..=part).unwrap(),
                    theirs.remote().slice(part..=part).unwrap(),
                )
            });
            posted.push(self.rails.post(peer, Transfer::write_list(parts).notify(tag)).unwrap());
        }
        // The other side has too few receives left, so some transfers are still under way when this one closes.
        let (mut ended, mut idle) = (Vec::new(), 0);
        while ended.len() < posted.len() && idle < 20 {
            self.network.advance(Duration::from_micros(100));
            self.rails.turn(self.now());
            idle += 1;
            while let Some(event) = self.rails.next_event() {
                if let Event::Ended { transfer, result: Ok(()), .. } = event {
                    ended.push(transfer);
                    idle = 0;
                }
            }
        }
        self.rails.remove(peer);
        let has_ended = |place: usize| ended.contains(&posted[place]);
        let count = messages.len();
        let arrived = (0..count)
            .filter(|&place| has_ended(place))
            .map(|place| mem::take(&mut messages[place]));
        let arrived = arrived.collect();
        (arrived, tags.into_iter().filter(|&tag| has_ended(count + usize::from(tag))).collect())
    }
}

/// The other side's stream: as soon as it is looked at, after the device was, everything happens at once.
struct Surprise<F>(Pipe, Arc<Mutex<Option<F>>>);

impl<F: FnOnce() + Send> Read for Surprise<F> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let act = self.1.lock().unwrap().take();
        act.into_iter().for_each(|act| act());
        self.0.read(to)
    }
}

impl<F: FnOnce() + Send> Write for Surprise<F> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<F: FnOnce() + Send> ControlStream for Surprise<F> {
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

#[test]
fn what_was_acknowledged_comes_before_the_end() {
    let settings = |rails: ibverbs_rails::RailsBuilder| rails.queue_pairs(8).longest_message(256);
    let World { network, sides: [sender, mut receiver], devices: _devices, .. } =
        World::unconnected([1, 1], network(), settings);
    let theirs = receiver.allocate(64, AccessFlags::REMOTE_WRITE).unwrap();
    let memory = sender.allocate(64, AccessFlags::empty()).unwrap();
    let began = Instant::now();
    let sender = Sender { rails: sender, network: network.clone(), began, memory };
    let sender = Arc::new(Mutex::new(sender));
    let (mut most, mut all) = (0, 0);
    let seeds = std::env::var("IBVERBS_RAILS_SEEDS").ok().map(|seeds| seeds.parse().unwrap());
    let seeds = seeds.unwrap_or(250_u64);
    for seed in 0..seeds {
        let mut random = fastrand::Rng::with_seed(seed);
        let [one, two] = Pipe::pair();
        let act = Arc::new(Mutex::new(None::<Box<dyn FnOnce() + Send>>));
        let peer = sender.lock().unwrap().rails.connect_over(one).unwrap();
        let other = receiver.accept_over(Surprise(two, act.clone())).unwrap();
        let mut is_connected = [false; 2];
        while is_connected != [true; 2] {
            network.advance(Duration::from_micros(5));
            let mut sender = sender.lock().unwrap();
            let now = sender.now();
            for (side, rails) in [&mut sender.rails, &mut receiver].into_iter().enumerate() {
                rails.turn(now);
                while let Some(event) = rails.next_event() {
                    is_connected[side] |= matches!(event, Event::Connected(_));
                }
            }
        }
        // The sender acts before the receiver looks again at all, or between its looks at the device and at
        // the stream.
        let arrived = Arc::new(Mutex::new(Arrived::default()));
        let mut send = {
            let (sender, arrived, theirs) = (sender.clone(), arrived.clone(), theirs.clone());
            let mut random = random.fork();
            move || {
                let sent = sender.lock().unwrap().send_and_close(peer, &theirs, &mut random);
                *arrived.lock().unwrap() = sent;
            }
        };
        if random.bool() {
            send()
        } else {
            *act.lock().unwrap() = Some(Box::new(send))
        }
        let (mut got, mut is_over) = (Arrived::default(), false);
        while !is_over {
            network.advance(Duration::from_micros(5));
            receiver.turn(began + network.now());
            while let Some(event) = receiver.next_event() {
                assert!(!is_over, "seed {seed}: after the end, {event:?}");
                match event {
                    Event::Message { bytes, .. } => got.0.push(bytes),
                    Event::Notified { tag, .. } => got.1.push(tag),
                    Event::Disconnected { peer, .. } => is_over = peer == other,
                    _ => {}
                }
            }
        }
        // A transfer that has arrived without the sender's knowledge may come, too.
        let arrived = arrived.lock().unwrap();
        assert!(
            got.0.starts_with(&arrived.0),
            "seed {seed}: {} of {}",
            got.0.len(),
            arrived.0.len()
        );
        let is_missing = |tag: &&u16| got.1.iter().filter(|got| got == tag).count() != 1;
        let missing: Vec<_> = arrived.1.iter().filter(is_missing).collect();
        assert!(missing.is_empty(), "seed {seed}: notified writes {missing:?}");
        most = most.max(got.0.len() + got.1.len());
        all += got.0.len() + got.1.len();
    }
    println!("{seeds} times closed at once, with {all} messages and notifications, {most} at most");
}
