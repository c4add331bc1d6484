//! Shows RDMA devices, as rdma-core's `ibv_devinfo` does: the same options, the same layout. It also shows
//! the devices' counters.

#[path = "common/broken_pipe.rs"]
mod broken_pipe;

use std::error::Error;
use std::fmt::Display;
use std::fs;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use ibverbs::device::{
    AtomicCapability, Counters, DeviceAttributes, GidType, LinkLayer, OnDemandPagingOperations,
    PortAttributes, PortState, QueuePairTypes, RawPacketCapabilities, TransportType,
};
use ibverbs::{Context, Device, Gid, QueuePairType, settings::MaximumTransferUnit};
use lexopt::prelude::*;

const USAGE: &str = "\
Usage: devinfo                print the attributes of all devices

Options:
  -d, --ib-dev=<dev>     use IB device <dev> (default all devices)
  -i, --ib-port=<port>   use port <port> of IB device (default all ports)
  -l, --list             print only the IB devices names
  -c, --counters         print the counters of the devices and their ports
  -w, --watch=<seconds>  print by how much the counters move within this time
  -v, --verbose          print all the attributes of the IB device(s)
  -h, --help             print this";

#[derive(Default)]
struct Options {
    device: Option<String>,
    port: Option<u8>,
    list: bool,
    counters: bool,
    watch: Option<Duration>,
    verbose: bool,
}

fn main() -> ExitCode {
    broken_pipe::end_quietly();
    let options = match parse() {
        Ok(Some(options)) => options,
        Ok(None) => {
            println!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("devinfo: {error}\n{USAGE}");
            return ExitCode::FAILURE;
        }
    };
    match run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("devinfo: {error}");
            ExitCode::FAILURE
        }
    }
}

fn parse() -> Result<Option<Options>, lexopt::Error> {
    let mut options = Options::default();
    let mut arguments = lexopt::Parser::from_env();
    while let Some(argument) = arguments.next()? {
        match argument {
            Short('d') | Long("ib-dev") => options.device = Some(arguments.value()?.string()?),
            Short('i') | Long("ib-port") => options.port = Some(arguments.value()?.parse()?),
            Short('c') | Long("counters") => options.counters = true,
            Short('w') | Long("watch") => {
                options.watch = Some(arguments.value()?.parse_with(|text| {
                    let seconds = text.parse().map_err(|_| "it is not a number")?;
                    Duration::try_from_secs_f64(seconds).map_err(|_| "it is not a time")
                })?);
            }
            Short('l') | Long("list") => options.list = true,
            Short('v') | Long("verbose") => options.verbose = true,
            Short('h') | Long("help") => return Ok(None),
            other => return Err(other.unexpected()),
        }
    }
    Ok(Some(options))
}

fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let devices = ibverbs::devices()?;
    if options.list {
        println!("{} HCA{} found:", devices.len(), if devices.len() == 1 { "" } else { "s" });
        for device in &devices {
            println!("\t{}", device.name());
        }
        println!();
        return Ok(());
    }
    let mut shown = 0;
    for device in &devices {
        if options.device.as_deref().is_none_or(|name| name == device.name()) {
            let show = match options.counters || options.watch.is_some() {
                true => show_counters,
                false => show_device,
            };
            show(device, options).map_err(|error| format!("{}: {error}", device.name()))?;
            shown += 1;
        }
    }
    match (&options.device, devices.why_empty()) {
        (_, Some(error)) => Err(error.into()),
        (Some(name), None) if shown == 0 => Err(format!("there is no RDMA device '{name}'").into()),
        _ => Ok(()),
    }
}

