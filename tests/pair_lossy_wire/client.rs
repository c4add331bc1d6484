//! The active side: sends, writes and reads.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use ibverbs::channel::ScopedPendingWork;
use ibverbs::{Channel, MemoryRegion, ProtectionDomain, RemoteMemoryRegion, TransportError};

use crate::server::failure;
use crate::two_machines::{Peer, assert_nothing_left, pattern, report, soak_seconds};
use crate::wire::{
    Counts, QUIT, RECEIVE, RECONNECT, SUM, Sum, connect, counts, deadline, reconnect,
};
use crate::{BYTES, LENGTH, MESSAGES, PARTS, WINDOW};

/// The first number that is written. Messages begin at 0.
const WRITES: u64 = 1 << 30;
/// More errors than this in a round cannot be chance.
const TOO_MANY: u32 = 50;

/// An operation that the client does many times in a row.
#[derive(Clone, Copy)]
enum Operation {
    Send,
    /// Writes from the client's memory to the parts of the server's.
    Write(RemoteMemoryRegion),
    /// Reads from the parts of the server's memory.
    Read(RemoteMemoryRegion),
}

struct Client<'res> {
    /// `None` only while the channel is being connected again.
    channel: Option<Channel<'res>>,
    buffers: MemoryRegion<'res, u64>,
    peer: Peer,
    /// The errors so far, and how often each came.
    errors: BTreeMap<String, u32>,
    /// The highest number of errors by the end of this round.
    bearable: u32,
}

/// All transfers over a wire with one fault.
pub(crate) fn transfer(fault: &str) {
    let seconds = soak_seconds();
    let mut rounds = 0;
    let (errors, counts, took) = {
        let context = ibverbs::open("rxe1").unwrap();
        let domain = context.alloc_pd().unwrap();
        let mut client = Client::new(&domain);
        let remote: RemoteMemoryRegion = client.peer.exchange(());
        let mut sum = Sum::new();
        let start = Instant::now();
        while rounds == 0 || start.elapsed() < Duration::from_secs(seconds) {
            client.round(rounds, remote, &mut sum);
            rounds += 1;
        }
        let took = start.elapsed();
        client.command(QUIT, 0);
        let theirs: Counts = client.peer.exchange(());
        (client.errors, [counts(), theirs], took)
    };
    assert_nothing_left("rxe1");

    let seconds = took.as_secs_f64();
    let mebibytes = rounds * (BYTES * (MESSAGES + 2 * PARTS)) as u64 / (1 << 20);
    let [sent, lost, twice, disordered] =
        std::array::from_fn(|index| counts[0][index] + counts[1][index]);
    // The fault did occur.
    match fault {
        "lost" => assert!(lost > 0),
        "duplicated" => assert!(twice > 0),
        "reordered" => assert!(disordered > 0),
        fault => panic!("{fault} is no fault"),
    }
    let errors: Vec<_> = errors.iter().map(|(error, count)| format!("{count} {error}")).collect();
    report(&format!(
        "{mebibytes} MiB by sends, writes and reads in {seconds:.1} s ({:.1} MiB/s); of {sent} packets \
         {lost} lost; {twice} requests came twice, {disordered} out of order; every byte in order, \
         checksums equal; {}; resources at baseline",
        mebibytes as f64 / seconds,
        if errors.is_empty() {
            "no error".to_owned()
        } else {
            format!("errors, after which it went on by reset and handshake: {}", errors.join(", "))
        },
    ));
}

impl<'res> Client<'res> {
    fn new(domain: &'res ProtectionDomain<'_>) -> Self {
        let mut peer = Peer::meet(18515);
        let channel = Some(connect(domain, &mut peer));
        let buffers = domain.allocate(WINDOW * LENGTH).unwrap();
        Self { channel, buffers, peer, errors: BTreeMap::new(), bearable: 0 }
    }

    fn command(&mut self, command: u8, until: u64) {
        self.peer.exchange((command, until))
    }

