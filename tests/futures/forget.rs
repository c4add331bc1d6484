//! Futures, channels and reactors that are forgotten or dropped in any order: what is left is never used after it was
//! freed, which valgrind would see.

use std::mem::forget;

use crate::rig::{CHUNKS, Rig, filled, poll, posted, serve};

/// What the test may forget, one bit each.
const FUTURES: u32 = 1;
const FIRST: u32 = 2;
const SECOND: u32 = 4;
const REACTOR: u32 = 8;
const POOL: u32 = 16;

fn forget_if<T>(forgotten: bool, value: T) {
    if forgotten { forget(value) } else { drop(value) }
}

#[test]
fn anything_may_be_forgotten_in_any_order() {
    for what in 0..32_u32 {
        for order in 0..6 {
            let rig = Rig::new();
            let target = rig.target();
            // Posted, ended, in line for room, and not posted.
            let receives = [(); 5].map(|()| posted(rig.two.receive(rig.buffer(0))));
            let sends = [(); 2].map(|()| posted(rig.one.send(rig.buffer(1))));
            serve(&rig.device, &rig.reactor);
            let more = [(); 5].map(|()| posted(rig.one.send(rig.buffer(2))));
            let read = posted(rig.two.read(rig.buffer(3), target.remote()));
            let new = rig.one.write(rig.buffer(4), target.remote());
            let ahead = rig.one.post_receive(rig.buffer(5));
            ahead.map_err(|failed| failed.error).unwrap();
            let Rig { one, two, reactor, pool, domain, device } = rig;
            let mut ends: Vec<Box<dyn FnOnce()>> = vec![
                Box::new(move || {
                    forget_if(what & FUTURES != 0, (receives, sends, more, read, new))
                }),
                Box::new(move || forget_if(what & FIRST != 0, one)),
                Box::new(move || forget_if(what & SECOND != 0, two)),
                Box::new(move || forget_if(what & REACTOR != 0, reactor)),
                Box::new(move || forget_if(what & POOL != 0, pool)),
                Box::new(move || drop((target, domain))),
            ];
            ends.rotate_left(order);
            if order % 2 == 1 {
                ends.reverse();
            }
            for end in ends {
                end();
                // The device carries out what is still posted.
                device.run();
            }
            assert_eq!(device.violations().0, 0, "{what} {order}: {}", device.violations().1);
            if what == 0 {
                device.assert_clean();
            }
        }
    }
}

/// Its operation goes on, but its place and its buffer stay with the channel, also when both have ended.
#[test]
fn what_a_forgotten_future_has_never_comes_back() {
    let Rig { one, two, reactor, pool, domain, device } = Rig::new();
    forget(posted(one.send(filled(&pool, 1))));
    two.post_receive(filled(&pool, 0)).map_err(drop).unwrap();
    serve(&device, &reactor);
    assert_eq!(device.outstanding(one.number()), (0, 0), "it has ended");
    assert_eq!(pool.available(), CHUNKS - 2);
    // Its place is in use: there is room for three others.
    let mut sends = [(); 4].map(|()| posted(one.send(filled(&pool, 2))));
    assert_eq!(device.outstanding(one.number()), (3, 0));
    drop(one);
    serve(&device, &reactor);
    for send in &mut sends {
        assert!(poll(send).expect("it has ended").unwrap_err().buffer.is_some());
    }
    // The future that was forgotten has a part in the channel's memory, but not in its buffers.
    assert_eq!(pool.available(), CHUNKS - 2);
    drop((sends, two, reactor, pool, domain));
    assert_eq!(device.violations().0, 0, "{}", device.violations().1);
}

/// As when a program forgets one of many, and drops the others.
#[test]
fn a_forgotten_future_takes_nothing_from_others() {
    let rig = Rig::new();
    forget(posted(rig.one.send(rig.buffer(1))));
    let others = [(); 3].map(|()| posted(rig.one.send(rig.buffer(2))));
    (0..4).for_each(|_| rig.two.post_receive(rig.buffer(0)).map_err(drop).unwrap());
    serve(&rig.device, &rig.reactor);
    for mut other in others {
        poll(&mut other).expect("it has ended").unwrap();
    }
    for byte in [1, 2, 2, 2] {
        let mut receive = rig.two.receive(rig.buffer(0));
        assert_eq!(poll(&mut receive).expect("it has arrived").unwrap().0[0], byte);
    }
}
