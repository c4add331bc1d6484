//! Random programs of both sides: no order of their steps ends in a deadlock.

use std::collections::VecDeque;

use super::*;

/// A small generator of numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % limit
    }
}

/// One side of the random program.
struct Peer<'a> {
    side: &'a Side,
    channel: Channel<'static>,
    sends: Vec<Kept<PooledBuffer>>,
    receives: VecDeque<Kept<PooledBuffer>>,
    sent: u64,
    arrived: u64,
    to_send: u64,
    to_receive: u64,
}

impl Peer<'_> {
    fn is_done(&self) -> bool {
        self.sent == self.to_send && self.arrived == self.to_receive && self.sends.is_empty()
    }

    fn post_receive(&mut self) {
        if self.arrived + (self.receives.len() as u64) < self.to_receive {
            match kept::receive(&mut self.channel, self.side.buffer(0)) {
                Ok(receive) => self.receives.push_back(receive),
                Err(refused) => assert_eq!(refused, TransportError::QueueFull),
            }
        }
    }

    fn send(&mut self) {
        if self.sent == self.to_send {
            return;
        }
        match kept::send(&mut self.channel, self.side.buffer(self.sent)) {
            Ok(send) => {
                self.sends.push(send);
                self.sent += 1;
            }
            Err(refused) => {
                let (full, none) = (TransportError::QueueFull, TransportError::NoCredit);
                assert!([full, none].contains(&refused), "{refused}");
            }
        }
    }

    fn send_blocking(&mut self) {
        if self.sent == self.to_send {
            return;
        }
        let soon = Instant::now() + Duration::from_micros(200);
        match self.channel.wait_for_credit_until(soon) {
            Ok(()) => self.send(),
            Err(error) => assert_eq!(error, TransportError::NoCredit),
        }
    }

    fn poll(&mut self) {
        let channel = &mut self.channel;
        self.sends.retain_mut(|send| send.poll(channel).unwrap().is_none());
        if let Some(first) = self.receives.front_mut()
            && let Some((buffer, _)) = first.poll(channel).unwrap()
        {
            assert_eq!(number(&buffer), self.arrived);
            self.receives.pop_front();
            self.arrived += 1;
        }
        channel.poll().unwrap();
    }

    fn step(&mut self, random: &mut Random) {
        match random.below(8) {
            0 | 1 => self.post_receive(),
            2 | 3 => self.send(),
            4 => self.send_blocking(),
            _ => self.poll(),
        }
    }
}

#[test]
fn random_programs_come_to_their_end() {
    for seed in 0..30 {
        let random = &mut Random(seed);
        let loss = if seed % 2 == 0 { 0.0 } else { 0.03 };
        let network = Network::builder().seed(seed).loss(loss).build();
        let sides = simulated(&network);
        let channels = connect(sides.each_ref().map(|side| {
            let [sends, receives] = [(); 2].map(|()| 1 + random.below(6) as u32);
            side.builder().max_send_wr(sends).max_recv_wr(receives)
        }));
        let counts = [random.below(60), random.below(60)];
        let mut index = 0;
        let mut peers: Vec<_> = sides
            .iter()
            .zip(channels)
            .map(|(side, channel)| {
                index += 1;
                Peer {
                    side,
                    channel,
                    sends: Vec::new(),
                    receives: VecDeque::new(),
                    sent: 0,
                    arrived: 0,
                    to_send: counts[index - 1],
                    to_receive: counts[2 - index],
                }
            })
            .collect();
        let end = deadline();
        while !peers.iter().all(Peer::is_done) {
            assert!(Instant::now() < end, "seed {seed}: {counts:?}");
            // Stretches of one side, so that the other one runs into its limits.
            let side = random.below(2) as usize;
            for _ in 0..random.below(20) {
                peers[side].step(random);
            }
        }
    }
}
