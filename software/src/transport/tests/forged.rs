//! Packets of a malicious peer, of strangers, and noise: they do no harm.

use super::*;

/// Packets of a malicious peer: almost correct.
fn forge(random: &mut Random, side: &Side) -> Vec<u8> {
    let (qpn, key) = (side.target, side.key);
    let qp = side.engine.qps.get(qpn).unwrap();
    let expected = qp.responder.expected;
    let near = |random: &mut Random, n: u32| n.wrapping_add(random.below(5) as u32).wrapping_sub(2);
    let operation = random.below(26) as u8;
    let psn = if random.below(3) > 0 { expected } else { near(random, expected) };
    let mut bth = Bth::new(qp.transport.bits() | operation, qpn, psn & 0xff_ffff);
    bth.acknowledge = random.below(2) == 0;
    bth.pad = if random.below(4) == 0 { random.below(4) as u8 } else { 0 };
    let mut packet = bth.bytes().to_vec();
    if let Some(srq) = side.srq {
        let srq = if random.below(16) == 0 { near(random, srq) } else { srq };
        XrcEth { srq }.write(&mut packet);
    }
    let rkey = if random.below(8) == 0 { near(random, key) } else { key };
    let edges = [0, 1, 8, MTU as u64, LENGTH as u64 - 8, LENGTH as u64, 1 << 31, u64::MAX / 2];
    let offset = edges[random.below(8) as usize].wrapping_add(random.below(3)).wrapping_sub(1);
    let address = 0x10_0000_u64.wrapping_add(offset);
    let length = edges[random.below(8) as usize].wrapping_add(random.below(3)) as u32;
    match random.below(4) {
        0 => Reth { address, rkey, length }.write(&mut packet),
        1 => AtomicEth { address, rkey, swap_add: 1, compare: 0 }.write(&mut packet),
        2 => packet.extend_from_slice(&(random.next() as u32).to_be_bytes()),
        _ => {}
    }
    let payload = [0, 1, 8, MTU, MTU + 4, 3 * MTU][random.below(6) as usize];
    packet.resize(packet.len() + payload, 0x66);
    if random.below(4) == 0 {
        let at = random.below(packet.len() as u64) as usize;
        packet[at] ^= 1 << random.below(8);
    }
    packet
}

/// No memory outside of the region changes, no answer is longer than the region that it may read, and
/// the state that is kept for the peer stays bounded.
#[test]
fn forged_packets_do_no_harm() {
    let mut answered = 0;
    for seed in 1..=2000 {
        let kind = if seed % 2 == 0 { Kind::Extended } else { Kind::Reliable };
        let mut world = World::of(kind, seed);
        for i in 0..64 {
            world.sides[1].receive(i, 0, LENGTH);
        }
        let (from, to) = (world.sides[0].address, world.sides[1].address);
        for _ in 0..300 {
            let side = &mut world.sides[1];
            if side.state() == ibv_qp_state::IBV_QPS_ERR {
                break;
            }
            let packet = forge(&mut world.random, side);
            let packet = seal(from, to, packet);
            side.engine.receive((from, PORT), to, &packet);
            while side.engine.due() == Some(0) {
                side.engine.advance();
            }
            side.engine.settle();
            let mut sent = world.sent.lock().unwrap();
            let bytes: usize = sent.iter().map(|packet| packet.2.len()).sum();
            answered += sent.len();
            assert!(bytes <= (LENGTH / MTU + 40) * (MTU + 64), "{bytes} bytes for one packet");
            sent.clear();
        }
        world.sides[1].assert_guards();
        // Each receive completed at most once.
        let mut ids: Vec<u64> = world.sides[1].poll().iter().map(|c| c.id).collect();
        let count = ids.len();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), count);
    }
    assert!(answered > 2000, "{answered}: too few of them get anywhere");
}

/// Random bytes, and packets with a wrong CRC.
#[test]
fn noise_is_dropped() {
    let mut world = World::new(3);
    let (from, to) = (world.sides[0].address, world.sides[1].address);
    for _ in 0..20_000 {
        let length = world.random.below(200) as usize;
        let noise: Vec<u8> = (0..length).map(|_| world.random.next() as u8).collect();
        let sealed = if world.random.below(2) == 0 { seal(from, to, noise) } else { noise };
        world.deliver(from, to, &sealed);
    }
    assert_eq!(world.sides[1].state(), ibv_qp_state::IBV_QPS_RTS);
    let counters = world.sides[1].engine.core.counters();
    let dropped = counters.packets_unexpected + counters.dropped_wrong_partition;
    assert_eq!(counters.packets_malformed + dropped, 20_000, "{counters:?}");
}

#[test]
fn what_a_stranger_sends_is_not_for_us() {
    let mut world = World::new(4);
    let (stranger, to) = (IpAddr::from([127, 9, 9, 3]), world.sides[1].address);
    let side = &mut world.sides[1];
    side.receive(1, 0, 64);
    let expected = side.engine.qps.get(side.qp).unwrap().responder.expected;
    let packet = Bth::new(opcode::RC | opcode::SEND_ONLY, side.qp, expected).bytes().to_vec();
    side.engine.receive((stranger, PORT), to, &seal(stranger, to, packet.clone()));
    assert_eq!(side.engine.core.counters.packets_unexpected, 1);
    assert!(side.poll().is_empty());
    let peer = world.sides[0].address;
    world.deliver(peer, to, &seal(peer, to, packet));
    assert_eq!(world.sides[1].poll().len(), 1);
}

/// Deregistered memory is neither read nor written, even if the request was valid when it arrived.
#[test]
fn a_region_that_is_gone_is_not_touched() {
    let mut world = World::new(5);
    let rkey = world.sides[1].key;
    let read = Operation::Read { address: 0x10_0000, rkey };
    world.sides[0].post(1, read, Extra::None, 0, LENGTH);
    let key = world.sides[1].key;
    world.sides[1].engine.deregister(key).unwrap();
    world.run(0);
    let status: Vec<_> = world.sides[0].poll().iter().map(|c| c.status).collect();
    assert_eq!(status, [ibv_wc_status::IBV_WC_REM_ACCESS_ERR]);
    assert_eq!(world.sides[1].state(), ibv_qp_state::IBV_QPS_ERR);
}

#[test]
fn what_regions_hold_is_given_back_however_they_were_registered() {
    let mut world = World::new(1);
    let engine = &mut world.sides[1].engine;
    let pd = engine.alloc_pd().unwrap();
    let (before, demand) = (engine.core.registered, ibv_access_flags::IBV_ACCESS_ON_DEMAND.0);
    for (first, access, held) in
        [(0, None, 2), (0, Some(demand), 0), (demand, None, 0), (demand, Some(0), 2)]
    {
        let backing = if first == 0 { Backing::Memory(0x1000) } else { Backing::OnDemand(0x1000) };
        let key = engine.register(pd, backing, 1, 0x1000, first).unwrap();
        engine.reregister(key, None, Some((0x1000, 2)), access).unwrap();
        assert_eq!(engine.core.registered, before + held);
        engine.deregister(key).unwrap();
        assert_eq!(engine.core.registered, before);
    }
}
