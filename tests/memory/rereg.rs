//! Regions that are re-registered.

use std::os::fd::AsFd;
use std::sync::Arc;

use ibverbs::memory::{RawMemoryRegion, ReregisteredState, Reregistration};
use ibverbs::*;
use ibverbs_function_device::{Builder, FunctionDevice, Kind};

use crate::{PAGE, shared_file};

#[test]
fn rereg_changes_access_and_domain() {
    let device = FunctionDevice::model();
    let context = device.context();
    let (first, second) = (context.alloc_pd().unwrap(), context.alloc_pd().unwrap());
    let mut region = first.allocate_shared::<u8>(64, AccessFlags::REMOTE_WRITE).unwrap();
    region.write(0, b"stays").unwrap();

    region.rereg(Reregistration::new().access(AccessFlags::REMOTE_READ)).unwrap();
    let call = device.last_call("rereg_mr").unwrap();
    let access = AccessFlags::REMOTE_READ | AccessFlags::LOCAL_WRITE;
    assert_eq!((call.mask, call.access, call.addr, call.length), (4, access.bits(), 0, 0));
    assert_eq!(region.access(), access);

    region.rereg(Reregistration::new().protection_domain(&second)).unwrap();
    let call = device.last_call("rereg_mr").unwrap();
    assert_eq!((call.mask, call.access), (2, 0));
    assert_eq!(region.protection_domain().as_raw(), second.as_raw());
    assert_eq!(region.access(), access);

    let both = Reregistration::new().protection_domain(&first).access(AccessFlags::REMOTE_ATOMIC);
    region.rereg(both).unwrap();
    assert_eq!(device.last_call("rereg_mr").unwrap().mask, 6);
    assert_eq!(region.protection_domain().as_raw(), first.as_raw());
    assert_eq!(region.read_one(0), Ok(b's'));

    let calls = device.calls("rereg_mr");
    let foreign = device.context();
    let foreign = Arc::new(ProtectionDomain::new(Arc::new(foreign)).unwrap());
    for (change, words) in [
        (Reregistration::new(), "nothing is to be changed"),
        (Reregistration::new().access(AccessFlags::ZERO_BASED), "cannot be changed"),
        (Reregistration::new().access(AccessFlags::ON_DEMAND), "cannot be changed"),
        (Reregistration::new().protection_domain(&foreign), "another context"),
    ] {
        let error = region.rereg(change).unwrap_err();
        assert_eq!(error.state, ReregisteredState::Unchanged);
        assert!(error.to_string().contains(words), "{error}");
    }
    let mut local = first.allocate::<u8>(1).unwrap();
    let error = local.rereg(Reregistration::new().access(AccessFlags::REMOTE_READ)).unwrap_err();
    assert!(error.error.to_string().contains("local access only"), "{error}");
    assert_eq!(device.calls("rereg_mr"), calls);
    local.rereg(Reregistration::new().access(AccessFlags::RELAXED_ORDERING)).unwrap();
    assert_eq!(local.access(), AccessFlags::RELAXED_ORDERING | AccessFlags::LOCAL_WRITE);
}

#[test]
fn a_failed_rereg_says_what_became_of_the_region() {
    let device = FunctionDevice::model();
    let context = device.context();
    let (first, second) = (context.alloc_pd().unwrap(), context.alloc_pd().unwrap());
    let mut region = first.allocate_shared::<u8>(64, AccessFlags::REMOTE_WRITE).unwrap();
    let change = || Reregistration::new().protection_domain(&second);
    device.fail("rereg_mr").errno(libc::EOPNOTSUPP).times(1);
    let error = region.rereg(change()).unwrap_err();
    assert_eq!(error.state, ReregisteredState::Unchanged);
    device.fail("rereg_mr").errno(libc::EIO).times(1);
    let error = region.rereg(change()).unwrap_err();
    assert_eq!(error.state, ReregisteredState::Lost);
    assert_eq!(region.protection_domain().as_raw(), first.as_raw());
    assert!(std::io::Error::from(error).to_string().contains("no request can use"));
    region.close().unwrap();
    assert_eq!(device.live(Kind::MemoryRegion), 0);
    drop(second);
    // libibverbs itself refuses to re-register device memory and dma-bufs.
    let file = shared_file(PAGE as u64);
    let access = AccessFlags::LOCAL_WRITE;
    let mut region =
        RawMemoryRegion::from_dmabuf(&first, file.as_fd(), 0, PAGE, 0, access).unwrap();
    let calls = device.calls("rereg_mr");
    // SAFETY: nothing names the region.
    let error = unsafe { region.rereg(Reregistration::new().access(access)) }.unwrap_err();
    assert_eq!(error.state, ReregisteredState::Unchanged);
    assert_eq!((error.error.raw_os_error(), device.calls("rereg_mr")), (Some(libc::EINVAL), calls));
}

#[test]
fn rereg_moves_a_raw_region_to_other_memory() {
    let device = Builder::model().limits(|limits| limits.max_mr_size = 100).build();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let (mut old, mut new) = (vec![1_u8; 100], vec![2_u8; 50]);
    let (from, to) = (old.as_mut_ptr(), new.as_mut_ptr());
    // SAFETY: both vectors outlive the region, and are not touched meanwhile.
    unsafe {
        let mut region =
            RawMemoryRegion::new(&domain, from, 100, AccessFlags::LOCAL_WRITE).unwrap();
        for (address, bytes) in [(std::ptr::null_mut(), 1), (to, 0), (to, usize::MAX)] {
            let error = region.rereg_memory(address, bytes, Reregistration::new()).unwrap_err();
            assert_eq!(error.state, ReregisteredState::Unchanged);
        }
        assert_eq!(device.calls("rereg_mr"), 0);
        region.rereg_memory(to, 50, Reregistration::new()).unwrap();
        let call = device.last_call("rereg_mr").unwrap();
        assert_eq!((call.mask, call.addr, call.length), (1, to as u64, 50));
        assert_eq!((region.as_ptr(), region.len()), (to, 50));
        assert_eq!(region.gather_element(..).unwrap().as_raw().addr, to as u64);
        device.fail("rereg_mr").errno(libc::EFAULT).times(1);
        let error = region.rereg_memory(from, 100, Reregistration::new()).unwrap_err();
        assert_eq!(error.state, ReregisteredState::Lost);
        assert_eq!((region.as_ptr(), region.len()), (to, 50));
        let error = region.rereg_memory(from, 101, Reregistration::new()).unwrap_err();
        assert!(error.to_string().contains("is 101, and must be within 1..=100"), "{error}");
    }
    drop((old, new));
}
