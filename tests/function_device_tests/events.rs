//! Asynchronous events and completion channels.

use crate::rig::Rig;
use ibverbs::ffi::{self, *};
use ibverbs_function_device::{Builder, FunctionDevice, Progress};
use std::ptr::null_mut;

unsafe fn next(context: *mut ibv_context) -> ibv_async_event {
    let mut event = ibv_async_event::default();
    unsafe { assert_eq!(ibv_get_async_event(context, &mut event), 0) };
    event
}

fn readable(fd: i32) -> bool {
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    unsafe { libc::poll(&mut poll, 1, 0) == 1 }
}

#[test]
fn asynchronous() {
    let rig = Rig::rc();
    let fd = unsafe { (*rig.context).async_fd };
    assert!(!readable(fd));
    rig.device.raise(rig.context, ibv_event_type::IBV_EVENT_PORT_ERR, 1);
    rig.device.raise(rig.context, ibv_event_type(12345), 0);
    assert!(readable(fd));
    unsafe {
        let port = next(rig.context);
        assert_eq!(port.event_type, ibv_event_type::IBV_EVENT_PORT_ERR);
        assert_eq!(port.element.port_num, 1);
        assert_eq!(next(rig.context).event_type.0, 12345);
        let fatal = ibv_event_type::IBV_EVENT_QP_FATAL;
        rig.device.raise_about(rig.context, fatal, rig.a.qp);
        let mut event = next(rig.context);
        assert_eq!(event.element.qp, rig.a.qp);
        ibv_ack_async_event(&mut event);
        // An event that is not read before its object is destroyed goes with the object.
        rig.device.raise_about(rig.context, fatal, rig.b.qp);
        assert!(readable(fd));
        assert_eq!(ibv_destroy_qp(rig.b.qp), 0);
        assert!(!readable(fd));
        assert_eq!(ibv_destroy_qp(rig.a.qp), 0);
        for side in [&rig.a, &rig.b] {
            assert_eq!(ibv_dereg_mr(side.mr), 0);
            assert_eq!(ibv_destroy_cq(side.cq), 0);
        }
        assert_eq!(ibv_dealloc_pd(rig.pd), 0);
        ibv_close_device(rig.context);
    }
    rig.device.assert_clean();
}

#[test]
fn destroying_waits_for_the_acknowledgement() {
    let rig = Rig::rc();
    unsafe {
        rig.device.raise_about(rig.context, ibv_event_type::IBV_EVENT_COMM_EST, rig.a.qp);
        let mut event = next(rig.context);
        std::thread::scope(|scope| {
            let qp = rig.a.qp as usize;
            let waiting = scope.spawn(move || ibv_destroy_qp(qp as *mut ibv_qp));
            std::thread::sleep(std::time::Duration::from_millis(50));
            assert!(!waiting.is_finished());
            ibv_ack_async_event(&mut event);
            assert_eq!(waiting.join().unwrap(), 0);
        });
        assert_eq!(ibv_destroy_qp(rig.b.qp), 0);
        ibv_close_device(rig.context);
    }
}

#[test]
fn a_dying_device() {
    let rig = Rig::rc();
    rig.b.receive(1, 0, 1);
    rig.device.kill();
    unsafe {
        let event = next(rig.context);
        assert_eq!(event.event_type, ibv_event_type::IBV_EVENT_DEVICE_FATAL);
        assert!(ibv_alloc_pd(rig.context).is_null());
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EIO));
    }
    assert_eq!(rig.b.one().status, ibv_wc_status::IBV_WC_WR_FLUSH_ERR);
    assert_eq!(rig.a.send(1, 0, 1), libc::EIO);
    assert_eq!(rig.a.to_state(ibv_qp_state::IBV_QPS_RESET), libc::EIO);
    rig.finish();
}

