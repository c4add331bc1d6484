//! Datagrams and multicast groups by address, within this crate and with `udaddy` and `mckey`.

use std::net::IpAddr;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::queue_pair::GlobalRouteHeader;
use ibverbs::rdmacm::{ConnectionError, DatagramAddress, Listener, MulticastMembership, Route};
use ibverbs::{
    CompletionQueue, Context, MemoryRegion, PreparedQueuePair, ProtectionDomain, QueuePair,
    QueuePairType, SendWorkRequest, Ud, operation::DatagramPeer, queue_pair::AddressVector,
};

use crate::managed::{TIME, here};
use crate::nothing_is_left;
use crate::vm::{alone, completions, has_address_handles, run, success};

/// The bytes before a datagram in its receive buffer.
const ROUTE: usize = GlobalRouteHeader::LEN;
const MESSAGES: usize = 5;
const LENGTH: usize = 100;

/// The objects of one side.
struct Side<'a> {
    context: &'a Context<'a>,
    domain: &'a ProtectionDomain<'a>,
    queue: &'a CompletionQueue<'a>,
}

fn with_side<R>(context: Context<'static>, test: impl FnOnce(Side<'_>) -> R) -> R {
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(64).unwrap();
    test(Side { context: &context, domain: &domain, queue: &queue })
}

impl<'a> Side<'a> {
    fn prepare(&self) -> PreparedQueuePair<'a, Ud> {
        self.domain
            .create_qp(self.queue, self.queue, Ud)
            .max_send_wr(16)
            .max_recv_wr(16)
            .build()
            .unwrap()
    }

    /// Room for all messages, with a receive for each.
    fn receives(&self, queue_pair: &mut QueuePair<'_, Ud>) -> MemoryRegion<'a, u8> {
        let size = ROUTE + LENGTH;
        let mut region = self.domain.allocate::<u8>(MESSAGES * size).unwrap();
        for at in 0..MESSAGES {
            let part = at * size..(at + 1) * size;
            // SAFETY: the region is read once the completion was polled, and dropped after that.
            unsafe { queue_pair.post_receive(&mut region, part, 100 + at as u64) }.unwrap();
        }
        region
    }

    fn send(
        &self,
        queue_pair: &mut QueuePair<'_, Ud>,
        path: &AddressVector,
        number: u32,
        qkey: u32,
        text: &[u8],
    ) {
        let mut region = self.domain.allocate::<u8>(LENGTH).unwrap();
        region[..text.len()].copy_from_slice(text);
        let handle = self.domain.create_ah(path).unwrap();
        let elements = [region.gather_element(..).unwrap()];
        let own = queue_pair.number();
        let request = SendWorkRequest::new(&elements).immediate(own).to(DatagramPeer {
            path: &handle,
            number,
            qkey,
        });
        // SAFETY: region and handle are there until the completion was polled, right below.
        unsafe { queue_pair.post(request, 1) }.unwrap();
        // Receives may complete too.
        success(&self.wait_for(1), 1);
        handle.close().unwrap();
    }

    fn wait_for(&self, id: u64) -> Vec<ibverbs::WorkCompletion> {
        let mut all = completions(self.queue, 1);
        while !all.iter().any(|c| c.wr_id() == id) {
            all.extend(completions(self.queue, 1));
        }
        all
    }

    fn send_to(&self, queue_pair: &mut QueuePair<'_, Ud>, peer: &DatagramAddress, text: &[u8]) {
        let to = &peer.destination;
        self.send(queue_pair, &to.path, to.number, to.qkey, text);
    }
}

fn tool(command: &str) -> thread::JoinHandle<String> {
    let command = format!("timeout 60 {command}");
    thread::spawn(move || run(&command))
}

