use std::sync::{Arc, Mutex};

use super::*;
use crate::transport::rig::Random;
use crate::wire::management::IpHeader;

/// Events of the two programs: whose identifier, and what.
#[derive(Debug, Default)]
pub(super) struct Log(pub(super) Mutex<Vec<(u32, Event)>>);

impl Outlet for Log {
    fn tell(&self, id: u32, event: Event) {
        self.0.lock().unwrap().push((id, event));
    }
}

pub(super) const SERVICE: u64 = 0x0106_1d0b;
/// The listener's identifier.
pub(super) const LISTENER: u32 = 1;

pub(super) fn addresses() -> [IpAddr; 2] {
    [IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2])]
}

/// Two devices; the second has a listener.
pub(super) struct Two {
    pub(super) sides: [Connections; 2],
    pub(super) log: Arc<Log>,
    /// Datagrams under way, with the side and the path that they go to.
    pub(super) wire: Vec<(usize, Path, Box<Mad>)>,
    pub(super) now: Time,
    pub(super) room: Arc<AtomicU32>,
}

use std::sync::atomic::{AtomicU32, Ordering};

impl Two {
    pub(super) fn new() -> Self {
        let log = Arc::new(Log::default());
        let room = Arc::new(AtomicU32::new(1000));
        let mut sides = [Connections::new(0xa, 1), Connections::new(0xb, 2)];
        for (service, transport) in [(SERVICE, Transport::Rc), (SERVICE + 1, Transport::Ud)] {
            sides[1].listen(Listener {
                owner: Owner {
                    id: LISTENER + u32::from(transport == Transport::Ud),
                    outlet: log.clone(),
                },
                service,
                transport: Some(transport),
                address: addresses()[1],
                is_of_both: false,
                room: room.clone(),
            });
        }
        Self { sides, log, wire: Vec::new(), now: 1, room }
    }

    pub(super) fn owner(&self, id: u32) -> Owner {
        Owner { id, outlet: self.log.clone() }
    }

    pub(super) fn path() -> Path {
        Path { from: addresses()[0], to: addresses()[1] }
    }

    pub(super) fn header() -> [u8; IpHeader::SIZE] {
        IpHeader { port: 7, source: addresses()[0], destination: addresses()[1] }.bytes()
    }

    pub(super) fn connect(&mut self, id: u32, qpn: u32) -> u32 {
        self.connect_to(id, qpn, SERVICE)
    }

    fn connect_to(&mut self, id: u32, qpn: u32, service: u64) -> u32 {
        let mut request = Request { service, qpn, retry: 7, ack_timeout: 17, ..Request::default() };
        request.data[..IpHeader::SIZE].copy_from_slice(&Self::header());
        let owner = self.owner(id);
        let number =
            self.sides[0].connect(self.now, (Self::path(), owner), 0, Transport::Rc, request);
        self.collect();
        number
    }

    pub(super) fn call<T>(
        &mut self,
        side: usize,
        run: impl FnOnce(&mut Connections, Time) -> T,
    ) -> T {
        let result = run(&mut self.sides[side], self.now);
        self.collect();
        result
    }

    /// Takes what the sides have sent.
    pub(super) fn collect(&mut self) {
        for side in 0..2 {
            for (path, mad) in self.sides[side].outbox().drain(..) {
                let to = addresses().iter().position(|address| *address == path.to).unwrap();
                self.wire.push((to, Path { from: path.to, to: path.from }, mad));
            }
        }
    }

    pub(super) fn deliver(&mut self, index: usize) -> bool {
        let (to, path, mad) = self.wire.remove(index);
        self.call(to, |side, now| side.receive(now, path, &mad))
    }

    pub(super) fn deliver_all(&mut self) {
        while !self.wire.is_empty() {
            self.deliver(0);
        }
    }

