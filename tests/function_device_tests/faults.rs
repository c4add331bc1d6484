//! Faults that tests can provoke.

use crate::rig::Rig;
use ibverbs::ffi::{self, *};
use ibverbs_function_device::{Builder, FunctionDevice, Progress};
use std::ptr::null_mut;

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap()
}

#[test]
fn polls_fail_as_often_as_told() {
    let rig = Rig::rc();
    rig.device.inject(rig.a.cq, &ibv_wc::default());
    rig.device.fail("poll_cq").errno(libc::EFAULT).skip(1).times(2);
    let mut wc = ibv_wc::default();
    let mut poll = || unsafe { ffi::ibv_poll_cq(rig.a.cq, 1, &mut wc) };
    assert_eq!(poll(), 1);
    assert_eq!((poll(), errno()), (-1, libc::EFAULT));
    rig.device.poll_error(-2);
    assert_eq!(poll(), -2);
    assert_eq!(poll(), 0);
    rig.finish();
}

#[test]
fn nothing_may_be_used_once_its_destroy_verb_has_failed() {
    let mut rig = Rig::rc();
    let violations = |rig: &Rig, count| {
        assert_eq!(rig.device.violations().0, count, "{}", rig.device.violations().1);
    };
    unsafe {
        rig.device.fail("destroy_qp").errno(libc::EBUSY).times(1);
        assert_eq!(ibv_destroy_qp(rig.a.qp), libc::EBUSY);
        rig.device.fail("dereg_mr").errno(libc::EIO).times(1);
        assert_eq!(ibv_dereg_mr(rig.a.mr), libc::EIO);
        violations(&rig, 0);
        rig.a.to_state(ibv_qp_state::IBV_QPS_ERR);
        violations(&rig, 1);
        // The parents of the queue pair.
        assert_eq!(ibv_destroy_cq(rig.a.cq), libc::EBUSY);
        violations(&rig, 2);
        assert!(rig.device.violations().1.contains("made from"));
        rig.drop_sides();
        violations(&rig, 4);
        assert_eq!(ibv_dealloc_pd(rig.pd), 0);
        assert_eq!(ibv_close_device(rig.context), 0);
    }
}

#[test]
fn verbs_fail_by_name() {
    let rig = Rig::rc();
    unsafe {
        rig.device.fail("modify_qp").errno(libc::EIO).times(1);
        assert_eq!(rig.a.to_state(ibv_qp_state::IBV_QPS_ERR), libc::EIO);
        rig.device.fail("create_cq").errno(libc::ENOMEM).always();
        assert!(ibv_create_cq(rig.context, 1, null_mut(), null_mut(), 0).is_null());
        assert_eq!(errno(), libc::ENOMEM);
        rig.device.clear_faults();
        let cq = ibv_create_cq(rig.context, 1, null_mut(), null_mut(), 0);
        assert_eq!(ibv_destroy_cq(cq), 0);
        rig.device.fail("open_device").errno(libc::EMFILE).times(1);
        assert_eq!(rig.device.open().unwrap_err().raw_os_error(), Some(libc::EMFILE));
        rig.device.fail("query_gid_table").errno(libc::EIO).times(1);
        assert_eq!(_ibv_query_gid_table(rig.context, null_mut(), 0, 0, 32), -5);
    }
    rig.finish();
}

#[test]
#[should_panic(expected = "no verb is named destroy_qps")]
fn a_misspelt_verb_is_an_error() {
    FunctionDevice::lean().fail("destroy_qps").times(1);
}

#[test]
fn a_list_fails_in_its_middle() {
    let rig = Rig::rc();
    rig.device.fail("post_recv").errno(libc::EIO).skip(1).times(1);
    let mut list: [ibv_recv_wr; 3] = Default::default();
    list[0].next = &mut list[1];
    list[1].next = &mut list[2];
    let mut bad = null_mut();
    unsafe { assert_eq!(ffi::ibv_post_recv(rig.a.qp, &mut list[0], &mut bad), libc::EIO) };
    assert_eq!(bad, &mut list[1] as *mut _);
    assert_eq!(rig.device.outstanding(rig.a.number()), (0, 1));
    rig.finish();
}

#[test]
fn held_completions_arrive_when_told() {
    let rig = Rig::rc();
    rig.device.hold_completions(rig.b.cq, 0, true);
    rig.a.fill(0, b"abc");
    for id in 0..3 {
        rig.b.receive(id, 10 * id as usize, 1);
        rig.a.send(id, id as usize, 1);
    }
    rig.device.run();
    assert_eq!(rig.a.poll().len(), 3);
    // The bytes have arrived, their completions have not.
    assert_eq!(rig.b.bytes(0, 21)[20], b'c');
    assert!(rig.b.poll().is_empty());
    assert_eq!(rig.device.held(rig.b.cq), 3);
    rig.device.release(rig.b.cq, 2);
    assert_eq!(rig.b.one().wr_id, 2);
    rig.device.release_all(rig.b.cq);
    let ids: Vec<_> = rig.b.poll().iter().map(|wc| wc.wr_id).collect();
    assert_eq!(ids, [0, 1]);
    rig.device.hold_completions(rig.b.cq, rig.b.number(), true);
    rig.device.hold_completions(rig.b.cq, 0, false);
    rig.b.receive(9, 0, 1);
    rig.device.break_qp(rig.b.number());
    assert_eq!(rig.device.held(rig.b.cq), 1);
    assert!(rig.b.poll().is_empty());
    rig.device.release_all(rig.b.cq);
    assert_eq!(rig.b.one().wr_id, 9);
    rig.finish();
}