fn show_device(device: Device<'_>, options: &Options) -> Result<(), Box<dyn Error>> {
    let context = device.open()?;
    let attributes = context.query_device()?;
    if let Some(port) = options.port {
        context.query_port(port)?; // an error that says which ports there are
    }

    println!("hca_id:\t{}", device.name());
    let transport = device.transport_type();
    field("transport", with_number(transport_name(transport), transport_number(device)));
    if !attributes.firmware_version().is_empty() {
        field("fw_ver", attributes.firmware_version());
    }
    field("node_guid", attributes.node_guid());
    field("sys_image_guid", attributes.system_image_guid());
    field("vendor_id", format_args!("{:#06x}", attributes.vendor_id()));
    field("vendor_part_id", attributes.vendor_part_id());
    field("hw_ver", format_args!("{:#X}", attributes.hardware_version()));
    if let Ok(board) = fs::read_to_string(device.sysfs_path().join("board_id")) {
        field("board_id", board.trim_end());
    }
    field("phys_port_cnt", attributes.phys_port_cnt());
    if options.verbose {
        show_limits(&attributes);
        show_capabilities(&attributes);
        field("num_comp_vectors", context.completion_vectors());
    }

    for number in 1..=attributes.phys_port_cnt() {
        if options.port.is_none_or(|port| port == number) {
            println!("\t\tport:\t{number}");
            let port = context.query_port(number)?;
            show_port(&port);
            if options.verbose {
                show_port_details(&port, transport);
                show_gids(&context, number, port.link_layer())?;
            }
            println!();
        }
    }
    Ok(context.close()?)
}

/// The counters of a device, or their rates of change.
fn show_counters(device: Device<'_>, options: &Options) -> Result<(), Box<dyn Error>> {
    let context = device.open()?;
    if let Some(port) = options.port {
        context.query_port(port)?; // an error that says which ports there are
    }
    let ports = 1..=context.query_device()?.phys_port_cnt();
    let ports: Vec<u8> =
        ports.filter(|number| options.port.is_none_or(|port| port == *number)).collect();
    let read = || -> ibverbs::Result<Vec<Counters>> {
        let of_ports = ports.iter().map(|port| context.port_counters(*port));
        std::iter::once(context.counters()).chain(of_ports).collect()
    };
    let mut tables = read()?;
    if let Some(time) = options.watch {
        thread::sleep(time);
        tables = read()?.iter().zip(&tables).map(|(now, before)| now.since(before)).collect();
    }
    println!("hca_id:\t{}", device.name());
    for (index, table) in tables.iter().enumerate() {
        if index > 0 {
            println!("\t\tport:\t{}", ports[index - 1]);
        }
        for (name, value) in table.iter() {
            println!("\t\t\t{name:<32}{value:>20}");
        }
    }
    println!();
    context.close().map_err(Into::into)
}

fn show_limits(a: &DeviceAttributes) {
    field("max_mr_size", format_args!("{:#x}", a.max_mr_size()));
    field("page_size_cap", format_args!("{:#x}", a.page_sizes()));
    field("max_qp", a.max_qp());
    field("max_qp_wr", a.max_qp_wr());
    let capabilities = a.capabilities().bits() as u32;
    field("device_cap_flags", format_args!("{capabilities:#010x}"));
    // The upper half has a field of its own.
    flags("", &ibverbs::device::DeviceCapabilities::from_bits_retain(capabilities.into()));
    field("max_sge", a.max_sge());
    field("max_sge_rd", a.max_sge_rd());
    field("max_cq", a.max_cq());
    field("max_cqe", a.max_cqe());
    field("max_mr", a.max_mr());
    field("max_pd", a.max_pd());
    field("max_qp_rd_atom", a.max_qp_rd_atom());
    field("max_ee_rd_atom", a.max_ee_rd_atom());
    field("max_res_rd_atom", a.max_res_rd_atom());
    field("max_qp_init_rd_atom", a.max_qp_init_rd_atom());
    field("max_ee_init_rd_atom", a.max_ee_init_rd_atom());
    let atomics = match a.atomic_capability() {
        AtomicCapability::None => "ATOMIC_NONE",
        AtomicCapability::Device => "ATOMIC_HCA",
        AtomicCapability::Global => "ATOMIC_GLOB",
        _ => "invalid atomic capability",
    };
    field("atomic_cap", with_number(atomics, a.as_raw().orig_attr.atomic_cap.0));
    field("max_ee", a.max_ee());
    field("max_rdd", a.max_rdd());
    field("max_mw", a.max_mw());
    field("max_raw_ipv6_qp", a.max_raw_ipv6_qp());
    field("max_raw_ethy_qp", a.max_raw_ethy_qp());
    field("max_mcast_grp", a.max_mcast_grp());
    field("max_mcast_qp_attach", a.max_mcast_qp_attach());
    field("max_total_mcast_qp_attach", a.max_total_mcast_qp_attach());
    field("max_ah", a.max_ah());
    field("max_fmr", a.max_fmr());
    if a.max_fmr() > 0 {
        field("max_map_per_fmr", a.max_map_per_fmr());
    }
    field("max_srq", a.max_srq());
    if a.max_srq() > 0 {
        field("max_srq_wr", a.max_srq_wr());
        field("max_srq_sge", a.max_srq_sge());
    }
    field("max_pkeys", a.max_pkeys());
    field("local_ca_ack_delay", a.local_ca_ack_delay());
}