    /// The names of the messages under way.
    pub(super) fn names(&self) -> Vec<&'static str> {
        self.wire.iter().map(|(_, _, mad)| Message::parse(mad).unwrap().1.name()).collect()
    }

    /// Lets time pass until the next timer.
    pub(super) fn pass(&mut self) -> bool {
        let Some(due) = self.sides.iter().filter_map(Connections::due).min() else { return false };
        self.now = due;
        for side in 0..2 {
            self.call(side, Connections::advance);
        }
        true
    }

    pub(super) fn told(&self) -> Vec<(u32, Event)> {
        std::mem::take(&mut self.log.0.lock().unwrap())
    }

    /// The request that the listener was told of.
    fn request(&self) -> Arrived<Request> {
        let told = self.told();
        let mut requests = told.into_iter().filter_map(|(id, event)| match event {
            Event::Request(arrived) if id == LISTENER => Some(*arrived),
            _ => None,
        });
        let request = requests.next().expect("a request");
        assert!(requests.next().is_none(), "one request");
        request
    }

    /// A connection between identifiers 10 and 20: our number, and the peer's.
    fn established(&mut self) -> (u32, u32) {
        let active = self.connect(10, 0x111);
        self.deliver_all();
        let passive = self.request().connection;
        self.accept(passive, 20, 0x222).unwrap();
        self.deliver_all();
        self.call(0, |side, _| side.ready(active)).unwrap();
        self.deliver_all();
        let told = self.told();
        assert!(matches!(told[..], [(10, Event::Reply(..)), (20, Event::Established)]), "{told:?}");
        (active, passive)
    }

    pub(super) fn accept(&mut self, number: u32, id: u32, qpn: u32) -> Result<(), WrongState> {
        let owner = self.owner(id);
        let reply = Reply { qpn, resources: 2, depth: 3, ..Reply::default() };
        self.call(1, |side, now| side.accept(now, number, owner, 0, reply))
    }

    pub(super) fn is_empty(&self) -> bool {
        let empty = |side: &Connections| {
            side.all.is_empty()
                && side.by_remote.is_empty()
                && side.by_queue_pair.is_empty()
                && side.timers.is_empty()
                && side.waiting == 0
                && side.waiting_of.is_empty()
        };
        self.sides.iter().all(empty)
    }
}

#[test]
fn both_sides_learn_what_their_queue_pairs_need() {
    let mut two = Two::new();
    let mut request =
        Request { service: SERVICE, qpn: 0x111, resources: 4, depth: 5, ..Request::default() };
    (request.mtu, request.retry, request.rnr_retry, request.ack_timeout) = (3, 6, 5, 17);
    request.data[..IpHeader::SIZE].copy_from_slice(&Two::header());
    let owner = two.owner(10);
    let active =
        two.call(0, |side, now| side.connect(now, (Two::path(), owner), 9, Transport::Rc, request));
    assert_eq!(two.sides[0].attributes(active).map(|(_, known)| known), Some(false));
    two.deliver_all();
    let arrived = two.request();
    assert_eq!(
        (arrived.modifier, arrived.message.pkey, arrived.message.from),
        (9, PKEY, gid(addresses()[0]))
    );
    let (theirs, known) = two.sides[1].attributes(arrived.connection).unwrap();
    assert!(known);
    // One side may ask at once as much as the other answers at once.
    assert_eq!((theirs.remote_qpn, theirs.resources, theirs.depth), (0x111, 5, 4));
    assert_eq!((theirs.mtu, theirs.retry, theirs.rnr_retry, theirs.ack_timeout), (3, 6, 5, 17));
    let before = theirs.psn;
    two.accept(arrived.connection, 20, 0x222).unwrap();
    two.deliver_all();
    let (ours, theirs) = (
        two.sides[0].attributes(active).unwrap().0,
        two.sides[1].attributes(arrived.connection).unwrap().0,
    );
    assert_eq!((ours.remote_qpn, ours.resources, ours.depth), (0x222, 3, 2));
    assert_eq!((ours.psn, ours.remote_psn), (theirs.remote_psn, theirs.psn));
    assert_ne!(ours.psn, theirs.psn);
    assert_eq!(theirs.psn, before, "the queue pair is ready before the program accepts");
}

