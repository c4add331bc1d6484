//! The connection manager by its commands, as librdmacm gives them, in the order of `rdma_user_cm.h`.

use std::ffi::{c_int, c_void};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::UnixDatagram;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ibverbs::provider::hooks;
use ibverbs_software::{Device, Network};

#[path = "support/child.rs"]
mod child;
#[path = "support/stranger.rs"]
mod stranger;

use child::{Process, is_child, parent};
use stranger::{DREP, DREQ, MRA, REJ, REP, RTU, Stranger, message};

/// The registered devices, and the ports, are the process's.
fn alone() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An event as the program reads it.
#[derive(Debug)]
struct Event {
    uid: u64,
    id: u32,
    kind: u32,
    status: i32,
    data: Vec<u8>,
    qpn: u32,
}

const ADDRESS_RESOLVED: u32 = 0;
const ADDRESS_ERROR: u32 = 1;
const ROUTE_RESOLVED: u32 = 2;
const REQUEST: u32 = 4;
const RESPONSE: u32 = 5;
const UNREACHABLE: u32 = 7;
const REJECTED: u32 = 8;
const ESTABLISHED: u32 = 9;
const DISCONNECTED: u32 = 10;
const REMOVAL: u32 = 11;
const MULTICAST_JOIN: u32 = 12;
const ADDRESS_CHANGE: u32 = 14;
const TIMEWAIT_EXIT: u32 = 15;

struct File(c_int);

impl Drop for File {
    fn drop(&mut self) {
        (hooks().unwrap().manager_close)(self.0);
        // SAFETY: the file is this one's.
        unsafe { libc::close(self.0) };
    }
}

fn number(value: u32) -> [u8; 4] {
    value.to_ne_bytes()
}

fn sockaddr(address: SocketAddr) -> Vec<u8> {
    let mut bytes = vec![0; 128];
    bytes[2..4].copy_from_slice(&address.port().to_be_bytes());
    match address.ip() {
        IpAddr::V4(v4) => {
            bytes[..2].copy_from_slice(&2_u16.to_ne_bytes());
            bytes[4..8].copy_from_slice(&v4.octets());
        }
        IpAddr::V6(v6) => {
            bytes[..2].copy_from_slice(&10_u16.to_ne_bytes());
            bytes[8..24].copy_from_slice(&v6.octets());
        }
    }
    bytes
}

fn parameters(qpn: u32, data: &[u8], is_valid: bool) -> Vec<u8> {
    let mut bytes = vec![0; 272];
    bytes[..4].copy_from_slice(&number(qpn));
    bytes[8..8 + data.len()].copy_from_slice(data);
    bytes[264] = data.len() as u8;
    bytes[269..].copy_from_slice(&[7, 7, is_valid.into()]);
    bytes
}

/// `RDMA_OPTION_ID_REUSEADDR` and `RDMA_OPTION_ID_AFONLY`.
const REUSE_ADDRESS: u32 = 1;
const ONLY_IPV6: u32 = 2;

impl File {
    fn open() -> Self {
        let file = (hooks().unwrap().manager_open)().expect("a device is registered");
        assert!(file >= 0);
        Self(file)
    }

    fn write(&self, bytes: &[u8]) -> io::Result<()> {
        let hook = hooks().unwrap().manager_write;
        // SAFETY: the commands of this file have addresses of buffers that outlive the call.
        match unsafe { hook(self.0, bytes.as_ptr().cast::<c_void>(), bytes.len()) } {
            Some(-1) => Err(io::Error::last_os_error()),
            Some(_) => Ok(()),
            None => panic!("the file is no connection manager's"),
        }
    }

    fn command(&self, command: u32, body: &[&[u8]]) -> io::Result<()> {
        let mut bytes = number(command).to_vec();
        bytes.extend_from_slice(&[0, 0, 0, 0]);
        bytes.extend(body.iter().copied().flatten());
        self.write(&bytes)
    }

    /// A command that begins with the address of its answer; `before`: what comes before the address.
    fn ask(&self, command: u32, before: &[u8], body: &[&[u8]], size: usize) -> io::Result<Vec<u8>> {
        let mut answer = vec![0_u8; size];
        let mut bytes = number(command).to_vec();
        bytes.extend_from_slice(&[0, 0]);
        bytes.extend_from_slice(&(size as u16).to_ne_bytes());
        bytes.extend_from_slice(before);
        bytes.extend_from_slice(&(answer.as_mut_ptr() as u64).to_ne_bytes());
        bytes.extend(body.iter().copied().flatten());
        self.write(&bytes)?;
        Ok(answer)
    }

    /// An identifier of the port space of TCP.
    fn create(&self, uid: u64) -> u32 {
        let kind = [0x06, 0x01, 2, 0, 0, 0, 0, 0];
        let answer = self.ask(0, &uid.to_ne_bytes(), &[&kind], 4).unwrap();
        u32::from_ne_bytes(answer.try_into().unwrap())
    }

    /// Returns how many events of it were read.
    fn destroy(&self, id: u32) -> io::Result<u32> {
        let answer = self.ask(1, &[], &[&number(id), &[0; 4]], 4)?;
        Ok(u32::from_ne_bytes(answer.try_into().unwrap()))
    }

    fn bind(&self, id: u32, address: SocketAddr) -> io::Result<()> {
        self.command(20, &[&number(id), &[28, 0, 0, 0], &sockaddr(address)])
    }

    /// `RDMA_OPTION_ID_AFONLY`.
    fn set(&self, id: u32, option: u32) -> io::Result<()> {
        let yes = 1_u32;
        let at = (&raw const yes as u64).to_ne_bytes();
        self.command(14, &[&at, &number(id), &number(0), &number(option), &number(4)])
    }

    fn listen(&self, id: u32, address: SocketAddr) -> io::Result<()> {
        self.bind(id, address)?;
        self.listen_bound(id)
    }

