//! Random programs: connections come and go in any order, and every established connection works.

use std::collections::VecDeque;
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::Channel;
use ibverbs::rdmacm::{
    Connecting, ConnectionEventKind as Kind, ConnectionRequest, Listener, Route, Step,
};

use crate::managed::{Device, Managed, TIME, is_iwarp, listen, nothing_is_left, transfer};
use crate::vm::alone;
use crate::vm::process::open_files;

/// Pseudo-random numbers, the same each time (xorshift).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % limit
    }
}

/// The objects of the program, each side by itself.
struct World {
    device: Device,
    listener: Listener,
    address: std::net::SocketAddr,
    routes: Vec<Route>,
    connecting: VecDeque<Connecting<Channel<'static>>>,
    requests: VecDeque<ConnectionRequest>,
    accepting: VecDeque<Connecting<Channel<'static>>>,
    /// Connections: those that have connected, and those that have accepted.
    one: Vec<Managed>,
    two: Vec<Managed>,
    moved: usize,
}

impl World {
    fn step(&mut self, numbers: &mut Numbers) {
        match numbers.below(12) {
            0 => self.routes.push(Route::resolve(self.address, Instant::now() + TIME).unwrap()),
            1 | 2 => {
                let route = match self.routes.pop() {
                    Some(route) => route,
                    None => Route::resolve(self.address, Instant::now() + TIME).unwrap(),
                };
                let prepared = self.device.prepare();
                let pending = route.prepare(prepared).map_err(|(.., error)| error).unwrap();
                if numbers.below(8) > 0 {
                    self.connecting.push_back(pending.start(b"random").unwrap());
                }
            }
            3 | 4 => self.requests.extend(self.listener.try_next().unwrap()),
            5 | 6 => {
                let Some(request) = self.requests.pop_front() else { return };
                match numbers.below(6) {
                    0 => drop(request),
                    1 => drop(request.reject(b"no")),
                    _ => {
                        let prepared = self.device.prepare();
                        // The peer may have given up.
                        if let Ok(pending) = request.prepare(prepared)
                            && let Ok(connecting) = pending.start(b"yes")
                        {
                            self.accepting.push_back(connecting);
                        }
                    }
                }
            }
            7 => advance(&mut self.connecting, &mut self.one, numbers),
            8 => advance(&mut self.accepting, &mut self.two, numbers),
            9 => {
                let side = if numbers.below(2) == 0 { &mut self.one } else { &mut self.two };
                if side.is_empty() {
                    return;
                }
                let mut connection = side.swap_remove(numbers.below(side.len()));
                match numbers.below(3) {
                    0 => drop(connection),
                    1 => drop(connection.into_parts()),
                    // The other side may have ended the connection already.
                    _ => drop(connection.disconnect()),
                }
            }
            10 => {
                for connection in self.one.iter_mut().chain(&mut self.two) {
                    while let Some(event) = connection.event().unwrap() {
                        let kind = event.kind();
                        assert!(
                            // Rejected: the other side gave up before the connection was established.
                            matches!(
                                kind,
                                Kind::Disconnected | Kind::TimeWaitExit | Kind::Rejected
                            ),
                            "{kind:?}"
                        );
                    }
                }
            }
            _ => self.move_data(),
        }
    }

    /// Sends over a connection whose two sides both exist.
    fn move_data(&mut self) {
        let found = self.one.iter().enumerate().find_map(|(at, one)| {
            let other = self.two.iter().position(|two| two.peer_addr() == one.local_addr());
            Some((at, other?))
        });
        let Some((at, other)) = found else { return };
        let one = self.one.swap_remove(at);
        let two = self.two.swap_remove(other);
        let (mut one, mut two) = ((one, self.device.clone()), (two, self.device.clone()));
        transfer(&mut one, &mut two, b"at random");
        transfer(&mut two, &mut one, b"and back");
        self.moved += 1;
        self.one.push(one.0);
        self.two.push(two.0);
    }
}

/// Takes the next step of the first connection that waits.
fn advance(
    waiting: &mut VecDeque<Connecting<Channel<'static>>>,
    done: &mut Vec<Managed>,
    numbers: &mut Numbers,
) {
    let Some(connecting) = waiting.pop_front() else { return };
    if numbers.below(10) == 0 {
        return; // gives up
    }
    // A connection that the other side has rejected or given up is removed.
    match connecting.step() {
        Ok(Step::Done(connection)) => done.push(connection),
        Ok(Step::Pending(connecting)) => waiting.push_back(connecting),
        Err(_) => {}
    }
}

#[test]
fn in_any_order() {
    let _alone = alone("random", 600);
    let mut files = None;
    // On Soft-iWARP the kernel needs ten seconds for each connection that is given up half made.
    let programs: u64 = if is_iwarp() { 2 } else { 6 };
    for seed in 1..=programs {
        let mut numbers = Numbers(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let (listener, address) = listen();
        let mut world = World {
            device: Device::first(),
            listener,
            address,
            routes: Vec::new(),
            connecting: VecDeque::new(),
            requests: VecDeque::new(),
            accepting: VecDeque::new(),
            one: Vec::new(),
            two: Vec::new(),
            moved: 0,
        };
        // A busy host takes more steps, since connecting takes more of them.
        for step in 0.. {
            if step >= 150 && world.moved > 0 {
                break;
            }
            assert!(step < 10_000, "program {seed} moves nothing");
            world.step(&mut numbers);
            if step % 4 == 0 {
                thread::sleep(Duration::from_micros(500)); // messages take a while
            }
        }
        drop(world);
        let open = open_files();
        assert_eq!(*files.get_or_insert(open), open, "files are left after program {seed}");
    }
    nothing_is_left();
}