#[test]
fn the_end_of_a_connection_is_told_once_on_both_sides() {
    for first in 0..2 {
        let mut two = Two::new();
        let (active, passive) = two.established();
        let (numbers, ids) = ([active, passive], [10, 20]);
        two.call(first, |side, now| side.disconnect(now, numbers[first])).unwrap();
        two.call(first, |side, now| side.disconnect(now, numbers[first])).unwrap();
        assert_eq!(two.names(), ["Disconnect"], "a second call asks nothing");
        two.deliver_all();
        assert_eq!(two.told(), [(ids[1 - first], Event::Disconnected(true))]);
        two.call(1 - first, |side, now| side.disconnect(now, numbers[1 - first])).unwrap();
        two.deliver_all();
        assert_eq!(two.told(), [(ids[first], Event::Disconnected(true))]);
        assert_eq!(two.sides[0].attributes(active), None);
        while two.pass() {}
        let mut told = two.told();
        told.sort_by_key(|(id, _)| *id);
        assert_eq!(told, [(10, Event::TimewaitExit), (20, Event::TimewaitExit)]);
        assert!(two.is_empty());
        assert_eq!(two.now, 1 + 512_000_000, "4.096 us * 2^17");
    }
}

#[test]
fn two_ends_at_once_are_one() {
    let mut two = Two::new();
    let (active, passive) = two.established();
    two.call(0, |side, now| side.disconnect(now, active)).unwrap();
    two.call(1, |side, now| side.disconnect(now, passive)).unwrap();
    two.deliver_all();
    let mut told = two.told();
    told.sort_by_key(|(id, _)| *id);
    assert_eq!(told, [(10, Event::Disconnected(true)), (20, Event::Disconnected(true))]);
    while two.pass() {}
    assert!(two.is_empty());
}

#[test]
fn a_request_without_a_listener_is_refused_at_once() {
    for address in ["10.0.0.3", "fd00::2"] {
        let mut two = Two::new();
        two.connect_to(10, 1, SERVICE + 5);
        two.deliver_all();
        assert!(matches!(two.told()[..], [(10, Event::Rejected(reason::INVALID_SERVICE, _))]));
        // The program asked for another address than that of the listener.
        two.connect(10, 1);
        let (_, _, mad) = &mut two.wire[0];
        let destination = address.parse().unwrap();
        let source =
            if IpAddr::is_ipv4(&destination) { destination } else { "fd00::1".parse().unwrap() };
        mad[24 + 140..][..IpHeader::SIZE]
            .copy_from_slice(&IpHeader { port: 1, source, destination }.bytes());
        two.deliver_all();
        assert!(matches!(two.told()[..], [(10, Event::Rejected(reason::INVALID_SERVICE, _))]));
        assert!(two.is_empty());
    }
}

#[test]
fn one_address_goes_before_all_and_ipv6_may_stand_for_both() {
    let log = Arc::new(Log::default());
    let mut listeners = Listeners::default();
    let listener = |id, address: &str, is_of_both, transport| Listener {
        owner: Owner { id, outlet: log.clone() },
        service: SERVICE,
        transport,
        address: address.parse().unwrap(),
        is_of_both,
        room: Arc::default(),
    };
    let find = |listeners: &Listeners, to: &str, transport| {
        let destination = to.parse().unwrap();
        let header = IpHeader { port: 1, source: destination, destination };
        listeners.find(SERVICE, &header, transport).map(|listener| listener.owner.id)
    };
    listeners.add(listener(1, "::", true, Some(Transport::Rc)));
    assert_eq!(find(&listeners, "10.0.0.2", Transport::Rc), Some(1));
    assert_eq!(find(&listeners, "10.0.0.2", Transport::Uc), None);
    listeners.add(listener(2, "10.0.0.2", false, Some(Transport::Rc)));
    assert_eq!(find(&listeners, "10.0.0.2", Transport::Rc), Some(2));
    assert_eq!(find(&listeners, "10.0.0.3", Transport::Rc), Some(1));
    listeners.add(listener(1, "::", false, None));
    assert_eq!(find(&listeners, "10.0.0.3", Transport::Rc), None);
    assert_eq!(find(&listeners, "fd00::1", Transport::Uc), Some(1));
    assert_eq!(find(&listeners, "fd00::1", Transport::Ud), None);
    listeners.add(listener(1, "0.0.0.0", false, Some(Transport::XrcSend)));
    assert_eq!(find(&listeners, "10.0.0.3", Transport::XrcReceive), Some(1));
    listeners.remove(2);
    assert_eq!(find(&listeners, "10.0.0.2", Transport::Rc), None);
}

