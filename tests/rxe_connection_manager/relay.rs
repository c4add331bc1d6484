//! `ib_send_bw -R` on either end: both of its connections go through this program, which accepts them from
//! the client, connects to the server, and passes each message on to the other side.
//!
//! The tools exchange their settings over the first connection. The bandwidth that they measure is that of
//! the second one, which they make while the first one is there.

use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::rdmacm::{Connection, ConnectionEventKind as Kind, Listener, Route};
use ibverbs::{
    CompletionQueue, MemoryRegion, PreparedQueuePair, ProtectionDomain, QueuePair, Rc,
    WorkCompletion,
};

use crate::managed::{TIME, here};
use crate::nothing_is_left;
use crate::tools::{Tool, connect_soon};
use crate::vm::alone;

/// Messages that can be on their way in each direction, and their maximum length.
const SLOTS: usize = 128;
const LENGTH: usize = 4096;
/// How many messages the tool sends.
const MESSAGES: usize = 50;

/// One direction of a connection: what one side receives, the other sends.
struct Way<'a> {
    slots: MemoryRegion<'a, u8>,
    posted: usize,
    sent: usize,
}

impl Way<'_> {
    fn post_receive(&mut self, queue_pair: &mut QueuePair<'_>, slot: usize) {
        let range = slot * LENGTH..(slot + 1) * LENGTH;
        // SAFETY: the slot is used again when the completion was polled, and the region is dropped after
        // the queue pair.
        unsafe { queue_pair.post_receive(&mut self.slots, range, slot as u64) }.unwrap();
    }

    fn post_send(&mut self, queue_pair: &mut QueuePair<'_>, slot: usize, length: usize) {
        let range = slot * LENGTH..slot * LENGTH + length;
        // SAFETY: as above.
        unsafe { queue_pair.post_send(&self.slots, range, (SLOTS + slot) as u64) }.unwrap();
        self.posted += 1;
    }
}

/// A connection of the client, and one to the server, between which messages are passed on.
struct Relay<'a> {
    sides: [Connection<QueuePair<'a>>; 2],
    queues: &'a [CompletionQueue<'a>; 2],
    /// The direction from the client, and the one from the server.
    ways: [Way<'a>; 2],
}

impl<'a> Relay<'a> {
    /// Takes the next connection of the client, and makes one to the server.
    fn accept(
        domain: &'a ProtectionDomain<'a>,
        queues: &'a [CompletionQueue<'a>; 2],
        listener: &mut Listener,
        server: SocketAddr,
    ) -> Self {
        let mut ways = [0; 2].map(|_| {
            let slots = domain.allocate(SLOTS * LENGTH).unwrap();
            Way { slots, posted: 0, sent: 0 }
        });
        let prepare = |queue: &'a CompletionQueue<'a>| -> PreparedQueuePair<'a> {
            domain
                .create_qp(queue, queue, Rc)
                .max_send_wr(SLOTS as u32)
                .max_recv_wr(SLOTS as u32)
                .build()
                .unwrap()
        };
        let request = listener.next_until(Instant::now() + TIME).unwrap();
        let to_server = connect_soon(|| {
            let prepared = prepare(&queues[1]);
            let route = Route::resolve(server, Instant::now() + TIME)?;
            let mut pending = route.prepare(prepared).map_err(|(.., error)| error)?;
            (0..SLOTS).for_each(|slot| ways[1].post_receive(pending.queue_pair(), slot));
            pending.start(b"")?.finish(Instant::now() + TIME)
        });
        let prepared = prepare(&queues[0]);
        let mut pending = request.prepare(prepared).map_err(|(.., error)| error).unwrap();
        (0..SLOTS).for_each(|slot| ways[0].post_receive(pending.queue_pair(), slot));
        let to_client = pending.start(b"").unwrap().finish(Instant::now() + TIME).unwrap();
        Self { sides: [to_client, to_server], queues, ways }
    }

    /// Passes messages on until one side ends the connection, and then ends that of the other side. Returns
    /// how many messages came from the client and from the server.
    fn run(mut self) -> [usize; 2] {
        let start = Instant::now();
        loop {
            assert!(start.elapsed() < 2 * TIME, "the tools do not end");
            // Messages that came from a side before it ended the connection are passed on first.
            let ended = self.sides.each_mut().map(|side| match side.event().unwrap() {
                None => false,
                Some(event) => {
                    assert_eq!(event.kind(), Kind::Disconnected);
                    true
                }
            });
            let quiet = !self.pass_on();
            if ended.contains(&true) {
                while self.pass_on() || self.ways.iter().any(|way| way.posted > way.sent) {
                    assert!(start.elapsed() < 2 * TIME, "a message is not taken");
                }
                // Both may end it at the same time.
                for side in &mut self.sides {
                    let _ = side.disconnect();
                }
                return self.ways.each_ref().map(|way| way.sent);
            }
            if quiet {
                thread::sleep(Duration::from_micros(200));
            }
        }
    }

    /// Whether there was anything.
    fn pass_on(&mut self) -> bool {
        let mut slice = [WorkCompletion::default(); 16];
        let mut any = false;
        for (side, queue) in self.queues.iter().enumerate() {
            let other = 1 - side;
            for completion in queue.poll(&mut slice).unwrap() {
                any = true;
                let slot = completion.wr_id() as usize % SLOTS;
                let done = completion.result().unwrap();
                if completion.wr_id() < SLOTS as u64 {
                    let length = done.byte_len() as usize;
                    self.ways[side].post_send(&mut self.sides[other], slot, length);
                } else {
                    // The other side's receive can have its slot back.
                    self.ways[other].sent += 1;
                    self.ways[other].post_receive(&mut self.sides[other], slot);
                }
            }
        }
        any
    }
}

#[test]
#[ignore = "Soft-RoCE: a program of rdma-core is the other side, which asks the kernel"]
fn ib_send_bw_with_us_on_either_end() {
    let _alone = alone("ib_send_bw", 180);
    let (outside, server) = (here(7506), here(7507));
    let mut listener = Listener::bind(outside).unwrap();
    // -e: three programs that poll all the time would leave each other little of a processor.
    let tool = |more: String| {
        Tool::start(&format!("ib_send_bw -e -d rxe0 -R -n {MESSAGES} -s 64 -p {more}"))
    };
    let tools = [tool("7507".to_owned()), tool(format!("7506 {}", outside.ip()))];
    {
        let context = ibverbs::open("rxe0").unwrap();
        let domain = context.alloc_pd().unwrap();
        let queues = || [0; 2].map(|_| context.create_cq(4 * SLOTS as u32).unwrap());
        let (settings, data) = (queues(), queues());
        thread::scope(|scope| {
            let first = Relay::accept(&domain, &settings, &mut listener, server);
            let first = scope.spawn(move || first.run());
            let second = Relay::accept(&domain, &data, &mut listener, server);
            assert_eq!(second.run(), [MESSAGES, 0], "only the client sends");
            let [from_client, from_server] = first.join().unwrap();
            assert!(from_client > 0 && from_server > 0);
        });
    }
    for tool in tools {
        let text = tool.finish();
        assert!(text.contains("rdma_cm QPs\t : ON"), "{text}");
    }
    drop(listener);
    nothing_is_left();
}
