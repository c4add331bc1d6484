//! Allocators that panic, and give nothing. What calls them while which lock is held is in `tests/callbacks.rs`.

use std::alloc::Layout;
use std::panic::panic_any;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use ibverbs::domain::{Allocation, Allocator};
use ibverbs::{ProtectionDomain, Rc};
use ibverbs_function_device::FunctionDevice;

/// A payload that panics when it is dropped.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("dropped");
    }
}

/// Each call does something else.
#[derive(Default)]
struct Hostile {
    calls: AtomicUsize,
}

// SAFETY: the memory is zeroed, of that layout, and valid until it is freed. Nothing forks here.
unsafe impl Allocator for Hostile {
    fn alloc(&self, layout: Layout, _: u64) -> Allocation {
        match self.calls.fetch_add(1, Ordering::SeqCst) % 4 {
            0 => panic_any(Bomb),
            1 => Allocation::Failed,
            2 => Allocation::Default,
            _ => {
                // SAFETY: the size is not 0.
                let memory = unsafe { std::alloc::alloc_zeroed(layout) };
                NonNull::new(memory).map_or(Allocation::Failed, Allocation::Memory)
            }
        }
    }

    unsafe fn free(&self, memory: NonNull<u8>, layout: Layout, _: u64) {
        // SAFETY: `alloc` has allocated it, with this layout.
        unsafe { std::alloc::dealloc(memory.as_ptr(), layout) };
        panic_any(Bomb);
    }
}

#[test]
fn an_allocator_that_panics_fails_what_asks_it() {
    let device = FunctionDevice::model();
    let context = device.context();
    let base = context.alloc_pd().unwrap();
    let queue = context.create_cq(4).unwrap();
    // SAFETY: there is no thread domain.
    let domain =
        unsafe { ProtectionDomain::parent_domain_with_allocator(&base, None, Hostile::default()) }
            .unwrap();
    for round in 0..12 {
        let made = domain.create_qp(&queue, &queue, Rc).build();
        assert_eq!(made.is_ok(), round % 4 >= 2, "{round}");
    }
    domain.close().unwrap();
    assert_eq!(device.violations().0, 0, "{}", device.violations().1);
}
