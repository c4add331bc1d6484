//! EFA: the very calls that the provider gets, and the errors on other devices.

use std::cell::RefCell;

use crate::support::{self, Call, Played, calls, play, plays, posts};
use ibverbs::device::EfaCapabilities;
use ibverbs::ffi::{self, *};
use ibverbs::operation::DatagramPeer;
use ibverbs::queue_pair::AddressVector;
use ibverbs::queue_pair::{SendOperations, Srd, SrdOptions};
use ibverbs::settings::MaxRnrRetries;
use ibverbs::*;
use ibverbs_function_device::FunctionDevice;

/// The settings of the played device, and the calls that it got.
#[derive(Default)]
struct Efa {
    attributes: efadv_device_attr,
    /// The error with which `efadv_create_qp_ex` fails.
    refuses: i32,
    /// The device has no extended posting interface.
    lacks_operations: bool,
    created: Vec<(usize, ibv_qp_init_attr_ex, efadv_qp_init_attr, u32)>,
    queried: Vec<(usize, u32)>,
    handles: Vec<(usize, u32)>,
}

thread_local! {
    static EFA: RefCell<Efa> = RefCell::default();
}

const ALL: EfaCapabilities = EfaCapabilities::RDMA_READ
    .union(EfaCapabilities::RDMA_WRITE)
    .union(EfaCapabilities::RNR_RETRY)
    .union(EfaCapabilities::UNSOLICITED_WRITE_RECEIVE);

/// Plays an EFA device with these abilities.
fn play_efa(capabilities: EfaCapabilities) {
    play(Played::Efa);
    let attributes = efadv_device_attr {
        max_sq_wr: 4096,
        max_rq_wr: 32768,
        max_sq_sge: 2,
        max_rq_sge: 3,
        inline_buf_size: 32,
        device_caps: capabilities.bits(),
        max_rdma_size: 1 << 30,
        ..Default::default()
    };
    EFA.set(Efa { attributes, ..Efa::default() });
}

unsafe extern "C" {
    fn __real_efadv_query_device(
        context: *mut ibv_context,
        attr: *mut efadv_device_attr,
        size: u32,
    ) -> i32;
    fn __real_efadv_query_ah(ah: *mut ibv_ah, attr: *mut efadv_ah_attr, size: u32) -> i32;
    fn __real_efadv_create_qp_ex(
        context: *mut ibv_context,
        attr: *mut ibv_qp_init_attr_ex,
        efa: *mut efadv_qp_init_attr,
        size: u32,
    ) -> *mut ibv_qp;
}

/// # Safety
///
/// As the C function.
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_efadv_query_device(
    context: *mut ibv_context,
    attr: *mut efadv_device_attr,
    size: u32,
) -> i32 {
    // SAFETY: all are the caller's.
    unsafe {
        if !plays(Played::Efa) {
            return __real_efadv_query_device(context, attr, size);
        }
        EFA.with_borrow_mut(|efa| {
            efa.queried.push((context as usize, size));
            attr.write(efa.attributes);
        });
        0
    }
}

/// # Safety
///
/// As the C function.
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_efadv_query_ah(
    ah: *mut ibv_ah,
    attr: *mut efadv_ah_attr,
    size: u32,
) -> i32 {
    // SAFETY: all are the caller's.
    unsafe {
        if !plays(Played::Efa) {
            return __real_efadv_query_ah(ah, attr, size);
        }
        EFA.with_borrow_mut(|efa| efa.handles.push((ah as usize, size)));
        (*attr).ahn = 0x1234;
        0
    }
}

/// # Safety
///
/// As the C function.
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_efadv_create_qp_ex(
    context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
    efa: *mut efadv_qp_init_attr,
    size: u32,
) -> *mut ibv_qp {
    // SAFETY: all are the caller's; a queue pair with the interface has functions to replace.
    unsafe {
        if !plays(Played::Efa) {
            return __real_efadv_create_qp_ex(context, attr, efa, size);
        }
        let refused = EFA.with_borrow_mut(|played| {
            played.created.push((context as usize, *attr, *efa, size));
            if played.lacks_operations && (*attr).send_ops_flags != 0 {
                return libc::EOPNOTSUPP;
            }
            played.refuses
        });
        if refused != 0 {
            *libc::__errno_location() = refused;
            return std::ptr::null_mut();
        }
        let qp = support::create_datagram_qp(context, &*attr);
        if !qp.is_null() && (*attr).send_ops_flags != 0 {
            support::record_posting(qp, (*attr).send_ops_flags);
        }
        qp
    }
}

