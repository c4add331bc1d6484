//! Connections between two sides of this crate, without faults.

use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::queue_pair::{AttributeMask, EnhancedConnection};
use ibverbs::rdmacm::{ConnectionEventKind as Kind, Listener, Route};
use ibverbs::{AccessFlags, Inline, Rc, TransportError, settings::AckTimeout};

use crate::managed::{Device, TIME, accept, connect, expect, here, listen, pair, transfer};
use crate::nothing_is_left;
use crate::vm::process::open_files;
use crate::vm::{alone, completions, success};

#[test]
fn both_sides_send_and_hear_of_the_end() {
    let _alone = alone("both sides", 120);
    for ends in 0..2 {
        let [mut one, mut two] = pair();
        assert_eq!(one.0.private_data().trim_end(), b"from two");
        assert_eq!(one.0.private_data().len(), 196, "padded with zeros");
        assert!(two.0.private_data().is_empty());
        assert_eq!(one.0.peer_addr(), two.0.local_addr());
        assert_eq!(one.0.local_addr(), two.0.peer_addr());
        for round in 0..10 {
            transfer(&mut one, &mut two, format!("one to two, {round}").as_bytes());
            transfer(&mut two, &mut one, format!("two to one, {round}").as_bytes());
        }
        assert_eq!(one.0.event().unwrap(), None);
        let (first, second) = if ends == 0 { (&mut one, &mut two) } else { (&mut two, &mut one) };
        first.0.disconnect().unwrap();
        expect(&mut second.0, Kind::Disconnected);
        second.0.disconnect().unwrap();
        expect(&mut first.0, Kind::Disconnected);
        assert!(matches!(first.0.send(Inline(b"x")), Err(TransportError::Stopped)));
        drop((one, two));
        nothing_is_left();
    }
}

#[test]
fn a_request_says_who_and_what() {
    let _alone = alone("a request", 60);
    let (mut listener, address) = listen();
    thread::scope(|scope| {
        let one = scope.spawn(move || connect(address, &[7; 56]).unwrap());
        let request = listener.next_until(Instant::now() + TIME).unwrap();
        assert_eq!(request.private_data()[..], [7; 56]);
        assert_eq!(request.device_name().as_deref(), Some("rxe0"));
        assert_eq!((request.port(), request.is_iwarp()), (1, false));
        assert_eq!(request.local_addr(), Some(address));
        let peer = request.peer_addr().unwrap();
        let two = accept(request, &[9; 196]).unwrap();
        let one = one.join().unwrap();
        assert_eq!(one.0.private_data()[..], [9; 196]);
        assert_eq!(one.0.local_addr(), Some(peer));
        drop(two);
    });
    drop(listener);
    nothing_is_left();
}