fn show_capabilities(a: &DeviceAttributes) {
    let paging = a.on_demand_paging();
    println!("\tgeneral_odp_caps:");
    flags("ODP_", &paging.general);
    for (name, operations) in
        [("rc", paging.rc), ("uc", paging.uc), ("ud", paging.ud), ("xrc", paging.xrc)]
    {
        println!("\t{name}_odp_caps:");
        show_paged_operations(operations);
    }
    match a.completion_timestamp_mask() {
        0 => println!("\tcompletion_timestamp_mask not supported"),
        mask => println!("\tcompletion timestamp_mask:\t\t\t{mask:#018x}"),
    }
    match a.core_clock() {
        0 => println!("\tcore clock not supported"),
        clock => println!("\thca_core_clock:\t\t\t{clock}kHZ"),
    }
    if !a.raw_packet().is_empty() {
        println!("\traw packet caps:");
        for (flag, text) in [
            (RawPacketCapabilities::CVLAN_STRIPPING, "C-VLAN stripping offload"),
            (RawPacketCapabilities::SCATTER_FCS, "Scatter FCS offload"),
            (RawPacketCapabilities::IP_CSUM, "IP csum offload"),
            (RawPacketCapabilities::DELAY_DROP, "Delay drop"),
        ] {
            if a.raw_packet().contains(flag) {
                item(text);
            }
        }
    }
    let all = a.as_raw().device_cap_flags_ex;
    field("device_cap_flags_ex", format_args!("{all:#X}"));
    let upper = a.capabilities().bits() >> 32 << 32;
    flags("", &ibverbs::device::DeviceCapabilities::from_bits_retain(upper));

    let segmentation = a.segmentation();
    println!("\ttso_caps:");
    println!("\t\tmax_tso:\t\t\t{}", segmentation.max_tso);
    if segmentation.max_tso > 0 {
        show_queue_pair_types(segmentation.supported_types);
    }
    let scaling = a.receive_scaling();
    println!("\trss_caps:");
    for (name, value) in [
        ("max_rwq_indirection_tables", scaling.max_rwq_indirection_tables),
        ("max_rwq_indirection_table_size", scaling.max_rwq_indirection_table_size),
    ] {
        println!("\t\t{name}:\t\t\t{value}");
    }
    println!("\t\trx_hash_function:\t\t\t\t{:#x}", scaling.rx_hash_function);
    println!("\t\trx_hash_fields_mask:\t\t\t\t{:#X}", scaling.rx_hash_fields_mask);
    if !scaling.supported_types.is_empty() {
        show_queue_pair_types(scaling.supported_types);
    }
    field("max_wq_type_rq", a.max_wq_type_rq());
    let pacing = a.packet_pacing();
    println!("\tpacket_pacing_caps:");
    println!("\t\tqp_rate_limit_min:\t{}kbps", pacing.min_rate);
    println!("\t\tqp_rate_limit_max:\t{}kbps", pacing.max_rate);
    if pacing.max_rate > 0 {
        show_queue_pair_types(pacing.supported_types);
    }
    let tags = a.tag_matching();
    if tags.max_tags > 0 {
        field("max_rndv_hdr_size", tags.max_rendezvous_header);
        field("max_num_tags", tags.max_tags);
        field("max_ops", tags.max_operations);
        field("max_sge", tags.max_sge);
        println!("\tflags:");
        flags("IBV_TM_CAP_", &tags.flags);
    } else {
        println!("\ttag matching not supported");
    }
    let moderation = a.moderation();
    if moderation.max_count > 0 && moderation.max_period > 0 {
        println!("\n\tcq moderation caps:");
        println!("\t\tmax_cq_count:\t{}", moderation.max_count);
        println!("\t\tmax_cq_period:\t{} us\n", moderation.max_period);
    }
    if a.max_device_memory() > 0 {
        println!("\tmaximum available device memory:\t{}Bytes\n", a.max_device_memory());
    }
}

