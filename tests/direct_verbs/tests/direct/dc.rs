//! DC of mlx5: the very calls that the provider gets, and the errors on other devices.

use std::cell::RefCell;

use crate::support::{self, Call, Modified, Played, calls, play, plays, posts};
use ibverbs::ffi::{self, *};
use ibverbs::operation::DatagramPeer;
use ibverbs::operation::DcPeer;
use ibverbs::queue_pair::AddressVector;
use ibverbs::queue_pair::{DcStreams, Dci, SendOperations};
use ibverbs::settings::MaximumTransferUnit;
use ibverbs::*;
use ibverbs_function_device::FunctionDevice;

/// The settings of the played device, and the calls that it got.
#[derive(Default)]
pub(crate) struct Mlx5 {
    streams: Option<(u8, u8)>,
    created: Vec<(usize, ibv_qp_init_attr_ex, mlx5dv_qp_init_attr)>,
    queried: Vec<(usize, u64)>,
    reset: Vec<(usize, u16)>,
    extended: Option<Box<mlx5dv_qp_ex>>,
    /// Memory keys, with what they were created for, until they are destroyed.
    #[expect(clippy::vec_box, reason = "the caller has their addresses")]
    pub(crate) keys: Vec<Box<(mlx5dv_mkey, mlx5dv_mkey_init_attr)>>,
}

impl Mlx5 {
    pub(crate) fn extended_ptr(&self) -> *const mlx5dv_qp_ex {
        &raw const **self.extended.as_ref().unwrap()
    }
}

thread_local! {
    pub(crate) static MLX5: RefCell<Mlx5> = RefCell::default();
}

pub(crate) fn play_mlx5(streams: Option<(u8, u8)>) {
    play(Played::Mlx5);
    let functions = mlx5dv_qp_ex {
        wr_mr_list: Some(crate::memory_keys::mr_list),
        wr_set_dc_addr: Some(set_dc_addr),
        wr_set_dc_addr_stream: Some(set_dc_addr_stream),
        ..Default::default()
    };
    MLX5.set(Mlx5 { streams, extended: Some(Box::new(functions)), ..Mlx5::default() });
}

unsafe extern "C" fn set_dc_addr(
    _: *mut mlx5dv_qp_ex,
    ah: *mut ibv_ah,
    number: u32,
    access_key: u64,
) {
    support::post("wr_set_dc_addr", &[ah as u64, number.into(), access_key]);
}

unsafe extern "C" fn set_dc_addr_stream(
    _: *mut mlx5dv_qp_ex,
    ah: *mut ibv_ah,
    number: u32,
    access_key: u64,
    stream: u16,
) {
    let all = [ah as u64, number.into(), access_key, stream.into()];
    support::post("wr_set_dc_addr_stream", &all);
}

unsafe extern "C" {
    fn __real_mlx5dv_query_device(context: *mut ibv_context, attr: *mut mlx5dv_context) -> i32;
    fn __real_mlx5dv_create_qp(
        context: *mut ibv_context,
        attr: *mut ibv_qp_init_attr_ex,
        direct: *mut mlx5dv_qp_init_attr,
    ) -> *mut ibv_qp;
    fn __real_mlx5dv_qp_ex_from_ibv_qp_ex(qp: *mut ibv_qp_ex) -> *mut mlx5dv_qp_ex;
    fn __real_mlx5dv_dci_stream_id_reset(qp: *mut ibv_qp, stream: u16) -> i32;
}

/// # Safety
///
/// As the C function.
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_mlx5dv_query_device(
    context: *mut ibv_context,
    attr: *mut mlx5dv_context,
) -> i32 {
    // SAFETY: all are the caller's.
    unsafe {
        if !plays(Played::Mlx5) {
            return __real_mlx5dv_query_device(context, attr);
        }
        use mlx5dv_context_comp_mask as m;
        MLX5.with_borrow_mut(|mlx5| {
            mlx5.queried.push((context as usize, (*attr).comp_mask));
            let mut mask = m::MLX5DV_CONTEXT_MASK_MAX_DC_RD_ATOM;
            ((*attr).max_dc_rd_atom, (*attr).max_dc_init_rd_atom) = (16, 8);
            if let Some((concurrent, errored)) = mlx5.streams {
                mask |= m::MLX5DV_CONTEXT_MASK_DCI_STREAMS;
                (*attr).dci_streams_caps = mlx5dv_dci_streams_caps {
                    max_log_num_concurent: concurrent,
                    max_log_num_errored: errored,
                };
            }
            (*attr).comp_mask &= u64::from(mask.0);
        });
        0
    }
}

