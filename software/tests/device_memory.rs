//! Device memory: the program's copies, a peer's access, limits and failures.

use std::error::Error;

use ibverbs::memory::{DeviceMemory, DeviceMemoryRegion};
use ibverbs::{
    AccessFlags, ErrorKind, FetchAddWorkRequest, QueuePair, Rc, RemoteMemoryRegion, WorkCompletion,
    WorkStatus,
};
use ibverbs_software::{Device, Network, Verb, When};

type Outcome = Result<(), Box<dyn Error>>;

const ALL: AccessFlags =
    AccessFlags::REMOTE_READ.union(AccessFlags::REMOTE_WRITE).union(AccessFlags::REMOTE_ATOMIC);

#[test]
fn a_peer_reads_writes_and_counts_in_it() -> Outcome {
    let network = Network::new();
    let (near, far) = (network.device()?.open()?, network.device()?.open()?);
    let (near, far) = (near.alloc_pd()?, far.alloc_pd()?);
    let memory = far.context().alloc_dm(64)?;
    memory.write(8, &[1_u64, 2, 3])?;
    // The region begins at the first number.
    let region = DeviceMemoryRegion::new(&far, &memory, 8.., ALL)?;
    assert_eq!(region.len(), 56);

    let (one, other) =
        (near.create_channel().access(ALL).build()?, far.create_channel().access(ALL).build()?);
    let (to_one, to_other) = (one.endpoint(), other.endpoint());
    let (mut one, _other) = (one.handshake(to_other)?, other.handshake(to_one)?);
    let mut words = near.allocate::<u64>(3)?;
    let remote = region.remote();
    one.read(&mut words.slice_mut(..)?, remote.slice(..24)?)?;
    assert_eq!(words[..], [1, 2, 3]);
    words.copy_from_slice(&[10, 20, 30]);
    one.write(words.slice(..2)?, remote.slice(8..24)?)?;
    one.run(FetchAddWorkRequest::new(&mut words.slice_mut(..1)?, remote.slice(8..16)?, 5))?;
    assert_eq!(words[0], 10, "what was there");
    let mut found = [0_u64; 5];
    memory.read(0, &mut found)?;
    assert_eq!(found, [0, 1, 15, 20, 0]);
    // Beyond the end of the region, which the device finds.
    let beyond = RemoteMemoryRegion::new(remote.address() + 49, 8, remote.rkey())?;
    let error = one.read(&mut words.slice_mut(..1)?, beyond).unwrap_err();
    assert_eq!(error.work_error().map(|error| error.status()), Some(WorkStatus::RemoteAccess));
    Ok(())
}

#[test]
fn a_message_goes_from_one_to_another() -> Outcome {
    let network = Network::new();
    let contexts = [network.device()?.open()?, network.device()?.open()?];
    let [near, far] = [contexts[0].alloc_pd()?, contexts[1].alloc_pd()?];
    let queues = [contexts[0].create_cq(4)?, contexts[1].create_cq(4)?];
    let new = |domain, queue| QueuePair::builder(domain, queue, queue, Rc).build();
    let (one, other) = (new(&near, &queues[0])?, new(&far, &queues[1])?);
    let (to_one, to_other) = (one.endpoint(), other.endpoint());
    let (mut one, mut other) = (one.handshake(to_other)?, other.handshake(to_one)?);
    let (from, to) = (contexts[0].alloc_dm(16)?, contexts[1].alloc_dm(16)?);
    from.write(0, b"0123456789abcdef")?;
    let source = DeviceMemoryRegion::new(&near, &from, .., AccessFlags::empty())?;
    let mut target = DeviceMemoryRegion::new(&far, &to, .., AccessFlags::empty())?;
    // SAFETY: the regions live until both requests have completed.
    unsafe {
        other.post_receive(&mut target, 4.., 1)?;
        one.post_send(&source, ..12, 2)?;
    }
    for queue in &queues {
        let mut completions = [WorkCompletion::default()];
        while queue.poll(&mut completions)?.is_empty() {}
        completions[0].result()?;
    }
    let mut bytes = [0; 16];
    to.read(0, &mut bytes)?;
    assert_eq!((&bytes[..4], &bytes[4..]), (&[0; 4][..], &b"0123456789ab"[..]));
    Ok(())
}

