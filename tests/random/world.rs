//! Runs a random program.

use std::collections::{HashMap, HashSet};
use std::mem::forget;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use ibverbs::{
    AccessFlags, AckTimeout, CompletionQueue, Context, MaxRnrRetries, MemoryRegion, MinRnrTimer,
    PreparedQueuePair, ProtectionDomain, QueuePair, QueuePairType, SharedMemoryRegion,
    WorkCompletion,
};
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::TestCaseError;

use super::Bed;
use super::books::Books;
use super::family::{Family, Kind, Member};
use super::operations::{How, Operation, Program, What};

pub(crate) type Outcome = Result<(), TestCaseError>;

/// The bytes of each region; a receive of all of them is long enough for any message.
pub(crate) const LEN: usize = 64;
/// Targets of writes and reads consist of so many blocks.
pub(crate) const BLOCKS: usize = 2;
pub(crate) const BLOCK: usize = LEN / BLOCKS;

const OPEN: AccessFlags = AccessFlags::REMOTE_READ.union(AccessFlags::REMOTE_WRITE);

/// Longer than anything takes that is due.
const PATIENCE: Duration = Duration::from_secs(60);

/// Something that is held in an `Arc`, until it ends.
pub(crate) struct Shared<T> {
    pub(crate) it: Arc<T>,
    pub(crate) member: Member,
    pub(crate) side: usize,
    /// The context that it is of, or itself.
    context: Member,
}

pub(crate) struct Region {
    /// `None` when it has ended; it may be in flight still, if it was forgotten.
    pub(crate) memory: Option<MemoryRegion<'static, u8>>,
    /// What is in it, if it is not being written.
    pub(crate) content: Vec<u8>,
    /// How many requests read it, and whether one writes it.
    pub(crate) readers: usize,
    pub(crate) written: bool,
    pub(crate) domain: Member,
    member: Member,
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
    /// `None` when it has ended. One that was forgotten goes on.
    pub(crate) pair: Option<State>,
    pub(crate) number: u32,
    pub(crate) domain: Member,
    queues: [Weak<CompletionQueue<'static>>; 2],
    /// What the peer, and nobody else, writes and reads; and what it has written, where known.
    pub(crate) target: Option<SharedMemoryRegion<'static, u8>>,
    pub(crate) written: [Option<Vec<u8>>; BLOCKS],
    pub(crate) books: Books,
    pub(crate) connected: bool,
    /// Something is wrong on the link by now: requests may fail.
    pub(crate) troubled: bool,
    members: [Member; 2],
}

pub(crate) struct World<'bed, B> {
    // In this order they are dropped when a case has failed.
    pub(crate) ends: Vec<End>,
    pub(crate) regions: Vec<Region>,
    queues: Vec<Shared<CompletionQueue<'static>>>,
    domains: Vec<Shared<ProtectionDomain<'static>>>,
    contexts: Vec<Shared<Context<'static>>>,
    family: Family,
    /// To which end, and to which queue of it, a request was posted.
    pub(crate) owners: HashMap<u64, (usize, bool)>,
    /// Requests that a reset has ended, of which completions may be left.
    pub(crate) lost: HashSet<u64>,
    pub(crate) bed: &'bed B,
    pub(crate) next: u64,
}

fn pick<'a, T>(from: &'a [T], index: &Index) -> Option<&'a T> {
    if from.is_empty() { None } else { Some(index.get(from)) }
}

/// Ends a shared object in one of the ways; to close it, it must not be shared any more.
fn end_shared<T>(it: Arc<T>, how: How, close: impl FnOnce(T) -> bool) -> Outcome {
    match how {
        How::Forget => forget(it),
        How::Close => {
            if let Some(it) = Arc::into_inner(it) {
                prop_assert!(close(it), "{} cannot be closed", std::any::type_name::<T>());
            }
        }
        How::Drop => drop(it),
    }
    Ok(())
}