fn show_paged_operations(operations: OnDemandPagingOperations) {
    if operations.is_empty() {
        return item("NO SUPPORT");
    }
    let mut named = operations.iter_names();
    for (name, _) in named.by_ref() {
        let name = match name {
            "RECEIVE" => "RECV",
            "SRQ_RECEIVE" => "SRQ",
            name => name,
        };
        item(format_args!("SUPPORT_{name}"));
    }
    unknown_flags(named.remaining().bits().into());
}

fn show_queue_pair_types(types: QueuePairTypes) {
    println!("\t\tsupported_qp:");
    let mut rest = types.bits();
    for (queue_pair_type, name) in [
        (QueuePairType::RawPacket, "SUPPORT_RAW_PACKET"),
        (QueuePairType::UnreliableDatagram, "SUPPORT_UD"),
    ] {
        if types.contains(queue_pair_type) {
            item(name);
            rest &= !(1 << ibverbs::ffi::ibv_qp_type::from(queue_pair_type).0);
        }
    }
    unknown_flags(rest.into());
}

fn show_port(port: &PortAttributes) {
    let raw = port.as_raw();
    let state = match port.state() {
        PortState::Down => "PORT_DOWN",
        PortState::Initialize => "PORT_INIT",
        PortState::Armed => "PORT_ARMED",
        PortState::Active => "PORT_ACTIVE",
        _ => "invalid state",
    };
    let link_layer = match port.link_layer() {
        LinkLayer::Unspecified => "Unspecified",
        LinkLayer::InfiniBand => "InfiniBand",
        LinkLayer::Ethernet => "Ethernet",
        _ => "Unknown",
    };
    port_field("state", with_number(state, raw.state.0));
    port_field("max_mtu", with_number(mtu(port.max_mtu()), raw.max_mtu.0));
    port_field("active_mtu", with_number(mtu(port.active_mtu()), raw.active_mtu.0));
    port_field("sm_lid", port.sm_lid());
    port_field("port_lid", port.lid());
    port_field("port_lmc", format_args!("{:#04x}", port.lmc()));
    port_field("link_layer", link_layer);
}

fn show_port_details(port: &PortAttributes, transport: TransportType) {
    let raw = port.as_raw();
    port_field("max_msg_sz", format_args!("{:#x}", port.max_message_size()));
    port_field("port_cap_flags", format_args!("{:#010x}", port.capability_flags()));
    port_field("port_cap_flags2", format_args!("{:#06x}", port.capability_flags2()));
    let lanes = match port.max_vl_num() {
        1 => "1",
        2 => "2",
        3 => "4",
        4 => "8",
        5 => "15",
        _ => "invalid value",
    };
    port_field("max_vl_num", with_number(lanes, port.max_vl_num()));
    port_field("bad_pkey_cntr", format_args!("{:#x}", port.bad_pkey_counter()));
    port_field("qkey_viol_cntr", format_args!("{:#x}", port.qkey_violation_counter()));
    port_field("sm_sl", port.sm_sl());
    port_field("pkey_tbl_len", port.pkey_table_len());
    port_field("gid_tbl_len", port.gid_table_len());
    port_field("subnet_timeout", port.subnet_timeout());
    port_field("init_type_reply", port.init_type_reply());
    let width = port.width().map_or("invalid width".into(), |lanes| lanes.to_string());
    port_field("active_width", with_number(width + "X", raw.active_width));
    let speed =
        if raw.active_speed_ex == 0 { raw.active_speed.into() } else { raw.active_speed_ex };
    port_field("active_speed", with_number(speed_name(speed), speed));
    if transport == TransportType::InfiniBand {
        let state = match raw.phys_state {
            1 => "SLEEP",
            2 => "POLLING",
            3 => "DISABLED",
            4 => "PORT_CONFIGURATION TRAINNING",
            5 => "LINK_UP",
            6 => "LINK_ERROR_RECOVERY",
            7 => "PHY TEST",
            _ => "invalid physical state",
        };
        port_field("phys_state", with_number(state, raw.phys_state));
    }
}