#[test]
fn ours_with_ours() {
    if !has_address_handles() {
        return;
    }
    let _alone = alone("datagrams", 60);
    let mut listener = Listener::builder(here(0)).bind_datagram().unwrap();
    let address = listener.local_addr().unwrap();
    thread::scope(|scope| {
        scope.spawn(move || {
            let mut route = Route::to(address).resolve_datagram(Instant::now() + TIME).unwrap();
            with_side(route.open_device().unwrap(), |side| {
                let mut queue_pair = route.activate(side.prepare()).unwrap();
                let peer = route.connect(&queue_pair, &[3; 180], Instant::now() + TIME).unwrap();
                assert_eq!(peer.private_data[..], [4; 136]);
                side.send_to(&mut queue_pair, &peer, b"a datagram");
            });
        });
        let mut request = listener.next_until(Instant::now() + TIME).unwrap();
        assert_eq!(request.private_data()[..], [3; 180]);
        assert!(request.peer_addr().is_some());
        with_side(request.open_device().unwrap(), |side| {
            let mut queue_pair = request.activate(side.prepare()).unwrap();
            let region = side.receives(&mut queue_pair);
            request.accept(&queue_pair, &[4; 136]).unwrap();
            success(&completions(side.queue, 1), 100);
            assert_eq!(&region[ROUTE..][..10], b"a datagram");
        });

        // A request that is rejected, one that is not answered, and private data that are too long.
        for (refuse, data) in [(true, 3), (false, 3), (true, 181)] {
            let one = scope.spawn(move || {
                let mut route = Route::to(address).resolve_datagram(Instant::now() + TIME).unwrap();
                with_side(route.open_device().unwrap(), |side| {
                    let queue_pair = route.activate(side.prepare()).unwrap();
                    let time = if refuse { TIME } else { Duration::from_millis(200) };
                    route.connect(&queue_pair, &vec![0; data], Instant::now() + time).unwrap_err()
                })
            });
            if data > 180 {
                assert!(one.join().unwrap().to_string().contains("is 181"));
                continue;
            }
            let request = if refuse {
                listener.next_until(Instant::now() + TIME).unwrap()
            } else {
                let mut tries = std::iter::repeat_with(|| listener.try_next().unwrap());
                tries.find_map(|request| request).unwrap()
            };
            if refuse {
                request.reject(b"no").unwrap();
                let error = one.join().unwrap();
                assert!(matches!(error, ConnectionError::Unreachable(1..)), "{error}");
            } else {
                assert_eq!(one.join().unwrap(), ConnectionError::TimedOut);
            }
        }
    });
    drop(listener);
    nothing_is_left();
}

#[test]
fn a_queue_pair_that_is_connected_takes_no_datagrams() {
    let _alone = alone("no datagrams", 60);
    let mut listener = Listener::builder(here(0)).bind_datagram().unwrap();
    let address = listener.local_addr().unwrap();
    let mut route = Route::to(address).resolve_datagram(Instant::now() + TIME).unwrap();
    with_side(route.open_device().unwrap(), |side| {
        let wrong = side
            .domain
            .create_qp(side.queue, side.queue, QueuePairType::ReliableConnected)
            .build()
            .unwrap();
        let error = route.activate(wrong).unwrap_err();
        assert!(error.to_string().contains("type UD"), "{error}");
    });
    with_side(ibverbs::open("rxe1").unwrap(), |side| {
        assert_eq!(route.activate(side.prepare()).unwrap_err(), ConnectionError::WrongDevice);
    });
    assert!(listener.try_next().unwrap().is_none());
    drop((route, listener));
    nothing_is_left();
}

#[test]
#[ignore = "Soft-RoCE: a program of rdma-core is the other side, which asks the kernel"]
fn udaddy_answers_us() {
    if !has_address_handles() {
        return;
    }
    let _alone = alone("udaddy answers", 120);
    let server = tool(&format!("udaddy -b {} -c 1 -C {MESSAGES} -S {LENGTH}", here(0).ip()));
    let mut tries = 0;
    loop {
        let mut route = Route::to(here(7174)).resolve_datagram(Instant::now() + TIME).unwrap();
        let done = with_side(route.open_device().unwrap(), |side| {
            let mut queue_pair = route.activate(side.prepare()).unwrap();
            let region = side.receives(&mut queue_pair);
            let peer = match route.connect(&queue_pair, b"", Instant::now() + TIME) {
                Ok(peer) => peer,
                Err(ConnectionError::Unreachable(1..)) if tries < 100 => return false,
                Err(error) => panic!("{error}"),
            };
            for _ in 0..MESSAGES {
                side.send_to(&mut queue_pair, &peer, b"to udaddy");
            }
            // Some answers may have come while we were sending. The last one decides.
            let last = 100 + MESSAGES as u64 - 1;
            success(&side.wait_for(last), last);
            drop(region);
            true
        });
        if done {
            break;
        }
        tries += 1;
        thread::sleep(Duration::from_millis(100));
    }
    server.join().unwrap();
    nothing_is_left();
}

