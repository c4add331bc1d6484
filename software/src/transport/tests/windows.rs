//! Tests of a peer's access through a memory window.

use super::*;
use crate::transport::memory::{Denied, Keys};
use crate::transport::work::Bind;

const READ: ibv_access_flags = ibv_access_flags::IBV_ACCESS_REMOTE_READ;
const WRITE: ibv_access_flags = ibv_access_flags::IBV_ACCESS_REMOTE_WRITE;

#[test]
fn a_window_opens_its_range_to_its_domain_or_queue_pair() {
    let mut world = World::new(1);
    let side = &mut world.sides[0];
    let (engine, qp) = (&mut side.engine, side.qp);
    let pd = engine.qps.get(qp).unwrap().pd;
    let backing = Backing::Memory(side.memory.as_ptr() as u64 + GUARD as u64);
    let access = SEND_LOCAL | ibv_access_flags::IBV_ACCESS_MW_BIND.0;
    let region = engine.register(pd, backing, 4096, 0x1000, access).unwrap();
    for type_2 in [false, true] {
        let window = engine.alloc_window(pd, type_2).unwrap();
        let rkey = window & !0xff | 5;
        let bind = |address, length| Bind { window, rkey, region, address, length, access: READ.0 };
        let may = |keys: &Keys, who: (u32, u32), address, length, right| {
            keys.remote(who, rkey, address, length, right).is_ok()
        };
        assert!(!may(&engine.core.keys, (pd, qp), 0x1100, 1, READ), "it is not bound");
        // Not in the region; of another domain.
        assert_eq!(engine.core.bind_window(pd, qp, bind(0x1000, 4097)), Err(Denied));
        assert_eq!(engine.core.bind_window(pd, qp, bind(0xfff, 10)), Err(Denied));
        assert_eq!(engine.core.bind_window(pd + 1, qp, bind(0x1100, 16)), Err(Denied));
        assert_eq!(engine.core.bind_window(pd, qp, bind(0x1100, 16)), Ok(()));
        let keys = &engine.core.keys;
        assert!(may(keys, (pd, qp), 0x1100, 16, READ));
        assert!(may(keys, (pd, qp), 0x110f, 1, READ) && may(keys, (pd, qp), 0x1110, 0, READ));
        for (address, length) in [(0x10ff, 2), (0x1100, 17), (0x1110, 1), (u64::MAX, 2)] {
            assert!(!may(keys, (pd, qp), address, length, READ), "{address:#x} {length}");
        }
        assert!(!may(keys, (pd, qp), 0x1100, 16, WRITE), "no right");
        assert!(!may(keys, (pd + 1, qp), 0x1100, 16, READ), "another domain");
        assert_eq!(may(keys, (pd, qp + 1), 0x1100, 16, READ), !type_2, "another queue pair");
        assert!(keys.remote((pd, qp), window & !0xff | 6, 0x1100, 1, READ).is_err(), "an old key");
        // The end of a queue pair invalidates the windows of type 2 that were bound through it, and no others.
        engine.core.unbind_all_of(qp + 1);
        assert!(may(&engine.core.keys, (pd, qp), 0x1100, 16, READ));
        engine.core.unbind_all_of(qp);
        assert_eq!(may(&engine.core.keys, (pd, qp), 0x1100, 16, READ), !type_2);
        if type_2 {
            assert_eq!(engine.core.bind_window(pd, qp, bind(0x1100, 16)), Ok(()));
        }
        // The region stays, and the window's range does not, once it is invalidated or bound to nothing.
        assert_eq!(engine.deregister(region), Err(libc::EBUSY));
        if type_2 {
            assert_eq!(
                engine.core.bind_window(pd, qp, bind(0x1000, 1)),
                Err(Denied),
                "it is bound"
            );
            assert_eq!(engine.core.invalidate_window((pd, qp + 1), rkey), Err(Denied));
            assert_eq!(engine.core.invalidate_window((pd + 1, qp), rkey), Err(Denied));
            assert_eq!(engine.core.invalidate_window((pd, qp), rkey), Ok(()));
        } else {
            assert_eq!(engine.core.invalidate_window((pd, qp), rkey), Err(Denied));
            assert_eq!(engine.core.bind_window(pd, qp, bind(0x1100, 0)), Ok(()));
        }
        assert!(!may(&engine.core.keys, (pd, qp), 0x1100, 16, READ));
        assert_eq!(engine.dealloc_window(window), Ok(()));
    }
    assert_eq!(engine.deregister(region), Ok(()));
}