/// Queue pairs of the verbs layer, with a write and a read, on one context that both sides share.
#[test]
fn queue_pairs_are_connected_like_channels() {
    let _alone = alone("queue pairs", 60);
    {
        let context = ibverbs::open("rxe0").unwrap();
        let domain = context.alloc_pd().unwrap();
        let queue = context.create_cq(16).unwrap();
        let prepare = || {
            domain
                .create_qp(&queue, &queue, Rc)
                .access(AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ)
                .max_rd_atomic(3)
                .max_dest_rd_atomic(2)
                .build()
                .unwrap()
        };
        let (mut listener, address) = listen();
        let (mut one, two) = thread::scope(|scope| {
            let (prepared, other) = (prepare(), prepare());
            let one = scope.spawn(move || {
                let route = Route::to(address)
                    .type_of_service(0x20)
                    .resolve(Instant::now() + TIME)
                    .unwrap();
                route.connect(prepared, b"", Instant::now() + TIME).unwrap()
            });
            let request = listener.next_until(Instant::now() + TIME).unwrap();
            let two = request.accept(other, b"", Instant::now() + TIME).unwrap();
            (one.join().unwrap(), two)
        });
        for side in [&one, &two] {
            let mask = AttributeMask::MAX_RD_ATOMIC
                | AttributeMask::MAX_DEST_RD_ATOMIC
                | AttributeMask::ACK_TIMEOUT
                | AttributeMask::ACCESS;
            let attributes = side.query_attributes(mask).unwrap();
            // Each side requests at most what the other answers.
            assert_eq!(attributes.max_rd_atomic(), Some(2));
            assert_eq!(attributes.max_dest_rd_atomic(), Some(2));
            assert_eq!(attributes.ack_timeout(), Some(AckTimeout::default()));
            let access = attributes.access().unwrap();
            assert!(access.contains(AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ));
            assert!(!access.contains(AccessFlags::REMOTE_ATOMIC), "as it was built");
        }
        let shared = domain.allocate_shared::<u64>(2, AccessFlags::REMOTE_WRITE).unwrap();
        let mut region = domain.allocate::<u64>(2).unwrap();
        region.copy_from_slice(&[5, 6]);
        let remote = shared.remote();
        // SAFETY: the regions are not used until the completions were polled.
        unsafe { one.post_write(&region, .., remote, 1) }.unwrap();
        success(&completions(&queue, 1), 1);
        let mut back = [0; 2];
        shared.read(0, &mut back).unwrap();
        assert_eq!(back, [5, 6]);
        drop((one, two));
    }
    nothing_is_left();
}

#[test]
fn options_and_addresses() {
    let _alone = alone("options", 60);
    let mut listener = Listener::builder("0.0.0.0:0".parse().unwrap())
        .backlog(3)
        .reuse_address(true)
        .bind()
        .unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::scope(|scope| {
        let one = scope.spawn(move || {
            let source = SocketAddr::new(here(0).ip(), 40_404);
            let route = Route::to(here(port))
                .source(source)
                .type_of_service(0xb8)
                .ack_timeout(AckTimeout::new(15).unwrap())
                .reuse_address(true)
                .resolve(Instant::now() + TIME)
                .unwrap();
            assert_eq!(route.local_addr(), Some(source));
            assert_eq!(route.peer_addr(), Some(here(port)));
            let mut route = route;
            let none = route.set_local_ece(EnhancedConnection::default());
            assert!(none.is_err(), "it has no vendor");
            let device = Device::of(route.open_device().unwrap(), route.port());
            route.connect(device.prepare(), b"", Instant::now() + TIME).unwrap()
        });
        let request = listener.next_until(Instant::now() + TIME).unwrap();
        assert_eq!(request.peer_addr().unwrap().port(), 40_404);
        let two = accept(request, b"").unwrap();
        drop((one.join().unwrap(), two));
    });
    let error = Listener::bind("203.0.113.9:1".parse().unwrap()).unwrap_err();
    assert!(matches!(error.raw_os_error(), Some(libc::EADDRNOTAVAIL | libc::ENODEV)), "{error}");
    let (first, address) = listen();
    let error = Listener::bind(address).unwrap_err();
    assert_eq!((error.verb(), error.raw_os_error()), ("rdma_bind_addr", Some(libc::EADDRINUSE)));
    drop((first, listener));
    nothing_is_left();
}

#[test]
#[ignore = "Soft-RoCE: a link-local address of a network interface"]
fn ipv6() {
    let _alone = alone("IPv6", 120);
    // The link-local address of veth0. The kernel needs a moment for duplicate address detection.
    let start = Instant::now();
    let address = loop {
        let text = crate::vm::run("ip -6 -br addr show dev veth0 scope link -tentative");
        if let Some(word) = text.split_whitespace().find(|word| word.starts_with("fe80")) {
            break word.split('/').next().unwrap().to_owned();
        }
        assert!(start.elapsed() < Duration::from_secs(30), "{text}");
        thread::sleep(Duration::from_millis(100));
    };
    let index = std::fs::read_to_string("/sys/class/net/veth0/ifindex").unwrap();
    let address: SocketAddr = format!("[{address}%{}]:0", index.trim()).parse().unwrap();
    let mut listener = Listener::builder(address).only_ipv6(true).bind().unwrap();
    let address = listener.local_addr().unwrap();
    assert!(address.is_ipv6() && address.port() != 0);
    thread::scope(|scope| {
        let one = scope.spawn(move || connect(address, b"six").unwrap());
        let request = listener.next_until(Instant::now() + TIME).unwrap();
        assert_eq!(request.private_data().trim_end(), b"six");
        let mut two = accept(request, b"").unwrap();
        let mut one = one.join().unwrap();
        transfer(&mut one, &mut two, b"over IPv6");
    });
    drop(listener);
    nothing_is_left();
}

