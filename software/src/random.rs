//! Random numbers that a seed repeats.

use std::net::IpAddr;

/// Random numbers: xorshift64*, which is fast, and the same everywhere.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        // Neighbouring seeds give unrelated numbers; the state is never 0.
        Self(mix(seed) | 1)
    }

    /// The numbers for packets between two addresses.
    pub(crate) fn between(seed: u64, from: IpAddr, to: IpAddr) -> Self {
        let mut all = mix(seed);
        for address in [from, to] {
            let bits = match address {
                IpAddr::V4(v4) => v4.to_ipv6_mapped().to_bits(),
                IpAddr::V6(v6) => v6.to_bits(),
            };
            all = mix(all ^ bits as u64);
            all = mix(all ^ (bits >> 64) as u64);
        }
        Self::new(all)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `n`; 0 if `n` is 0.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(n)) >> 64) as u64
    }

    /// True with this probability.
    pub(crate) fn chance(&mut self, probability: f64) -> bool {
        let number = (self.next() >> 11) as f64 / (1_u64 << 53) as f64;
        number < probability
    }
}

/// A step of splitmix64.
fn mix(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probability_is_one() {
        let mut random = Random::new(1);
        let mut count = |p| (0..100_000).filter(|_| random.chance(p)).count();
        assert_eq!((count(0.0), count(-1.0), count(f64::NAN)), (0, 0, 0));
        assert_eq!((count(1.0), count(7.0)), (100_000, 100_000));
        let tenth = count(0.1);
        assert!((9_500..10_500).contains(&tenth), "{tenth}");
    }

    #[test]
    fn pairs_and_seeds_are_unrelated() {
        let [a, b] = [[10, 0, 0, 1], [10, 0, 0, 2]].map(IpAddr::from);
        let first = |mut random: Random| random.next();
        let all = [
            first(Random::between(1, a, b)),
            first(Random::between(1, b, a)),
            first(Random::between(2, a, b)),
            first(Random::new(1)),
        ];
        for (i, one) in all.iter().enumerate() {
            assert!(all[..i].iter().all(|other| other != one));
        }
        assert_eq!(Random::new(3).below(0), 0);
        assert!((0..1000).all(|seed| Random::new(seed).below(3) < 3));
    }
}