/// A region is a buffer of a channel, whole.
#[test]
fn a_channel_sends_and_receives_it() -> Outcome {
    let network = Network::new();
    let contexts = [network.device()?.open()?, network.device()?.open()?];
    let [near, far] = [contexts[0].alloc_pd()?, contexts[1].alloc_pd()?];
    let (from, to) = (contexts[0].alloc_dm(16)?, contexts[1].alloc_dm(16)?);
    from.write(0, b"0123456789abcdef")?;
    let source = DeviceMemoryRegion::new(&near, &from, 4..16, AccessFlags::empty())?;
    let mut target = DeviceMemoryRegion::new(&far, &to, .., AccessFlags::empty())?;
    let (one, other) = (near.create_channel().build()?, far.create_channel().build()?);
    let (to_one, to_other) = (one.endpoint(), other.endpoint());
    let (mut one, mut other) = (one.handshake(to_other)?, other.handshake(to_one)?);
    let received = other.scope(|s| {
        let receiving = s.post_receive(&mut target)?;
        one.send(&source)?;
        let (_, success) = receiving.wait()?;
        Ok::<_, ibverbs::TransportError>(success.byte_len())
    })?;
    assert_eq!(received, 12);
    let mut bytes = [0; 16];
    to.read(0, &mut bytes)?;
    assert_eq!(&bytes[..], b"456789abcdef\0\0\0\0");
    Ok(())
}

#[test]
fn a_copy_of_less_than_a_word_says_what_is_wrong() -> Outcome {
    let context = Network::new().device()?.open()?;
    let memory = context.alloc_dm(16)?;
    for (offset, bytes) in [(1, 4), (2, 4), (0, 1), (4, 3), (0, 7)] {
        for error in [
            memory.write(offset, &vec![0_u8; bytes]).unwrap_err(),
            memory.read(offset, &mut vec![0_u8; bytes]).unwrap_err(),
        ] {
            assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
            assert!(error.to_string().contains("must be multiples of 4"), "{error}");
        }
    }
    memory.write(4, &[1_u32; 3])?;
    Ok(())
}

/// A region of it is zero-based, and has no windows and no pages that come on demand.
#[test]
fn rights_that_it_cannot_have_are_refused() -> Outcome {
    use ibverbs::ffi::{ibv_access_flags as Access, ibv_dereg_mr, ibv_reg_dm_mr};

    let context = Network::new().device()?.open()?;
    let (memory, domain) = (context.alloc_dm(8)?, context.alloc_pd()?);
    let base = Access::IBV_ACCESS_ZERO_BASED | Access::IBV_ACCESS_LOCAL_WRITE;
    let [demand, windows] = [Access::IBV_ACCESS_ON_DEMAND, Access::IBV_ACCESS_MW_BIND];
    for (rights, is_possible) in [
        (base, true),
        (Access::IBV_ACCESS_LOCAL_WRITE, false),
        (base | demand, false),
        (base | windows, false),
    ] {
        // SAFETY: the objects are live; a region that is made is deregistered.
        let made = unsafe {
            let region = ibv_reg_dm_mr(domain.as_raw(), memory.as_raw(), 0, 8, rights.0);
            !region.is_null() && ibv_dereg_mr(region) == 0
        };
        assert_eq!(made, is_possible, "{:#x}", rights.0);
    }
    Ok(())
}

#[test]
fn it_is_limited_and_freed_after_its_regions() -> Outcome {
    let device = Device::builder().network(&Network::new()).max_device_memory(8192).build()?;
    let context = device.open()?;
    assert_eq!(context.query_device()?.max_device_memory(), 8192);
    let kind = |result: ibverbs::Result<DeviceMemory<'_>>| result.unwrap_err().kind();
    assert_eq!(kind(context.alloc_dm(8193)), ErrorKind::Resource);
    assert_eq!(kind(DeviceMemory::with_alignment(&context, 8, 8192)), ErrorKind::InvalidInput);
    let first = DeviceMemory::with_alignment(&context, 8000, 4096)?;
    assert_eq!(kind(context.alloc_dm(193)), ErrorKind::Resource);
    context.alloc_dm(192)?.close()?;

    let domain = context.alloc_pd()?;
    let register = |range| DeviceMemoryRegion::new(&domain, &first, range, AccessFlags::empty());
    assert_eq!(register(0..8001).unwrap_err().kind(), ErrorKind::InvalidInput);
    device.fail(Verb::FreeDm, libc::EIO, When::Before, 1);
    device.fail(Verb::AllocDm, libc::ENOMEM, When::Before, 1);
    assert_eq!(kind(context.alloc_dm(1)), ErrorKind::Resource);
    let region = register(0..8000)?;
    // SAFETY: the memory stays as it is while the region exists: the verb refuses.
    let busy = unsafe { ibverbs::ffi::ibv_free_dm(first.as_raw()) };
    assert_eq!(busy, libc::EIO, "the verb that was to fail");
    // SAFETY: as above.
    let busy = unsafe { ibverbs::ffi::ibv_free_dm(first.as_raw()) };
    assert_eq!(busy, libc::EBUSY);
    region.close()?;
    first.close()?;
    context.alloc_dm(8192)?.close()?;
    Ok(())
}