    /// Sends, writes and reads everything once.
    fn round(&mut self, round: u64, remote: RemoteMemoryRegion, sum: &mut Sum) {
        self.bearable = self.errors.values().sum::<u32>() + TOO_MANY;
        let first = round * MESSAGES as u64;
        let start = Instant::now();
        self.send(first, first + MESSAGES as u64, sum);
        println!("sends: {:.1?}", start.elapsed());

        let first = WRITES + round * PARTS as u64;
        self.carry_out(Operation::Write(remote), first);
        let mut expected = Sum::new();
        (first..).take(PARTS).for_each(|number| expected.add(&numbers(number)));
        self.command(SUM, 0);
        assert_eq!(self.peer.exchange::<_, u64>(()), expected.0, "what was written is not there");
        println!("writes: {:.1?}", start.elapsed());
        self.carry_out(Operation::Read(remote), first);
        println!("reads: {:.1?}", start.elapsed());
    }

    /// Sends these messages, with as many attempts as that takes.
    fn send(&mut self, first: u64, until: u64, sum: &mut Sum) {
        (first..until).for_each(|number| sum.add(&numbers(number)));
        let mut sent = first;
        while sent < until {
            self.command(RECEIVE, until);
            let mut acknowledged = sent;
            let ended = self.stream(Operation::Send, &mut acknowledged, until);
            let (received, theirs, error): (u64, u64, String) = self.peer.exchange(());
            // Acknowledged messages have arrived; of others, the acknowledgement may have been lost.
            assert!((acknowledged..=until).contains(&received), "{acknowledged}, {received}");
            sent = received;
            if sent == until {
                assert_eq!(theirs, sum.0, "something else was received");
            }
            self.heed(ended, Some(error));
        }
    }

    /// Writes or reads all parts of the server's memory, with as many attempts as that takes.
    fn carry_out(&mut self, operation: Operation, first: u64) {
        let (mut done, until) = (first, first + PARTS as u64);
        while done < until {
            let ended = self.stream(operation, &mut done, until);
            self.heed(ended, None);
        }
    }

    /// After an error on either side, both connect again.
    fn heed(&mut self, ended: Result<(), TransportError>, theirs: Option<String>) {
        let errors = [Some(failure(ended)), theirs];
        let mut errors = errors.into_iter().flatten().filter(|error| !error.is_empty()).peekable();
        if errors.peek().is_none() {
            return;
        }
        for error in errors {
            println!("{error}");
            *self.errors.entry(error).or_default() += 1;
        }
        assert!(self.errors.values().sum::<u32>() < self.bearable, "{:?}", self.errors);
        self.command(RECONNECT, 0);
        let channel = self.channel.take().unwrap();
        self.channel = Some(reconnect(channel, &mut self.peer));
    }

    /// Carries out the operations from `done` on, a window of them at a time, and counts them in `done`.
    fn stream(
        &mut self,
        operation: Operation,
        done: &mut u64,
        until: u64,
    ) -> Result<(), TransportError> {
        let part = |remote: RemoteMemoryRegion, number: u64| {
            remote.sub_region((number - WRITES) % PARTS as u64 * BYTES as u64, BYTES as u64)
        };
        let buffers = &mut self.buffers;
        self.channel.as_mut().unwrap().manual_scope(|scope| {
            let mut idle: Vec<_> = buffers.slice_mut(..)?.chunks(LENGTH)?.collect();
            let mut flying: VecDeque<ScopedPendingWork<'_, _>> = VecDeque::with_capacity(WINDOW);
            let mut next = *done;
            while *done < until {
                while next < until
                    && let Some(mut buffer) = idle.pop()
                {
                    match operation {
                        Operation::Read(_) => buffer.fill(0),
                        _ => buffer.copy_from_slice(&numbers(next)),
                    }
                    flying.push_back(match operation {
                        Operation::Send => scope.post_send(buffer)?,
                        Operation::Write(remote) => {
                            scope.post_write(buffer, part(remote, next)?)?
                        }
                        Operation::Read(remote) => scope.post_read(buffer, part(remote, next)?)?,
                    });
                    next += 1;
                }
                let (buffer, _) = flying.pop_front().unwrap().wait_until(deadline())?;
                if let Operation::Read(_) = operation {
                    assert!(buffer[..] == numbers(*done)[..], "part {done} was read wrong");
                }
                *done += 1;
                idle.push(buffer);
            }
            Ok(())
        })
    }
}

/// The content of message, write or read `number`.
fn numbers(number: u64) -> Vec<u64> {
    (0..LENGTH).map(|index| pattern(number, index)).collect()
}