/// # Safety
///
/// As the C function.
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_mlx5dv_create_qp(
    context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
    direct: *mut mlx5dv_qp_init_attr,
) -> *mut ibv_qp {
    // SAFETY: all are the caller's; a queue pair with the interface has functions to replace.
    unsafe {
        if !plays(Played::Mlx5) {
            return __real_mlx5dv_create_qp(context, attr, direct);
        }
        MLX5.with_borrow_mut(|mlx5| mlx5.created.push((context as usize, *attr, *direct)));
        let qp = support::create_datagram_qp(context, &*attr);
        if !qp.is_null() {
            (*qp).srq = (*attr).srq;
            if (*attr).send_ops_flags != 0 {
                support::record_posting(qp, (*attr).send_ops_flags);
                (*ibv_qp_to_qp_ex(qp)).wr_set_ud_addr = None;
            }
        }
        qp
    }
}

/// # Safety
///
/// As the C function.
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_mlx5dv_qp_ex_from_ibv_qp_ex(qp: *mut ibv_qp_ex) -> *mut mlx5dv_qp_ex {
    if !plays(Played::Mlx5) {
        // SAFETY: the pointer is the caller's.
        return unsafe { __real_mlx5dv_qp_ex_from_ibv_qp_ex(qp) };
    }
    MLX5.with_borrow_mut(|mlx5| &raw mut **mlx5.extended.as_mut().unwrap())
}

/// # Safety
///
/// As the C function.
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_mlx5dv_dci_stream_id_reset(qp: *mut ibv_qp, stream: u16) -> i32 {
    if !plays(Played::Mlx5) {
        // SAFETY: the pointer is the caller's.
        return unsafe { __real_mlx5dv_dci_stream_id_reset(qp, stream) };
    }
    MLX5.with_borrow_mut(|mlx5| mlx5.reset.push((qp as usize, stream)));
    0
}

pub(crate) fn created() -> (usize, ibv_qp_init_attr_ex, mlx5dv_qp_init_attr) {
    MLX5.with_borrow(|mlx5| *mlx5.created.last().expect("mlx5dv_create_qp was called"))
}

fn steps() -> Vec<(u32, Modified)> {
    calls()
        .into_iter()
        .map(|call| match call {
            Call::Modify { mask, attr } => (mask, attr),
            other => panic!("{other:?}"),
        })
        .collect()
}

const PD: u32 = ibv_qp_init_attr_mask::IBV_QP_INIT_ATTR_PD.0;

#[test]
fn an_initiator_is_created_by_mlx5s_own_verb() {
    use SendOperations as S;

    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    play_mlx5(None);
    let new = || domain.create_qp(&queue, &queue, Dci);
    let prepared = new().max_send_wr(32).max_send_sge(3).max_inline_data(60).build().unwrap();
    let (on, attr, direct) = created();
    assert_eq!(on, context.as_raw() as usize);
    assert_eq!(attr.qp_type, ibv_qp_type::IBV_QPT_DRIVER);
    assert_eq!(
        (attr.send_cq, attr.recv_cq, attr.pd),
        (queue.as_raw(), queue.as_raw(), domain.as_raw())
    );
    let (cap, send) = (attr.cap, (32, 3, 60));
    assert_eq!((cap.max_send_wr, cap.max_send_sge, cap.max_inline_data), send);
    assert_eq!((cap.max_recv_wr, cap.max_recv_sge), (0, 0), "it receives nothing");
    let operations = ibv_qp_init_attr_mask::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS.0;
    assert_eq!(attr.comp_mask, PD | operations);
    let usual = S::SEND | S::SEND_WITH_IMMEDIATE | S::WRITE | S::WRITE_WITH_IMMEDIATE | S::READ;
    let usual = usual | S::COMPARE_SWAP | S::FETCH_ADD;
    assert_eq!(attr.send_ops_flags, usual.bits());
    assert_eq!((direct.comp_mask, direct.create_flags, direct.send_ops_flags), (2, 0, 0));
    assert_eq!(direct.dc_init_attr.dc_type, mlx5dv_dc_type::MLX5DV_DCTYPE_DCI);
    assert_eq!(direct.dc_init_attr.dc_type.0, 2);
    drop(prepared);
    // Without the interface it could not name a target.
    drop(new().extended_if_available(S::empty()).build().unwrap());
    assert_eq!(created().1.send_ops_flags, usual.bits());
    drop(new().extended_if_available(S::WRITE).build().unwrap());
    assert_eq!(created().1.send_ops_flags, S::WRITE.bits());
}

