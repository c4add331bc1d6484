//! The invariant CRC: it covers all fields that routers do not change.
//!
//! It includes the identification and the fragment field of the IPv4 header. A socket that is not
//! connected and never fragments sends identification 0 with "do not fragment"; this file computes the CRC
//! for that. Other senders, such as the kernel's rxe, increment the identification, and so does the kernel when it cuts a message
//! into datagrams ([`identify`]), and the receiver cannot read it from a socket. CRCs are linear, so [`matches()`] computes
//! whether any of the 65,536 identifications fits the packet, which leaves a check of 16 bits instead of 32.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};

use crc32fast::Hasher;

use super::header::Bth;

/// The size of the CRC at the end of each packet.
pub(crate) const SIZE: usize = 4;

/// The CRC of a packet from its BTH to its payload's padding. With one address of IPv6, as of IPv6.
pub(crate) fn compute(from: (IpAddr, u16), to: (IpAddr, u16), packet: &[u8]) -> u32 {
    let udp = (8 + packet.len() + SIZE) as u16;
    // Eight bytes of ones replace the local routing header.
    let mut header = [0xff; 8 + 40 + 8 + Bth::SIZE];
    let used = match (from.0, to.0) {
        (IpAddr::V4(a), IpAddr::V4(b)) => {
            let ip = &mut header[8..28];
            ip[0] = 0x45;
            ip[2..4].copy_from_slice(&(20 + udp).to_be_bytes());
            ip[4..8].copy_from_slice(&[0, 0, 0x40, 0]);
            ip[9] = 17;
            ip[12..16].copy_from_slice(&a.octets());
            ip[16..20].copy_from_slice(&b.octets());
            28
        }
        (a, b) => {
            let ip = &mut header[8..48];
            ip[0] = 0x6f;
            ip[4..6].copy_from_slice(&udp.to_be_bytes());
            ip[6] = 17;
            ip[8..24].copy_from_slice(&v6(a));
            ip[24..40].copy_from_slice(&v6(b));
            48
        }
    };
    header[used..used + 2].copy_from_slice(&from.1.to_be_bytes());
    header[used + 2..used + 4].copy_from_slice(&to.1.to_be_bytes());
    header[used + 4..used + 6].copy_from_slice(&udp.to_be_bytes());
    let used = used + 8;
    let (bth, rest) = packet.split_at(Bth::SIZE.min(packet.len()));
    let end = used + bth.len();
    header[used..end].copy_from_slice(bth);
    header[used + 4] = 0xff;
    let mut hasher = Hasher::new();
    hasher.update(&header[..end]);
    hasher.update(rest);
    hasher.finalize()
}

fn v6(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// Whether `sent` is the CRC of the packet.
pub(crate) fn matches(from: (IpAddr, u16), to: (IpAddr, u16), packet: &[u8], sent: u32) -> bool {
    let difference = compute(from, to, packet) ^ sent;
    if difference == 0 || from.0.is_ipv6() || to.0.is_ipv6() {
        return difference == 0;
    }
    // Back to before the two bytes: the register then holds what was mixed into it, at its low end.
    static LAST: AtomicU64 = AtomicU64::new(0);
    multiply(difference, raise(&BACK, from_identification(packet.len()), &LAST)) >> 16 == 0
}

/// The CRC of a packet of this length, whose addresses are both of IPv4, after its identification has changed in these bits.
pub(crate) fn identify(sent: u32, length: usize, changed: u16) -> u32 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    let mixed_in = u32::from(changed.swap_bytes());
    sent ^ multiply(mixed_in, raise(&ON, from_identification(length), &LAST))
}

/// The bytes from the identification on: of IP, UDP, and the packet.
fn from_identification(length: usize) -> usize {
    20 - 4 + 8 + length
}

const POLYNOMIAL: u32 = 0xedb8_8320;

/// What a register is multiplied by to run it over so many zero bytes, on or back. `last`: the last length, and its result:
/// mostly packets have one length.
fn raise(powers: &[u32; 17], bytes: usize, last: &AtomicU64) -> u32 {
    let found = last.load(Ordering::Relaxed);
    if (found >> 32) as usize == bytes {
        return found as u32;
    }
    let set = powers.iter().enumerate().filter(|(bit, _)| bytes >> bit & 1 != 0);
    let product = set.fold(1 << 31, |product, (_, power)| multiply(product, *power));
    last.store((bytes as u64) << 32 | u64::from(product), Ordering::Relaxed);
    product
}