    fn listen_bound(&self, id: u32) -> io::Result<()> {
        self.command(7, &[&number(id), &number(0)])
    }

    fn resolve(&self, id: u32, to: SocketAddr) -> io::Result<()> {
        self.command(21, &[&number(id), &number(1000), &[0; 8], &[0; 128], &sockaddr(to)])
    }

    fn connect(&self, id: u32, qpn: u32, data: &[u8]) -> io::Result<()> {
        self.command(6, &[&parameters(qpn, data, true), &number(id), &[0; 12]])
    }

    fn accept(&self, id: u32, uid: u64, qpn: u32, data: &[u8], is_passive: bool) -> io::Result<()> {
        let parameters = parameters(qpn, data, is_passive);
        self.command(8, &[&uid.to_ne_bytes(), &parameters, &number(id), &[0; 12]])
    }

    fn disconnect(&self, id: u32) -> io::Result<()> {
        self.command(10, &[&number(id)])
    }

    fn attributes(&self, id: u32, state: u32) -> io::Result<Vec<u8>> {
        self.ask(11, &[], &[&number(id), &number(state)], 144)
    }

    fn addresses(&self, id: u32) -> [Vec<u8>; 2] {
        let answer = self.ask(19, &[], &[&number(id), &number(0)], 280).unwrap();
        [answer[16..24].to_vec(), answer[144..152].to_vec()]
    }

    fn event(&self) -> Event {
        self.read().unwrap()
    }

    fn read(&self) -> io::Result<Event> {
        let bytes = self.ask(12, &[], &[], 336)?;
        let n32 = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
        Ok(Event {
            uid: u64::from_ne_bytes(bytes[..8].try_into().unwrap()),
            id: n32(8),
            kind: n32(12),
            status: n32(16) as i32,
            qpn: n32(20),
            data: bytes[28..28 + usize::from(bytes[284])].to_vec(),
        })
    }

    fn expect(&self, uid: u64, kind: u32, status: i32) -> Event {
        let event = self.event();
        assert_eq!((event.uid, event.kind, event.status), (uid, kind, status), "{event:?}");
        event
    }

    /// An identifier whose route is known.
    fn routed(&self, uid: u64, to: SocketAddr) -> u32 {
        self.route(self.create(uid), uid, to)
    }

    fn route(&self, id: u32, uid: u64, to: SocketAddr) -> u32 {
        self.resolve(id, to).unwrap();
        self.expect(uid, ADDRESS_RESOLVED, 0);
        self.command(4, &[&number(id), &number(1000)]).unwrap();
        self.expect(uid, ROUTE_RESOLVED, 0);
        id
    }
}

fn errno<T: std::fmt::Debug>(result: io::Result<T>) -> c_int {
    result.unwrap_err().raw_os_error().unwrap()
}

/// A port that no other process of the machine has taken.
fn free_port(file: &File) -> u16 {
    let id = file.create(1);
    file.bind(id, "0.0.0.0:0".parse().unwrap()).unwrap();
    let [own, _] = file.addresses(id);
    file.destroy(id).unwrap();
    u16::from_be_bytes([own[2], own[3]])
}

/// Server and client, connected; the identifiers of the connection, and that of the listener.
fn connected(server: &File, client: &File, at: SocketAddr) -> (u32, u32, u32) {
    let listener = server.create(5);
    server.listen(listener, at).unwrap();
    let (active, passive) = connect_to(server, client, at);
    (active, passive, listener)
}

fn connect_to(server: &File, client: &File, at: SocketAddr) -> (u32, u32) {
    let active = client.routed(6, at);
    (active, connect_by(server, client, active))
}

/// Returns the server's identifier.
fn connect_by(server: &File, client: &File, active: u32) -> u32 {
    client.connect(active, 0x111, b"hello").unwrap();
    let request = server.expect(5, REQUEST, 0);
    assert_eq!((request.qpn, request.data.len(), &request.data[..6]), (0x111, 56, &b"hello\0"[..]));
    let passive = request.id;
    server.attributes(passive, 2).unwrap();
    server.accept(passive, 7, 0x222, b"you", true).unwrap();
    let response = client.expect(6, RESPONSE, 0);
    assert_eq!(
        (response.qpn, response.data.len(), &response.data[..4]),
        (0x222, 196, &b"you\0"[..])
    );
    client.accept(active, 0, 0, &[], false).unwrap();
    server.expect(7, ESTABLISHED, 0);
    passive
}

#[test]
fn a_client_finds_a_server_of_the_machine_by_its_port() {
    let _alone = alone();
    let device = Device::new().unwrap();
    device.register();
    let (server, client) = (File::open(), File::open());
    for (any, name, taken) in [
        ("0.0.0.0", "127.0.0.1", libc::EADDRNOTAVAIL),
        ("127.0.0.1", "127.0.0.1", libc::EADDRINUSE),
    ] {
        let port = free_port(&server);
        let at = |address: &str| SocketAddr::new(address.parse().unwrap(), port);
        let listener = server.create(5);
        server.listen(listener, at(any)).unwrap();
        // The port is taken, for this process too.
        let other = client.create(8);
        assert_eq!(errno(client.bind(other, at(any))), taken);
        client.destroy(other).unwrap();
        let (active, passive) = connect_to(&server, &client, at(name));
        let [own, peer] = client.addresses(active);
        assert_eq!(peer[..8], sockaddr(at(name))[..8], "the address that the program asked for");
        assert_eq!(own[4..8], sockaddr(SocketAddr::new(device.address(), 0))[4..8]);
        client.disconnect(active).unwrap();
        server.expect(7, DISCONNECTED, 0);
        server.disconnect(passive).unwrap();
        client.expect(6, DISCONNECTED, 0);
        client.expect(6, TIMEWAIT_EXIT, 0);
        assert_eq!(errno(client.attributes(active, 2)), libc::EINVAL, "the connection is over");
        // Address, route, response, disconnected, exit.
        assert_eq!(client.destroy(active).unwrap(), 5);
        server.expect(7, TIMEWAIT_EXIT, 0);
        assert_eq!((server.destroy(passive).unwrap(), server.destroy(listener).unwrap()), (3, 1));
        assert_eq!(errno(server.destroy(listener)), libc::ENOENT);
    }
}

