//! Children of `fork` that exit, or drop what they have of their parent's: the parent's channels and loops go on, and notice when their
//! peers leave. One test: it concerns the whole process.

use std::net::TcpListener;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::pool::BufferPool;
use ibverbs::{
    AccessFlags, Channel, Loop, PooledBuffer, ProtectionDomain, ReceiveWorkRequest, TransportError,
};
use ibverbs_software::Device;

fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

#[derive(Clone, Copy, Debug)]
enum How {
    ExitsAtOnce,
    Exits,
    Drops,
}

#[test]
fn what_a_child_does_with_its_copies_costs_its_parent_nothing() {
    let host = || {
        let device = Device::new().unwrap();
        let domain = ProtectionDomain::new(Arc::new(device.open().unwrap())).unwrap();
        (Arc::new(domain), device)
    };
    let ((server_domain, _server_device), (domain, _device)) = (host(), host());
    let pool = BufferPool::new(&server_domain, 64, 8, AccessFlags::empty()).unwrap();
    let mut server = Loop::<PooledBuffer>::new(server_domain.context_parent(), 8).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (mut client, channel) = thread::scope(|threads| {
        let connects = threads.spawn(|| {
            let prepared = Channel::builder(&domain).max_send_wr(4).max_recv_wr(4).build().unwrap();
            prepared.connect(address, b"", deadline()).unwrap().0
        });
        let builder = server.create_channel(&server_domain).max_send_wr(4).max_recv_wr(4);
        let accepted = builder.build().unwrap().accept(&listener, b"", deadline()).unwrap().0;
        let channel = server.add(accepted).unwrap();
        (connects.join().unwrap(), channel)
    });
    let data = domain.allocate::<u8>(8).unwrap();
    for how in [How::ExitsAtOnce, How::Exits, How::Drops] {
        server.post(channel, ReceiveWorkRequest::new(pool.take().unwrap()), 0).unwrap();
        // SAFETY: the child ends below. It may wait for a lock that a thread of its parent had; then the alarm ends it.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: no memory is involved.
            unsafe { libc::alarm(5) };
            match how {
                How::ExitsAtOnce => {}
                // SAFETY: it runs what the process has for its exit.
                How::Exits => unsafe { libc::exit(0) },
                How::Drops => {
                    drop(server);
                    drop(client);
                    drop((data, pool, server_domain));
                }
            }
            // SAFETY: it ends the child at once.
            unsafe { libc::_exit(0) };
        }
        assert!(child > 0);
        let mut status = 0;
        // SAFETY: the child is ours, and the status is writable.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        println!("{how:?}: {status:#x}");
        client.until(deadline()).send(data.slice(..).unwrap()).unwrap();
        let ended = server.wait_ended_until(deadline()).unwrap().expect("nothing arrives");
        assert_eq!(ended.result().unwrap().byte_len(), 8, "{how:?}");
    }
    server.post(channel, ReceiveWorkRequest::new(pool.take().unwrap()), 0).unwrap();
    drop(client);
    let ended = server.wait_ended_until(deadline()).unwrap().expect("nobody notices");
    assert_eq!(ended.result().unwrap_err(), TransportError::PeerGone);
}
