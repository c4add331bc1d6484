//! Memory that peers write while the program uses it.

use ibverbs::memory::BorrowedMemoryRegion;
use ibverbs::{CompareSwapWorkRequest, FetchAddWorkRequest, MemoryRegion};

use crate::device;
use crate::rig::{ALL, Pair, domain};

#[test]
fn a_region_lends_itself_like_a_slice() {
    let domain = domain();
    let mut region = MemoryRegion::<u32>::new(&domain, 8).unwrap();
    region[3] = 5;
    {
        let (mut left, right) = region.slice_mut(..).unwrap().split_at(4).unwrap();
        left[0] = right[0] + 1;
        let part = left.slice(1..).unwrap();
        assert_eq!(part[2], 5);
    }
    for mut chunk in region.slice_mut(..).unwrap().chunks(3).unwrap() {
        chunk[0] = 9;
    }
    assert_eq!(region[..], [9, 0, 0, 9, 0, 0, 9, 0]);
    region.close().map_err(drop).unwrap();
    assert_eq!(device::live().0, 0);
}

#[test]
fn borrowed_memory_is_the_vectors_again() {
    let domain = domain();
    let mut vector = vec![1_u16; 6];
    {
        let mut region = BorrowedMemoryRegion::new(&domain, &mut vector).unwrap();
        region[2] = 4;
        let slice = region.slice_mut(1..4).unwrap();
        assert_eq!(slice[1], 4);
    }
    vector.push(2);
    assert_eq!(vector, [1, 1, 4, 1, 1, 1, 2]);
}

#[test]
fn peers_write_shared_memory_that_the_program_reads() {
    for eager in [true, false] {
        device::eager(eager);
        let mut pair = Pair::new();
        let target = pair.shared(4);
        let mut source = pair.region(16, 1);
        let view = target.slice(1..3).unwrap();
        let mut copy = [0; 2];
        view.read(0, &mut copy).unwrap();
        let remote = target.remote_range(1..3).unwrap();
        pair.one.write(&source.slice(..).unwrap(), remote).unwrap();
        view.read(0, &mut copy).unwrap();
        assert_eq!(copy[0].to_ne_bytes(), source[..8]);
        source.fill(0);
        pair.one.read(&mut source.slice_mut(..).unwrap(), remote).unwrap();
        assert_eq!(copy[1].to_ne_bytes(), source[8..]);
        target.write_one(1, 40).unwrap();
        let mut old = pair.region(8, 0);
        let word = target.remote_range(1..2).unwrap();
        pair.one.run(FetchAddWorkRequest::new(&mut old.slice_mut(..).unwrap(), word, 2)).unwrap();
        assert_eq!(target.read_one(1).unwrap(), 42);
        pair.one
            .run(CompareSwapWorkRequest::new(&mut old.slice_mut(..).unwrap(), word, 42, 1))
            .unwrap();
        assert_eq!((target.read_one(1).unwrap(), old[0]), (1, 42));
    }
}

#[test]
fn threads_share_a_region_that_a_peer_writes() {
    device::eager(true);
    let mut pair = Pair::new();
    let target = ibverbs::SharedMemoryRegion::<u64>::new(&pair.domain, 4, ALL).unwrap();
    let source = pair.region(8, 1);
    let remote = target.remote_range(..1).unwrap();
    std::thread::scope(|threads| {
        let target = &target;
        threads.spawn(move || {
            for value in 0..20 {
                target.write_one(2, value).unwrap();
                target.read_one(3).unwrap();
            }
        });
        for value in 0..20 {
            target.write_one(3, value).unwrap();
            pair.one.write(&source.slice(..).unwrap(), remote).unwrap();
        }
    });
    assert_eq!(target.read_one(2).unwrap(), 19);
}