/// The kernel's `cma_check_port` gives the same answers.
#[test]
fn a_port_that_is_taken_says_so_as_the_kernel_does() {
    const TAKEN: Option<c_int> = Some(libc::EADDRINUSE);
    const BY_ANY: Option<c_int> = Some(libc::EADDRNOTAVAIL);
    let _alone = alone();
    let device = Device::new().unwrap();
    device.register();
    let file = File::open();
    let own = device.address().to_string();
    for (first, second, is_ipv6_only, expected) in [
        ("0.0.0.0", "0.0.0.0", false, BY_ANY),
        ("0.0.0.0", "127.0.0.1", false, BY_ANY),
        ("127.0.0.1", "0.0.0.0", false, BY_ANY),
        ("127.0.0.1", "127.0.0.1", false, TAKEN),
        (&own, "0.0.0.0", false, BY_ANY),
        ("0.0.0.0", &own, false, BY_ANY),
        (&own, &own, false, TAKEN),
        (&own, "127.0.0.1", false, None),
        ("::", "::", false, BY_ANY),
        ("::", "::", true, BY_ANY),
        ("::", "0.0.0.0", false, BY_ANY),
        ("0.0.0.0", "::", false, BY_ANY),
        ("::", &own, false, BY_ANY),
        ("::", "0.0.0.0", true, None),
        ("0.0.0.0", "::", true, None),
    ] {
        let port = free_port(&file);
        let bind = |address: &str| {
            let id = file.create(1);
            if is_ipv6_only && address.contains(':') {
                file.set(id, ONLY_IPV6).unwrap();
            }
            let bound = file.bind(id, SocketAddr::new(address.parse().unwrap(), port));
            (id, bound.err().map(|e| e.raw_os_error().unwrap()))
        };
        let (one, result) = bind(first);
        assert_eq!(result, None, "{first}");
        let (two, result) = bind(second);
        assert_eq!(result, expected, "{first}, then {second}, {is_ipv6_only}");
        file.destroy(one).unwrap();
        file.destroy(two).unwrap();
    }
    // Identifiers that reuse a port share it until one listens, which fails while others are bound.
    let at = SocketAddr::new(device.address(), free_port(&file));
    let [one, two, three] = [(); 3].map(|()| {
        let id = file.create(1);
        file.set(id, REUSE_ADDRESS).unwrap();
        id
    });
    file.bind(one, at).unwrap();
    file.bind(two, at).unwrap();
    assert_eq!(errno(file.listen_bound(one)), libc::EADDRINUSE);
    file.destroy(two).unwrap();
    file.listen_bound(one).unwrap();
    assert_eq!(errno(file.bind(three, at)), libc::EADDRINUSE, "one listens");
    file.destroy(one).unwrap();
    file.listen(three, at).unwrap();
    file.destroy(three).unwrap();
    // Another process has it, for one family of addresses.
    for (family, address, is_ipv6_only, expected) in [
        ("Ipv4", "0.0.0.0", false, BY_ANY),
        ("Ipv4", "::", false, BY_ANY),
        ("Ipv4", "127.0.0.1", false, TAKEN),
        ("Ipv4", "::", true, None),
        ("Ipv6", "::", false, BY_ANY),
        ("Ipv6", "::", true, BY_ANY),
        ("Ipv6", "0.0.0.0", false, None),
    ] {
        let port = free_port(&file);
        let name = format!("ibverbs-cm/0106/{port}/{family}");
        let name = std::os::unix::net::SocketAddr::from_abstract_name(name).unwrap();
        let _elsewhere = UnixDatagram::bind_addr(&name).unwrap();
        let id = file.create(1);
        if is_ipv6_only {
            file.set(id, ONLY_IPV6).unwrap();
        }
        let bound = file.bind(id, SocketAddr::new(address.parse().unwrap(), port));
        let errno = bound.err().map(|e| e.raw_os_error().unwrap());
        assert_eq!(errno, expected, "{family} is taken: {address}, {is_ipv6_only}");
        file.destroy(id).unwrap();
    }
    // This process has it for the other family, which does not share this one.
    let port = free_port(&file);
    let [ours, refused] = [(); 2].map(|()| file.create(1));
    file.set(ours, ONLY_IPV6).unwrap();
    file.bind(ours, SocketAddr::new("::".parse().unwrap(), port)).unwrap();
    let name = format!("ibverbs-cm/0106/{port}/Ipv4");
    let name = std::os::unix::net::SocketAddr::from_abstract_name(name).unwrap();
    let _elsewhere = UnixDatagram::bind_addr(&name).unwrap();
    let at = SocketAddr::new("0.0.0.0".parse().unwrap(), port);
    assert_eq!(errno(file.bind(refused, at)), libc::EADDRNOTAVAIL);
}