#[test]
fn a_listener_without_room_hears_nothing() {
    let mut two = Two::new();
    two.room.store(1, Ordering::Relaxed);
    two.connect(10, 1);
    two.connect(11, 2);
    assert!(two.deliver(0) && !two.deliver(0));
    two.request();
    // The request comes again, and then finds room.
    two.room.store(1, Ordering::Relaxed);
    assert!(two.pass());
    two.deliver_all();
    assert_eq!(two.request().message.qpn, 2);
}

#[test]
fn one_peer_does_not_take_the_room_of_others() {
    let mut two = Two::new();
    two.room.store(u32::MAX, Ordering::Relaxed);
    for qpn in 1..=MOST_OF_PEER + 1 {
        two.connect(10, qpn);
    }
    let (_, _, last) = two.wire.remove(MOST_OF_PEER as usize);
    two.deliver_all();
    let told = two.told();
    assert_eq!(told.len(), MOST_OF_PEER as usize);
    let path_to = |to| Path { from: addresses()[1], to };
    let hears = |two: &mut Two, to| {
        two.call(1, |side, now| side.receive(now, path_to(to), &last)) && two.told().len() == 1
    };
    assert!(!hears(&mut two, addresses()[0]));
    assert!(hears(&mut two, IpAddr::from([10, 0, 0, 3])));
    // A decision makes room.
    let (_, Event::Request(first)) = &told[0] else { panic!("{told:?}") };
    two.accept(first.connection, 20, 1).unwrap();
    assert!(hears(&mut two, addresses()[0]));
}

#[test]
fn a_refusal_has_its_reason_and_data() {
    let mut two = Two::new();
    two.connect(10, 1);
    two.deliver_all();
    let passive = two.request().connection;
    two.call(1, |side, _| side.reject(passive, 35, b"no", 0)).unwrap();
    two.deliver_all();
    let told = two.told();
    let [(10, Event::Rejected(35, data))] = &told[..] else { panic!("{told:?}") };
    assert_eq!(data[..3], *b"no\0");
    assert_eq!(two.accept(passive, 20, 1), Err(WrongState));
    assert!(two.is_empty());
    // The active side ends it, after the answer.
    let active = two.connect(10, 1);
    two.deliver_all();
    let passive = two.request().connection;
    two.accept(passive, 20, 2).unwrap();
    two.deliver_all();
    two.call(0, |side, _| side.reject(active, 28, b"", 0)).unwrap();
    two.deliver_all();
    assert!(matches!(two.told()[..], [(10, Event::Reply(..)), (20, Event::Rejected(28, _))]));
    assert!(two.is_empty());
}

#[test]
fn what_is_not_answered_is_repeated_for_73_seconds() {
    let mut two = Two::new();
    two.connect(10, 1);
    let mut sent = 0;
    loop {
        sent += two.names().iter().filter(|name| **name == "Request").count();
        let is_over = two.names() == ["Rejection"];
        two.wire.clear();
        if is_over {
            break;
        }
        assert!(two.pass());
    }
    assert_eq!(sent, 16);
    assert_eq!(two.now, 1 + 16 * (4_096 + 512) * 1_000_000);
    assert_eq!(two.told(), [(10, Event::Unreachable)]);
    assert!(two.is_empty());
}

