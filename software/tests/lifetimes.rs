//! Other threads destroy objects and devices while packets arrive.

#[path = "support/patience.rs"]
mod patience;
#[path = "support/two_devices.rs"]
mod two_devices;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ibverbs::{AccessFlags, Channel, MemoryRegion, RemoteMemoryRegion, SharedMemoryRegion};
use ibverbs_software::Device;

use patience::{PATIENCE, deadline};
use two_devices::{channels, contexts};

const LENGTH: usize = 64 << 10;

/// Stops the threads of a scope, also when this one panics: the scope waits for them.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Writes to the peer's memory until it is told to stop, or refused.
fn hammer(
    channel: &mut Channel<'_>,
    from: &MemoryRegion<'_, u8>,
    to: RemoteMemoryRegion,
    stop: &AtomicBool,
) -> usize {
    let mut written = 0;
    while !stop.load(Ordering::Relaxed) {
        match channel.until(deadline()).write(from.slice(..).unwrap(), to) {
            Ok(_) => written += 1,
            Err(_) => break,
        }
    }
    written
}

/// The memory is freed right after it is deregistered, and allocated again: a late access would change the new
/// contents, or cause SIGSEGV.
#[test]
fn memory_is_not_touched_after_it_was_deregistered() {
    for round in 0..20 {
        let contexts = contexts(round % 2 == 0);
        let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
        let [mut one, _other] = channels(&domains[0], &domains[1]);
        let mut from = domains[0].allocate::<u8>(LENGTH).unwrap();
        from.fill(0x77);
        let access = AccessFlags::REMOTE_WRITE;
        let target: SharedMemoryRegion<'_, u8> =
            domains[1].allocate_shared(LENGTH, access).unwrap();
        let remote = target.remote();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| hammer(&mut one, &from, remote, &stop));
            let _stopper = Stop(&stop);
            let start = Instant::now();
            while target.read_one(LENGTH - 1).unwrap() == 0 {
                assert!(start.elapsed() < PATIENCE);
                std::thread::yield_now();
            }
            target.close().unwrap();
            // New memory may well lie where the region was.
            let again: Vec<Vec<u8>> = (0..8).map(|_| vec![0; LENGTH]).collect();
            std::thread::sleep(Duration::from_millis(2));
            assert!(again.iter().flatten().all(|&byte| byte == 0));
            assert!(writer.join().unwrap() >= 1);
        });
    }
}

#[test]
fn a_channel_may_go_while_its_peer_writes() {
    for round in 0..10 {
        let contexts = contexts(round % 2 == 0);
        let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
        let access = AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
        let prepare = |domain| {
            let timeout = ibverbs::settings::AckTimeout::new(1).unwrap();
            Channel::builder(domain).access(access).ack_timeout(timeout)
        };
        let (one, other) =
            (prepare(&domains[0]).build().unwrap(), prepare(&domains[1]).build().unwrap());
        let endpoints = (one.endpoint(), other.endpoint());
        let mut one = one.handshake(endpoints.1).unwrap();
        let other = other.handshake(endpoints.0).unwrap();
        let from = domains[0].allocate::<u8>(LENGTH).unwrap();
        let target = domains[1].allocate_shared::<u8>(LENGTH, AccessFlags::REMOTE_WRITE).unwrap();
        let remote = target.remote();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| hammer(&mut one, &from, remote, &stop));
            std::thread::sleep(Duration::from_millis(3));
            drop(other);
            // The writer gets no answers any more, and gives up.
            writer.join().unwrap();
        });
    }
}

#[test]
fn an_address_is_free_when_its_device_is_gone() {
    let device = Device::new().unwrap();
    let address = device.address();
    let context = device.open().unwrap();
    drop(device);
    let again = || Device::builder().address(address).build();
    assert_eq!(again().unwrap_err().kind(), std::io::ErrorKind::AddrInUse, "a context holds it");
    drop(context);
    again().unwrap();
}

#[test]
fn devices_on_ipv6_work_too() {
    // Only one such address exists, so the two queue pairs are of one device.
    let device = match Device::builder().address("::1".parse().unwrap()).build() {
        Err(e) if e.kind() == std::io::ErrorKind::AddrNotAvailable => {
            eprintln!("NOT CHECKED: this machine has no IPv6");
            return;
        }
        device => device.unwrap(),
    };
    let context = device.open().unwrap();
    assert_eq!(context.query_gid(1, 0).unwrap().gid.to_string(), "::1");
    let domain = context.alloc_pd().unwrap();
    let [mut one, mut other] = channels(&domain, &domain);
    let mut from = domain.allocate::<u8>(LENGTH).unwrap();
    let mut to = domain.allocate::<u8>(LENGTH).unwrap();
    from.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i * 5 + i / 256) as u8);
    std::thread::scope(|scope| {
        let receiver = scope.spawn(|| {
            other.until(deadline()).receive(to.slice_mut(..).unwrap()).unwrap();
        });
        one.until(deadline()).send(from.slice(..).unwrap()).unwrap();
        receiver.join().unwrap();
    });
    assert!(from[..] == to[..]);
}

#[test]
fn many_devices_come_and_go() {
    for _ in 0..5 {
        let devices: Vec<Device> = (0..20).map(|_| Device::new().unwrap()).collect();
        devices.iter().for_each(|device| {
            device.register();
        });
        let listed = ibverbs::devices().unwrap();
        for device in &devices {
            assert!(listed.iter().any(|one| one.name() == device.name()), "{}", device.name());
        }
        drop(devices);
        // The list holds them.
        assert!(listed.get(0).unwrap().open().is_ok());
    }
}
