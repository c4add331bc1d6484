//! Packet sequence numbers: 24 bits, compared modulo 2^24.

/// The bits of a sequence number.
pub(crate) const MASK: u32 = 0xff_ffff;

/// `a - b`, from -2^23 to 2^23 - 1.
pub(crate) fn distance(a: u32, b: u32) -> i32 {
    ((a.wrapping_sub(b) << 8) as i32) >> 8
}

pub(crate) fn add(a: u32, b: u32) -> u32 {
    a.wrapping_add(b) & MASK
}

pub(crate) fn before(a: u32) -> u32 {
    a.wrapping_sub(1) & MASK
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_wrap() {
        assert_eq!(distance(0, MASK), 1);
        assert_eq!(distance(MASK, 0), -1);
        assert_eq!(distance(0x80_0000, 0), -0x80_0000);
        assert_eq!(distance(0x7f_ffff, 0), 0x7f_ffff);
        assert_eq!((add(MASK, 2), before(0)), (1, MASK));
    }
}