#[test]
fn a_program_that_takes_its_time_is_waited_for() {
    let mut two = Two::new();
    two.connect(10, 1);
    two.deliver_all();
    let passive = two.request().connection;
    assert!(two.pass());
    assert_eq!(two.names(), ["Request"]);
    two.deliver(0);
    assert_eq!(two.names(), ["Processing"]);
    let before = two.now;
    two.deliver_all();
    two.pass();
    assert_eq!(two.now - before, (65_536 + 4_096 + 512) * 1_000_000);
    // A second MRA for one message changes nothing, however many there are.
    let mut mras = Vec::new();
    while let Some((to, path, mad)) = two.wire.pop() {
        mras.push((to, path, mad));
    }
    assert!(two.told().is_empty());
    two.accept(passive, 20, 2).unwrap();
    two.deliver_all();
    assert!(matches!(two.told()[..], [(10, Event::Reply(..))]));
}

#[test]
fn nobody_gets_more_time_than_once_for_a_message() {
    let mut two = Two::new();
    let active = two.connect(10, 1);
    two.wire.clear();
    let mra = Message::from(Processing { local: 5, remote: active, which: 0, timeout: 31 });
    let deliver = |two: &mut Two| {
        let mad = mra.mad(1.into());
        two.call(0, |side, now| side.receive(now, Two::path(), &mad))
    };
    assert!(deliver(&mut two));
    let due = two.sides[0].due().unwrap();
    assert_eq!(due, 1 + (65_536 + 4_096 + 512) * 1_000_000, "65 s at the most");
    two.now = due / 2;
    assert!(deliver(&mut two));
    assert_eq!(two.sides[0].due(), Some(due));
}

#[test]
fn a_peer_that_gave_up_frees_the_request() {
    let mut two = Two::new();
    let active = two.connect(10, 1);
    two.deliver_all();
    let passive = two.request().connection;
    two.accept(passive, 20, 2).unwrap();
    two.wire.clear();
    two.call(0, |side, now| side.abandon(now, active));
    two.deliver_all();
    assert!(matches!(two.told()[..], [(20, Event::Rejected(reason::TIMEOUT, _))]));
    assert!(two.is_empty());
}

#[test]
fn an_end_that_nobody_answers_is_told_after_its_repetitions() {
    let mut two = Two::new();
    let (active, _) = two.established();
    two.call(0, |side, now| side.disconnect(now, active)).unwrap();
    let mut sent = 0;
    while two.told().is_empty() {
        sent += two.wire.len();
        two.wire.clear();
        assert!(two.pass());
    }
    assert_eq!(sent, 16);
}

#[test]
fn an_unknown_connection_is_ended_by_an_answer() {
    let mut two = Two::new();
    let (active, _) = two.established();
    two.call(1, |side, _| side.clear());
    two.call(0, |side, now| side.disconnect(now, active)).unwrap();
    two.deliver_all();
    assert_eq!(two.told(), [(10, Event::Disconnected(true))]);
}

#[test]
fn a_lost_rtu_is_made_up_for() {
    let mut two = Two::new();
    let active = two.connect(10, 1);
    two.deliver_all();
    let passive = two.request().connection;
    two.accept(passive, 20, 2).unwrap();
    two.deliver_all();
    two.call(0, |side, _| side.ready(active)).unwrap();
    two.wire.clear();
    // The REP comes again, and so does its answer.
    assert!(two.pass());
    two.deliver_all();
    assert!(matches!(two.told()[..], [(10, Event::Reply(..)), (20, Event::Established)]));
    // Or something has come over the queue pair.
    let active = two.connect(11, 3);
    two.deliver_all();
    let passive = two.request().connection;
    assert_eq!(two.call(1, |side, _| side.is_used(passive)), Err(WrongState));
    two.accept(passive, 21, 4).unwrap();
    two.call(1, |side, _| side.is_used(passive)).unwrap();
    two.deliver_all();
    two.call(0, |side, _| side.ready(active)).unwrap();
    two.deliver_all();
    assert!(matches!(two.told()[..], [(21, Event::Established), (11, Event::Reply(..))]));
}

