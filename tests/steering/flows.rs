//! Flows and their counters.

use ibverbs::flow::{
    Counter, Counters, EspMatch, EthernetMatch, GreMatch, Ipv4Match, Ipv6Match, MplsMatch,
    PortMatch, Rule, RuleFlags, VxlanMatch,
};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use ibverbs::ffi::{self, ibv_flow_spec_type as SpecType};

use super::*;

/// The latest rule that the provider saw, with its specifications: types and bytes.
fn specs(device: &FunctionDevice) -> (ffi::ibv_flow_attr, Vec<(u32, Vec<u8>)>) {
    let call = device.last_call("create_flow").unwrap();
    let (mut specs, mut at) = (Vec::new(), 0);
    for _ in 0..call.flow_attr.num_of_specs {
        let word = |at: usize, n: usize| &call.flow_specs[at..at + n];
        let kind = u32::from_ne_bytes(word(at, 4).try_into().unwrap());
        let size = u16::from_ne_bytes(word(at + 4, 2).try_into().unwrap()) as usize;
        specs.push((kind, word(at, size).to_vec()));
        at += size;
    }
    assert_eq!(at + size_of::<ffi::ibv_flow_attr>(), call.flow_attr.size as usize);
    (call.flow_attr, specs)
}

/// The value and the mask of a header.
macro_rules! parts {
    ($spec:ident, $bytes:expr) => {{
        assert_eq!($bytes.len(), size_of::<ffi::$spec>());
        // SAFETY: the struct is made of numbers, and there are as many bytes.
        let spec = unsafe { $bytes.as_ptr().cast::<ffi::$spec>().read_unaligned() };
        (spec.val, spec.mask)
    }};
}