fn show_gids(context: &Context<'_>, port: u8, link_layer: LinkLayer) -> ibverbs::Result<()> {
    for entry in context.gid_table()? {
        if entry.port != port || entry.gid.interface_id() == 0 {
            continue;
        }
        let (gid, protocol) = match entry.gid_type {
            GidType::RoceV2 => (entry.gid.to_string(), ", RoCE v2"),
            GidType::InfiniBand | GidType::RoceV1 => (groups(entry.gid), ", RoCE v1"),
            _ => continue,
        };
        let protocol = if link_layer == LinkLayer::Ethernet { protocol } else { "" };
        println!("\t\t\tGID[{:3}]:\t\t{gid}{protocol}", entry.index);
    }
    Ok(())
}

/// Eight groups of four digits, without abbreviation.
fn groups(gid: Gid) -> String {
    gid.to_bytes()
        .chunks(2)
        .map(|pair| format!("{:02x}{:02x}", pair[0], pair[1]))
        .collect::<Vec<_>>()
        .join(":")
}

/// A line whose value is in the column for the values of a device.
fn field(name: &str, value: impl Display) {
    println!("\t{name}:{}{value}", tabs(8 + name.len() + 1, 40));
}

/// A line whose value is in the column for the values of a port.
fn port_field(name: &str, value: impl Display) {
    println!("\t\t\t{name}:{}{value}", tabs(24 + name.len() + 1, 48));
}

/// The tabs from one column to another: at least one.
fn tabs(from: usize, to: usize) -> String {
    "\t".repeat((to / 8).saturating_sub(from / 8).max(1))
}

/// A line of a list.
fn item(text: impl Display) {
    println!("\t\t\t\t\t{text}");
}

/// The names of the flags that are set, and the bits without a name.
fn flags<F: bitflags::Flags<Bits: Into<u64>>>(prefix: &str, flags: &F) {
    let mut named = flags.iter_names();
    for (name, _) in named.by_ref() {
        item(format_args!("{prefix}{name}"));
    }
    unknown_flags(named.remaining().bits().into());
}

fn unknown_flags(bits: u64) {
    if bits != 0 {
        item(format_args!("Unknown flags: {bits:#X}"));
    }
}

fn with_number(text: impl Display, number: impl Display) -> String {
    format!("{text} ({number})")
}

fn transport_name(transport: TransportType) -> &'static str {
    match transport {
        TransportType::InfiniBand => "InfiniBand",
        TransportType::Iwarp => "iWARP",
        TransportType::Usnic => "usNIC",
        TransportType::UsnicUdp => "usNIC UDP",
        TransportType::Unspecified => "unspecified",
        _ => "invalid transport",
    }
}

fn transport_number(device: Device<'_>) -> i32 {
    ibverbs::ffi::ibv_transport_type::from(device.transport_type()).0
}

fn mtu(mtu: Option<MaximumTransferUnit>) -> String {
    mtu.map_or("invalid MTU".into(), |mtu| mtu.bytes().to_string())
}

/// The C tool's names, which round the speed more than [`ibverbs::device::LinkSpeed`].
fn speed_name(speed: u32) -> &'static str {
    match speed {
        1 => "2.5 Gbps",
        2 => "5.0 Gbps",
        4 | 8 => "10.0 Gbps",
        16 => "14.0 Gbps",
        32 => "25.0 Gbps",
        64 => "50.0 Gbps",
        128 => "100.0 Gbps",
        256 => "200.0 Gbps",
        _ => "invalid speed",
    }
}
