//! Two sides that the connection manager connects, on the devices of the machine: Soft-RoCE or
//! Soft-iWARP.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part of it")]

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, LazyLock};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::rdmacm::{
    Connection, ConnectionError, ConnectionEventKind, ConnectionRequest, Listener, Route,
};
use ibverbs::{AccessFlags, Channel, Context, PreparedChannel, ProtectionDomain};

/// The address of the first device.
pub static HERE: LazyLock<String> = LazyLock::new(|| match super::vm::software() {
    Some(devices) => devices[0].address().to_string(),
    None => "10.77.0.1".to_owned(),
});

/// The address of the second device.
pub static THERE: LazyLock<String> = LazyLock::new(|| match super::vm::software() {
    Some(devices) => devices[1].address().to_string(),
    None => "10.77.0.2".to_owned(),
});

/// Longer than anything here takes, even on a loaded machine.
pub const TIME: Duration = Duration::from_secs(120);

pub type Managed = Connection<Channel<'static>>;

/// Whether the machine has Soft-iWARP, not Soft-RoCE.
pub fn is_iwarp() -> bool {
    Path::new("/sys/class/infiniband/siw0").exists()
}

/// The device with the address [`HERE`].
pub fn first_device() -> &'static str {
    if is_iwarp() { "siw0" } else { "rxe0" }
}

/// Waits until nothing of this program is left but the device that librdmacm keeps open. The kernel destroys
/// some objects a little later.
pub fn nothing_is_left() {
    // The kernel itself has these.
    let own = if is_iwarp() { [0; 6] } else { [1, 1, 1, 0, 0, 0] };
    let start = Instant::now();
    loop {
        let resources = super::vm::resources(first_device());
        let words: Vec<_> = resources.split_whitespace().collect();
        let count = |name: &str| {
            let at = words.iter().position(|word| *word == name).unwrap();
            words[at + 1].parse::<u32>().unwrap()
        };
        if ["pd", "cq", "qp", "cm_id", "mr", "srq"].map(count) == own && count("ctx") <= 1 {
            return;
        }
        assert!(start.elapsed() < TIME, "{resources}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// A device that is open, for objects that share it.
#[derive(Clone)]
pub struct Device {
    pub domain: Arc<ProtectionDomain<'static>>,
    port: u8,
}

impl Device {
    pub fn of(context: Context<'static>, port: u8) -> Self {
        let domain = ProtectionDomain::new(Arc::new(context)).unwrap();
        Self { domain: Arc::new(domain), port }
    }

    /// The device with the address [`HERE`].
    pub fn first() -> Self {
        Self::named(first_device())
    }

    pub fn named(name: &str) -> Self {
        Self::of(ibverbs::open(name).unwrap(), 1)
    }

    pub fn prepare(&self) -> PreparedChannel<'static> {
        Channel::builder(&self.domain)
            .port(self.port)
            .access(AccessFlags::LOCAL_WRITE)
            .allow_remote_rw()
            .max_inline_data(32)
            .build()
            .unwrap()
    }
}

/// An address of ours with this port, 0 for any.
pub fn here(port: u16) -> SocketAddr {
    SocketAddr::new(HERE.parse().unwrap(), port)
}

pub fn listen() -> (Listener, SocketAddr) {
    let listener = Listener::bind(here(0)).unwrap();
    let address = listener.local_addr().unwrap();
    assert_ne!(address.port(), 0);
    (listener, address)
}

/// Connects to `address`, on a context of its own.
pub fn connect(address: SocketAddr, data: &[u8]) -> Result<(Managed, Device), ConnectionError> {
    let route = Route::resolve(address, Instant::now() + TIME)?;
    let device = Device::of(route.open_device()?, route.port());
    Ok((route.connect(device.prepare(), data, Instant::now() + TIME)?, device))
}

/// Accepts, on a context of its own.
pub fn accept(
    request: ConnectionRequest,
    data: &[u8],
) -> Result<(Managed, Device), ConnectionError> {
    let device = Device::of(request.open_device()?, request.port());
    Ok((request.accept(device.prepare(), data, Instant::now() + TIME)?, device))
}

/// Two sides that are connected: the one that has connected, and the one that has accepted.
pub fn pair() -> [(Managed, Device); 2] {
    let (mut listener, address) = listen();
    thread::scope(|scope| {
        let one = scope.spawn(move || connect(address, b"from one").unwrap());
        let request = listener.next_until(Instant::now() + TIME).unwrap();
        let two = accept(request, b"from two").unwrap();
        [one.join().unwrap(), two]
    })
}

/// Sends one message from one to the other. The receive is posted before the message is sent.
pub fn transfer(from: &mut (Managed, Device), to: &mut (Managed, Device), text: &[u8]) {
    let mut sent = from.1.domain.allocate::<u8>(text.len()).unwrap();
    sent.copy_from_slice(text);
    let mut got = to.1.domain.allocate::<u8>(64).unwrap();
    let (room, message) = (got.slice_mut(..).unwrap(), sent.slice(..).unwrap());
    to.0.scope(|scope| {
        let receive = scope.post_receive(room)?;
        from.0.until(Instant::now() + TIME).send(message)?;
        let (received, told) = receive.wait_until(Instant::now() + TIME)?;
        assert_eq!(&received[..told.byte_len() as usize], text);
        Ok::<_, ibverbs::TransportError>(())
    })
    .unwrap();
}

/// Waits for this event.
pub fn expect(connection: &mut Managed, kind: ConnectionEventKind) {
    assert_eq!(connection.event_until(Instant::now() + TIME).unwrap().kind(), kind);
}
