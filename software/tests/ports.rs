//! Ports that go down and up, and addresses that change: on a simulated network, and on UDP.

#[path = "support/patience.rs"]
mod patience;

use std::net::IpAddr;
use std::time::Duration;

use ibverbs::device::{AsyncEventKind, AsyncEventSubject, AsyncEvents, PortState};
use ibverbs::{
    Channel, ChannelBuilder, ProtectionDomain, TransportError, WorkStatus,
    settings::{AckTimeout, MaxAckRetries},
};
use ibverbs_software::{Device, Network};

use patience::deadline;

/// Two devices: on a network, and with sockets.
fn kinds() -> [[Device; 2]; 2] {
    let network = Network::new();
    [[(); 2].map(|()| network.device().unwrap()), [(); 2].map(|()| Device::new().unwrap())]
}

fn channels<'a>(
    one: &'a ProtectionDomain<'a>,
    other: &'a ProtectionDomain<'a>,
) -> [Channel<'a>; 2] {
    let prepare = |domain: &'a ProtectionDomain<'a>| {
        let timeout = AckTimeout::from_duration(Duration::from_millis(100)).unwrap();
        let builder = ChannelBuilder::new(domain).ack_timeout(timeout);
        builder.max_ack_retries(MaxAckRetries::new(2).unwrap()).build().unwrap()
    };
    let (one, other) = (prepare(one), prepare(other));
    let endpoints = (one.endpoint(), other.endpoint());
    [one.handshake(endpoints.1).unwrap(), other.handshake(endpoints.0).unwrap()]
}

/// Sends a message there.
fn send(
    [one, other]: &mut [Channel<'_>; 2],
    domain: &ProtectionDomain<'_>,
) -> Result<(), WorkStatus> {
    let mut to = domain.allocate::<u8>(8).unwrap();
    let sent = other.scope(|scope| {
        let receive = scope.post_receive(to.slice_mut(..).unwrap())?;
        one.until(deadline()).send(())?;
        receive.wait_until(deadline())?;
        Ok::<(), TransportError>(())
    });
    sent.map_err(|error| match error {
        ibverbs::channel::ScopeError::Closure(TransportError::Work(error)) => error.status(),
        other => panic!("{other}"),
    })
}

#[test]
fn a_port_goes_down_and_up() {
    for devices in kinds() {
        let contexts = devices.each_ref().map(|device| device.open().unwrap());
        let events = AsyncEvents::new(&contexts[0]).unwrap();
        let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
        send(&mut channels(&domains[0], &domains[1]), &domains[1]).unwrap();
        let state = || contexts[0].query_port(1).unwrap().state();
        assert_eq!(state(), PortState::Active);
        let mut pairs = [(); 2].map(|()| channels(&domains[0], &domains[1]));
        let before = devices[1].counters().packets_received;

        devices[0].set_port_active(1, false).unwrap();
        devices[0].set_port_active(1, false).unwrap();
        assert_eq!(state(), PortState::Down);
        let event = events.next_event().unwrap().unwrap();
        assert_eq!(event.kind(), AsyncEventKind::PortError);
        assert_eq!(event.subject(), AsyncEventSubject::Port(1));
        let sent = send(&mut pairs[0], &domains[1]);
        assert_eq!(sent, Err(WorkStatus::RetryExceeded));
        assert_eq!(devices[1].counters().packets_received, before, "nothing left the port");

        devices[0].set_port_active(1, true).unwrap();
        assert_eq!(state(), PortState::Active);
        assert_eq!(events.next_event().unwrap().unwrap().kind(), AsyncEventKind::PortActive);
        assert!(events.next_event().unwrap().is_none(), "an event for each change, and no more");
        send(&mut pairs[1], &domains[1]).unwrap();
        for port in [0, 2, 255] {
            let error = devices[0].set_port_active(port, true).unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
        }
    }
}

#[test]
fn a_device_has_the_address_of_one_machine() {
    let network = Network::new();
    let device = network.device().unwrap();
    for address in ["0.0.0.0", "::", "::ffff:0.0.0.0", "224.0.0.1", "ff02::1", "255.255.255.255"] {
        let ip: IpAddr = address.parse().unwrap();
        for error in [
            Device::builder().address(ip).build().unwrap_err(),
            Device::builder().network(&network).port([device.address(), ip]).build().unwrap_err(),
            device.set_addresses(1, [ip]).unwrap_err(),
        ] {
            assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
            assert!(
                error
                    .to_string()
                    .starts_with(&format!("{address} is the address of no one machine")),
                "{error}"
            );
        }
    }
}

/// An address of loopback that is likely free.
fn another(of: IpAddr) -> IpAddr {
    let IpAddr::V4(v4) = of else { panic!("IPv4") };
    let [a, b, c, d] = v4.octets();
    IpAddr::from([a, b ^ 0x80, c, d])
}

#[test]
fn an_address_moves() {
    for devices in kinds() {
        let contexts = devices.each_ref().map(|device| device.open().unwrap());
        let events = AsyncEvents::new(&contexts[1]).unwrap();
        let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
        let mut old = channels(&domains[0], &domains[1]);
        send(&mut old, &domains[1]).unwrap();
        let (was, is) = (devices[1].address(), another(devices[1].address()));

        devices[1].set_addresses(1, [is]).unwrap();
        assert_eq!(devices[1].address(), is);
        let gid = contexts[1].query_gid(1, 0).unwrap().gid.to_string();
        assert_eq!(gid, format!("::ffff:{is}"));
        // The rest of the table is empty, and has an end.
        let errno = |index| contexts[1].query_gid(1, index).map(|_| ()).unwrap_err().raw_os_error();
        assert_eq!(
            [errno(1), errno(15), errno(16)],
            [libc::ENODATA, libc::ENODATA, libc::EINVAL].map(Some)
        );
        let event = events.next_event().unwrap().unwrap();
        assert_eq!(event.kind(), AsyncEventKind::GidChange);
        assert_eq!(event.subject(), AsyncEventSubject::Port(1));
        // An old connection still uses the old address, and fails. A new connection uses the new address.
        assert_eq!(send(&mut old, &domains[1]), Err(WorkStatus::RetryExceeded));
        send(&mut channels(&domains[0], &domains[1]), &domains[1]).unwrap();

        // A change that fails changes nothing.
        let taken = devices[0].address();
        let error = devices[1].set_addresses(1, [was, taken]).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::AddrInUse, "{error}");
        assert!(devices[1].set_addresses(1, []).is_err());
        assert!(devices[1].set_addresses(2, [was]).is_err());
        assert!(devices[1].set_addresses(1, vec![was; 256]).is_err());
        assert_eq!(devices[1].address(), is);
        assert!(events.next_event().unwrap().is_none());
        send(&mut channels(&domains[0], &domains[1]), &domains[1]).unwrap();
        devices[1].set_addresses(1, [was, is]).unwrap();
        assert_eq!(contexts[1].query_gid(1, 1).unwrap().gid.to_string(), gid);
    }
}

