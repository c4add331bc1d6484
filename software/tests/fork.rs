//! After `fork_init`, a child has the memory that its parent has registered with a device of software. One test: it concerns
//! the whole process.

use ibverbs::device::fork_init;
use ibverbs::{AccessFlags, MemoryRegion};
use ibverbs_software::Device;

/// Whether a child can read and write all of it. What it writes is in a copy of its own.
fn a_child_has(memory: *mut u8, length: usize) -> bool {
    // SAFETY: the child reads and writes memory of its own, and ends.
    unsafe {
        let child = libc::fork();
        assert!(child >= 0);
        if child == 0 {
            for at in (0..length).step_by(512) {
                let byte = memory.add(at);
                byte.write_volatile(byte.read_volatile().wrapping_add(1));
            }
            libc::_exit(0);
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &mut status, 0), child);
        status == 0
    }
}

#[test]
fn children_keep_registered_memory() {
    fork_init().unwrap();
    let context = Device::new().unwrap().open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let mut region: MemoryRegion<'_, u8> = domain.allocate(1 << 20).unwrap();
    let start = region.as_mut_ptr();
    assert!(a_child_has(start, 1 << 20), "the child was killed");
    assert_eq!(region[0], 0, "the child's copy is its own");
    // A second region of the same pages, which ends first; then the memory is the program's alone.
    let shared = domain.allocate_shared::<u8>(1 << 16, AccessFlags::REMOTE_READ).unwrap();
    let other = shared.remote().address() as *mut u8;
    assert!(a_child_has(other, 1 << 16));
    drop(shared);
    let mut own = vec![1_u8; 1 << 16];
    for _ in 0..3 {
        // SAFETY: the memory lives longer than both regions, and nobody uses them.
        unsafe {
            let [one, two] = [(); 2].map(|()| {
                let access = ibverbs::ffi::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0 as i32;
                let start = own.as_mut_ptr().cast();
                ibverbs::ffi::ibv_reg_mr(domain.as_raw(), start, own.len(), access)
            });
            assert!(!one.is_null() && !two.is_null());
            assert!(a_child_has(own.as_mut_ptr(), own.len()));
            assert_eq!(ibverbs::ffi::ibv_dereg_mr(one), 0);
            assert!(a_child_has(own.as_mut_ptr(), own.len()));
            assert_eq!(ibverbs::ffi::ibv_dereg_mr(two), 0);
        }
        assert!(a_child_has(own.as_mut_ptr(), own.len()));
    }
}
