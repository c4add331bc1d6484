//! Pools of memory that peers access: the buffers are owned by operations as others are.

use ibverbs::channel::AnyBuffer;
use ibverbs::pool::Shared;
use ibverbs::{
    AccessFlags, BufferPool, Inline, Loop, PooledBuffer, ReadWorkRequest, ReceiveWorkRequest,
    SendWorkRequest, WriteWorkRequest,
};

use crate::loops::{Loops, next};
use crate::pair::ALL;
use crate::software::Software;

const CHUNK: usize = 100;

#[test]
fn peers_read_and_write_the_bytes_of_a_buffer_while_its_owner_copies_them() {
    let loops = Loops::on(Software::new());
    let pool = BufferPool::shared(&loops.domain, CHUNK, 4, ALL).unwrap();
    let mut both = Loop::<AnyBuffer>::new(loops.domain.context_parent(), 64).unwrap();
    let (one, two) = crate::pair::connect(loops.prepare(&both), loops.prepare(&both));
    let (one, two) = (both.add(one).unwrap(), both.add(two).unwrap());
    // An earlier user's.
    let all: Vec<_> = (0..4).map(|_| pool.take_from(&[0xee; CHUNK]).unwrap().unwrap()).collect();
    drop(all);

    let mut block = pool.take_from(b"a block").unwrap().unwrap();
    assert_eq!((block.remote().length(), block.as_slice().to_vec()), (7, b"a block".to_vec()));
    let mut room = pool.take().unwrap();
    room.set_len(7).unwrap();
    both.post(one, ReadWorkRequest::new(room, block.remote()), 1).unwrap();
    let read: PooledBuffer<Shared> = next(&mut both).buffer.downcast().unwrap();
    assert_eq!(read.as_slice().to_vec(), b"a block");

    // A peer writes a part of it, and the neighbours stay as they are.
    let part = block.remote().slice(2..5).unwrap();
    both.post(one, WriteWorkRequest::new(Inline(b"XYZ"), part), 2).unwrap();
    next(&mut both).result().unwrap();
    assert_eq!(block.as_slice().to_vec(), b"a XYZck");
    block.as_slice().write(0, b"A").unwrap();
    let mut first = [0; 3];
    block.as_slice().read(0, &mut first).unwrap();
    assert_eq!(first, *b"A X");

    // Messages: a send has its bytes, and a receive sets the length.
    let mut received = read;
    for message in [&b"short"[..], b"a message that is longer", b""] {
        block.clear();
        block.extend_from_slice(message).unwrap();
        both.post(two, ReceiveWorkRequest::new(received), 3).unwrap();
        both.post(one, SendWorkRequest::new(block), 4).unwrap();
        let mut ended = [next(&mut both), next(&mut both)];
        ended.sort_by_key(|ended| ended.token);
        let [of_two, of_one] = ended.map(|ended| ended.buffer.downcast().unwrap());
        (received, block) = (of_two, of_one);
        assert_eq!(received.as_slice().to_vec(), message);
        assert_eq!(received.remote().length() as usize, message.len());
    }
    drop((both, received, block));
    assert_eq!(pool.available(), 4);
    // A device may still have what a buffer keeps: the pool outlives its handle.
    let last = pool.take_from(&[1]).unwrap().unwrap();
    drop(pool);
    assert_eq!(last.as_slice().to_vec(), [1]);
    drop(last);
    loops.finish();
}

#[test]
fn each_kind_of_pool_refuses_the_access_of_the_other_and_names_it() {
    let loops = Loops::on(Software::new());
    let exclusive = BufferPool::new(&loops.domain, 8, 8, AccessFlags::REMOTE_READ).unwrap_err();
    assert!(exclusive.to_string().contains("`BufferPool::shared`"), "{exclusive}");
    let shared = BufferPool::shared(&loops.domain, 8, 8, AccessFlags::LOCAL_WRITE).unwrap_err();
    assert!(shared.to_string().contains("`BufferPool::new`"), "{shared}");
    let pool = BufferPool::shared(&loops.domain, 8, 1, AccessFlags::REMOTE_WRITE).unwrap();
    assert!(pool.take_from(&[0; 9]).is_err());
    assert_eq!(pool.available(), 1);
    let mut only = pool.take().unwrap();
    assert!(pool.take().is_none() && only.set_len(9).is_err() && only.is_empty());
    drop((only, pool));
    loops.finish();
}