/// The child's part of the next test: no other test opens or closes files of its process.
#[test]
fn looks_with_few_files() {
    if !is_child("looks_with_few_files") {
        return;
    }
    let device = Device::new().unwrap();
    device.register();
    let file = File::open();
    // SAFETY: no memory is involved.
    let is_free = |fd: &c_int| unsafe { libc::fcntl(*fd, libc::F_GETFD) } < 0;
    let free: Vec<c_int> = (0..1024).filter(is_free).take(16).collect();
    let mut old = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a live structure.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut old) }, 0);
    let with_few = |end: &c_int, call: Call| {
        let id = file.create(1);
        let limit = libc::rlimit { rlim_cur: *end as u64, ..old };
        // SAFETY: live structures.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
        let done = call(&file, id);
        // SAFETY: as above.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &old) }, 0);
        file.destroy(id).unwrap();
        done.map_err(|e| e.raw_os_error().unwrap())
    };
    type Call = fn(&File, u32) -> io::Result<()>;
    let calls: [(Call, _); 3] = [
        (|file, id| file.bind(id, "0.0.0.0:0".parse().unwrap()), Ok(())),
        // No address of a machine, and one of this machine's that is no device's.
        (|file, id| file.bind(id, "192.0.2.1:0".parse().unwrap()), Err(libc::EADDRNOTAVAIL)),
        (|file, id| file.resolve(id, "127.9.8.7:1".parse().unwrap()), Ok(())),
    ];
    for (call, expected) in calls {
        let done: Vec<_> = free.iter().map(|end| with_few(end, call)).collect();
        let enough = done.iter().position(|it| *it == expected).expect("16 files are enough");
        assert!(enough > 0 && done[..enough].iter().all(|it| *it == Err(libc::EMFILE)), "{done:?}");
    }
    println!("had too few files");
}

#[test]
fn who_has_no_file_left_is_told_so() {
    let mut child = Process::run("looks_with_few_files", "127.0.0.1:1".parse().unwrap());
    child.wait_for("had too few files");
}

/// The child's part of the next test: wants the port at which the parent listens.
#[test]
fn wants_the_port_of_the_parent() {
    if !is_child("wants_the_port_of_the_parent") {
        return;
    }
    let device = Device::new().unwrap();
    device.register();
    let file = File::open();
    for address in ["0.0.0.0", "127.0.0.1", "::"] {
        for reuses in [false, true] {
            let id = file.create(1);
            if reuses {
                file.set(id, REUSE_ADDRESS).unwrap();
            }
            let at = SocketAddr::new(address.parse().unwrap(), parent().port());
            let bound = file.bind(id, at);
            let expected =
                if at.ip().is_unspecified() { libc::EADDRNOTAVAIL } else { libc::EADDRINUSE };
            assert_eq!(errno(bound), expected, "{at}, {reuses}");
        }
    }
    // Names that say that this process has the port, as far as it can take them.
    let names = ["Ipv4/127.6.6.6", "127.6.6.6", "Ipv4/9.9/9"];
    let begin = format!("ibverbs-cm/0106/{}", parent().port());
    let take = |name: &&str| {
        let name = std::os::unix::net::SocketAddr::from_abstract_name(format!("{begin}/{name}"));
        UnixDatagram::bind_addr(&name.unwrap()).unwrap()
    };
    let _taken: Vec<_> = names.iter().map(take).collect();
    println!("refused");
    let to = SocketAddr::from(([127, 0, 0, 1], parent().port()));
    let active = file.routed(6, to);
    file.connect(active, 0x111, b"hello").unwrap();
    std::thread::sleep(Duration::from_secs(600));
}

#[test]
fn a_port_belongs_to_the_process_that_listens() {
    let _alone = alone();
    let device = Device::new().unwrap();
    device.register();
    for reuses in [false, true] {
        let file = File::open();
        let at = SocketAddr::from(([0, 0, 0, 0], free_port(&file)));
        let listener = file.create(5);
        if reuses {
            file.set(listener, REUSE_ADDRESS).unwrap();
        }
        file.listen(listener, at).unwrap();
        let mut other = Process::run("wants_the_port_of_the_parent", at);
        other.wait_for("refused");
        file.expect(5, REQUEST, 0);
    }
}

/// The child's part of the next test: shares the port of its parent, and cannot listen.
#[test]
fn shares_the_port_of_the_parent() {
    if !is_child("shares_the_port_of_the_parent") {
        return;
    }
    let device = Device::new().unwrap();
    device.register();
    let file = File::open();
    let id = file.create(1);
    file.set(id, REUSE_ADDRESS).unwrap();
    file.bind(id, parent()).unwrap();
    assert_eq!(errno(file.listen_bound(id)), libc::EADDRINUSE);
    let other = file.create(1);
    assert_eq!(errno(file.bind(other, parent())), libc::EADDRNOTAVAIL, "it does not share");
    println!("shared");
    std::thread::sleep(Duration::from_secs(600));
}

#[test]
fn processes_share_a_port_until_one_listens() {
    let _alone = alone();
    let device = Device::new().unwrap();
    device.register();
    let file = File::open();
    let at = SocketAddr::from(([0, 0, 0, 0], free_port(&file)));
    let id = file.create(5);
    file.set(id, REUSE_ADDRESS).unwrap();
    file.bind(id, at).unwrap();
    let mut other = Process::run("shares_the_port_of_the_parent", at);
    other.wait_for("shared");
    assert_eq!(errno(file.listen_bound(id)), libc::EADDRINUSE);
    other.kill();
    file.listen_bound(id).unwrap();
}

/// The client asks for all connections before one is answered, and ends all before one end is answered.
#[test]
fn a_thousand_connections_at_once_come_and_go() {
    const COUNT: u32 = 1000;
    let _alone = alone();
    let device = Device::new().unwrap();
    device.register();
    let (server, client) = (File::open(), File::open());
    let at = SocketAddr::new(device.address(), free_port(&server));
    let listener = server.create(5);
    server.listen(listener, at).unwrap();
    let active: Vec<u32> = (0..COUNT).map(|_| client.routed(6, at)).collect();
    for (&id, qpn) in active.iter().zip(0x1000..) {
        client.connect(id, qpn, b"hello").unwrap();
    }
    let mut passive = Vec::new();
    for qpn in 0x2000..0x2000 + COUNT {
        let request = server.expect(5, REQUEST, 0);
        server.accept(request.id, 7, qpn, b"you", true).unwrap();
        passive.push(request.id);
    }
    for _ in &active {
        let response = client.expect(6, RESPONSE, 0);
        client.accept(response.id, 0, 0, &[], false).unwrap();
    }
    passive.iter().for_each(|_| drop(server.expect(7, ESTABLISHED, 0)));
    active.iter().for_each(|&id| client.disconnect(id).unwrap());
    for (file, answers) in [(&server, true), (&client, false)] {
        let mut ends = [0; 2];
        while ends != [COUNT; 2] {
            let event = file.event();
            assert_eq!(event.status, 0, "{event:?}");
            match event.kind {
                DISCONNECTED => ends[0] += 1,
                TIMEWAIT_EXIT => ends[1] += 1,
                _ => panic!("{event:?}"),
            }
            if answers && event.kind == DISCONNECTED {
                server.disconnect(event.id).unwrap();
            }
        }
    }
    active.iter().for_each(|&id| assert_eq!(client.destroy(id).unwrap(), 5));
    passive.iter().for_each(|&id| assert_eq!(server.destroy(id).unwrap(), 3));
    assert_eq!(server.destroy(listener).unwrap(), COUNT);
}