#[test]
fn streams_are_within_what_the_device_has() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let new = |log_concurrent, log_errored| {
        let streams = DcStreams { log_concurrent, log_errored };
        domain.create_qp(&queue, &queue, Dci).dc_streams(streams).build()
    };
    play_mlx5(None);
    let error = new(1, 0).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EOPNOTSUPP));
    assert!(error.to_string().contains("no streams"), "{error}");
    play_mlx5(Some((4, 2)));
    assert_eq!(context.query_mlx5().unwrap().max_dc_streams(), Some((4, 2)));
    let error = new(5, 0).unwrap_err().to_string();
    assert_eq!(error, "mlx5dv_create_qp: log_num_concurent is 5, and must be within 0..=4");
    let error = new(4, 3).unwrap_err().to_string();
    assert_eq!(error, "mlx5dv_create_qp: log_num_errored is 3, and must be within 0..=2");
    assert!(MLX5.with_borrow(|mlx5| mlx5.created.is_empty()), "the provider was not called");
    let mut queue_pair = new(4, 2).unwrap().activate().unwrap();
    let (_, _, direct) = created();
    assert_eq!(direct.comp_mask, 2 | 8);
    // SAFETY: the union's other member is a number.
    let streams = unsafe { direct.dc_init_attr.__bindgen_anon_1.dci_streams };
    assert_eq!((streams.log_num_concurent, streams.log_num_errored), (4, 2));
    queue_pair.reset_dc_stream(3).unwrap();
    let reset = MLX5.with_borrow(|mlx5| mlx5.reset.clone());
    assert_eq!(reset, [(queue_pair.as_raw() as usize, 3)]);
}

#[test]
fn the_way_of_an_initiator_to_rts() {
    use ibv_qp_attr_mask as m;

    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    play_mlx5(None);
    let builder = domain.create_qp(&queue, &queue, Dci);
    let builder = builder.path_mtu(MaximumTransferUnit::Mtu1024).max_rd_atomic(5);
    builder.build().unwrap().activate().unwrap();
    let steps = steps();
    let masks: Vec<_> = steps.iter().map(|(mask, _)| *mask).collect();
    let rts = m::IBV_QP_TIMEOUT | m::IBV_QP_RETRY_CNT | m::IBV_QP_RNR_RETRY;
    let rts = m::IBV_QP_STATE | m::IBV_QP_MAX_QP_RD_ATOMIC | m::IBV_QP_SQ_PSN | rts;
    let init = m::IBV_QP_STATE | m::IBV_QP_PKEY_INDEX | m::IBV_QP_PORT;
    assert_eq!(masks, [init.0, (m::IBV_QP_STATE | m::IBV_QP_PATH_MTU).0, rts.0]);
    assert_eq!(steps[1].1.path_mtu, 3);
    assert_eq!((steps[2].1.max_rd_atomic, steps[2].1.rnr_retry), (5, 6));
}

