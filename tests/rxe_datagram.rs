//! Datagrams between the two Soft-RoCE devices of `script/vm`: address handles, replies, multicast.

#[path = "support/vm/mod.rs"]
mod vm;

use ibverbs::device::GidEntry;
use ibverbs::queue_pair::GlobalRouteHeader;
use ibverbs::{
    CompletionQueue, Context, Gid, MemoryRegion, ProtectionDomain, QueuePair, SendWorkRequest, Ud,
    operation::DatagramPeer, queue_pair::AddressVector,
};
use vm::{assert_nothing_left, completions, has_address_handles, one_at_a_time, run, success};

const QKEY: u32 = 0x1234;
/// The bytes before a datagram in its receive buffer.
const ROUTE: usize = GlobalRouteHeader::LEN;

struct Side<'a> {
    own: GidEntry,
    context: &'a Context<'a>,
    domain: &'a ProtectionDomain<'a>,
    queue: &'a CompletionQueue<'a>,
    queue_pair: QueuePair<'a, Ud>,
    region: MemoryRegion<'a, u8>,
}

/// Runs `test` with a datagram queue pair on `device`.
fn with_side<R>(device: &str, test: impl FnOnce(Side<'_>) -> R) -> R {
    let context = ibverbs::open(device).unwrap();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(8).unwrap();
    let queue_pair = domain
        .create_qp(&queue, &queue, Ud)
        .max_send_wr(4)
        .max_recv_wr(4)
        .qkey(QKEY)
        .build()
        .unwrap()
        .activate()
        .unwrap();
    let own = context.routable_gid(1).unwrap();
    let region = domain.allocate(512).unwrap();
    let (context, domain, queue) = (&context, &domain, &queue);
    test(Side { own, context, domain, queue, queue_pair, region })
}

impl Side<'_> {
    fn path(&self, to: Gid) -> AddressVector {
        AddressVector::new(1, 0).global(to, u8::try_from(self.own.index).unwrap())
    }

    /// Sends what is at the start of the region.
    fn send(&mut self, path: &AddressVector, number: u32, length: usize) {
        let handle = self.domain.create_ah(path).unwrap();
        let elements = [self.region.gather_element(..length).unwrap()];
        let request =
            SendWorkRequest::new(&elements).to(DatagramPeer { path: &handle, number, qkey: QKEY });
        // SAFETY: region and handle are not touched until the completion was polled, right below.
        unsafe { self.queue_pair.post(request, 1) }.unwrap();
        success(&completions(self.queue, 1), 1);
        handle.close().unwrap();
    }
}

#[test]
fn a_datagram_is_answered_by_what_its_completion_says() {
    if !has_address_handles() {
        return;
    }
    let _lock = one_at_a_time();
    with_side("rxe0", |mut one| {
        with_side("rxe1", |mut two| {
            // SAFETY: neither region is touched where a receive may write.
            unsafe { one.queue_pair.post_receive(&mut one.region, 256.., 7) }.unwrap();
            // SAFETY: as above.
            unsafe { two.queue_pair.post_receive(&mut two.region, 256.., 8) }.unwrap();
            one.region[..5].copy_from_slice(b"hello");
            let peer = two.queue_pair.endpoint();
            let path = AddressVector::to_peer(one.context, 1, &peer).unwrap();
            assert_eq!(path, one.path(two.own.gid));
            one.send(&path, peer.num(), 5);

            let received = success(&completions(two.queue, 1), 8);
            assert_eq!(received.byte_len() as usize, ROUTE + 5);
            assert_eq!(received.source_queue_pair(), one.queue_pair.number());
            assert!(received.has_global_route());
            assert_eq!(&two.region[256 + ROUTE..][..5], b"hello");
            let (header, _) = GlobalRouteHeader::split(&two.region[256..]).unwrap();
            let back = AddressVector::reply_to(two.context, 1, &received, &header).unwrap();
            assert_eq!(back.gid(), Some(one.own.gid), "{back:?}");
            assert_eq!(header.source(), back.gid());

            two.region[..3].copy_from_slice(b"aye");
            two.send(&back, received.source_queue_pair(), 3);
            let answer = success(&completions(one.queue, 1), 7);
            assert_eq!(answer.source_queue_pair(), two.queue_pair.number());
            assert_eq!(&one.region[256 + ROUTE..][..3], b"aye");
        });
    });
    assert_nothing_left("rxe0");
    assert_nothing_left("rxe1");
}

#[test]
#[ignore = "Soft-RoCE: routes groups by a network interface"]
fn a_group_hears_what_is_sent_to_it() {
    if !has_address_handles() {
        return;
    }
    let _lock = one_at_a_time();
    let group: Gid = "::ffff:239.1.2.3".parse().unwrap();
    run(
        "ip route replace 239.0.0.0/8 dev veth0; ip address replace 239.1.2.3/32 dev veth1 autojoin",
    );
    with_side("rxe0", |mut one| {
        with_side("rxe1", |mut two| {
            two.queue_pair.attach_multicast(group, 0).unwrap();
            // SAFETY: the region is not touched where the receive may write.
            unsafe { two.queue_pair.post_receive(&mut two.region, 256.., 8) }.unwrap();
            one.region[..3].copy_from_slice(b"all");
            let path = one.path(group);
            one.send(&path, 0xff_ffff, 3);
            success(&completions(two.queue, 1), 8);
            assert_eq!(&two.region[256 + ROUTE..][..3], b"all");
            two.queue_pair.detach_multicast(group, 0).unwrap();
        });
    });
}