#[test]
fn every_header_reaches_the_provider_in_network_order() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let mut pair = raw_packets(&domain, &queue);
    let source = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);
    let rule = Rule::new(1)
        .matching(
            EthernetMatch::new()
                .destination(OUR_MAC)
                .source_masked([1; 6], [0xf0; 6])
                .ether_type(0x86dd)
                .vlan_tag_masked(0x0123, 0x0fff),
        )
        .matching(Ipv6Match::new().source(source).flow_label(0xabcde).next_header(17).hop_limit(9))
        .matching(PortMatch::udp().destination(4789))
        .matching(VxlanMatch::new().network_identifier(0x123456))
        .matching_inner(
            Ipv4Match::new()
                .source(Ipv4Addr::new(10, 1, 2, 3))
                .destination_masked(Ipv4Addr::new(10, 0, 0, 0), Ipv4Addr::new(255, 0, 0, 0))
                .protocol(6)
                .time_to_live(64),
        )
        .matching_inner(PortMatch::tcp().source(80))
        .priority(0x1234)
        .flags(RuleFlags::DONT_TRAP)
        .tag(0xcafe)
        .drop_packets();
    pair.create_flow(&rule).unwrap();
    let (attributes, specs) = specs(&device);
    assert_eq!((attributes.port, attributes.priority, attributes.flags), (1, 0x1234, 2));
    assert_eq!(attributes.type_, ffi::ibv_flow_attr_type::IBV_FLOW_ATTR_NORMAL);
    let inner = SpecType::IBV_FLOW_SPEC_INNER.0;
    let kinds: Vec<_> = specs.iter().map(|(kind, _)| *kind).collect();
    assert_eq!(
        kinds,
        [
            SpecType::IBV_FLOW_SPEC_ETH.0,
            SpecType::IBV_FLOW_SPEC_IPV6.0,
            SpecType::IBV_FLOW_SPEC_UDP.0,
            SpecType::IBV_FLOW_SPEC_VXLAN_TUNNEL.0,
            SpecType::IBV_FLOW_SPEC_IPV4_EXT.0 | inner,
            SpecType::IBV_FLOW_SPEC_TCP.0 | inner,
            SpecType::IBV_FLOW_SPEC_ACTION_DROP.0,
            SpecType::IBV_FLOW_SPEC_ACTION_TAG.0,
        ]
    );
    let (value, mask) = parts!(ibv_flow_spec_eth, specs[0].1);
    assert_eq!((value.dst_mac, mask.dst_mac), (OUR_MAC, [0xff; 6]));
    assert_eq!((value.src_mac, mask.src_mac), ([1; 6], [0xf0; 6]));
    assert_eq!((u16::from_be(value.ether_type), mask.ether_type), (0x86dd, 0xffff));
    assert_eq!((u16::from_be(value.vlan_tag), u16::from_be(mask.vlan_tag)), (0x0123, 0x0fff));
    let (value, mask) = parts!(ibv_flow_spec_ipv6, specs[1].1);
    assert_eq!((value.src_ip, mask.src_ip), (source.octets(), [0xff; 16]));
    assert_eq!((value.dst_ip, mask.dst_ip), ([0; 16], [0; 16]), "not named");
    assert_eq!((u32::from_be(value.flow_label), mask.flow_label), (0xabcde, u32::MAX));
    assert_eq!((value.next_hdr, mask.next_hdr, mask.traffic_class), (17, 0xff, 0));
    assert_eq!((value.hop_limit, mask.hop_limit), (9, 0xff));
    let (value, mask) = parts!(ibv_flow_spec_tcp_udp, specs[2].1);
    assert_eq!((u16::from_be(value.dst_port), mask.dst_port, mask.src_port), (4789, 0xffff, 0));
    let (value, mask) = parts!(ibv_flow_spec_tunnel, specs[3].1);
    assert_eq!((u32::from_be(value.tunnel_id), mask.tunnel_id), (0x123456, u32::MAX));
    let (value, mask) = parts!(ibv_flow_spec_ipv4_ext, specs[4].1);
    assert_eq!((value.src_ip.to_ne_bytes(), mask.src_ip), ([10, 1, 2, 3], u32::MAX));
    assert_eq!(value.dst_ip.to_ne_bytes(), [10, 0, 0, 0]);
    assert_eq!(mask.dst_ip.to_ne_bytes(), [255, 0, 0, 0]);
    assert_eq!((value.proto, mask.proto, value.ttl, mask.ttl), (6, 0xff, 64, 0xff));
    assert_eq!((mask.tos, mask.flags), (0, 0));
    let (value, mask) = parts!(ibv_flow_spec_tcp_udp, specs[5].1);
    assert_eq!((u16::from_be(value.src_port), mask.src_port, mask.dst_port), (80, 0xffff, 0));
    assert_eq!(specs[7].1[8..], 0xcafe_u32.to_ne_bytes());

    let rule = Rule::new(1)
        .matching(GreMatch::new().flags_and_version(0x2000).protocol(0x8847).key(7))
        .matching(MplsMatch::new().entry_masked(0x1234_5000, 0xffff_f000))
        .matching(EspMatch::new().security_parameters_index(5).sequence_number(6))
        .matching(Ipv6Match::default().destination(source).traffic_class_masked(3, 7))
        .matching(Ipv4Match::default().type_of_service(1).flags(2))
        .flags(RuleFlags::EGRESS);
    pair.create_flow(&rule).unwrap();
    let (attributes, specs) = self::specs(&device);
    assert_eq!((attributes.flags, specs.len()), (4, 5));
    let (value, mask) = parts!(ibv_flow_spec_gre, specs[0].1);
    assert_eq!(u16::from_be(value.c_ks_res0_ver), 0x2000);
    assert_eq!((u16::from_be(value.protocol), u32::from_be(value.key)), (0x8847, 7));
    assert_eq!((mask.c_ks_res0_ver, mask.protocol, mask.key), (0xffff, 0xffff, u32::MAX));
    let (value, mask) = parts!(ibv_flow_spec_mpls, specs[1].1);
    assert_eq!((u32::from_be(value.label), u32::from_be(mask.label)), (0x1234_5000, 0xffff_f000));
    let (value, mask) = parts!(ibv_flow_spec_esp, specs[2].1);
    assert_eq!((u32::from_be(value.spi), u32::from_be(value.seq)), (5, 6));
    assert_eq!((mask.spi, mask.seq), (u32::MAX, u32::MAX));
    let (value, mask) = parts!(ibv_flow_spec_ipv6, specs[3].1);
    assert_eq!((value.dst_ip, value.traffic_class, mask.traffic_class), (source.octets(), 3, 7));
    let (value, mask) = parts!(ibv_flow_spec_ipv4_ext, specs[4].1);
    assert_eq!((value.tos, value.flags, mask.tos, mask.flags), (1, 2, 0xff, 0xff));
}