#[test]
fn a_target_is_created_and_taken_to_rtr() {
    use ibv_qp_attr_mask as m;

    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let shared = SharedReceiveQueue::new(&domain, 4, 1).unwrap();
    play_mlx5(None);
    support::number_in_rtr(0xd0d0);
    let new = || domain.create_qp(&queue, &queue, QueuePairType::Driver);
    let error = new().build_dc_target(7).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
    assert!(error.to_string().contains("shared receive queue"), "{error}");
    let target = new()
        .srq(&shared)
        .allow_remote_rw()
        .gid_index(3)
        .path_mtu(MaximumTransferUnit::Mtu512)
        .build_dc_target(0xabcd_ef01_2345)
        .unwrap();
    let (on, attr, direct) = created();
    assert_eq!(on, context.as_raw() as usize);
    assert_eq!((attr.comp_mask, attr.send_ops_flags), (PD, 0), "mlx5 accepts no other");
    assert_eq!((attr.qp_type, attr.srq), (ibv_qp_type::IBV_QPT_DRIVER, shared.as_raw()));
    assert_eq!((attr.cap.max_send_wr, attr.cap.max_recv_wr), (0, 0));
    assert_eq!((direct.comp_mask, direct.create_flags), (2, 0));
    assert_eq!(direct.dc_init_attr.dc_type.0, 1, "MLX5DV_DCTYPE_DCT");
    // SAFETY: the union's other member is shorter.
    let key = unsafe { direct.dc_init_attr.__bindgen_anon_1.dct_access_key };
    assert_eq!((key, target.access_key()), (0xabcd_ef01_2345, 0xabcd_ef01_2345));

    let steps = steps();
    let masks: Vec<_> = steps.iter().map(|(mask, _)| *mask).collect();
    let init = m::IBV_QP_PKEY_INDEX | m::IBV_QP_PORT | m::IBV_QP_ACCESS_FLAGS;
    let rtr = m::IBV_QP_MIN_RNR_TIMER | m::IBV_QP_AV | m::IBV_QP_PATH_MTU;
    assert_eq!(masks, [(m::IBV_QP_STATE | init).0, (m::IBV_QP_STATE | rtr).0]);
    assert_eq!(steps[0].1.access, 1 | 2 | 4, "local write, remote write, remote read");
    assert_eq!((steps[1].1.state, steps[1].1.path_mtu, steps[1].1.sgid_index), (2, 2, Some(3)));
    // The device gives the number in RTR.
    assert_eq!((target.number(), target.endpoint().num()), (0xd0d0, 0xd0d0));
    assert_eq!(target.shared_receive_queue().as_raw(), shared.as_raw());
    assert!(!format!("{target:?}").contains("abcdef"), "the key is a secret");
    device.fail("destroy_qp").errno(libc::EBUSY).times(1);
    assert_eq!(target.close().unwrap_err().raw_os_error(), Some(libc::EBUSY));
}