#[test]
fn each_port_counts_what_it_carries() {
    for devices in kinds() {
        let contexts = devices.each_ref().map(|device| device.open().unwrap());
        let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
        let mut pair = channels(&domains[0], &domains[1]);
        for _ in 0..3 {
            send(&mut pair, &domains[1]).unwrap();
        }
        let [sender, receiver] = devices.each_ref().map(|device| device.port_counters()[0]);
        // An empty message is a base transport header of 12 bytes, and an invariant CRC of 4.
        assert!(sender.packets_sent >= 3, "{sender:?}");
        assert_eq!(sender.bytes_sent, 16 * sender.packets_sent);
        assert!(receiver.packets_received >= 3 && receiver.packets_malformed == 0);
        assert_eq!(receiver.bytes_received, 16 * receiver.packets_received);
        let all = devices[0].counters();
        assert_eq!(all.packets_sent, sender.packets_sent);
    }
    // Each of two ports has its own, and the device's are their sum.
    let network = Network::new();
    let (near, far) = (|| network.device().unwrap(), network.device().unwrap());
    let addresses = [near().address(), near().address()];
    let device = Device::builder().network(&network);
    let device = addresses.into_iter().fold(device, |device, address| device.port([address]));
    let device = device.build().unwrap();
    let (context, other) = (device.open().unwrap(), far.open().unwrap());
    let (domain, other) = (context.alloc_pd().unwrap(), other.alloc_pd().unwrap());
    let timeout = AckTimeout::from_duration(Duration::from_millis(20)).unwrap();
    let from = ChannelBuilder::new(&domain).port(2).ack_timeout(timeout).build().unwrap();
    let to = ChannelBuilder::new(&other).build().unwrap();
    let endpoints = (from.endpoint(), to.endpoint());
    let mut pair = [from.handshake(endpoints.1).unwrap(), to.handshake(endpoints.0).unwrap()];
    send(&mut pair, &other).unwrap();
    let counters = device.port_counters();
    assert_eq!(counters.len(), 2);
    assert_eq!(counters[0], ibverbs_software::PortCounters::default());
    assert!(counters[1].packets_sent > 0 && counters[1].packets_received > 0, "{counters:?}");
    assert_eq!(device.counters().packets_received, counters[1].packets_received);
}

#[test]
fn a_device_that_cannot_be_made_says_why() {
    let own = Device::new().unwrap();
    let made = |address: IpAddr| Device::builder().address(address).build().map(drop);
    let taken = made(own.address()).unwrap_err();
    assert_eq!(taken.kind(), std::io::ErrorKind::AddrInUse);
    let said = taken.to_string();
    let words = [&*own.address().to_string(), "4791", "another device", "Soft-RoCE"];
    words.into_iter().for_each(|word| assert!(said.contains(word), "{word:?} is not in: {said}"));
    // For examples in documents alone.
    let elsewhere = made("192.0.2.1".parse().unwrap()).unwrap_err();
    assert_eq!(elsewhere.kind(), std::io::ErrorKind::AddrNotAvailable);
    let said = elsewhere.to_string();
    assert!(said.contains("192.0.2.1: no interface of this machine"), "{said}");
}
