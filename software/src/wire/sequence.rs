//! Packet sequence numbers: 24 bits, compared modulo 2^24.
//!
//! The sending side counts its packets with 64 bits, since a full send queue may have far more than 2^24 of them. Only
//! headers have 24: [`wire`] cuts a number, [`whole`] completes it. The receiving side has nothing but the 24 bits:
//! [`distance`] decides, as the specification does, that the 2^23 numbers before the expected one were seen.

/// The bits of a sequence number.
pub(crate) const MASK: u32 = 0xff_ffff;

/// `a - b` of two numbers that are at most 2^23 apart: from -2^23 to 2^23 - 1.
pub(crate) fn distance(a: u32, b: u32) -> i32 {
    ((a.wrapping_sub(b) << 8) as i32) >> 8
}

pub(crate) fn add(a: u32, b: u32) -> u32 {
    a.wrapping_add(b) & MASK
}

pub(crate) fn before(a: u32) -> u32 {
    a.wrapping_sub(1) & MASK
}

/// The sequence number of a packet.
pub(crate) fn wire(number: u64) -> u32 {
    number as u32 & MASK
}

/// The number, not below `from`, of the packet with this sequence number: less than 2^24 above it.
pub(crate) fn whole(sequence: u32, from: u64) -> u64 {
    from + u64::from(sequence.wrapping_sub(wire(from)) & MASK)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NUMBERS: i64 = 1 << 24;

    /// Against arithmetic without a limit, for every distance, and around every edge.
    #[test]
    fn all_numbers_agree_with_wide_integers() {
        for b in [0, 1, 0x1234, 0x7f_ffff, 0x80_0000, 0x80_0001, MASK - 1, MASK] {
            for a in 0..=MASK {
                let wide = i64::from(a) - i64::from(b);
                let near = (wide + NUMBERS / 2).rem_euclid(NUMBERS) - NUMBERS / 2;
                assert_eq!(i64::from(distance(a, b)), near, "{a:#x} - {b:#x}");
                let sum = (i64::from(a) + i64::from(b)).rem_euclid(NUMBERS);
                assert_eq!(i64::from(add(a, b)), sum, "{a:#x} + {b:#x}");
            }
        }
        for a in 0..=MASK {
            assert_eq!(i64::from(before(a)), (i64::from(a) - 1).rem_euclid(NUMBERS));
            assert_eq!(add(before(a), 1), a);
        }
        // More than 24 bits are added: the length of a message in packets has up to 23.
        assert_eq!(add(MASK, u32::MAX), MASK - 1);
    }

    #[test]
    fn a_number_is_completed_from_every_sequence_number() {
        let edges = [0, 1, 1 << 23, (1 << 24) - 1, 1 << 24, (1 << 24) + 1, (1 << 40) + 0xff_fff0];
        for from in edges {
            for sequence in 0..=MASK {
                let number = whole(sequence, from);
                assert_eq!(wire(number), sequence);
                assert!(
                    number >= from && number - from < NUMBERS as u64,
                    "{sequence:#x} {from:#x}"
                );
            }
        }
    }
}