/// How often the device's thread has been given a processor.
fn turns(device: &Device) -> u64 {
    // A list of threads may lack one while others end.
    (0..100).find_map(|_| turns_in_list(device)).expect("the device has a thread of its name")
}

fn turns_in_list(device: &Device) -> Option<u64> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let mut turns = None;
    for task in tasks.filter_map(|task| Some(task.ok()?.path())) {
        let read = |file| std::fs::read_to_string(task.join(file)).unwrap_or_default();
        if read("comm").trim_end() == device.name() {
            let status = read("status");
            let counts = status.lines().filter(|line| line.contains("ctxt_switches"));
            let counts = counts.map(|line| line.split_once(':').unwrap().1.trim().parse::<u64>());
            turns = Some(counts.map(Result::unwrap).sum());
        }
    }
    turns
}

/// Timers of the connections are stopped once these stand: sooner or later the thread sleeps for a whole second.
#[test]
fn idle_connections_and_listeners_cost_nothing() {
    let _alone = alone();
    let device = Device::builder().name("idle0").build().unwrap();
    device.register();
    let (server, client) = (File::open(), File::open());
    let at = SocketAddr::new(device.address(), free_port(&server));
    let listener = server.create(5);
    server.listen(listener, at).unwrap();
    for qpn in 0x1000..0x1064 {
        client.connect(client.routed(6, at), qpn, b"hello").unwrap();
        let request = server.expect(5, REQUEST, 0);
        server.accept(request.id, 7, 0x1000 + qpn, b"you", true).unwrap();
        let response = client.expect(6, RESPONSE, 0);
        client.accept(response.id, 0, 0, &[], false).unwrap();
        server.expect(7, ESTABLISHED, 0);
    }
    let sleeps = (0..120).any(|_| {
        let before = turns(&device);
        std::thread::sleep(Duration::from_secs(1));
        turns(&device) == before
    });
    assert!(sleeps, "with 100 connections that do nothing, the thread wakes in each second");
}

#[test]
fn without_a_listener_a_client_is_refused_at_once() {
    let _alone = alone();
    let device = Device::new().unwrap();
    device.register();
    let client = File::open();
    let port = free_port(&client);
    for address in [IpAddr::from([127, 0, 0, 1]), device.address()] {
        let id = client.routed(1, SocketAddr::new(address, port));
        assert_eq!(errno(client.connect(id, 1, &[0; 57])), libc::EINVAL, "56 bytes of data");
        client.connect(id, 1, &[0; 56]).unwrap();
        client.expect(1, REJECTED, 8);
        client.destroy(id).unwrap();
    }
    // No device is on the way to an address of IPv6.
    let id = client.create(1);
    client.resolve(id, "[::1]:7".parse().unwrap()).unwrap();
    client.expect(1, ADDRESS_ERROR, -libc::ENODEV);
    assert_eq!(errno(client.bind(id, "192.0.2.1:7".parse().unwrap())), libc::EINVAL);
    let id = client.create(1);
    assert_eq!(errno(client.bind(id, "192.0.2.1:7".parse().unwrap())), libc::EADDRNOTAVAIL);
    assert_eq!(errno(client.bind(id, "[::1]:7".parse().unwrap())), libc::ENODEV);
}

/// `mckey -m ff02::1:2` asks for a group in this way.
#[test]
fn a_group_of_ipv6_is_joined_on_a_device_of_ipv4() {
    let _alone = alone();
    let device = Device::new().unwrap();
    device.register();
    let file = File::open();
    let group = SocketAddr::new("ff02::1:2".parse().unwrap(), 0);
    for is_bound in [false, true] {
        // An identifier of the port space of UDP.
        let kind = [0x11, 0x01, 4, 0, 0, 0, 0, 0];
        let id = file.ask(0, &1_u64.to_ne_bytes(), &[&kind], 4).unwrap();
        let id = u32::from_ne_bytes(id.try_into().unwrap());
        if is_bound {
            file.bind(id, SocketAddr::new(device.address(), 0)).unwrap();
        }
        file.resolve(id, group).unwrap();
        file.expect(1, ADDRESS_RESOLVED, 0);
        let [own, _] = file.addresses(id);
        assert_eq!(own[4..8], sockaddr(SocketAddr::new(device.address(), 0))[4..8]);
        let body: [&[u8]; 4] =
            [&2_u64.to_ne_bytes(), &number(id), &[28, 0, 0, 0], &sockaddr(group)];
        file.ask(22, &[], &body, 4).unwrap();
        let joined = file.expect(2, MULTICAST_JOIN, 0);
        assert_eq!(joined.qpn, 0xff_ffff);
        file.destroy(id).unwrap();
    }
}