#[test]
fn frames_reach_the_queue_pair_whose_flow_matches() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queues: [_; 4] = std::array::from_fn(|_| context.create_cq(64).unwrap());
    let mut region = domain.allocate::<u8>(192).unwrap();
    let [mut sender, mut udp, mut rest, mut sniffer] =
        queues.each_ref().map(|queue| raw_packets(&domain, queue));
    for (number, pair) in [&mut udp, &mut rest, &mut sniffer].into_iter().enumerate() {
        for wr_id in 0..8 {
            // SAFETY: each queue pair has memory of its own, which is read when nothing arrives any more.
            unsafe { pair.post_receive(&mut region, number * 64..(number + 1) * 64, wr_id) }
                .unwrap();
        }
    }
    let to_us = EthernetMatch::new().destination(OUR_MAC);
    let from = Ipv4Match::new().source_masked([10, 0, 0, 0].into(), [255, 0, 0, 0].into());
    let rule =
        Rule::new(1).matching(to_us).matching(from).matching(PortMatch::udp().destination(53));
    let first = udp.create_flow(&rule).unwrap();
    rest.create_flow(&Rule::all_default(1)).unwrap();
    sniffer.create_flow(&Rule::sniffer(1)).unwrap();
    let mut seen = |frame: &[u8]| {
        send(&mut sender, frame);
        queues.each_ref().map(|queue| received(queue).len())
    };
    let query = frame(OUR_MAC, [10, 7, 7, 7], (99, 53), b"q");
    assert_eq!(seen(&query), [0, 1, 0, 1]);
    for other in [
        frame(THEIR_MAC, [10, 7, 7, 7], (99, 53), b"q"),
        frame(OUR_MAC, [11, 7, 7, 7], (99, 53), b"q"),
        frame(OUR_MAC, [10, 7, 7, 7], (99, 54), b"q"),
    ] {
        assert_eq!(seen(&other), [0, 0, 1, 1]);
    }
    assert_eq!(region[..query.len()], query[..], "the whole frame");
    udp.destroy_flow(first).unwrap();
    assert_eq!(seen(&query), [0, 0, 1, 1]);
    // A rule that drops is before those that take what is left over.
    let dropping = udp.create_flow(&rule.clone().drop_packets()).unwrap();
    assert_eq!(seen(&query), [0, 0, 0, 1]);
    udp.destroy_flow(dropping).unwrap();
    rest.create_flow(&Rule::multicast_default(1)).unwrap();
    drop((udp, rest, sniffer));
    assert_eq!(device.live(Kind::Flow), 0, "flows end with their queue pair");
    assert_eq!(device.violations().0, 0, "{}", device.violations().1);
}

#[test]
fn counters_count_what_a_flow_takes() {
    let device = FunctionDevice::model();
    let context = Arc::new(device.context());
    let counters = Arc::new(Counters::new(&context).unwrap());
    counters.attach(Counter::Packets, 1).unwrap();
    let call = device.last_call("attach_counters_point_flow").unwrap();
    let packets = ffi::ibv_counter_description::IBV_COUNTER_PACKETS;
    assert_eq!((call.counter_attr.counter_desc, call.counter_attr.index), (packets, 1));
    assert_eq!((call.counter_attr.comp_mask, call.flow.is_null()), (0, true));
    counters.attach(Counter::Bytes, 0).unwrap();

    let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
    let queue = Arc::new(CompletionQueue::new(&context, 64).unwrap());
    let builder = QueuePair::builder(&domain, &queue, &queue, RawPacket);
    let builder = builder.max_send_wr(8).max_inline_data(128);
    let mut pair = builder.build().unwrap().into_queue_pair();
    pair.modify(StateTransition::to(QueuePairState::Init).port(1)).unwrap();
    pair.modify(StateTransition::to(QueuePairState::ReadyToReceive)).unwrap();
    pair.modify(StateTransition::to(QueuePairState::ReadyToSend)).unwrap();
    let rule = Rule::sniffer(1).count(&counters);
    let flow = pair.create_flow(&rule).unwrap();
    let (_, specs) = specs(&device);
    assert_eq!(specs[0].0, SpecType::IBV_FLOW_SPEC_ACTION_COUNT.0);
    assert_eq!(specs[0].1[8..], (counters.as_raw() as usize).to_ne_bytes());
    drop(rule);

    let one = frame(OUR_MAC, [10, 0, 0, 2], (1, 2), b"count me");
    for _ in 0..3 {
        send(&mut pair, &one);
    }
    assert!(received(&queue).is_empty());
    let mut values = [0; 2];
    counters.read(&mut values).unwrap();
    assert_eq!(values, [3 * one.len() as u64, 3]);
    let call = device.last_call("read_counters").unwrap();
    assert_eq!((call.counters_read, call.read_flags), (2, 0));
    counters.read_cached(&mut values[..1]).unwrap();
    let call = device.last_call("read_counters").unwrap();
    assert_eq!((call.counters_read, call.read_flags), (1, 1));
    let error = counters.read(&mut []).unwrap_err();
    assert_eq!((error.verb(), error.kind()), ("ibv_read_counters", ErrorKind::InvalidInput));
    assert_eq!(counters.attach(Counter::Bytes, 2).unwrap_err().kind(), ErrorKind::Busy);
    // This device, like mlx5, refuses counters for a flow that exists. The flow keeps those that it has.
    let late = Arc::new(Counters::new(&context).unwrap());
    let error = pair.attach_counters(flow, &late, Counter::Packets, 3).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let call = device.last_call("attach_counters_point_flow").unwrap();
    assert!(!call.flow.is_null());
    drop(late);
    assert_eq!(device.live(Kind::FlowCounters), 2);

    drop((counters, queue, domain, context));
    assert_eq!(device.live(Kind::FlowCounters), 2, "the flow keeps them");
    pair.destroy_flow(flow).unwrap();
    assert_eq!(device.live(Kind::FlowCounters), 0);
    let error = pair.destroy_flow(flow).expect_err("it is gone").to_string();
    assert!(error.contains("no such flow"), "{error}");
    pair.close().unwrap();
    device.assert_clean();
}

