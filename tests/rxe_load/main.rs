//! Load from many threads: every posted request completes or is flushed, exactly once, and the
//! received data equals the sent data. To be run by `script/test rxe`, in the machine that `script/vm` starts;
//! for longer than its 30 s by `script/soak`.

#[path = "../support/figures.rs"]
mod figures;
mod one_queue;
mod random;
#[path = "../support/vm/mod.rs"]
mod vm;

use vm::alone;

/// Numbers that are the same in every run of the same seed: xorshift64*.
#[derive(Clone, Debug)]
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A random number less than `bound`.
    fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }
}