#[test]
fn requests_name_their_target() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    play_mlx5(Some((4, 2)));
    let new = |streams: Option<DcStreams>| {
        let new = domain.create_qp(&queue, &queue, Dci);
        let new = if let Some(streams) = streams { new.dc_streams(streams) } else { new };
        new.build().unwrap().activate().unwrap()
    };
    let mut plain = new(None);
    let mut streams = new(Some(DcStreams { log_concurrent: 2, log_errored: 1 }));
    let data = domain.allocate::<u64>(8).unwrap();
    let mut result = domain.allocate::<u64>(1).unwrap();
    let all = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
    let window = domain.allocate_shared::<u64>(8, all).unwrap();
    let remote = window.remote();
    let gid = context.routable_gid(1).unwrap();
    let path = domain.create_ah(&AddressVector::new(1, 0).global(gid.gid, 0)).unwrap();
    let piece = [data.gather_element(..2).unwrap()];
    let (lkey, address) = (u64::from(data.lkey()), data.as_ptr() as u64);
    let (into_lkey, into_address) = (u64::from(result.lkey()), result.as_ptr() as u64);
    let mut into = result.scatter_element(..).unwrap();
    let peer = |number, access_key, stream| DcPeer { path: &path, number, access_key, stream };
    calls();

    // SAFETY: the played device keeps no request.
    unsafe {
        plain
            .batch(|batch| {
                let write = WriteWorkRequest::new(&piece, remote);
                batch.add(write.to(peer(0xd0d0, 0xabcd_ef01, None)), 1)?;
                let add = FetchAddWorkRequest::new(&mut into, remote, 9);
                batch.add(add.to(peer(0xd0d1, 5, None)), 2)
            })
            .unwrap();
    }
    let (rkey, at, ah) = (u64::from(remote.rkey()), remote.address(), path.as_raw() as u64);
    assert_eq!(
        posts(),
        [
            ("wr_start", vec![]),
            ("wr_rdma_write", vec![1, 2, rkey, at]),
            ("wr_set_dc_addr", vec![ah, 0xd0d0, 0xabcd_ef01]),
            ("wr_set_sge", vec![lkey, address, 16]),
            ("wr_atomic_fetch_add", vec![2, 2, rkey, at, 9]),
            ("wr_set_dc_addr", vec![ah, 0xd0d1, 5]),
            ("wr_set_sge", vec![into_lkey, into_address, 8]),
            ("wr_complete", vec![]),
        ]
    );
    // SAFETY: as above.
    unsafe {
        streams
            .batch(|batch| {
                let write = WriteWorkRequest::new(&piece, remote);
                batch.add(write.to(peer(0xd0d0, 5, Some(3))), 1)
            })
            .unwrap();
    }
    assert_eq!(posts()[2], ("wr_set_dc_addr_stream", vec![ah, 0xd0d0, 5, 3]));

    // Errors, found before the device is asked. With the transport in the type, most do not compile.
    let mut plain = plain.erase();
    // SAFETY: as above.
    let refused = |error: Error, text: &str| {
        assert!(error.to_string().contains(text), "{error}");
    };
    let write = WriteWorkRequest::new(&piece, remote);
    // SAFETY: nothing is posted, here and below.
    let error = unsafe { plain.batch(|b| b.add(write, 1)) }.unwrap_err();
    refused(error, "must say where it goes");
    // SAFETY: as above.
    let error = unsafe { plain.batch(|b| b.add(write.to(peer(1, 1, Some(1))), 1)) }.unwrap_err();
    refused(error, "not a DC initiator with streams");
    // SAFETY: as above.
    let error = unsafe {
        plain.batch(|b| b.add(write.to(DatagramPeer { path: &path, number: 1, qkey: 1 }), 1))
    }
    .unwrap_err();
    refused(error, "does not send datagrams");
    // SAFETY: as above.
    let error = unsafe { plain.batch(|b| b.add(write.to(peer(1 << 24, 1, None)), 1)) }.unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "{error}");
    // SAFETY: as above.
    let error = unsafe { plain.post_send(&data, .., 1) }.unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "{error}");
    let error = plain.reset_dc_stream(1).unwrap_err();
    refused(error, "not a DC initiator with streams");
    let names: Vec<_> = posts().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["wr_start", "wr_abort"].repeat(4));
}

#[test]
fn limits_are_queried() {
    let device = FunctionDevice::model();
    let context = device.context();
    play_mlx5(Some((4, 2)));
    let mlx5 = context.query_mlx5().unwrap();
    assert_eq!((mlx5.max_dc_rd_atom(), mlx5.max_dc_init_rd_atom()), (Some(16), Some(8)));
    assert_eq!(mlx5.as_raw().max_dc_rd_atom, 16);
    let queried = MLX5.with_borrow(|mlx5| mlx5.queried.clone());
    // All but the clock's registers, which would be mapped.
    assert_eq!(queried, [(context.as_raw() as usize, 0x1_ffff & !(1 << 8))]);
    play_mlx5(None);
    assert_eq!(context.query_mlx5().unwrap().max_dc_streams(), None);
}

/// The provider's own functions, on a device that is not mlx5.
#[test]
fn other_devices_are_told_apart() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    // SAFETY: the device is live.
    assert!(!unsafe { ffi::mlx5dv_is_supported((*context.as_raw()).device) });
    let shared = SharedReceiveQueue::new(&domain, 4, 1).unwrap();
    let new = || domain.create_qp(&queue, &queue, QueuePairType::Driver);
    for error in [
        context.query_mlx5().unwrap_err(),
        domain.create_qp(&queue, &queue, Dci).build().unwrap_err(),
        new().srq(&shared).build_dc_target(1).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("this is no mlx5 device"), "{error}");
    }
    assert_eq!(device.calls("create_qp_ex") + device.calls("create_qp"), 0);
    let mut attr = ibv_qp_init_attr_ex {
        qp_type: ibv_qp_type::IBV_QPT_DRIVER,
        pd: domain.as_raw(),
        ..Default::default()
    };
    let mut direct = mlx5dv_qp_init_attr::default();
    // SAFETY: the context is live, and the structs are ours.
    let raw = unsafe { mlx5dv_create_qp(context.as_raw(), &mut attr, &mut direct) };
    assert!(raw.is_null(), "the function itself is linked, and refuses");
    assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EOPNOTSUPP));
}