#[test]
fn a_bad_rule_never_reaches_the_provider() {
    let device = FunctionDevice::model();
    let (context, other) = (device.context(), device.context());
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let foreign = Counters::new(&other).unwrap();
    let rc = domain.create_qp(&queue, &queue, Rc);
    let mut rc = rc.build().unwrap().into_queue_pair();
    let mut raw = raw_packets(&domain, &queue);
    let mut another = raw_packets(&domain, &queue);
    let error = rc.create_flow(&Rule::sniffer(1)).unwrap_err();
    assert!(error.to_string().contains("only raw packet and UD"), "{error}");
    let mut many = Rule::new(1);
    for _ in 0..300 {
        many = many.matching(MplsMatch::new());
    }
    for (rule, what) in [
        (Rule::new(0), "the port is 0, and must be within 1..=1"),
        (Rule::new(2), "the port is 2"),
        (Rule::sniffer(1).matching(EthernetMatch::new()), "match no headers"),
        (Rule::new(1).count(&foreign), "another context"),
        (many, "the number of headers and actions is 300"),
    ] {
        let error = raw.create_flow(&rule).unwrap_err();
        assert_eq!((error.verb(), error.kind()), ("ibv_create_flow", ErrorKind::InvalidInput));
        assert!(error.to_string().contains(what), "{error}");
    }
    assert_eq!(device.calls("create_flow"), 0);
    let flow = raw.create_flow(&Rule::sniffer(1)).unwrap();
    assert_eq!(another.destroy_flow(flow).unwrap_err().kind(), ErrorKind::InvalidInput);
    assert_eq!(device.calls("destroy_flow"), 0, "it belongs to the other queue pair");
    // Counters without a counter: the provider knows it.
    let empty = Counters::new(&context).unwrap();
    let mut counting = raw_packets(&domain, &queue);
    let error = counting.create_flow(&Rule::sniffer(1).count(&empty)).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
    device.fail("create_flow").errno(libc::EEXIST).times(1);
    let error = counting.create_flow(&Rule::sniffer(1)).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EEXIST));
}

/// A flow that cannot be destroyed is leaked, with its queue pair and all that it was made from.
#[test]
fn a_flow_that_cannot_be_destroyed_is_leaked() {
    for explicit in [true, false] {
        let device = FunctionDevice::model();
        let context = Arc::new(device.context());
        let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
        let queue = Arc::new(CompletionQueue::new(&context, 64).unwrap());
        let counters = Arc::new(Counters::new(&context).unwrap());
        counters.attach(Counter::Packets, 0).unwrap();
        let builder = QueuePair::builder(&domain, &queue, &queue, RawPacket);
        let mut pair = builder.build().unwrap().into_queue_pair();
        let flow = pair.create_flow(&Rule::sniffer(1).count(&counters)).unwrap();
        device.fail("destroy_flow").errno(libc::EIO).times(1);
        if explicit {
            assert_eq!(pair.destroy_flow(flow).unwrap_err().raw_os_error(), Some(libc::EIO));
        }
        let error = pair.close().unwrap_err();
        assert!(error.to_string().contains("could not be destroyed"), "{error}");
        drop((counters, queue, domain, context));
        let verbs = [
            "destroy_flow",
            "destroy_qp",
            "destroy_cq",
            "dealloc_pd",
            "destroy_counters",
            "free_context",
        ];
        assert_eq!(verbs.map(|verb| device.calls(verb)), [1, 0, 0, 0, 0, 0]);
        assert_eq!(device.violations().0, 0, "{}", device.violations().1);
    }
}