fn created() -> (usize, ibv_qp_init_attr_ex, efadv_qp_init_attr, u32) {
    EFA.with_borrow(|efa| *efa.created.last().expect("efadv_create_qp_ex was called"))
}

#[test]
fn a_queue_pair_is_created_by_efas_own_verb() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let (sends, receives) = (context.create_cq(16).unwrap(), context.create_cq(16).unwrap());
    play_efa(ALL);
    let options = SrdOptions { unsolicited_write_receive: true, service_level: 5 };
    let prepared = domain
        .create_qp(&sends, &receives, Srd)
        .srd(options)
        .max_send_wr(48)
        .max_recv_wr(40)
        .max_send_sge(2)
        .max_recv_sge(3)
        .max_inline_data(32)
        .signal_all(true)
        .build()
        .unwrap();
    let (on, attr, efa, size) = created();
    assert_eq!(on, context.as_raw() as usize);
    assert_eq!(size as usize, size_of::<efadv_qp_init_attr>());
    assert_eq!((efa.comp_mask, efa.driver_qp_type, efa.flags, efa.sl), (0, 0, 1, 5));
    assert_eq!(attr.qp_type, ibv_qp_type::IBV_QPT_DRIVER);
    assert_eq!((attr.send_cq, attr.recv_cq), (sends.as_raw(), receives.as_raw()));
    assert!(attr.srq.is_null());
    assert_eq!((attr.cap.max_send_wr, attr.cap.max_recv_wr), (48, 40));
    assert_eq!((attr.cap.max_send_sge, attr.cap.max_recv_sge), (2, 3));
    assert_eq!((attr.cap.max_inline_data, attr.sq_sig_all), (32, 1));
    assert_eq!(attr.pd, domain.as_raw());
    use ffi::ibv_qp_init_attr_mask as mask;
    let both = mask::IBV_QP_INIT_ATTR_PD | mask::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    assert_eq!(attr.comp_mask, both.0, "EFA accepts no other");
    assert_eq!(attr.send_ops_flags, 0b1_1111, "writes, sends and reads");
    let queue_pair = prepared.into_queue_pair();
    assert_eq!(queue_pair.queue_pair_type(), QueuePairType::Driver);
    drop(queue_pair);
    drop((sends, receives));
    drop(domain);
    drop(context);
    device.assert_clean();
}

#[test]
fn a_queue_pair_has_the_operations_of_the_device() {
    use SendOperations as S;

    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let sends = S::SEND | S::SEND_WITH_IMMEDIATE;
    let writes = S::WRITE | S::WRITE_WITH_IMMEDIATE;
    for (capabilities, operations) in [
        (EfaCapabilities::empty(), sends),
        (EfaCapabilities::RDMA_READ, sends | S::READ),
        (EfaCapabilities::RDMA_WRITE, sends | writes),
        (ALL, sends | writes | S::READ),
    ] {
        play_efa(capabilities);
        assert_eq!(context.query_efa().unwrap().send_operations(), operations);
        let queue_pair = domain.create_qp(&queue, &queue, Srd).build().unwrap().into_queue_pair();
        assert_eq!(created().1.send_ops_flags, operations.bits());
        assert_eq!(queue_pair.extended_operations(), operations);
        // The queue pair has fewer, if the program says so.
        let builder = domain.create_qp(&queue, &queue, Srd).extended(S::SEND);
        assert_eq!(builder.build().unwrap().into_queue_pair().extended_operations(), S::SEND);
        assert_eq!(created().1.send_ops_flags, S::SEND.bits());
    }
}

