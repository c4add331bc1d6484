//! Runs a random program.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use ibverbs::{
    AccessFlags, CompletionQueue, Context, MemoryRegion, PreparedQueuePair, ProtectionDomain,
    QueuePair, Rc, SharedMemoryRegion, WorkCompletion,
    settings::{AckTimeout, MaxRnrRetries, MinRnrTimer},
};
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::TestCaseError;

use super::Bed;
use super::books::Books;
use super::family::{Family, Kind, Member};
use super::operations::{Operation, Program};

pub(crate) type Outcome = Result<(), TestCaseError>;

/// The bytes of each region; a receive of all of them is long enough for any message.
pub(crate) const LEN: usize = 64;
/// Targets of writes and reads consist of this many blocks.
pub(crate) const BLOCKS: usize = 2;
pub(crate) const BLOCK: usize = LEN / BLOCKS;

/// The completions that a queue has room for at least, which no program can exceed.
pub(crate) const DEPTH: u32 = 256;

const OPEN: AccessFlags = AccessFlags::REMOTE_READ.union(AccessFlags::REMOTE_WRITE);

/// Longer than a completion that must come can take.
const PATIENCE: Duration = Duration::from_secs(60);

/// An object that is held in an `Arc` until it ends.
pub(crate) struct Shared<T> {
    pub(crate) it: Arc<T>,
    pub(crate) member: Member,
    pub(crate) side: usize,
    /// The context that it belongs to, or the object itself.
    context: Member,
}

pub(crate) struct Region {
    /// `None` when the region has ended. It may still be in flight if it was forgotten.
    pub(crate) memory: Option<MemoryRegion<'static, u8>>,
    /// Its content, if it is not being written.
    pub(crate) content: Vec<u8>,
    /// How many requests read it, and whether one writes it.
    pub(crate) readers: usize,
    pub(crate) written: bool,
    pub(crate) domain: Member,
    pub(crate) member: Member,
}

impl Region {
    pub(crate) fn is_busy(&self) -> bool {
        self.readers > 0 || self.written
    }
}

pub(crate) enum State {
    Prepared(PreparedQueuePair<'static>),
    Connected(QueuePair<'static>),
}

/// One end of a link. The peer of the end with number `n` is `n ^ 1`.
pub(crate) struct End {
    /// `None` when it has ended. A forgotten one still works.
    pub(crate) pair: Option<State>,
    pub(crate) number: u32,
    pub(crate) domain: Member,
    queues: [Weak<CompletionQueue<'static>>; 2],
    /// Memory that only the peer writes and reads, and what it has written, where known.
    pub(crate) target: Option<SharedMemoryRegion<'static, u8>>,
    pub(crate) written: [Option<Vec<u8>>; BLOCKS],
    pub(crate) books: Books,
    pub(crate) connected: bool,
    /// The link has failed: requests may fail.
    pub(crate) troubled: bool,
    pub(crate) members: [Member; 2],
}

pub(crate) struct World<'bed, B> {
    // The order in which fields are dropped when a case has failed.
    pub(crate) ends: Vec<End>,
    pub(crate) regions: Vec<Region>,
    pub(crate) queues: Vec<Shared<CompletionQueue<'static>>>,
    pub(crate) domains: Vec<Shared<ProtectionDomain<'static>>>,
    pub(crate) contexts: Vec<Shared<Context<'static>>>,
    pub(crate) family: Family,
    /// The end, and the queue of that end, to which a request was posted.
    pub(crate) owners: HashMap<u64, (usize, bool)>,
    /// Requests that a reset has ended, whose completions may still be in the queue.
    pub(crate) lost: HashSet<u64>,
    pub(crate) bed: &'bed B,
    pub(crate) next: u64,
}

pub(crate) fn pick<'a, T>(from: &'a [T], index: &Index) -> Option<&'a T> {
    if from.is_empty() { None } else { Some(index.get(from)) }
}