#[test]
fn a_removed_device() {
    let device = Builder::model().progress(Progress::OnPost).build();
    let rig = Rig::new(device, ibv_qp_type::IBV_QPT_RC, null_mut());
    rig.connect(7);
    unsafe {
        let channel = ibv_create_comp_channel(rig.context);
        let cq = ibv_create_cq(rig.context, 4, null_mut(), channel, 0);
        let (mut about, mut token) = (null_mut(), null_mut());
        let channel_address = channel as usize;
        std::thread::scope(|scope| {
            // This thread sleeps in the kernel already, in a read that blocks.
            let sleeper = scope.spawn(move || {
                let (mut cq, mut token) = (null_mut(), null_mut());
                ibv_get_cq_event(channel_address as *mut _, &mut cq, &mut token)
            });
            std::thread::sleep(std::time::Duration::from_millis(50));
            assert_eq!(rig.b.receive(1, 0, 1), 0);
            rig.device.remove();
            assert_eq!(sleeper.join().unwrap(), -1, "it woke, and there was no event");
        });
        assert_eq!(ibv_get_cq_event(channel, &mut about, &mut token), -1, "nor will there be");
        assert_eq!(next(rig.context).event_type, ibv_event_type::IBV_EVENT_DEVICE_FATAL);
        assert_eq!(rig.b.poll().len(), 0, "nothing is flushed");
        assert_eq!(rig.device.outstanding(rig.b.number()), (0, 1));
        assert_eq!(rig.b.to_state(ibv_qp_state::IBV_QPS_ERR), libc::EIO);
        assert_eq!(ibv_destroy_cq(cq), 0);
        assert_eq!(ibv_destroy_comp_channel(channel), 0);
    }
    rig.finish();
}

#[test]
fn completion_channels() {
    let device = Builder::model().progress(Progress::OnPost).build();
    let rig = Rig::new(device, ibv_qp_type::IBV_QPT_RC, null_mut());
    rig.connect(7);
    unsafe {
        let channel = ibv_create_comp_channel(rig.context);
        assert!(!channel.is_null());
        let user = 0x55 as *mut _;
        let cq = ibv_create_cq(rig.context, 8, user, channel, 1);
        assert_eq!(ibv_destroy_comp_channel(channel), libc::EBUSY);
        let wait = || {
            let (mut from, mut context) = (null_mut(), null_mut());
            assert_eq!(ibv_get_cq_event(channel, &mut from, &mut context), 0);
            assert_eq!((from, context), (cq, user));
        };
        let wc = ibv_wc::default();
        rig.device.inject(cq, &wc);
        assert!(!readable((*channel).fd), "not armed");
        assert_eq!(ffi::ibv_req_notify_cq(cq, 0), 0);
        assert!(!readable((*channel).fd), "what is there already says nothing");
        rig.device.inject(cq, &wc);
        rig.device.inject(cq, &wc);
        wait();
        assert!(!readable((*channel).fd), "armed once");
        rig.device.raise_cq_event(cq);
        wait();
        ibv_ack_cq_events(cq, 2);
        rig.device.raise_cq_event(cq);
        assert_eq!(ibv_destroy_cq(cq), 0);
        assert!(!readable((*channel).fd));
        assert_eq!(ibv_destroy_comp_channel(channel), 0);
        rig.device.fail("create_comp_channel").errno(libc::EMFILE).times(1);
        assert!(ibv_create_comp_channel(rig.context).is_null());
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EMFILE));
    }
    rig.finish();
}

#[test]
fn no_descriptor_is_left() {
    let count = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let device = FunctionDevice::model();
    let cycle = || unsafe {
        let context = device.open().unwrap();
        let channel = ibv_create_comp_channel(context);
        assert_eq!(ibv_destroy_comp_channel(channel), 0);
        ibv_close_device(context);
    };
    cycle();
    // Other tests of this process open descriptors too, so only a leak over many cycles stands out.
    let before = count();
    for _ in 0..200 {
        cycle();
    }
    assert!(count() < before + 100);
}

#[test]
fn a_full_queue_is_lost() {
    let rig = Rig::rc();
    let wc = ibv_wc::default();
    for _ in 0..65 {
        rig.device.inject(rig.a.cq, &wc);
    }
    rig.device.inject(rig.a.cq, &wc);
    unsafe {
        let mut event = next(rig.context);
        assert_eq!(event.event_type, ibv_event_type::IBV_EVENT_CQ_ERR);
        ibv_ack_async_event(&mut event);
        let mut event = next(rig.context);
        assert_eq!(event.event_type, ibv_event_type::IBV_EVENT_QP_FATAL);
        assert_eq!(event.element.qp, rig.a.qp);
        ibv_ack_async_event(&mut event);
    }
    assert_eq!(rig.a.poll().len(), 64);
    assert!(rig.a.poll().is_empty());
    rig.finish();
}