#[test]
fn who_leaves_requests_unread_refuses_them() {
    let _alone = alone();
    let device = Device::new().unwrap();
    device.register();
    let (server, client) = (File::open(), File::open());
    let at = SocketAddr::new(device.address(), 7471);
    let listener = server.create(5);
    server.listen(listener, at).unwrap();
    let id = client.routed(6, at);
    client.connect(id, 1, &[]).unwrap();
    let mut file = libc::pollfd { fd: server.0, events: libc::POLLIN, revents: 0 };
    // SAFETY: the structure is live. The request has arrived once the file is readable.
    assert_eq!(unsafe { libc::poll(&raw mut file, 1, 120_000) }, 1);
    drop(server);
    client.expect(6, REJECTED, 28);
    // The other way round: who connects is gone.
    let server = File::open();
    let (_, passive, _) = connected(&server, &client, at);
    drop(client);
    server.expect(7, DISCONNECTED, 0);
    server.disconnect(passive).unwrap();
}

#[test]
fn identifiers_learn_that_their_device_is_removed_or_has_moved() {
    let _alone = alone();
    let (device, gone) = (Device::new().unwrap(), Device::new().unwrap());
    device.register();
    gone.register();
    let file = File::open();
    let [here, there] = [&device, &gone].map(|device| SocketAddr::new(device.address(), 7471));
    let (kept, moved, lost) = (file.create(1), file.create(2), file.create(3));
    file.bind(kept, "0.0.0.0:0".parse().unwrap()).unwrap();
    file.listen(moved, here).unwrap();
    file.listen(lost, there).unwrap();
    gone.remove();
    file.expect(3, REMOVAL, 0);
    assert_eq!(errno(file.disconnect(lost)), libc::ENODEV);
    drop(gone);
    file.destroy(lost).unwrap();
    let other = Device::new().unwrap().address();
    device.set_addresses(1, [other]).unwrap();
    file.expect(2, ADDRESS_CHANGE, 0);
    assert_eq!(errno(file.disconnect(kept)), libc::EINVAL, "it has no device");
}

/// The program has the dropped device open, as librdmacm does.
#[test]
fn a_dropped_device_lives_while_it_is_open_and_then_both_sides_learn_that_it_is_gone() {
    let _alone = alone();
    let (device, dropped) = (Device::new().unwrap(), Device::new().unwrap());
    device.register();
    dropped.register();
    let context = dropped.open().unwrap();
    let (server, client) = (File::open(), File::open());
    let at = SocketAddr::new(device.address(), 7471);
    let own = SocketAddr::new(dropped.address(), 0);
    server.listen(server.create(5), at).unwrap();
    let id = client.create(6);
    client.bind(id, own).unwrap();
    client.route(id, 6, at);
    drop(dropped);
    connect_by(&server, &client, id);
    drop(context);
    assert_eq!(client.expect(6, REMOVAL, 0).id, id);
    assert_eq!(errno(client.disconnect(id)), libc::ENODEV);
    client.destroy(id).unwrap();
    server.expect(7, DISCONNECTED, 0);
}