#[test]
fn a_peer_that_has_forgotten_a_connection_ends_it() {
    let mut two = Two::new();
    let (_, passive) = two.established();
    // The peer's process is another one, with the same address and queue pair.
    two.sides[0] = Connections::new(0xa, 99);
    let active = two.connect(11, 0x111);
    two.deliver(0);
    assert_eq!(two.names(), ["Rejection", "Disconnect"]);
    two.deliver_all();
    let told = two.told();
    assert!(
        matches!(
            told[..],
            [(11, Event::Rejected(reason::STALE, _)), (20, Event::Disconnected(true))]
        ),
        "{told:?}"
    );
    assert_eq!(two.sides[1].attributes(passive), None);
    let _ = active;
    two.connect(12, 0x111);
    two.deliver_all();
    two.request();
}

#[test]
fn other_addresses_touch_no_connection() {
    let mut two = Two::new();
    let (active, passive) = two.established();
    let stranger = IpAddr::from([10, 0, 0, 9]);
    let remote = active;
    let messages: [Message; 5] = [
        Disconnect { local: remote, remote: passive, qpn: 0x222 }.into(),
        Rejection { local: remote, remote: passive, which: 2, reason: 28, ..Default::default() }
            .into(),
        Disconnected { local: remote, remote: passive }.into(),
        ReadyToUse { local: remote, remote: passive }.into(),
        Processing { local: remote, remote: passive, which: 1, timeout: 31 }.into(),
    ];
    for message in &messages {
        let paths = [
            Path { from: addresses()[1], to: stranger },
            Path { from: stranger, to: addresses()[0] },
        ];
        for path in paths {
            assert!(!two.sides[1].receive(5, path, &message.mad(1.into())), "{message:?}");
        }
    }
    // Nor does the peer itself, with a number or a queue pair that are not this connection's.
    let path = Path { from: addresses()[1], to: addresses()[0] };
    for message in [
        Disconnect { local: remote, remote: passive, qpn: 0x223 },
        Disconnect { local: remote ^ 1, remote: passive, qpn: 0x222 },
    ] {
        assert!(!two.sides[1].receive(5, path, &Message::from(message).mad(1.into())));
    }
    assert!(two.told().is_empty());
    assert!(two.sides[1].attributes(passive).is_some());
}

#[test]
fn a_peer_whose_process_has_ended_is_told_of() {
    let mut two = Two::new();
    let (_, _) = two.established();
    two.call(1, |side, now| side.lose_peer(addresses()[0], now));
    assert_eq!(two.told(), [(20, Event::Disconnected(true))]);
    let active = two.connect(11, 0x112);
    two.call(0, |side, now| side.lose_peer(addresses()[1], now));
    two.wire.clear();
    assert_eq!(two.told(), [(10, Event::Disconnected(true)), (11, Event::Unreachable)]);
    assert_eq!(two.sides[0].attributes(active), None);
    while two.pass() {}
    assert!(two.is_empty());
}

