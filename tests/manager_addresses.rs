//! Which addresses the connection manager takes on devices of software, and that its refusals name the cause.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use ibverbs::rdmacm::{Listener, Route};
use ibverbs_software::Device;

/// The devices of a process are visible to all its tests.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn bind(address: &str) -> Result<SocketAddr, String> {
    let listener = Listener::bind(address.parse().unwrap()).map_err(|error| error.to_string())?;
    Ok(listener.local_addr().unwrap())
}

fn resolve(address: SocketAddr) -> Result<(), String> {
    let route = Route::resolve(address, Instant::now() + Duration::from_secs(30));
    route.map(drop).map_err(|error| error.to_string())
}

#[test]
fn refusals_name_the_addresses_that_devices_have() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let device = Device::builder().name("only").build().unwrap();
    device.register();
    let theirs = format!(": they have {} (only)", device.address());
    for other in ["[::1]:0", "192.0.2.1:0", "[2001:db8::1]:0", "[fe80::1%1]:0"] {
        let text = bind(other).unwrap_err();
        assert!(text.contains("no RDMA device") && text.ends_with(&theirs), "{other}: {text}");
    }
    for other in ["[::1]:7", "192.0.2.1:7", "[2001:db8::1]:7"] {
        // A machine without a default route finds no network either.
        let text = resolve(other.parse().unwrap()).unwrap_err();
        let begin = "no RDMA device reaches the address:";
        assert!(text.starts_with(begin) && text.ends_with(&theirs), "{other}: {text}");
    }
    for any in ["0.0.0.0:0", "[::]:0", "127.0.0.1:0"] {
        assert_ne!(bind(any).unwrap().port(), 0, "{any}");
    }

    let all = Listener::bind("0.0.0.0:0".parse().unwrap()).unwrap();
    let port = all.local_addr().unwrap().port();
    for (ip, part) in [
        (IpAddr::from([0; 4]), "at one of the addresses"),
        (device.address(), "at all addresses"),
        (IpAddr::from([127, 0, 0, 1]), "at all addresses"),
    ] {
        let text = bind(&SocketAddr::new(ip, port).to_string()).unwrap_err();
        assert!(text.contains(&format!("port {port} is taken")) && text.contains(part), "{text}");
    }
}

#[test]
fn a_device_of_ipv6_is_reached_at_its_address() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let end = Instant::now() + Duration::from_secs(60);
    let device = loop {
        match Device::builder().name("sixth").address("::1".parse().unwrap()).build() {
            Err(e) if e.kind() == ErrorKind::AddrNotAvailable => {
                eprintln!("NOT CHECKED: this machine has no IPv6");
                return;
            }
            // Another test of this machine has it.
            Err(e) if e.kind() == ErrorKind::AddrInUse && Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(1));
            }
            device => break device.unwrap(),
        }
    };
    device.register();
    let at = bind("[::1]:0").unwrap();
    assert_eq!(at.ip(), device.address());
    resolve(at).unwrap();
    let text = resolve("192.0.2.1:7".parse().unwrap()).unwrap_err();
    assert!(text.ends_with(": they have ::1 (sixth)"), "{text}");
}