#[test]
fn the_way_to_rts_is_that_of_datagrams() {
    use ibv_qp_attr_mask as m;

    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    for capabilities in [EfaCapabilities::empty(), ALL] {
        play_efa(capabilities);
        let prepared = domain
            .create_qp(&queue, &queue, Srd)
            .qkey(0x77)
            .max_rnr_retries(MaxRnrRetries::new(3).unwrap())
            .build()
            .unwrap();
        let queue_pair = prepared.activate().unwrap();
        let steps: Vec<_> = calls()
            .into_iter()
            .map(|call| match call {
                Call::Modify { mask, attr } => (mask, attr),
                other => panic!("{other:?}"),
            })
            .collect();
        let masks: Vec<_> = steps.iter().map(|(mask, _)| *mask).collect();
        let retries = capabilities.contains(EfaCapabilities::RNR_RETRY);
        let rts = m::IBV_QP_STATE | m::IBV_QP_SQ_PSN;
        let rts = if retries { rts | m::IBV_QP_RNR_RETRY } else { rts };
        let init = m::IBV_QP_STATE | m::IBV_QP_PKEY_INDEX | m::IBV_QP_PORT | m::IBV_QP_QKEY;
        assert_eq!(masks, [init.0, m::IBV_QP_STATE.0, rts.0]);
        assert_eq!((steps[0].1.state, steps[0].1.port, steps[0].1.qkey), (1, 1, 0x77));
        assert_eq!((steps[1].1.state, steps[2].1.state), (2, 3));
        assert_eq!(steps[2].1.rnr_retry, 3);
        assert_eq!(queue_pair.state().unwrap(), QueuePairState::ReadyToSend);
    }
}

/// Two queue pairs with a region each, and the path from one to the other.
#[test]
fn requests_name_where_they_go() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(64).unwrap();
    play_efa(ALL);
    let new = || domain.create_qp(&queue, &queue, Srd).max_send_wr(16).max_recv_wr(16);
    let prepared = new().build().unwrap();
    let peer = prepared.endpoint();
    let mut receiver = prepared.activate().unwrap();
    let mut sender = new().build().unwrap().activate().unwrap();
    let mut data = domain.allocate::<u8>(64).unwrap();
    data.fill(7);
    let mut arrived = domain.allocate::<u8>(128).unwrap();
    let access = AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
    let window = domain.allocate_shared::<u8>(64, access).unwrap();
    let path = AddressVector::to_peer(&context, 1, &peer).unwrap();
    let path = domain.create_ah(&path).unwrap();
    // SAFETY: regions and handles outlive the queue pairs' requests.
    unsafe { receiver.post_receive(&mut arrived, .., 9).unwrap() };
    calls();

    let remote = window.remote();
    let piece = [data.gather_element(8..24).unwrap()];
    let (lkey, address) = (data.lkey(), data.as_ptr() as u64 + 8);
    let mut into = domain.allocate::<u8>(16).unwrap();
    let (into_lkey, into_address) = (into.lkey(), into.as_ptr() as u64);
    let mut scatter = [into.scatter_element(..).unwrap()];
    // SAFETY: as above.
    unsafe {
        sender
            .batch(|batch| {
                let to = DatagramPeer { path: &path, number: peer.num(), qkey: 0x1111_1111 };
                batch.add(SendWorkRequest::new(&piece).to(to), 1)?;
                batch.add(WriteWorkRequest::new(&piece, remote).unsignaled().to(to), 2)?;
                batch.add(WriteWorkRequest::new(&piece, remote).immediate(0xabcd).to(to), 3)?;
                batch.add(ReadWorkRequest::new(&mut scatter, remote).to(to), 4)
            })
            .unwrap();
    }
    let to = ("wr_set_ud_addr", vec![path.as_raw() as u64, peer.num().into(), 0x1111_1111]);
    let sge = ("wr_set_sge", vec![lkey.into(), address, 16]);
    let (rkey, at) = (u64::from(remote.rkey()), remote.address());
    assert_eq!(
        posts(),
        [
            ("wr_start", vec![]),
            ("wr_send", vec![1, 2]),
            to.clone(),
            sge.clone(),
            ("wr_rdma_write", vec![2, 0, rkey, at]),
            to.clone(),
            sge.clone(),
            ("wr_rdma_write_imm", vec![3, 2, rkey, at, 0xabcd_u32.to_be().into()]),
            to.clone(),
            sge,
            ("wr_rdma_read", vec![4, 2, rkey, at]),
            to,
            ("wr_set_sge", vec![into_lkey.into(), into_address, 16]),
            ("wr_complete", vec![]),
        ]
    );
    // The send went through the device, to the receive of the other queue pair.
    let mut completions = [WorkCompletion::default(); 8];
    let mut found = Vec::new();
    while found.len() < 2 {
        let done = queue.poll(&mut completions).unwrap();
        assert!(!done.is_empty(), "only {found:?} completed");
        found.extend(done.iter().map(|completion| {
            (completion.wr_id(), completion.result().expect("a success").byte_len())
        }));
    }
    found.sort();
    assert_eq!(found.iter().map(|(wr_id, _)| *wr_id).collect::<Vec<_>>(), [1, 9]);
    drop((sender, receiver));
    assert_eq!(arrived[40..56], [7; 16], "behind the device's own header");
}

