//! A message to a group, between two devices of this process.

use std::time::Duration;

use ibverbs::{
    CompletionQueue, Context, Gid, MemoryRegion, ProtectionDomain, QueuePair, SendWorkRequest, Ud,
    WorkCompletion, operation::DatagramPeer, queue_pair::AddressVector,
};

use crate::patience::deadline;

const QKEY: u32 = 0x1234;
/// The bytes before a datagram in its receive buffer.
const ROUTE: usize = 40;
/// The number of the send.
const SENT: u64 = 99;

pub(crate) struct Member<'a> {
    queue: &'a CompletionQueue<'a>,
    pub(crate) queue_pair: QueuePair<'a, Ud>,
    region: MemoryRegion<'a, u8>,
}

impl<'a> Member<'a> {
    pub(crate) fn new(domain: &'a ProtectionDomain<'a>, queue: &'a CompletionQueue<'a>) -> Self {
        let queue_pair = domain
            .create_qp(queue, queue, Ud)
            .max_send_wr(4)
            .max_recv_wr(4)
            .qkey(QKEY)
            .build()
            .unwrap();
        let region = domain.allocate(64).unwrap();
        Self { queue, queue_pair: queue_pair.activate().unwrap(), region }
    }

    pub(crate) fn post_receive(&mut self, number: u64) {
        // SAFETY: the region is not touched before the completion was polled.
        unsafe { self.queue_pair.post_receive(&mut self.region, 8.., number) }.unwrap();
    }

    fn completion(&self) -> WorkCompletion {
        let mut found = [WorkCompletion::default()];
        let end = deadline();
        while self.queue.poll(&mut found).unwrap().is_empty() {
            assert!(std::time::Instant::now() < end, "no completion");
        }
        found[0]
    }

    pub(crate) fn hears(&self, number: u64, text: &[u8], group: Gid) {
        let heard = self.completion();
        assert_eq!(heard.wr_id(), number);
        let success = heard.result().unwrap();
        assert_eq!(success.byte_len() as usize, ROUTE + text.len());
        let (route, payload) = self.region[8..].split_at(ROUTE);
        assert_eq!(&payload[..text.len()], text);
        // A route of IPv4 has 20 bytes without meaning, then the header that ends with the address.
        let is_ipv4 = route[0] == 0;
        let (header, address) = if is_ipv4 { (&route[20..], 4) } else { (route, 16) };
        let (version, service_level) = if is_ipv4 { (4, 2) } else { (6, 1) };
        assert_eq!((header[0] >> 4, success.service_level()), (version, service_level));
        assert_eq!(header[header.len() - address..], group.to_bytes()[16 - address..]);
    }

    pub(crate) fn send(
        &mut self,
        domain: &ProtectionDomain<'_>,
        path: &AddressVector,
        text: &[u8],
    ) {
        let handle = domain.create_ah(path).unwrap();
        self.region[..text.len()].copy_from_slice(text);
        let elements = [self.region.gather_element(..text.len()).unwrap()];
        let request = SendWorkRequest::new(&elements).to(DatagramPeer::group(&handle, QKEY));
        // SAFETY: region and handle are not touched until the completion was polled, right below.
        unsafe { self.queue_pair.post(request, SENT) }.unwrap();
        assert_eq!(self.completion().wr_id(), SENT);
    }
}

/// Members on both devices hear what is sent to the group, and those that have left do not. The sender's address is the
/// one at `index`.
pub(crate) fn a_group_hears_what_is_sent_to_it(contexts: &[Context<'_>; 2], index: u8, group: Gid) {
    let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
    let queues = [0, 0, 1, 1].map(|at| (contexts[at].create_cq(8).unwrap(), &domains[at]));
    let [mut sender, mut near, mut far, mut left] =
        queues.each_ref().map(|(queue, domain)| Member::new(domain, queue));
    for member in [&mut near, &mut far, &mut left] {
        member.queue_pair.attach_multicast(group, 0).unwrap();
    }
    left.queue_pair.detach_multicast(group, 0).unwrap();
    let path = AddressVector::new(1, 0).global(group, index).hop_limit(1);
    for (number, text) in [(1, &b"all"[..]), (2, b"again")] {
        for member in [&mut near, &mut far, &mut left] {
            member.post_receive(number);
        }
        sender.send(&domains[0], &path, text);
        near.hears(number, text, group);
        far.hears(number, text, group);
    }
    // Once the last member has left, nobody on that device hears anything.
    far.queue_pair.detach_multicast(group, 0).unwrap();
    far.post_receive(3);
    near.post_receive(3);
    sender.send(&domains[0], &path, b"some");
    near.hears(3, b"some", group);
    for deaf in [&far, &left] {
        std::thread::sleep(Duration::from_millis(1));
        assert!(deaf.queue.poll(&mut [WorkCompletion::default()]).unwrap().is_empty());
    }
}

/// A member of each group, on the other device, hears what is sent to its group alone.
#[allow(dead_code, reason = "tests of pairs of machines do not use it")]
pub(crate) fn only_its_members_hear_a_group(contexts: &[Context<'_>; 2], groups: [&str; 2]) {
    let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
    let queues = [0, 1, 1].map(|at| (contexts[at].create_cq(8).unwrap(), &domains[at]));
    let [mut sender, mut one, mut two] =
        queues.each_ref().map(|(queue, domain)| Member::new(domain, queue));
    let groups = groups.map(|group| group.parse::<Gid>().unwrap());
    one.queue_pair.attach_multicast(groups[0], 0).unwrap();
    two.queue_pair.attach_multicast(groups[1], 0).unwrap();
    for number in 1..4 {
        one.post_receive(number);
        two.post_receive(number);
        for ((group, text), member) in groups.iter().zip([b"first", b"other"]).zip([&one, &two]) {
            let path = AddressVector::new(1, 0).global(*group, 0).hop_limit(1);
            sender.send(&domains[0], &path, text);
            member.hears(number, text, *group);
        }
        for deaf in [&one, &two] {
            assert!(deaf.queue.poll(&mut [WorkCompletion::default()]).unwrap().is_empty());
        }
    }
}