#[test]
fn a_child_of_fork_has_nothing_of_its_parents() {
    let _alone = alone();
    let device = Device::new().unwrap();
    device.register();
    let file = File::open();
    let id = file.create(1);
    // SAFETY: the child calls what a program would, and leaves at once.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let is_refused = file.destroy(id).is_err_and(|e| e.raw_os_error() == Some(libc::EBADF));
        let opens = (hooks().unwrap().manager_open)().is_none();
        // SAFETY: it runs no destructors of the parent's.
        unsafe { libc::_exit(if is_refused && opens { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: the number is a live variable.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    assert_eq!(file.destroy(id).unwrap(), 0);
}

/// The bytes of commands are the program's, which may be wrong.
#[test]
fn any_command_is_answered() {
    let _alone = alone();
    let device = Device::new().unwrap();
    device.register();
    let file = File::open();
    let mut buffer = vec![0_u8; 1024];
    let mut state = 1_u64;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 16) as u8
    };
    let mut ids: Vec<u32> = (0..4).map(|uid| file.create(uid + 1)).collect();
    for _ in 0..20_000 {
        let command = u32::from(random() % 27);
        // Reading an event would wait for one.
        if command == 12 {
            continue;
        }
        let mut body: Vec<u8> =
            (0..300).map(|_| if random() % 4 == 0 { random() } else { 0 }).collect();
        let id = number(ids[usize::from(random()) % ids.len()]);
        let address = (buffer.as_mut_ptr() as u64).to_ne_bytes();
        // Wherever a command has its identifier, and its addresses.
        for at in [0, 8, 16, 36, 44, 56, 272, 280].into_iter().filter(|_| random() % 2 == 0) {
            body[at..at + 4].copy_from_slice(&id);
        }
        body[..8].copy_from_slice(&address);
        if command == 0 {
            body[8..16].copy_from_slice(&address);
        }
        if matches!(command, 2..=4 | 6..=10 | 15 | 20 | 21 | 24) {
            body[..4].copy_from_slice(&id);
        }
        if command == 21 && random() % 2 == 0 {
            body[144..152].copy_from_slice(&sockaddr(SocketAddr::new(device.address(), 7))[..8]);
        }
        let length = usize::from(random()) + 45;
        let mut bytes = number(command).to_vec();
        bytes.extend_from_slice(&[0, 0, 16, 0]);
        bytes.extend_from_slice(&body[..length.min(body.len())]);
        let done = file.write(&bytes).is_ok();
        if command == 1 && done {
            ids = (0..4).map(|uid| file.create(uid + 1)).collect();
        }
    }
}

/// Whether no event is there to be read.
fn is_silent(file: &File) -> bool {
    let mut file = libc::pollfd { fd: file.0, events: libc::POLLIN, revents: 0 };
    // SAFETY: the structure is live.
    unsafe { libc::poll(&raw mut file, 1, 0) == 0 }
}

#[test]
fn a_flood_of_requests_takes_the_room_of_one_peer() {
    const ROOM: u32 = 1024;
    let _alone = alone();
    let device = Device::new().unwrap();
    device.register();
    let (server, other, client) = (File::open(), File::open(), File::open());
    let [flooded, quiet] = [7471, 7472].map(|port| SocketAddr::new(device.address(), port));
    let stranger = Stranger::new(device.address());
    let listener = server.create(5);
    server.listen(listener, flooded).unwrap();
    let other_listener = other.create(5);
    other.listen(other_listener, quiet).unwrap();
    for local in 1..=3 * ROOM {
        stranger.send(&stranger.request(7471, local, local));
        // The socket of the device has room for these.
        if local % 16 == 0 {
            assert_eq!(stranger.answers(), []);
        }
    }
    // Others connect to another port, while the room of this one is taken; and to this one, once the requests are read.
    connect_to(&other, &client, quiet);
    let requests: Vec<u32> = (0..ROOM).map(|_| server.expect(5, REQUEST, 0).id).collect();
    assert!(is_silent(&server), "more requests than the room of a listener");
    stranger.send(&stranger.request(7471, 5 * ROOM, 5 * ROOM));
    assert_eq!(stranger.answers(), []);
    assert!(
        is_silent(&server),
        "the peer has no room, until the program has decided on what it has read"
    );
    let active = client.routed(6, flooded);
    client.connect(active, 0x112, &[]).unwrap();
    assert_eq!(server.expect(5, REQUEST, 0).qpn, 0x112);
    // Copies of what waits are asked to be patient, and are no requests.
    stranger.send(&stranger.request(7471, 1, 1));
    let [copy] = stranger.answers().try_into().unwrap();
    assert_eq!((copy.attribute, copy.numbers[1]), (MRA, 1));
    for id in requests {
        server.destroy(id).unwrap();
        let [refused] = stranger.answers().try_into().unwrap();
        assert_eq!((refused.attribute, refused.reason), (REJ, 28));
    }
    stranger.send(&stranger.request(7471, 5 * ROOM, 5 * ROOM));
    server.expect(5, REQUEST, 0);
}

/// Every message with numbers that are wrong, or right from another address; copies of those that are right; and the
/// stale request, by which who sends from a peer's address needs no number of a connection to end it.
#[test]
fn strangers_and_copies_end_no_connection() {
    const LOCAL: u32 = 77;
    let _alone = alone();
    let device = Device::new().unwrap();
    device.register();
    let server = File::open();
    let (peer, stranger) = (Stranger::new(device.address()), Stranger::new(device.address()));
    let listener = server.create(5);
    server.listen(listener, SocketAddr::new(device.address(), 7471)).unwrap();
    let request = peer.request(7471, LOCAL, 0x111);
    peer.send(&request);
    let passive = server.expect(5, REQUEST, 0).id;
    server.accept(passive, 7, 0x222, b"you", true).unwrap();
    let reply = peer.receive();
    assert_eq!((reply.attribute, reply.numbers[1]), (REP, LOCAL));
    let theirs = reply.numbers[0];
    let to = |attribute, own: u32, theirs: u32, behind: &[u8]| {
        message(attribute, &[(0, &own.to_be_bytes()), (4, &theirs.to_be_bytes()), (8, behind)])
    };
    let qpn = [0, 2, 0x22, 0];
    let every = |own: u32, theirs: u32| {
        [MRA, REJ, REP, RTU, DREQ, DREP].map(|attribute| to(attribute, own, theirs, &qpn))
    };
    // The messages come in each state: before the RTU, and after it.
    for is_established in [false, true] {
        if is_established {
            peer.send(&to(RTU, LOCAL, theirs, &[]));
            server.expect(7, ESTABLISHED, 0);
        }
        for mad in every(LOCAL, theirs) {
            stranger.send(&mad);
        }
        // A peer that gives up asking does not know the device's number, but its own GUID.
        stranger.send(&to(REJ, LOCAL, 0, &[0, 8 << 1, 0, 4, 7, 7, 7, 7, 7, 7, 7, 7]));
        let [answer] = stranger.answers().try_into().unwrap();
        assert_eq!(
            (answer.attribute, answer.numbers),
            (DREP, [theirs, LOCAL]),
            "of the unknown DREQ alone"
        );
        for (own, theirs) in
            [(LOCAL + 1, theirs), (LOCAL, theirs ^ 1), (0, theirs), (theirs, LOCAL)]
        {
            for mad in every(own, theirs) {
                peer.send(&mad);
            }
            let [answer] = peer.answers().try_into().unwrap();
            assert_eq!((answer.attribute, answer.numbers), (DREP, [theirs, own]));
        }
        // A DREQ of another queue pair, and copies, end nothing.
        peer.send(&to(DREQ, LOCAL, theirs, &[0, 2, 0x23]));
        peer.send(&request);
        if is_established {
            peer.send(&to(RTU, LOCAL, theirs, &[]));
        }
        assert_eq!(peer.answers(), []);
        assert!(is_silent(&server));
    }
    // A new connection of the same queue pair: the peer has forgotten the old one, and is asked.
    peer.send(&peer.request(7471, LOCAL + 5, 0x111));
    let answers = peer.answers();
    let kinds: Vec<u16> = answers.iter().map(|answer| answer.attribute).collect();
    assert_eq!(
        (kinds, answers[0].reason, answers[1].numbers),
        (vec![REJ, DREQ], 10, [theirs, LOCAL])
    );
    assert!(is_silent(&server), "the peer may still know of it");
    for _ in 0..3 {
        peer.send(&to(DREP, LOCAL, theirs, &[]));
        peer.send(&to(DREQ, LOCAL, theirs, &qpn));
    }
    peer.answers();
    server.expect(7, DISCONNECTED, 0);
    server.expect(7, TIMEWAIT_EXIT, 0);
    assert!(is_silent(&server), "an end is told once");
}

#[test]
fn on_a_network_that_loses_packets_connections_come_and_go_in_virtual_time() {
    let _alone = alone();
    for seed in 1..=5 {
        let network =
            Network::builder().seed(seed).loss(0.2).delay(Duration::from_micros(5)).build();
        let (one, other) = (network.device().unwrap(), network.device().unwrap());
        one.register();
        other.register();
        let (server, client) = (File::open(), File::open());
        let at = SocketAddr::new(one.address(), 7471);
        let listener = server.create(5);
        server.listen(listener, at).unwrap();
        for _ in 0..20 {
            let (active, passive) = connect_to(&server, &client, at);
            client.disconnect(active).unwrap();
            server.expect(7, DISCONNECTED, 0);
            server.disconnect(passive).unwrap();
            client.expect(6, DISCONNECTED, 0);
            client.destroy(active).unwrap();
            server.destroy(passive).unwrap();
        }
        // A client that is cut off gets no answer: 16 repetitions, in virtual time.
        network.partition(&one, &other);
        let id = client.create(6);
        client.bind(id, SocketAddr::new(other.address(), 0)).unwrap();
        client.resolve(id, at).unwrap();
        client.expect(6, ADDRESS_RESOLVED, 0);
        client.command(4, &[&number(id), &number(1000)]).unwrap();
        client.expect(6, ROUTE_RESOLVED, 0);
        client.connect(id, 1, &[]).unwrap();
        client.expect(6, UNREACHABLE, -libc::ETIMEDOUT);
    }
}

/// A host of a simulation loses its power at each step of a connection. The other host learns of it by the time-outs of the
/// protocol, in virtual time.
#[cfg(feature = "tokio")]
mod crashes {
    use super::*;
    use ibverbs_software::{Host, World, simulate};

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Step {
        Asked,
        RequestRead,
        Accepted,
        Established,
        Disconnected,
    }

    /// One host with a device.
    struct Side {
        host: Host,
        device: Device,
        file: File,
    }

    impl Side {
        fn new(host: Host) -> Self {
            let device = host.device().unwrap();
            device.register();
            let file = File::open();
            // SAFETY: the file is live. Who waits for it lets the simulation go on.
            assert_eq!(unsafe { libc::fcntl(file.0, libc::F_SETFL, libc::O_NONBLOCK) }, 0);
            Self { host, device, file }
        }

        async fn next(&self) -> Event {
            loop {
                match self.file.read() {
                    Ok(event) => return event,
                    Err(e) => assert_eq!(e.kind(), io::ErrorKind::WouldBlock),
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }

        async fn expect(&self, uid: u64, kind: u32) -> Event {
            let event = self.next().await;
            assert_eq!((event.uid, event.kind, event.status), (uid, kind, 0), "{event:?}");
            event
        }
    }

    /// Returns what the side that is left is told, and how long that takes.
    async fn left(world: &World, step: Step, server_crashes: bool) -> (u32, i32, Duration) {
        let (server, client) = (Side::new(world.host("server")), Side::new(world.host("client")));
        let (crashed, left) = if server_crashes { (&server, &client) } else { (&client, &server) };
        let crash = |at: Step| {
            if step == at {
                crashed.host.crash();
            }
            step == at
        };
        let began = left.host.now();
        let told = |event: Event| (event.kind, event.status, left.host.now() - began);
        let at = SocketAddr::new(server.device.address(), 7471);
        let listener = server.file.create(5);
        server.file.listen(listener, at).unwrap();
        let active = client.file.create(6);
        client.file.bind(active, SocketAddr::new(client.device.address(), 0)).unwrap();
        client.file.resolve(active, at).unwrap();
        client.expect(6, ADDRESS_RESOLVED).await;
        client.file.command(4, &[&number(active), &number(1000)]).unwrap();
        client.expect(6, ROUTE_RESOLVED).await;
        let is_over = crash(Step::Asked);
        client.file.connect(active, 0x111, &[]).unwrap();
        if is_over {
            return told(client.next().await);
        }
        let passive = server.expect(5, REQUEST).await.id;
        let is_over = crash(Step::RequestRead);
        if is_over && server_crashes {
            return told(client.next().await);
        }
        server.file.accept(passive, 7, 0x222, &[], true).unwrap();
        if is_over {
            return told(server.next().await);
        }
        client.expect(6, RESPONSE).await;
        let is_over = crash(Step::Accepted);
        if is_over && !server_crashes {
            return told(server.next().await);
        }
        client.file.accept(active, 0, 0, &[], false).unwrap();
        let (theirs, ours) = if server_crashes { (passive, active) } else { (active, passive) };
        if !is_over {
            server.expect(7, ESTABLISHED).await;
            if !crash(Step::Established) {
                crashed.file.disconnect(theirs).unwrap();
                left.expect(if server_crashes { 6 } else { 7 }, DISCONNECTED).await;
                assert!(crash(Step::Disconnected));
            }
        }
        left.file.disconnect(ours).unwrap();
        told(left.next().await)
    }

    #[test]
    fn who_is_left_learns_of_a_crash_at_each_step() {
        let _alone = alone();
        let timeout = -libc::ETIMEDOUT;
        for (step, server_crashes, kind, status) in [
            (Step::Asked, true, UNREACHABLE, timeout),
            (Step::RequestRead, true, UNREACHABLE, timeout),
            (Step::RequestRead, false, UNREACHABLE, timeout),
            (Step::Accepted, true, DISCONNECTED, timeout),
            (Step::Accepted, false, UNREACHABLE, timeout),
            (Step::Established, true, DISCONNECTED, timeout),
            (Step::Established, false, DISCONNECTED, timeout),
            (Step::Disconnected, true, TIMEWAIT_EXIT, 0),
            (Step::Disconnected, false, TIMEWAIT_EXIT, 0),
        ] {
            let (told, why, after) =
                simulate(1, async |world| left(&world, step, server_crashes).await);
            let case = format!("{step:?}, the server crashes: {server_crashes}");
            assert_eq!((told, why), (kind, status), "{case}");
            // 16 times four to five seconds, or the wait for packets that are under way.
            let seconds = if status == 0 { 0..=1 } else { 65..=74 };
            assert!(seconds.contains(&after.as_secs()), "{case}: {after:?}");
        }
    }
}