/// x^(8 * 2^i) and x^(-8 * 2^i), bits reversed as CRC-32 has them.
const ON: [u32; 17] = powers(true);
const BACK: [u32; 17] = powers(false);

const fn powers(on: bool) -> [u32; 17] {
    let mut powers = [0; 17];
    let mut power: u32 = 1 << 31;
    let mut bit = 0;
    while bit < 8 {
        power = match on {
            true if power & 1 != 0 => power >> 1 ^ POLYNOMIAL,
            true => power >> 1,
            false if power >> 31 != 0 => (power ^ POLYNOMIAL) << 1 | 1,
            false => power << 1,
        };
        bit += 1;
    }
    let mut i = 0;
    while i < powers.len() {
        powers[i] = power;
        power = multiply(power, power);
        i += 1;
    }
    powers
}

/// The product of two polynomials modulo the CRC's, bits reversed.
const fn multiply(a: u32, b: u32) -> u32 {
    let (mut product, mut b, mut bit) = (0, b, 1 << 31);
    while bit != 0 {
        if a & bit != 0 {
            product ^= b;
        }
        b = if b & 1 != 0 { b >> 1 ^ POLYNOMIAL } else { b >> 1 };
        bit >>= 1;
    }
    product
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computes it as specified: over the whole pseudo header, with an identification.
    fn slowly(from: [u8; 4], to: [u8; 4], packet: &[u8], identification: u16) -> u32 {
        let udp = (8 + packet.len() + 4) as u16;
        let mut all = vec![0xff; 8];
        all.extend([0x45, 0xff]);
        all.extend((20 + udp).to_be_bytes());
        all.extend(identification.to_be_bytes());
        all.extend([0x40, 0, 0xff, 17, 0xff, 0xff]);
        all.extend(from);
        all.extend(to);
        all.extend([4791_u16, 4791, udp].iter().flat_map(|n| n.to_be_bytes()));
        all.extend([0xff, 0xff]);
        let bth = all.len();
        all.extend(packet);
        all[bth + 4] = 0xff;
        let mut register = u32::MAX;
        for byte in all {
            register ^= u32::from(byte);
            for _ in 0..8 {
                register =
                    if register & 1 != 0 { register >> 1 ^ POLYNOMIAL } else { register >> 1 };
            }
        }
        !register
    }

    #[test]
    fn any_identification_is_worked_out_and_nothing_else() {
        let (a, b) = ([127, 0, 0, 2], [127, 0, 0, 3]);
        let (from, to) = ((IpAddr::from(a), 4791), (IpAddr::from(b), 4791));
        for length in [12, 16, 28, 100, 1052, 4124] {
            let packet: Vec<u8> = (0..length).map(|i| (i * 7 + 3) as u8).collect();
            assert_eq!(compute(from, to, &packet), slowly(a, b, &packet, 0));
            for identification in [0, 1, 0x8000, 0x1234, 0xffff] {
                let sent = slowly(a, b, &packet, identification);
                assert!(matches(from, to, &packet, sent), "{length} {identification:#x}");
                let own = slowly(a, b, &packet, 0x55aa);
                let changed = identify(own, length, 0x55aa ^ identification);
                assert_eq!(changed, sent, "{length} {identification:#x}");
                let wrong = (0..32).filter(|bit| matches(from, to, &packet, sent ^ 1 << bit));
                assert!(wrong.count() <= 1, "{length} {identification:#x}");
            }
        }
    }

    #[test]
    fn ipv6_is_checked_in_full() {
        let from = ("fd00::1".parse().unwrap(), 4791);
        let to = ("fd00::2".parse().unwrap(), 4791);
        let packet = [7; 40];
        let sent = compute(from, to, &packet);
        assert!(matches(from, to, &packet, sent));
        for bit in 0..32 {
            assert!(!matches(from, to, &packet, sent ^ 1 << bit));
        }
    }
}
