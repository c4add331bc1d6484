//! Memory keys of mlx5, and what the provider tells of its objects: the very calls that it gets.

use crate::dc::{MLX5, created, play_mlx5};
use crate::support::{self, Played, plays, posts};
use ibverbs::ffi::{self, *};
use ibverbs::memory::GatherElement;
use ibverbs::memory::MemoryKey;
use ibverbs::queue_pair::AddressVector;
use ibverbs::queue_pair::SendOperations;
use ibverbs::*;
use ibverbs_function_device::FunctionDevice;

pub(crate) unsafe extern "C" fn mr_list(
    _: *mut mlx5dv_qp_ex,
    key: *mut mlx5dv_mkey,
    access: u32,
    count: u16,
    list: *mut ibv_sge,
) {
    // SAFETY: the key is live, and the list has that many pieces.
    let (lkey, list) = unsafe { ((*key).lkey, std::slice::from_raw_parts(list, count.into())) };
    let mut all = vec![lkey.into(), access.into()];
    all.extend(list.iter().flat_map(|sge| [sge.addr, sge.length.into(), sge.lkey.into()]));
    support::post("wr_mr_list", &all);
}

unsafe extern "C" {
    fn __real_mlx5dv_create_mkey(attr: *mut mlx5dv_mkey_init_attr) -> *mut mlx5dv_mkey;
    fn __real_mlx5dv_init_obj(obj: *mut mlx5dv_obj, kind: u64) -> i32;
    fn __real_mlx5dv_is_supported(device: *mut ibv_device) -> bool;
}

/// # Safety
///
/// As the C function.
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_mlx5dv_is_supported(device: *mut ibv_device) -> bool {
    // SAFETY: the device is the caller's.
    plays(Played::Mlx5) || unsafe { __real_mlx5dv_is_supported(device) }
}

/// # Safety
///
/// As the C function.
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_mlx5dv_create_mkey(
    attr: *mut mlx5dv_mkey_init_attr,
) -> *mut mlx5dv_mkey {
    if !plays(Played::Mlx5) {
        // SAFETY: the attributes are the caller's.
        return unsafe { __real_mlx5dv_create_mkey(attr) };
    }
    MLX5.with_borrow_mut(|mlx5| {
        // SAFETY: as above.
        let attr = unsafe { &mut *attr };
        let asked = *attr;
        attr.max_entries = attr.max_entries.next_multiple_of(4);
        mlx5.keys.push(Box::new((mlx5dv_mkey { lkey: 0x1100, rkey: 0x1101 }, asked)));
        &raw mut mlx5.keys.last_mut().unwrap().0
    })
}

/// # Safety
///
/// As the C function. Only a played key exists.
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_mlx5dv_destroy_mkey(key: *mut mlx5dv_mkey) -> i32 {
    MLX5.with_borrow_mut(|mlx5| {
        let count = mlx5.keys.len();
        mlx5.keys.retain(|own| &raw const own.0 != key);
        if mlx5.keys.len() == count { libc::EINVAL } else { 0 }
    })
}

/// # Safety
///
/// As the C function.
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_mlx5dv_init_obj(obj: *mut mlx5dv_obj, kind: u64) -> i32 {
    if !plays(Played::Mlx5) {
        // SAFETY: the struct is the caller's.
        return unsafe { __real_mlx5dv_init_obj(obj, kind) };
    }
    let own = |expected: mlx5dv_obj_type| assert_eq!(kind, u64::from(expected.0));
    // SAFETY: as above; each object that is named is live, and each struct writable.
    unsafe {
        let obj = &*obj;
        if !obj.qp.in_.is_null() {
            own(mlx5dv_obj_type::MLX5DV_OBJ_QP);
            let mask = (*obj.qp.out).comp_mask;
            *obj.qp.out = mlx5dv_qp { sqn: (*obj.qp.in_).qp_num, ..Default::default() };
            (*obj.qp.out).comp_mask = mask & 2;
        } else if !obj.cq.in_.is_null() {
            own(mlx5dv_obj_type::MLX5DV_OBJ_CQ);
            (*obj.cq.out).cqe_cnt = (*obj.cq.in_).cqe as u32;
        } else if !obj.srq.in_.is_null() {
            own(mlx5dv_obj_type::MLX5DV_OBJ_SRQ);
            (*obj.srq.out).srqn = 7;
        } else if !obj.dm.in_.is_null() {
            own(mlx5dv_obj_type::MLX5DV_OBJ_DM);
            (*obj.dm.out).length = 64;
        } else if !obj.ah.in_.is_null() {
            own(mlx5dv_obj_type::MLX5DV_OBJ_AH);
        } else {
            own(mlx5dv_obj_type::MLX5DV_OBJ_PD);
            assert!(!obj.pd.in_.is_null());
            (*obj.pd.out).pdn = 9;
        }
    }
    0
}