#[test]
fn a_request_needs_a_destination_and_an_operation() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    play_efa(EfaCapabilities::empty());
    let prepared = domain.create_qp(&queue, &queue, Srd).build().unwrap();
    let peer = prepared.endpoint();
    // The transport is a value here: the compiler does not look at the requests.
    let mut queue_pair = prepared.activate().unwrap().erase();
    let mut region = domain.allocate::<u8>(64).unwrap();
    let path = AddressVector::to_peer(&context, 1, &peer).unwrap();
    let path = domain.create_ah(&path).unwrap();
    calls();
    let piece = [region.gather_element(..16).unwrap()];
    // SAFETY: nothing is posted.
    let error = unsafe { queue_pair.batch(|b| b.add(SendWorkRequest::new(&piece), 1)) };
    let error = error.unwrap_err();
    assert!(error.to_string().contains("must say where it goes"), "{error}");
    let window = domain.allocate_shared::<u8>(64, AccessFlags::REMOTE_READ).unwrap();
    let remote = window.remote();
    let mut into = [region.scatter_element(..16).unwrap()];
    // SAFETY: nothing is posted.
    let error = unsafe {
        queue_pair.batch(|batch| {
            let to = DatagramPeer { path: &path, number: peer.num(), qkey: 1 };
            batch.add(ReadWorkRequest::new(&mut into, remote).to(to), 1)
        })
    };
    let error = error.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.to_string().contains("not built for this operation"), "{error}");
    let names: Vec<_> = posts().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["wr_start", "wr_abort", "wr_start", "wr_abort"]);
    // A post without a batch needs a peer, which there is none of.
    let piece = [region.gather_element(..16).unwrap()];
    // SAFETY: nothing is posted.
    let error = unsafe { queue_pair.post_send(&region, ..16, 1) }.unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "{error}");
    let to = DatagramPeer { path: &path, number: 1 << 24, qkey: 1 };
    // SAFETY: nothing is posted.
    let error = unsafe { queue_pair.batch(|b| b.add(SendWorkRequest::new(&piece).to(to), 1)) };
    let error = error.unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "{error}");
}

#[test]
fn sizes_are_compared_with_efas_own_limits() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    play_efa(EfaCapabilities::empty());
    let new = || domain.create_qp(&queue, &queue, Srd);
    for (builder, text) in [
        (new().max_send_wr(4097), "max_send_wr is 4097, and must be within 0..=4096"),
        (new().max_recv_wr(32769), "max_recv_wr is 32769, and must be within 0..=32768"),
        (new().max_send_sge(3), "max_send_sge is 3, and must be within 0..=2"),
        (new().max_recv_sge(4), "max_recv_sge is 4, and must be within 0..=3"),
        (new().max_inline_data(33), "max_inline_data is 33, and must be within 0..=32"),
    ] {
        let error = builder.build().unwrap_err().to_string();
        assert_eq!(error, format!("efadv_create_qp_ex: {text}"));
    }
    let error = new()
        .srd(SrdOptions { unsolicited_write_receive: true, service_level: 0 })
        .build()
        .unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EOPNOTSUPP), "{error}");
    let shared = SharedReceiveQueue::new(&domain, 4, 1).unwrap();
    let error = new().srq(&shared).build().unwrap_err();
    assert!(error.to_string().contains("EFA has no shared receive queues"), "{error}");
    assert!(EFA.with_borrow(|efa| efa.created.is_empty()), "the provider was not called");
    // The queue takes more than ibv_query_device says, which has the smaller one of both queues.
    let most = device_limit(&context);
    assert!(most < 32768);
    drop(new().max_recv_wr(32768).build().unwrap());
    assert_eq!(created().1.cap.max_recv_wr, 32768);
}

fn device_limit(context: &Context<'_>) -> u32 {
    context.query_device().unwrap().max_qp_wr()
}

#[test]
fn the_provider_may_refuse() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    play_efa(ALL);
    EFA.with_borrow_mut(|efa| efa.refuses = libc::ENOMEM);
    let error = domain.create_qp(&queue, &queue, Srd).build().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENOMEM));
    assert!(error.to_string().starts_with("efadv_create_qp_ex: "), "{error}");
}