#[test]
fn shuffling_keeps_what_hardware_keeps() {
    let mut seen = std::collections::HashSet::new();
    for seed in 0..50 {
        let rig = Rig::rc();
        for id in 0..4 {
            rig.a.receive(100 + id, 0, 1);
            rig.b.receive(0, 0, 1);
            rig.a.send(id, 0, 1);
            rig.b.send(id, 0, 1);
        }
        rig.device.run();
        rig.device.shuffle(rig.a.cq, seed);
        let ids: Vec<_> = rig.a.poll().iter().map(|wc| wc.wr_id).collect();
        let of = |receives| -> Vec<_> {
            let pick = |id: &&u64| (**id >= 100) == receives;
            ids.iter().filter(pick).copied().collect()
        };
        assert_eq!(of(false), [0, 1, 2, 3]);
        assert_eq!(of(true), [100, 101, 102, 103]);
        seen.insert(ids);
        rig.finish();
    }
    assert!(seen.len() > 10);
}

#[test]
fn anything_can_be_injected() {
    let rig = Rig::rc();
    let wc = ibv_wc {
        wr_id: u64::MAX,
        status: ibv_wc_status(99),
        opcode: ibv_wc_opcode(98),
        qp_num: 0xabcdef,
        vendor_err: 97,
        ..Default::default()
    };
    rig.device.inject(rig.a.cq, &wc);
    let got = rig.a.one();
    assert_eq!((got.wr_id, got.status.0, got.opcode.0), (u64::MAX, 99, 98));
    assert_eq!((got.qp_num, got.vendor_err), (0xabcdef, 97));
    rig.finish();
}

#[test]
fn a_region_deregistered_too_early() {
    let mut rig = Rig::rc();
    rig.b.receive(1, 0, 8);
    rig.a.fill(0, b"late");
    rig.a.send(2, 0, 4);
    unsafe { assert_eq!(ibv_dereg_mr(rig.b.mr), 0) };
    let (count, text) = rig.device.violations();
    assert_eq!(count, 1, "{text}");
    // DMA that has begun goes to the address it began with.
    rig.device.stale_translation(true);
    rig.device.run();
    assert_eq!(unsafe { rig.b.memory.as_ptr().read_volatile() }, b'l');
    unsafe {
        rig.b.mr = ibv_reg_mr_iova2(rig.pd, rig.b.memory.as_mut_ptr().cast(), 8, 0, 1);
    }
    rig.drop_sides();
}

#[test]
fn stale_completions() {
    let rig = Rig::rc();
    rig.b.receive(1, 0, 1);
    rig.a.send(2, 0, 1);
    rig.device.run();
    rig.a.to_state(ibv_qp_state::IBV_QPS_RESET);
    assert!(rig.a.poll().is_empty());
    rig.device.keep_stale_completions(true);
    rig.b.to_state(ibv_qp_state::IBV_QPS_RESET);
    assert_eq!(rig.b.one().wr_id, 1);
    assert_eq!(rig.device.outstanding(rig.b.number()), (0, 0));
    rig.finish();
}

#[test]
fn numbers_come_again() {
    let device = Builder::model().first_qp_num(0x42).build();
    let rig = Rig::new(device, ibv_qp_type::IBV_QPT_RC, null_mut());
    assert_eq!((rig.a.number(), rig.b.number()), (0x42, 0x43));
    let device = rig.device.clone();
    rig.finish();
    device.next_qp_num(0x42);
    let rig = Rig::new(device, ibv_qp_type::IBV_QPT_RC, null_mut());
    assert_eq!(rig.a.number(), 0x42);
    rig.finish();
}

#[test]
fn many_threads() {
    let device = Builder::model().progress(Progress::OnPost).build();
    let rig = Rig::new(device, ibv_qp_type::IBV_QPT_RC, null_mut());
    rig.connect(7);
    struct Shared<'a>(&'a Rig);
    unsafe impl Sync for Shared<'_> {}
    let shared = Shared(&rig);
    let shared = &shared;
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for id in 0..1000 {
                while shared.0.a.send(id, 0, 1) != 0 {
                    std::thread::yield_now();
                }
                while shared.0.a.poll().is_empty() {
                    std::thread::yield_now();
                }
            }
        });
        scope.spawn(move || {
            for id in 0..1000 {
                assert_eq!(shared.0.b.receive(id, 0, 1), 0);
                loop {
                    if let [wc] = shared.0.b.poll()[..] {
                        assert_eq!((wc.wr_id, wc.status.0), (id, 0));
                        break;
                    }
                    std::thread::yield_now();
                }
            }
        });
    });
    rig.finish();
}