#[test]
fn a_request_sets_what_a_key_names() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    play_mlx5(None);
    let key = MemoryKey::new(&domain, 3).unwrap();
    assert_eq!((key.lkey(), key.rkey(), key.max_entries()), (0x1100, 0x1101, 4));
    MLX5.with_borrow(|mlx5| {
        let asked = mlx5.keys[0].1;
        assert_eq!((asked.pd, asked.create_flags, asked.max_entries), (domain.as_raw(), 1, 3));
    });
    let none = MemoryKey::new(&domain, 0).unwrap_err().to_string();
    assert_eq!(none, "mlx5dv_create_mkey: max_entries is 0, and must be within 1..=65535");

    let new = || domain.create_qp(&queue, &queue, Rc).max_inline_data(64);
    let pair = new().extended_with_memory_keys(SendOperations::WRITE).build().unwrap();
    let (_, attr, direct) = created();
    assert_eq!(attr.send_ops_flags, SendOperations::WRITE.bits());
    assert_eq!((direct.comp_mask, direct.create_flags), (4, 0));
    let list = ffi::mlx5dv_qp_create_send_ops_flags::MLX5DV_QP_EX_WITH_MR_LIST;
    assert_eq!(direct.send_ops_flags, u64::from(list.0));
    let mut pair = pair.into_queue_pair();
    let extended = MLX5.with_borrow(|mlx5| mlx5.extended_ptr());
    assert_eq!(pair.as_raw_mlx5().map(|raw| raw.as_ptr().cast_const()), Some(extended));

    let (one, other) = (domain.allocate::<u8>(100).unwrap(), domain.allocate::<u8>(9).unwrap());
    let piece = |region: &MemoryRegion<'_, u8>| *region.gather_element(..).unwrap().as_raw();
    let pieces = [one.gather_element(..).unwrap(), other.gather_element(..).unwrap()];
    posts();
    // SAFETY: the played device keeps no request, and the pieces stay registered.
    unsafe { pair.batch(|b| b.set_memory_key(&key, AccessFlags::REMOTE_READ, &pieces, 5)) }
        .unwrap();
    let mut expected = vec![0x1100, AccessFlags::REMOTE_READ.bits().into()];
    for sge in [piece(&one), piece(&other)] {
        expected.extend([sge.addr, sge.length.into(), sge.lkey.into()]);
    }
    let calls = [("wr_start", vec![]), ("wr_mr_list", expected), ("wr_complete", vec![])];
    assert_eq!(posts(), calls);
    // SAFETY: the queue pair is live.
    let raw = unsafe { *pair.as_raw_extended().unwrap().as_ptr() };
    let inline = ibv_send_flags::IBV_SEND_INLINE | ibv_send_flags::IBV_SEND_SIGNALED;
    assert_eq!((raw.wr_id, raw.wr_flags), (5, inline.0), "the list is inline data");

    // These lists are refused before the provider sees them.
    let mut refused = |pieces: &[GatherElement<'_>]| {
        // SAFETY: nothing is posted.
        let result: Result<()> =
            unsafe { pair.batch(|b| b.set_memory_key(&key, AccessFlags::empty(), pieces, 6)) };
        result.unwrap_err().to_string()
    };
    let count = "mlx5dv_wr_mr_list: the number of pieces is";
    assert_eq!(refused(&[]), format!("{count} 0, and must be within 1..=4"));
    assert_eq!(refused(&[pieces[0]; 5]), format!("{count} 5, and must be within 1..=4"));
    drop(pair);
    let mut plain = new().extended(SendOperations::WRITE).build().unwrap().into_queue_pair();
    // SAFETY: as above.
    let error: Result<()> =
        unsafe { plain.batch(|b| b.set_memory_key(&key, AccessFlags::empty(), &pieces, 7)) };
    let error = error.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("extended_with_memory_keys"), "{error}");
    key.close().unwrap();
    assert_eq!(MLX5.with_borrow(|mlx5| mlx5.keys.len()), 0);
}

#[test]
fn what_mlx5_knows_of_its_objects() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let pair = domain.create_qp(&queue, &queue, Rc).build().unwrap().into_queue_pair();
    let shared = SharedReceiveQueue::new(&domain, 4, 1).unwrap();
    let memory = context.alloc_dm(64).unwrap();
    let gid = context.routable_gid(1).unwrap();
    let path = domain.create_ah(&AddressVector::new(1, 0).global(gid.gid, 0)).unwrap();
    // Other devices refuse these calls.
    for error in [
        pair.query_mlx5().map(drop).unwrap_err(),
        queue.query_mlx5().map(drop).unwrap_err(),
        shared.query_mlx5().map(drop).unwrap_err(),
        memory.query_mlx5().map(drop).unwrap_err(),
        path.query_mlx5().map(drop).unwrap_err(),
        domain.query_mlx5().map(drop).unwrap_err(),
        MemoryKey::new(&domain, 4).unwrap_err(),
        domain
            .create_qp(&queue, &queue, Rc)
            .extended_with_memory_keys(SendOperations::SEND)
            .build()
            .unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.to_string().contains("this is no mlx5 device"), "{error}");
    }
    assert_eq!(pair.as_raw_mlx5(), None);

    play_mlx5(None);
    let raw = pair.query_mlx5().unwrap();
    assert_eq!((raw.sqn, raw.comp_mask), (pair.number(), 2));
    // SAFETY: the queue is live.
    let cqe = unsafe { (*queue.as_raw()).cqe };
    assert_eq!(queue.query_mlx5().unwrap().cqe_cnt, cqe as u32);
    let raw = shared.query_mlx5().unwrap();
    assert_eq!((raw.srqn, raw.comp_mask), (7, 1));
    let raw = memory.query_mlx5().unwrap();
    assert_eq!((raw.length, raw.comp_mask), (64, 1));
    path.query_mlx5().unwrap();
    assert_eq!(domain.query_mlx5().unwrap().pdn, 9);
}
