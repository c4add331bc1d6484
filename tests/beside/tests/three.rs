//! Three copies of libibverbs in one program, linked at once: that of this crate, another static one (a stand-in, which
//! `build.rs` makes), and the machine's shared one.

use std::ffi::{CStr, c_char, c_int, c_void};

use ibverbs::{QueuePair, Rc, ffi};
use ibverbs_software::Device;

unsafe extern "C" {
    /// The plain name, which is the stand-in's.
    fn ibv_wc_status_str(status: c_int) -> *const c_char;
}

fn text(found: *const c_char) -> String {
    // SAFETY: each of the three returns a string of its own.
    unsafe { CStr::from_ptr(found) }.to_string_lossy().into_owned()
}

#[test]
fn ours_works_beside_another_static_one() {
    let device = Device::builder().name("three0").build().expect("a device of software");
    device.register();
    let context = ibverbs::open("three0").expect("the device is registered");
    let domain = context.alloc_pd().expect("a domain");
    let queue = context.create_cq(4).expect("a queue");
    let _pair = QueuePair::builder(&domain, &queue, &queue, Rc).build().expect("a queue pair");

    // SAFETY: the functions have no conditions.
    let (ours, theirs) = unsafe {
        (
            text(ffi::ibv_wc_status_str(ffi::ibv_wc_status::IBV_WC_SUCCESS)),
            text(ibv_wc_status_str(0)),
        )
    };
    assert_eq!((&*ours, &*theirs), ("success", "the stand-in"));
}

#[test]
#[cfg_attr(not(machine_has_libibverbs), ignore = "the machine has no libibverbs to link with")]
fn the_machines_own_is_a_third() {
    type Function = unsafe extern "C" fn(c_int) -> *const c_char;
    // SAFETY: the library is loaded already, because the program is linked with it.
    let library =
        unsafe { libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_NOW) };
    assert!(!library.is_null(), "the program is linked with it");
    // SAFETY: the handle is live.
    let found = unsafe { libc::dlsym(library, c"ibv_wc_status_str".as_ptr()) };
    assert!(!found.is_null() && found != ibv_wc_status_str as *mut c_void);
    assert_ne!(found, ffi::ibv_wc_status_str as *mut c_void);
    // SAFETY: the library has this function of this type.
    let function = unsafe { std::mem::transmute::<*mut c_void, Function>(found) };
    // SAFETY: it has no conditions.
    assert_eq!(text(unsafe { function(0) }), "success");
}