/// Runs the whole program.
pub(crate) fn run(program: &Program, bed: &impl Bed) -> Outcome {
    let mut world = World {
        ends: vec![],
        regions: vec![],
        queues: vec![],
        domains: vec![],
        contexts: vec![],
        family: Family::default(),
        owners: HashMap::new(),
        lost: HashSet::new(),
        bed,
        next: 1,
    };
    world.begin()?;
    for operation in &program.operations {
        world.operate(operation)?;
        world.bed.check(&world.family.live())?;
    }
    world.settle()?;
    world.end(&program.ends)
}

impl<B: Bed> World<'_, B> {
    /// Makes one link, and a few regions on either side.
    fn begin(&mut self) -> Outcome {
        for side in 0..2 {
            self.context(side)?;
            self.domain(side)?;
            self.queue(side)?;
            (0..3).try_for_each(|_| self.region(side))?;
        }
        self.link([0, 1], [0, 0, 1, 1])?;
        self.connect(0)
    }

    fn operate(&mut self, operation: &Operation) -> Outcome {
        use Operation as O;

        let of = |len: usize, index: &Index| if len == 0 { None } else { Some(index.index(len)) };
        let (contexts, domains) = (self.contexts.len(), self.domains.len());
        let ends = self.ends.len(); // never 0: see `begin`
        match operation {
            O::Context { side } => self.context(*side),
            O::Domain { context } => of(contexts, context).map_or(Ok(()), |at| self.domain(at)),
            O::Queue { context } => of(contexts, context).map_or(Ok(()), |at| self.queue(at)),
            O::Region { domain } => of(domains, domain).map_or(Ok(()), |at| self.region(at)),
            O::Link { domains, queues } => self.any_link(domains, queues),
            O::Connect { link } => of(ends / 2, link).map_or(Ok(()), |at| self.connect(2 * at)),
            O::Receive { end, region, short } => self
                .choose(end, region, |region| !region.is_busy())
                .map_or(Ok(()), |(end, region)| self.receive(end, region, *short)),
            O::Send { end, region, len, signaled } => self
                .choose(end, region, |region| !region.written)
                .map_or(Ok(()), |(end, region)| self.send(end, region, *len, *signaled)),
            O::Write { end, region, block, signaled } => self
                .choose(end, region, |region| !region.written)
                .map_or(Ok(()), |(end, region)| self.write(end, region, *block, *signaled)),
            O::Read { end, region, block } => self
                .choose(end, region, |region| !region.is_busy())
                .map_or(Ok(()), |(end, region)| self.read(end, region, *block)),
            O::Poll { queue, room } => {
                let queue = pick(&self.queues, queue).map(|queue| Arc::clone(&queue.it));
                queue.map_or(Ok(()), |queue| self.poll(&queue, *room).map(drop))
            }
            O::Run => {
                self.bed.run();
                Ok(())
            }
            O::Reset { end } => self.reset(end.index(ends)),
            O::Fail { end } => self.fail(end.index(ends)),
            O::Early { end, region, state } => self.early(end.index(ends), region, *state),
            O::Drained { end, region } => self
                .choose(end, region, |region| !region.written)
                .map_or(Ok(()), |(end, region)| self.drained(end, region)),
            O::Resize { queue, entries, fails } => {
                let queue = pick(&self.queues, queue).map(|queue| Arc::clone(&queue.it));
                queue.map_or(Ok(()), |queue| self.resize(&queue, *entries, *fails))
            }
            O::End { what, which, how } => self.end_any(*what, which, *how),
        }
    }

    /// An end that can post, and a region of its domain that is `free`.
    fn choose(
        &self,
        end: &Index,
        region: &Index,
        free: impl Fn(&Region) -> bool,
    ) -> Option<(usize, usize)> {
        let connected = |&end: &usize| matches!(self.ends[end].pair, Some(State::Connected(_)));
        let ends: Vec<_> = (0..self.ends.len()).filter(connected).collect();
        let &end = pick(&ends, end)?;
        let suits = |&region: &usize| {
            let region = &self.regions[region];
            region.memory.is_some() && region.domain == self.ends[end].domain && free(region)
        };
        let regions: Vec<_> = (0..self.regions.len()).filter(suits).collect();
        Some((end, *pick(&regions, region)?))
    }

    fn context(&mut self, side: usize) -> Outcome {
        let it = Arc::new(self.bed.open(side));
        let member = self.family.add(Kind::Context, side, &[]);
        self.contexts.push(Shared { it, member, side, context: member });
        Ok(())
    }

    fn domain(&mut self, context: usize) -> Outcome {
        let Shared { it: parent, member: context, side, .. } = &self.contexts[context];
        let it = Arc::new(ProtectionDomain::new(parent).unwrap());
        let member = self.family.add(Kind::Domain, *side, &[*context]);
        self.domains.push(Shared { it, member, side: *side, context: *context });
        Ok(())
    }

    fn queue(&mut self, context: usize) -> Outcome {
        let Shared { it: parent, member: context, side, .. } = &self.contexts[context];
        let it = Arc::new(CompletionQueue::new(parent, DEPTH).unwrap());
        let member = self.family.add(Kind::Queue, *side, &[*context]);
        self.queues.push(Shared { it, member, side: *side, context: *context });
        Ok(())
    }

    fn region(&mut self, domain: usize) -> Outcome {
        let Shared { it: parent, member: domain, side, .. } = &self.domains[domain];
        let memory = MemoryRegion::new(parent, LEN).unwrap();
        prop_assert!(memory.iter().all(|&byte| byte == 0), "stale bytes");
        let (content, member) = (memory.to_vec(), self.family.add(Kind::Region, *side, &[*domain]));
        let memory = Some(memory);
        let domain = *domain;
        self.regions.push(Region { memory, content, readers: 0, written: false, domain, member });
        Ok(())
    }

    /// A link between two existing domains, over queues of their contexts.
    fn any_link(&mut self, domains: &[Index; 2], queues: &[Index; 4]) -> Outcome {
        if self.domains.is_empty() || self.ends.len() >= 8 {
            return Ok(());
        }
        let domains = [0, 1].map(|end| domains[end].index(self.domains.len()));
        let mut chosen = [0; 4];
        for (at, index) in queues.iter().enumerate() {
            let context = self.domains[domains[at / 2]].context;
            let of_it = |&queue: &usize| self.queues[queue].context == context;
            let all: Vec<_> = (0..self.queues.len()).filter(of_it).collect();
            let Some(&queue) = pick(&all, index) else { return Ok(()) };
            chosen[at] = queue;
        }
        self.link(domains, chosen)
    }

    fn link(&mut self, domains: [usize; 2], queues: [usize; 4]) -> Outcome {
        for (end, domain) in domains.into_iter().enumerate() {
            let Shared { it: parent, member: domain, side, .. } = &self.domains[domain];
            let [send, receive] = [0, 1].map(|at| &self.queues[queues[2 * end + at]]);
            let kind = Rc;
            let pair = QueuePair::builder(parent, &send.it, &receive.it, kind)
                .max_send_wr(8)
                .max_recv_wr(8)
                .access(OPEN)
                .max_rnr_retries(MaxRnrRetries::UNLIMITED)
                .min_rnr_timer(MinRnrTimer::SHORTEST)
                .ack_timeout(AckTimeout::new(16).unwrap())
                .build()
                .unwrap();
            let target = SharedMemoryRegion::new(parent, LEN, OPEN).unwrap();
            let parents = [*domain, send.member, receive.member];
            let members = [
                self.family.add(Kind::QueuePair, *side, &parents),
                self.family.add(Kind::Region, *side, &[*domain]),
            ];
            self.ends.push(End {
                number: pair.endpoint().num(),
                pair: Some(State::Prepared(pair)),
                domain: *domain,
                queues: [send, receive].map(|queue| Arc::downgrade(&queue.it)),
                target: Some(target),
                written: Default::default(),
                books: Books::default(),
                connected: false,
                troubled: true,
                members,
            });
        }
        Ok(())
    }

    /// Connects `end` and the one after it, if both are still held.
    fn connect(&mut self, end: usize) -> Outcome {
        let both = [end, end ^ 1];
        if both.iter().any(|&end| self.ends[end].pair.is_none()) {
            return Ok(());
        }
        both.into_iter().try_for_each(|end| self.reset(end))?;
        if self.bed.is_slow() {
            // The numbers of the earlier connection's packets could be those of this one.
            std::thread::sleep(Duration::from_millis(20));
        }
        let prepared = both.map(|end| match self.ends[end].pair.take() {
            Some(State::Prepared(pair)) => pair,
            _ => unreachable!("it was reset"),
        });
        let endpoints = [1, 0].map(|other: usize| prepared[other].endpoint());
        for ((end, pair), remote) in both.into_iter().zip(prepared).zip(endpoints) {
            let pair = pair.handshake(remote).unwrap();
            let at = &mut self.ends[end];
            prop_assert_eq!(pair.number(), at.number);
            at.pair = Some(State::Connected(pair));
            (at.connected, at.troubled) = (true, false);
            let target = at.target.as_ref().expect("the queue pair is held").to_vec();
            at.written = [0, 1].map(|block| Some(target[block * BLOCK..][..BLOCK].to_vec()));
        }
        Ok(())
    }

    pub(crate) fn trouble(&mut self, end: usize) {
        [end, end ^ 1].iter().for_each(|&end| self.ends[end].troubled = true);
    }

    /// Takes a queue pair to RESET if it is in another state.
    fn reset(&mut self, end: usize) -> Outcome {
        match self.ends[end].pair.take() {
            Some(State::Connected(pair)) => {
                let pair = pair.reset().unwrap();
                self.ends[end].pair = Some(State::Prepared(pair));
                self.lose(end);
            }
            pair => self.ends[end].pair = pair,
        }
        Ok(())
    }

    pub(crate) fn fail(&mut self, end: usize) -> Outcome {
        if let Some(State::Connected(pair)) = &mut self.ends[end].pair {
            pair.to_error().unwrap();
            self.trouble(end);
        }
        Ok(())
    }

    /// Takes up to `room` completions, and checks each.
    pub(crate) fn poll(
        &mut self,
        queue: &CompletionQueue<'_>,
        room: usize,
    ) -> Result<usize, TestCaseError> {
        let mut completions = [WorkCompletion::default(); 8];
        let found = queue.poll(&mut completions[..room]).unwrap();
        found.iter().try_for_each(|completion| self.complete(completion))?;
        Ok(found.len())
    }

    /// All queues that exist, also those that only queue pairs still hold.
    fn poll_all(&mut self) -> Outcome {
        let held = self.queues.iter().map(|queue| Arc::downgrade(&queue.it));
        let of_ends = self.ends.iter().flat_map(|end| end.queues.clone());
        let all: Vec<_> = held.chain(of_ends).collect();
        for queue in all.iter().filter_map(Weak::upgrade) {
            while self.poll(&queue, 8)? > 0 {}
        }
        Ok(())
    }

    /// Polls until no request is `open` any more.
    pub(crate) fn drain(&mut self, what: &str, open: impl Fn(&Self, usize) -> bool) -> Outcome {
        let start = Instant::now();
        loop {
            self.bed.run();
            self.poll_all()?;
            let Some(end) = (0..self.ends.len()).find(|&end| open(self, end)) else {
                return Ok(());
            };
            let waited = start.elapsed();
            if !self.bed.is_slow() || waited > PATIENCE {
                let books = &self.ends[end].books;
                return Err(TestCaseError::fail(format!("{what}, end {end}: {books:#?}")));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