#[test]
fn services_are_asked_for_and_answered_again() {
    let mut two = Two::new();
    let ask = |two: &mut Two, id, service| {
        let mut request = ServiceRequest { service, ..ServiceRequest::default() };
        request.data[..IpHeader::SIZE].copy_from_slice(&Two::header());
        let owner = two.owner(id);
        two.call(0, |side, now| side.ask(now, (Two::path(), owner), request))
    };
    ask(&mut two, 10, SERVICE + 7);
    two.deliver_all();
    let told = two.told();
    assert!(
        matches!(&told[..], [(10, Event::ServiceReply(reply))] if reply.status == status::UNSUPPORTED)
    );

    ask(&mut two, 10, SERVICE + 1);
    let again = two.wire[0].clone();
    two.deliver_all();
    let told = two.told();
    let [(2, Event::ServiceRequest(arrived))] = &told[..] else { panic!("{told:?}") };
    let passive = arrived.connection;
    let owner = two.owner(20);
    let reply =
        ServiceReply { qpn: 0x333, qkey: 5, service: SERVICE + 1, ..ServiceReply::default() };
    two.call(1, |side, _| side.answer(passive, owner.clone(), reply.clone())).unwrap();
    // The answer is lost, and sent again for the same request.
    two.wire.clear();
    two.wire.push(again);
    two.deliver_all();
    let told = two.told();
    let [(10, Event::ServiceReply(got))] = &told[..] else { panic!("{told:?}") };
    assert_eq!((got.qpn, got.qkey, got.status), (0x333, 5, status::VALID));
    assert_eq!(two.call(1, |side, _| side.answer(passive, owner, reply)), Err(WrongState));
    two.call(1, |side, now| side.abandon(now, passive));
    assert!(two.is_empty());

    ask(&mut two, 10, SERVICE + 1);
    two.deliver_all();
    let told = two.told();
    let [(2, Event::ServiceRequest(arrived))] = &told[..] else { panic!("{told:?}") };
    let passive = arrived.connection;
    two.call(1, |side, _| side.reject(passive, 0, b"x", SERVICE + 1)).unwrap();
    two.deliver_all();
    let told = two.told();
    assert!(
        matches!(&told[..], [(10, Event::ServiceReply(reply))] if reply.status == status::REJECTED && reply.data[0] == b'x')
    );
}

/// Connections under loss, duplicates and reordering: every one ends established on both sides, or on none; and nothing is
/// left of them.
#[test]
fn whatever_the_network_does_both_sides_agree() {
    for seed in 1..=40 {
        let mut random = Random(seed * 77);
        let mut two = Two::new();
        const COUNT: u32 = 30;
        let active: Vec<u32> = (0..COUNT).map(|i| two.connect(100 + i, 0x1000 + i)).collect();
        let (mut established, mut over) =
            ([[false; COUNT as usize]; 2], [[false; COUNT as usize]; 2]);
        let mut passive = [0; COUNT as usize];
        loop {
            for (id, event) in two.told() {
                let (side, i) = if id >= 200 { (1, id - 200) } else { (0, id.wrapping_sub(100)) };
                let at = i as usize;
                match event {
                    Event::Request(arrived) => {
                        let i = arrived.message.qpn - 0x1000;
                        passive[i as usize] = arrived.connection;
                        if i % 5 == 4 {
                            two.call(1, |side, _| side.reject(arrived.connection, 28, &[], 0))
                                .unwrap();
                        } else {
                            two.accept(arrived.connection, 200 + i, 0x2000 + i).unwrap();
                        }
                    }
                    Event::Reply(..) => {
                        two.call(0, |side, _| side.ready(active[at])).unwrap();
                        established[0][at] = true;
                    }
                    Event::Established => {
                        assert!(!std::mem::replace(&mut established[1][at], true));
                    }
                    Event::Rejected(..) | Event::Unreachable => over[side][at] = true,
                    other => panic!("{id} {other:?}"),
                }
            }
            if two.wire.is_empty() {
                if !two.pass() {
                    break;
                }
                continue;
            }
            let index = random.below(two.wire.len() as u64) as usize;
            match random.below(10) {
                0..3 => drop(two.wire.remove(index)),
                3 => {
                    let copy = two.wire[index].clone();
                    two.wire.push(copy);
                }
                _ => {
                    two.deliver(index);
                }
            }
        }
        for i in 0..COUNT as usize {
            let both = [established[0][i], established[1][i]];
            // A refusal that is lost is known by the time that has passed.
            assert!(
                both == [true; 2] || both == [false; 2] && over[0][i],
                "seed {seed}, {i}: {both:?}"
            );
        }
        for i in 0..COUNT as usize {
            two.call(0, |side, now| side.abandon(now, active[i]));
            two.deliver_all();
            two.call(1, |side, now| side.abandon(now, passive[i]));
        }
        while two.pass() {
            two.wire.clear();
        }
        assert!(two.is_empty(), "seed {seed}");
    }
}