/// Runs all of it.
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
    /// One link, and a few regions on either side.
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
        let it = Arc::new(CompletionQueue::new(parent, 256).unwrap());
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

    /// A link between two domains that are there, over queues of their contexts.
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
            let kind = QueuePairType::ReliableConnected;
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
            // Packets of the connection before are numbered as those of this one.
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

    /// Takes a queue pair to RESET, if it is not there.
    fn reset(&mut self, end: usize) -> Outcome {
        match self.ends[end].pair.take() {
            Some(State::Connected(pair)) => {
                let pair = pair.reset().map_err(|(_, error)| error).unwrap();
                self.ends[end].pair = Some(State::Prepared(pair));
                self.lose(end);
            }
            pair => self.ends[end].pair = pair,
        }
        Ok(())
    }

    fn fail(&mut self, end: usize) -> Outcome {
        if let Some(State::Connected(pair)) = &mut self.ends[end].pair {
            pair.to_error().unwrap();
            self.trouble(end);
        }
        Ok(())
    }

    /// Takes up to `room` completions, and looks at each.
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

    /// All queues that are there, also those that only queue pairs still hold.
    fn poll_all(&mut self) -> Outcome {
        let held = self.queues.iter().map(|queue| Arc::downgrade(&queue.it));
        let of_ends = self.ends.iter().flat_map(|end| end.queues.clone());
        let all: Vec<_> = held.chain(of_ends).collect();
        for queue in all.iter().filter_map(Weak::upgrade) {
            while self.poll(&queue, 8)? > 0 {}
        }
        Ok(())
    }

    /// Polls until nothing is `open` any more.
    fn drain(&mut self, what: &str, open: impl Fn(&Self, usize) -> bool) -> Outcome {
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

    /// What is due comes, and then the rest of it is flushed: there is nothing that never completes.
    fn settle(&mut self) -> Outcome {
        self.drain("due, and did not come", |world, at| {
            let (end, peer) = (&world.ends[at], &world.ends[at ^ 1]);
            end.connected && !end.troubled && end.books.is_due(&peer.books)
        })?;
        (0..self.ends.len()).try_for_each(|end| self.fail(end))?;
        self.drain("not flushed", |world, at| {
            let End { pair, books, .. } = &world.ends[at];
            let open = books.receives.posted.iter().chain(&books.sends.posted);
            matches!(pair, Some(State::Connected(_))) && open.into_iter().any(|p| p.signaled)
        })
    }

    /// Ends what `which` picks of one kind.
    fn end_any(&mut self, what: What, which: &Index, how: How) -> Outcome {
        let count = match what {
            What::Context => self.contexts.len(),
            What::Domain => self.domains.len(),
            What::Queue => self.queues.len(),
            What::Region => self.regions.len(),
            What::QueuePair => self.ends.len(),
        };
        if count == 0 { Ok(()) } else { self.end_one(what, which.index(count), how) }
    }

    fn end_one(&mut self, what: What, at: usize, how: How) -> Outcome {
        let member = match what {
            What::Context => {
                let gone = self.contexts.swap_remove(at);
                end_shared(gone.it, how, |it| it.close().is_ok())?;
                gone.member
            }
            What::Domain => {
                let gone = self.domains.swap_remove(at);
                end_shared(gone.it, how, |it| it.close().is_ok())?;
                gone.member
            }
            What::Queue => {
                let gone = self.queues.swap_remove(at);
                end_shared(gone.it, how, |it| it.close().is_ok())?;
                gone.member
            }
            What::Region => {
                let region = &mut self.regions[at];
                // To end one in flight is against the contract of posting; to forget it is not.
                if region.is_busy() && how != How::Forget {
                    return Ok(());
                }
                match (region.memory.take(), how) {
                    (None, _) => return Ok(()),
                    (Some(memory), How::Forget) => forget(memory),
                    (Some(memory), How::Close) => prop_assert!(memory.close().is_ok()),
                    (Some(memory), How::Drop) => drop(memory),
                }
                region.member
            }
            What::QueuePair => return self.end_pair(at, how),
        };
        if how != How::Forget {
            self.family.let_go(member);
        }
        Ok(())
    }

    fn end_pair(&mut self, at: usize, how: How) -> Outcome {
        let end = &mut self.ends[at];
        let Some(pair) = end.pair.take() else { return Ok(()) };
        if how == How::Forget {
            // It goes on, and what was posted to it still completes.
            forget((pair, end.target.take()));
            return Ok(());
        }
        let members = end.members;
        match (pair, how) {
            (State::Prepared(pair), How::Close) => {
                prop_assert!(pair.into_queue_pair().close().is_ok());
            }
            (State::Connected(pair), How::Close) => prop_assert!(pair.close().is_ok()),
            (pair, _) => drop(pair),
        }
        self.lose(at);
        self.ends[at].target = None;
        members.into_iter().for_each(|member| self.family.let_go(member));
        Ok(())
    }

    /// Ends all that is left, in any order, and looks at what is there then.
    fn end(mut self, ends: &[(Index, How)]) -> Outcome {
        let kinds = [What::QueuePair, What::Region, What::Queue, What::Domain, What::Context];
        for (number, (which, how)) in ends.iter().enumerate() {
            self.end_any(kinds[(which.index(usize::MAX) + number) % kinds.len()], which, *how)?;
            self.bed.check(&self.family.live())?;
        }
        for at in 0..self.ends.len() {
            self.end_pair(at, How::Drop)?;
        }
        for at in 0..self.regions.len() {
            // What is busy yet is in flight on a queue pair that was forgotten.
            let how = if self.regions[at].is_busy() { How::Forget } else { How::Drop };
            self.end_one(What::Region, at, how)?;
        }
        while !self.contexts.is_empty() {
            self.end_one(What::Context, 0, How::Close)?;
        }
        while !self.domains.is_empty() {
            self.end_one(What::Domain, 0, How::Close)?;
        }
        while !self.queues.is_empty() {
            self.end_one(What::Queue, 0, How::Close)?;
        }
        self.bed.run();
        self.bed.check_end(&self.family.live())
    }
}