/// `udaddy` asks for our queue pair, and expects an answer to each of its messages.
#[test]
#[ignore = "Soft-RoCE: a program of rdma-core is the other side, which asks the kernel"]
fn we_answer_udaddy() {
    if !has_address_handles() {
        return;
    }
    let _alone = alone("udaddy asks", 120);
    let mut listener = Listener::builder(here(7174)).bind_datagram().unwrap();
    let client = tool(&format!("udaddy -s {} -c 1 -C {MESSAGES} -S {LENGTH}", here(0).ip()));
    let mut request = listener.next_until(Instant::now() + TIME).unwrap();
    with_side(request.open_device().unwrap(), |side| {
        let mut queue_pair = request.activate(side.prepare()).unwrap();
        let qkey = queue_pair
            .query_attributes(ibverbs::queue_pair::AttributeMask::QKEY)
            .unwrap()
            .qkey()
            .unwrap();
        let region = side.receives(&mut queue_pair);
        request.accept(&queue_pair, b"").unwrap();
        let received = completions(side.queue, MESSAGES);
        let first = success(&received, 100);
        let (header, _) = GlobalRouteHeader::split(&region[..]).unwrap();
        let back = AddressVector::reply_to(side.context, 1, &first, &header).unwrap();
        assert_eq!(first.immediate(), Some(first.source_queue_pair()));
        for _ in 0..MESSAGES {
            side.send(&mut queue_pair, &back, first.source_queue_pair(), qkey, b"an answer");
        }
    });
    client.join().unwrap();
    drop(listener);
    nothing_is_left();
}

const GROUP: &str = "239.7.7.7";

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// The group's packets go from rxe0 to rxe1.
fn prepare_group() {
    if crate::vm::software().is_none() {
        run("ip route replace 239.0.0.0/8 dev veth0");
    }
}

fn join(local: &str) -> MulticastMembership {
    MulticastMembership::join(address(local), address(GROUP), Instant::now() + TIME).unwrap()
}

/// Joins on rxe1, takes all messages, and leaves again.
fn hear(ready: impl FnOnce()) {
    let mut group = join(&crate::managed::THERE);
    with_side(group.open_device().unwrap(), |side| {
        let mut queue_pair = group.activate(side.prepare()).unwrap();
        let _region = side.receives(&mut queue_pair);
        queue_pair.attach_multicast(group.gid(), group.lid()).unwrap();
        ready();
        let received = completions(side.queue, MESSAGES);
        for at in 0..MESSAGES as u64 {
            success(&received, 100 + at);
        }
        queue_pair.detach_multicast(group.gid(), group.lid()).unwrap();
    });
    group.leave().unwrap();
}

/// Joins on rxe0, and sends all messages.
fn tell() {
    tell_as_member(join(&crate::managed::HERE));
}

fn tell_as_member(mut group: MulticastMembership) {
    with_side(group.open_device().unwrap(), |side| {
        let mut queue_pair = group.activate(side.prepare()).unwrap();
        for _ in 0..MESSAGES {
            side.send_to(&mut queue_pair, group.peer(), b"to all");
        }
    });
}

#[test]
fn a_group_hears_us() {
    if !has_address_handles() {
        return;
    }
    let _alone = alone("multicast", 120);
    prepare_group();
    hear(tell);
    nothing_is_left();
}