/// A connection in two parts: one thread moves data while another watches the connection.
#[test]
fn the_control_can_be_watched_by_another_thread() {
    let _alone = alone("the control", 60);
    let [one, (two, _device)] = pair();
    let (channel, mut control) = one.0.into_parts();
    // Soft-RoCE does not have these options, and the kernel has the values already.
    assert_eq!(control.remote_ece().unwrap(), EnhancedConnection::default());
    assert!(control.notify_established().is_err());
    assert!(!control.as_raw().is_null());
    #[cfg(rdma_core_65)]
    match control.write_event(-7, 1 << 40) {
        Ok(()) => {
            let event = control.event_until(Instant::now() + TIME).unwrap();
            assert_eq!((event.kind(), event.status(), event.argument()), (Kind::User, -7, 1 << 40));
        }
        Err(error) => {
            assert_eq!(error.kind(), ibverbs::ErrorKind::Unsupported);
            assert!(error.to_string().contains("Linux 6.18"), "{error}");
        }
    }
    thread::scope(|scope| {
        let watcher =
            scope.spawn(move || control.event_until(Instant::now() + TIME).unwrap().kind());
        drop(two);
        assert_eq!(watcher.join().unwrap(), Kind::Disconnected);
    });
    drop((channel, one.1, _device));
    nothing_is_left();
}

/// librdmacm tells by an event that it has resolved a name, which an older kernel refuses.
#[cfg(rdma_core_65)]
#[test]
fn a_route_to_a_name_takes_a_kernel_with_written_events() {
    let _alone = alone("a name", 60);
    match Route::to_name(&crate::managed::HERE, "7471").resolve(Instant::now() + TIME) {
        Ok(route) => {
            let expected = format!("{}:7471", *crate::managed::HERE);
            assert_eq!(route.peer_addr(), Some(expected.parse().unwrap()));
        }
        Err(ibverbs::rdmacm::ConnectionError::Verbs(error)) => {
            assert_eq!(error.kind(), ibverbs::ErrorKind::Unsupported);
            assert!(error.to_string().contains("Linux 6.18"), "{error}");
        }
        Err(other) => panic!("{other}"),
    }
    nothing_is_left();
}

/// A thousand connections, one after the other, of one process with itself.
#[test]
fn a_thousand_connections_leave_nothing() {
    let _alone = alone("a thousand connections", 900);
    let (mut listener, address) = listen();
    let device = Device::named("rxe0");
    let mut files = 0;
    for round in 0..1000 {
        let [one, two] = thread::scope(|scope| {
            let prepared = device.prepare();
            let one = scope.spawn(move || {
                Route::resolve(address, Instant::now() + TIME)
                    .unwrap()
                    .connect(prepared, b"", Instant::now() + TIME)
                    .unwrap()
            });
            let request = listener.next_until(Instant::now() + TIME).unwrap();
            let two = request.accept(device.prepare(), b"", Instant::now() + TIME).unwrap();
            [one.join().unwrap(), two]
        });
        if round == 0 {
            // The listener has opened, or will open, the file for the next request.
            files = open_files() + 1;
        }
        if round % 100 == 0 {
            transfer(&mut (one, device.clone()), &mut (two, device.clone()), b"still works");
        }
    }
    assert!(open_files() <= files, "{} files are open, {files} were", open_files());
    drop((device, listener));
    nothing_is_left();
}
