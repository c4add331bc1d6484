//! Which device of one side works with which device of the other.

use std::cmp::Reverse;
use std::net::Ipv6Addr;

use serde::{Deserialize, Serialize};

/// A device's port, as the sides describe it to each other.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Facts {
    pub(crate) name: String,
    pub(crate) link: Link,
    /// The addresses of the port.
    pub(crate) gids: Vec<Ipv6Addr>,
    /// The speed of the port, in megabits per second; 0 if the kernel does not say.
    pub(crate) speed: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Link {
    InfiniBand,
    Ethernet,
}

impl Facts {
    /// How well the ports can reach each other, by their addresses; `None`: not at all.
    fn nearness(&self, other: &Self) -> Option<u32> {
        if self.link != other.link {
            return None;
        }
        let both = self.gids.iter().flat_map(|one| other.gids.iter().map(move |two| (one, two)));
        both.filter_map(|(one, two)| self.link.nearness(*one, *two)).max()
    }
}

impl Link {
    /// The bits that two addresses have in common, if packets get from one to the other.
    fn nearness(self, one: Ipv6Addr, other: Ipv6Addr) -> Option<u32> {
        let common = (one.to_bits() ^ other.to_bits()).leading_zeros();
        match self {
            // The first half is the number of the subnet.
            Self::InfiniBand => (common >= 64).then_some(64),
            // A link-local address says nothing of the link.
            Self::Ethernet if one.is_unicast_link_local() && other.is_unicast_link_local() => {
                Some(0)
            }
            Self::Ethernet => {
                let is_v4 = |address: Ipv6Addr| address.to_ipv4_mapped().is_some();
                let is_local = one.is_unicast_link_local() || other.is_unicast_link_local();
                (!is_local && is_v4(one) == is_v4(other)).then_some(common)
            }
        }
    }
}

/// Pairs devices of the two sides, each with one of the other side at most: as many pairs as can be, the nearest
/// addresses first, then equal speeds, then equal places in the lists.
pub(crate) fn pair(ours: &[Facts], theirs: &[Facts]) -> Vec<(u8, u8)> {
    let mut edges = Vec::new();
    for (i, one) in ours.iter().enumerate() {
        for (j, other) in theirs.iter().enumerate() {
            if let Some(nearness) = one.nearness(other) {
                edges.push((
                    Reverse(nearness),
                    one.speed.abs_diff(other.speed),
                    i.abs_diff(j),
                    i,
                    j,
                ));
            }
        }
    }
    edges.sort_unstable();
    // Our device for each of theirs.
    let mut partner = vec![None; theirs.len()];
    let mut paired = vec![false; ours.len()];
    for &(.., i, j) in &edges {
        if !paired[i] && partner[j].is_none() {
            (paired[i], partner[j]) = (true, Some(i));
        }
    }
    // A device that is left over may get a place if others change theirs.
    for (i, _) in paired.iter().enumerate().filter(|&(_, &is_paired)| !is_paired) {
        find_place(i, &edges, &mut partner, &mut vec![false; theirs.len()]);
    }
    // No side has more devices than these numbers name.
    let numbers =
        |(j, i): (usize, &Option<usize>)| Some((u8::try_from((*i)?).ok()?, u8::try_from(j).ok()?));
    let mut pairs: Vec<_> = partner.iter().enumerate().filter_map(numbers).collect();
    pairs.sort_unstable();
    pairs
}

type Edge = (Reverse<u32>, u32, usize, usize, usize);

fn find_place(i: usize, edges: &[Edge], partner: &mut [Option<usize>], seen: &mut [bool]) -> bool {
    for &(.., j) in edges.iter().filter(|&&(.., from, _)| from == i) {
        if seen[j] {
            continue;
        }
        seen[j] = true;
        if partner[j].is_none_or(|other| find_place(other, edges, partner, seen)) {
            partner[j] = Some(i);
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ethernet(name: &str, addresses: &[&str]) -> Facts {
        let gids = addresses.iter().map(|text| match text.parse().unwrap() {
            std::net::IpAddr::V4(address) => address.to_ipv6_mapped(),
            std::net::IpAddr::V6(address) => address,
        });
        Facts { name: name.into(), link: Link::Ethernet, gids: gids.collect(), speed: 400_000 }
    }

    #[test]
    fn the_same_subnet_comes_first() {
        let ours = [ethernet("a0", &["10.0.0.1"]), ethernet("a1", &["10.0.1.1"])];
        let theirs = [ethernet("b0", &["10.0.1.2"]), ethernet("b1", &["10.0.0.2"])];
        assert_eq!(pair(&ours, &theirs), [(0, 1), (1, 0)]);
        // The other side finds the same pairs.
        assert_eq!(pair(&theirs, &ours), [(0, 1), (1, 0)]);
    }

    #[test]
    fn one_subnet_pairs_by_place_and_speed() {
        let all = |side: &str| -> Vec<_> {
            (0..4).map(|i| ethernet(&format!("{side}{i}"), &[&format!("10.0.0.{i}")])).collect()
        };
        let (ours, mut theirs) = (all("a"), all("a"));
        assert_eq!(pair(&ours, &theirs), [(0, 0), (1, 1), (2, 2), (3, 3)]);
        theirs.iter_mut().for_each(|facts| facts.gids = vec!["::ffff:10.9.0.1".parse().unwrap()]);
        theirs[0].speed = 100_000;
        let pairs = pair(&ours[..3], &theirs);
        assert!(pairs.iter().all(|&(_, j)| j != 0), "{pairs:?}");
    }

    #[test]
    fn nothing_is_paired_that_cannot_reach() {
        let mut ours = [ethernet("a0", &["10.0.0.1"]), ethernet("a1", &["fd00::1"])];
        let theirs = [ethernet("b0", &["fe80::2", "fd01::2"])];
        assert_eq!(pair(&ours, &theirs), [(1, 0)]);
        ours[1].link = Link::InfiniBand;
        assert_eq!(pair(&ours, &theirs), []);
        let subnet = |prefix: u16| Facts {
            link: Link::InfiniBand,
            gids: vec![Ipv6Addr::new(0xfe80, 0, 0, prefix, 1, 2, 3, prefix)],
            ..ethernet("x", &[])
        };
        assert_eq!(pair(&[subnet(1), subnet(2)], &[subnet(2)]), [(1, 0)]);
    }

    #[test]
    fn as_many_pairs_as_can_be() {
        // The first takes what the second alone could have, unless it changes.
        let ours = [ethernet("a0", &["10.0.0.1", "fd00::1"]), ethernet("a1", &["10.1.0.1"])];
        let theirs = [ethernet("b0", &["10.0.0.2"]), ethernet("b1", &["fd00::9"])];
        assert_eq!(pair(&ours, &theirs), [(0, 1), (1, 0)]);
        assert_eq!(pair(&ours, &theirs[..1]), [(0, 0)]);
    }
}