/// A member that only sends. On RoCE the kernel asks no switch for the group's packets then.
#[test]
fn a_member_that_only_sends_is_heard() {
    if !has_address_handles() {
        return;
    }
    let _alone = alone("send-only member", 120);
    prepare_group();
    hear(|| {
        let here = address(&crate::managed::HERE);
        tell_as_member(
            MulticastMembership::join_to_send(here, address(GROUP), Instant::now() + TIME).unwrap(),
        );
    });
    nothing_is_left();
}

/// `mckey` sends, and we hear it.
///
/// It does not wait for its sends to complete before it leaves the group and destroys address handle and
/// queue pair. Soft-RoCE sends from a work queue of the kernel (`rxe_sched_task` in `rxe_post_send`), and
/// sends nothing for a queue pair or address handle that is gone by then (`rxe_requester`, `rxe_get_av`).
/// So the tool as it is sends between none and one of its messages. Here a library that is loaded before
/// librdmacm makes it leave the group only when its standard input ends, which is when all have arrived.
#[test]
#[ignore = "Soft-RoCE: a program of rdma-core is the other side, which asks the kernel"]
fn we_hear_mckey() {
    if !has_address_handles() {
        return;
    }
    let _alone = alone("mckey sends", 120);
    prepare_group();
    let folder = std::env::temp_dir();
    let (source, library) = (folder.join("wait.c"), folder.join("wait.so"));
    std::fs::write(&source, LEAVE_WHEN_TOLD).unwrap();
    let (source, library) = (source.to_str().unwrap(), library.to_str().unwrap());
    run(&format!("cc -shared -fPIC -o {library} {source} -ldl"));

    let mut mckey = None;
    hear(|| {
        let local = &crate::managed::HERE;
        let command = Command::new("timeout")
            .args(["60", "mckey", "-s", "-m", GROUP, "-b", local, "-c", "1"])
            .args(["-C", &MESSAGES.to_string(), "-S", &LENGTH.to_string()])
            .env("LD_PRELOAD", library)
            .stdin(Stdio::piped())
            .spawn();
        mckey = Some(command.unwrap());
    });
    // The input of `mckey` ends here.
    let output = mckey.unwrap().wait_with_output().unwrap();
    assert!(output.status.success(), "mckey: {}", output.status);
    nothing_is_left();
}

const LEAVE_WHEN_TOLD: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>
int rdma_leave_multicast(void *id, void *address)
{
    char byte;
    while (read(0, &byte, 1) > 0) {}
    int (*leave)(void *, void *) = dlsym(RTLD_NEXT, "rdma_leave_multicast");
    return leave(id, address);
}
"#;

#[test]
#[ignore = "Soft-RoCE: a program of rdma-core is the other side, which asks the kernel"]
fn mckey_hears_us() {
    if !has_address_handles() {
        return;
    }
    let _alone = alone("mckey hears", 120);
    prepare_group();
    let listener = tool(&format!("mckey -m {GROUP} -b 10.77.0.2 -c 1 -C {MESSAGES} -S {LENGTH}"));
    // `mckey` prints nothing when it is ready, so it may miss the first messages.
    for _ in 0..100 {
        thread::sleep(Duration::from_millis(200));
        if listener.is_finished() {
            break;
        }
        tell();
    }
    listener.join().unwrap();
    nothing_is_left();
}

#[test]
fn what_is_no_group_is_not_joined() {
    let _alone = alone("no group", 60);
    let short = Duration::from_secs(5);
    let (here, there) = (&**crate::managed::HERE, &**crate::managed::THERE);
    for (local, group, part) in [
        (here, there, "not a multicast address"),
        (here, "ff02::1", "IPv6"),
        ("0.0.0.0", GROUP, "device"),
    ] {
        let error =
            MulticastMembership::join(address(local), address(group), Instant::now() + short)
                .unwrap_err();
        assert!(error.to_string().contains(part), "{error}");
    }
    assert!(
        MulticastMembership::join(address("203.0.113.5"), address(GROUP), Instant::now() + short)
            .is_err()
    );
    nothing_is_left();
}
