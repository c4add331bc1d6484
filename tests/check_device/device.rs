//! The device, and what it says of itself.

use std::sync::LazyLock;

use ibverbs::device::{GidType, LinkLayer, PortState, TransportType};
use ibverbs::{
    CompletionQueue, Context, Error, ErrorKind, ProtectionDomain, QueuePairBuilder, Rc,
    settings::MaximumTransferUnit,
};
use ibverbs_software::Device;

use crate::{figure, unsupported};

/// The name of the device. If `IBVERBS_SOFTWARE` names devices of software, they are made first; "odd0" is one
/// with odd limits.
pub(crate) static NAME: LazyLock<&'static str> = LazyLock::new(|| {
    let name =
        std::env::var("IBVERBS_CHECK_DEVICE").expect("IBVERBS_CHECK_DEVICE names the device");
    if name == "odd0" {
        let device = Device::builder()
            .name(&name)
            .mtu(MaximumTransferUnit::Mtu256)
            .max_qp(6)
            .max_qp_wr(13)
            .max_sge(1)
            .max_inline_data(0)
            .max_cq(3)
            .max_cqe(77)
            .max_mr(9)
            .max_mr_size(5 << 20)
            .max_rd_atomic(1)
            .max_srq(0)
            .max_ah(1)
            .build()
            .expect("a device of software");
        device.register();
        std::mem::forget(device);
    } else if std::env::var_os("IBVERBS_SOFTWARE").is_some() {
        std::mem::forget(ibverbs_software::register_if_none().expect("a device of software"));
    }
    name.leak()
});

pub(crate) fn open() -> Context<'static> {
    ibverbs::open(*NAME).unwrap()
}

/// The first port that is up.
pub(crate) fn port(context: &Context<'_>) -> u8 {
    let ports = 1..=context.query_device().unwrap().phys_port_cnt();
    let up = |port: &u8| context.query_port(*port).unwrap().state() == PortState::Active;
    ports.clone().find(up).unwrap_or_else(|| panic!("none of the ports {ports:?} is up"))
}

pub(crate) fn is_iwarp(context: &Context<'_>) -> bool {
    context.transport_type() == TransportType::Iwarp
}

/// Returns what was made, or reports that the device or its provider lacks it. Other errors fail the test.
pub(crate) fn supported<T>(what: &str, result: Result<T, Error>) -> Option<T> {
    match result {
        Ok(made) => Some(made),
        Err(error) if error.kind() == ErrorKind::Unsupported => {
            unsupported(&format!("{what}: {error}"));
            None
        }
        Err(error) => panic!("{what}: {error}"),
    }
}

/// A queue pair of type RC with as many requests, elements and inline bytes as the device has, at most these.
pub(crate) fn reliable<'a>(
    domain: &'a ProtectionDomain<'a>,
    queue: &'a CompletionQueue<'a>,
) -> QueuePairBuilder<'a, Rc> {
    let limits = domain.context().query_device().unwrap();
    let builder = domain.create_qp(queue, queue, Rc).port(port(domain.context()));
    builder.max_send_wr(limits.max_qp_wr().min(8)).max_recv_wr(limits.max_qp_wr().min(8))
}

/// Whether the device has RC. EFA has not.
pub(crate) fn has_reliable(context: &Context<'_>) -> bool {
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(4).unwrap();
    supported("queue pairs of type RC", reliable(&domain, &queue).build()).is_some()
}

#[test]
fn says_what_it_is() {
    let context = open();
    let device = context.query_device().unwrap();
    let raw = device.as_raw().orig_attr;
    figure("firmware", &device.firmware_version());
    let (vendor, part) = (device.vendor_id(), device.vendor_part_id());
    figure("vendor, part, version", &format!("{vendor:#x}, {part}, {}", device.hardware_version()));
    figure("node, transport", &format!("{:?}", context.transport_type()));
    figure("qp, qp_wr, sge", &format!("{}, {}, {}", raw.max_qp, raw.max_qp_wr, raw.max_sge));
    figure("cq, cqe", &format!("{}, {}", raw.max_cq, raw.max_cqe));
    figure("mr, mr_size", &format!("{}, {}", raw.max_mr, raw.max_mr_size));
    figure("srq, ah, mw", &format!("{}, {}, {}", raw.max_srq, raw.max_ah, raw.max_mw));
    figure("reads, atomics", &format!("{}, {:?}", raw.max_qp_rd_atom, device.atomic_capability()));
    figure("capabilities", &format!("{:?}", device.capabilities()));
    assert!(device.phys_port_cnt() > 0 && device.max_sge() > 0 && device.max_cqe() > 0);
    for number in 1..=device.phys_port_cnt() {
        let port = context.query_port(number).unwrap();
        let (mtu, longest) = (port.active_mtu(), port.max_message_size());
        let text =
            format!("{:?}, {:?}, MTU {mtu:?}, {longest} bytes", port.state(), port.link_layer());
        figure(&format!("port {number}"), &text);
        if port.link_layer() == LinkLayer::InfiniBand {
            assert_ne!(context.query_pkey(number, 0).unwrap(), 0);
        }
    }
    // The kinds of addresses, but not the addresses themselves: a report is public.
    let table = context.gid_table().unwrap();
    for entry in &table {
        assert_eq!(context.query_gid(entry.port, entry.index).unwrap(), *entry);
    }
    let count = |kind| table.iter().filter(|entry| entry.gid_type == kind).count();
    let [ib, v1, v2] = [GidType::InfiniBand, GidType::RoceV1, GidType::RoceV2].map(count);
    figure("GIDs", &format!("InfiniBand or none {ib}, RoCE v1 {v1}, RoCE v2 {v2}"));
    let routable = context.routable_gid(port(&context)).map(|entry| entry.index);
    figure("own GID", &routable.map_or_else(|error| error.to_string(), |index| index.to_string()));
}

/// The tests of `channels` and `queue_pairs` are written for a certain size of requests.
#[test]
fn has_what_the_common_tests_use() {
    let context = open();
    if !has_reliable(&context) {
        println!("LIMITS: no RC");
        return;
    }
    let device = context.query_device().unwrap();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(4).unwrap();
    for (what, has, used) in [
        ("elements in a request", device.max_sge(), 4),
        ("requests in a queue", device.max_qp_wr(), 40),
        ("completions in a queue", device.max_cqe(), 256),
    ] {
        if has < used {
            println!("LIMITS: {has} {what}, and they use {used}");
            return;
        }
    }
    // All of it at once, since a device may grant less than what it says, or than it was asked for.
    let queue_pair = reliable(&domain, &queue).max_send_wr(40).max_recv_wr(40);
    let built = queue_pair.max_send_sge(4).max_recv_sge(4).max_inline_data(64).build();
    if let Err(error) = built {
        println!("LIMITS: no queue pair as they build it: {error}");
    }
    let granted = context.create_cq(256).map(|queue| queue.capacity());
    if !granted.as_ref().is_ok_and(|&entries| entries >= 256) {
        println!("LIMITS: {granted:?} completions in a queue, and they use 256");
    }
}