/// An old provider, or a program that goes without the interface: sends go as a list.
#[test]
fn without_the_interface_a_queue_pair_sends() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    play_efa(ALL);
    EFA.with_borrow_mut(|efa| efa.lacks_operations = true);
    let new = || domain.create_qp(&queue, &queue, Srd);
    let error = new().build().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EOPNOTSUPP), "{error}");
    let prepared = new().extended_if_available(SendOperations::all()).build().unwrap();
    assert_eq!((created().1.send_ops_flags, created().2.driver_qp_type), (0, 0));
    let peer = prepared.endpoint();
    let mut queue_pair = prepared.activate().unwrap().erase();
    assert!(queue_pair.extended_operations().is_empty());
    let region = domain.allocate::<u8>(64).unwrap();
    let window = domain.allocate_shared::<u8>(64, AccessFlags::REMOTE_WRITE).unwrap();
    let path = AddressVector::to_peer(&context, 1, &peer).unwrap();
    let path = domain.create_ah(&path).unwrap();
    let piece = [region.gather_element(..16).unwrap()];
    // SAFETY: region and handle outlive the requests.
    unsafe {
        queue_pair
            .batch(|batch| {
                let error = batch.add(SendWorkRequest::new(&piece), 1).unwrap_err();
                assert!(error.to_string().contains("where it goes"), "{error}");
                let to = DatagramPeer { path: &path, number: peer.num(), qkey: 0x77 };
                // In the C struct, the address of a datagram is where that of a write would be.
                let remote = window.remote();
                let write = WriteWorkRequest::new(&piece, remote).to(to);
                let error = batch.add(write, 1).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
                batch.add(SendWorkRequest::new(&piece).immediate(0xabcd).to(to), 2)
            })
            .unwrap();
    }
    let posted = device.posted(0).unwrap();
    assert_eq!((posted.wr_id, posted.send.opcode), (2, ibv_wr_opcode::IBV_WR_SEND_WITH_IMM));
    // SAFETY: the request is a datagram.
    let to = unsafe { posted.send.wr.ud };
    assert_eq!((to.remote_qpn, to.remote_qkey), (peer.num(), 0x77));
    assert!(device.posted(1).is_none(), "the others were not posted");
}

#[test]
fn limits_and_numbers_are_queried() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    play_efa(ALL);
    let efa = context.query_efa().unwrap();
    assert_eq!((efa.max_send_wr(), efa.max_recv_wr()), (4096, 32768));
    assert_eq!((efa.max_send_sge(), efa.max_recv_sge()), (2, 3));
    assert_eq!((efa.max_inline_data(), efa.max_rdma_size()), (32, 1 << 30));
    assert_eq!(efa.capabilities(), ALL);
    assert_eq!(efa.as_raw().device_caps, ALL.bits());
    let queried = EFA.with_borrow(|efa| efa.queried.clone());
    let size = size_of::<efadv_device_attr>() as u32;
    assert_eq!(queried, [(context.as_raw() as usize, size)]);
    let gid = context.routable_gid(1).unwrap();
    let path = AddressVector::new(1, 0).global(gid.gid, 0);
    let handle = domain.create_ah(&path).unwrap();
    assert_eq!(handle.efa_number().unwrap(), 0x1234);
    let handles = EFA.with_borrow(|efa| efa.handles.clone());
    assert_eq!(handles, [(handle.as_raw() as usize, 16)], "the size of struct efadv_ah_attr");
}

/// The provider's own functions, on a device that is not EFA.
#[test]
fn other_devices_are_told_apart() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let error = context.query_efa().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("this is no EFA device"), "{error}");
    let error = domain.create_qp(&queue, &queue, Srd).build().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EOPNOTSUPP));
    assert!(error.to_string().contains("this is no EFA device"), "{error}");
    assert_eq!(device.calls("create_qp_ex"), 0);
    let mut attr = ibv_qp_init_attr_ex {
        qp_type: ibv_qp_type::IBV_QPT_DRIVER,
        pd: domain.as_raw(),
        ..Default::default()
    };
    let mut efa = SrdOptions::default().to_raw();
    let size = size_of_val(&efa) as u32;
    // SAFETY: the context is live, and the structs are ours.
    let raw = unsafe { efadv_create_qp_ex(context.as_raw(), &mut attr, &mut efa, size) };
    assert!(raw.is_null(), "the function itself is linked, and refuses");
    assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EOPNOTSUPP));
    let gid = context.routable_gid(1).unwrap();
    let handle = domain.create_ah(&AddressVector::new(1, 0).global(gid.gid, 0)).unwrap();
    let error = handle.efa_number().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EOPNOTSUPP), "{error}");
}
