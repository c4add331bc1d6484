//! The GIDs by which two ports reach each other.
//!
//! A RoCE port has a RoCE v1 and a RoCE v2 GID for each address, and packets only go between GIDs of the same version
//! and IP family. So an endpoint carries the best GID of each class. Both sides compare the same lists in the same
//! order, and choose the same pair.

use std::net::Ipv6Addr;

use super::gid::{Gid, GidEntry, GidType};
use crate::base::GidClass;

impl From<GidType> for GidClass {
    fn from(gid_type: GidType) -> Self {
        match gid_type {
            GidType::InfiniBand => Self::InfiniBand,
            GidType::RoceV1 => Self::RoceV1,
            GidType::RoceV2 => Self::RoceV2,
            GidType::Unknown(_) => Self::Unspecified,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Family {
    Ipv4,
    Ipv6,
    LinkLocal,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub(crate) struct EndpointGid {
    pub(crate) gid: Gid,
    pub(crate) class: GidClass,
}

impl From<&GidEntry> for EndpointGid {
    fn from(entry: &GidEntry) -> Self {
        Self { gid: entry.gid, class: entry.gid_type.into() }
    }
}

impl EndpointGid {
    pub(crate) const fn named(self) -> (GidClass, Ipv6Addr) {
        (self.class, self.gid.to_ipv6())
    }

    fn family(&self) -> Family {
        if self.gid.to_ipv4().is_some() {
            Family::Ipv4
        } else if self.gid.is_link_local() {
            Family::LinkLocal
        } else {
            Family::Ipv6
        }
    }

    /// 0 is the best. `None`: no packets can go between the two.
    fn distance(&self, other: &Self) -> Option<u8> {
        if !self.class.fits(other.class) {
            return None;
        }
        match (self.family(), other.family()) {
            // An InfiniBand GID may look like an IP address.
            _ if self.class == GidClass::InfiniBand || other.class == GidClass::InfiniBand => {
                Some(0)
            }
            (one, two) if one == two => Some(0),
            // On one link.
            (Family::Ipv6, Family::LinkLocal) | (Family::LinkLocal, Family::Ipv6) => Some(1),
            _ => None,
        }
    }
}

/// Two versions of RoCE, three families.
pub(crate) const MAX_GIDS: usize = 6;

/// The best first.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub(crate) struct EndpointGids {
    /// Zero from `len` on.
    list: [EndpointGid; MAX_GIDS],
    len: u8,
}

impl EndpointGids {
    pub(crate) const fn one(gid: Gid, class: GidClass) -> Self {
        const NONE: EndpointGid = EndpointGid { gid: Gid::ZERO, class: GidClass::Unspecified };
        let mut list = [NONE; MAX_GIDS];
        if gid.is_zero() {
            return Self { list, len: 0 };
        }
        list[0] = EndpointGid { gid, class };
        Self { list, len: 1 }
    }

    /// Skips a zero GID. False: no room.
    pub(crate) fn push(&mut self, gid: EndpointGid) -> bool {
        if gid.gid.is_zero() {
            return true;
        }
        match self.list.get_mut(usize::from(self.len)) {
            None => false,
            Some(place) => {
                *place = gid;
                self.len += 1;
                true
            }
        }
    }

    /// Takes the best entry of each class and family, the best class first. Unknown types count only if there are no others.
    pub(crate) fn of_table(entries: impl IntoIterator<Item = GidEntry>) -> Self {
        const FAMILIES: usize = 3;
        let mut best = [None; FAMILIES * GidClass::ALL.len()];
        for entry in entries.into_iter().filter(|entry| !entry.gid.is_zero()) {
            let gid = EndpointGid::from(&entry);
            let place = &mut best[gid.class.code() as usize * FAMILIES + gid.family() as usize];
            let found = ((entry.preference(), entry.index), gid);
            if place.is_none_or(|(known, _)| found.0 < known) {
                *place = Some(found);
            }
        }
        best.sort_unstable_by_key(|found| {
            found.map_or((true, None), |found| (false, Some(found.0)))
        });
        let mut gids = Self::default();
        for (_, gid) in best.into_iter().flatten() {
            if gid.class != GidClass::Unspecified || gids.is_empty() {
                // Only the least preferred do not fit.
                gids.push(gid);
            }
        }
        gids
    }

    pub(crate) fn as_slice(&self) -> &[EndpointGid] {
        &self.list[..usize::from(self.len)]
    }

    pub(crate) const fn first(&self) -> EndpointGid {
        self.list[0]
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The other side chooses the same.
    pub(crate) fn choose(&self, theirs: &Self) -> Option<(EndpointGid, EndpointGid)> {
        let pairs = self.as_slice().iter().flat_map(|ours| {
            theirs
                .as_slice()
                .iter()
                .filter_map(move |theirs| Some((ours.distance(theirs)?, *ours, *theirs)))
        });
        // The first among equals: the best of ours.
        let (_, ours, theirs) = pairs.min_by_key(|pair| pair.0)?;
        Some((ours, theirs))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gids(list: &[(&str, GidClass)]) -> EndpointGids {
        let mut gids = EndpointGids::default();
        for (gid, class) in list {
            assert!(gids.push(EndpointGid { gid: gid.parse().unwrap(), class: *class }));
        }
        gids
    }

    const V1: GidClass = GidClass::RoceV1;
    const V2: GidClass = GidClass::RoceV2;
    const IPV4: [&str; 2] = ["::ffff:10.0.0.1", "::ffff:10.0.0.2"];
    const IPV6: [&str; 2] = ["2001:db8::1", "2001:db8::2"];
    const LOCAL: [&str; 2] = ["fe80::1", "fe80::2"];

    #[test]
    fn a_table_gives_the_best_of_each_class() {
        let entry = |index, gid: &str, gid_type| GidEntry {
            gid: gid.parse().unwrap(),
            index,
            port: 1,
            gid_type,
            interface_index: None,
        };
        let table = [
            entry(0, LOCAL[0], GidType::RoceV1),
            entry(1, LOCAL[0], GidType::RoceV2),
            entry(2, IPV4[0], GidType::RoceV1),
            entry(3, IPV4[0], GidType::RoceV2),
            entry(4, IPV4[1], GidType::RoceV2),
            entry(5, IPV6[0], GidType::RoceV2),
            entry(6, "::", GidType::RoceV2),
            entry(7, IPV6[1], GidType::Unknown(9)),
        ];
        let found = EndpointGids::of_table(table);
        assert_eq!(
            found,
            gids(&[(IPV4[0], V2), (IPV6[0], V2), (LOCAL[0], V2), (IPV4[0], V1), (LOCAL[0], V1)])
        );
        let unknown = EndpointGids::of_table([entry(0, IPV6[0], GidType::Unknown(9))]);
        assert_eq!(unknown, EndpointGids::one(IPV6[0].parse().unwrap(), GidClass::Unspecified));
        assert!(EndpointGids::of_table([]).is_empty());
    }

    #[test]
    #[cfg_attr(miri, ignore = "safe code, and thousands of rounds")]
    fn both_sides_choose_the_same_two() {
        let all = |i: usize| {
            [
                (IPV4[i], V2),
                (IPV6[i], V2),
                (LOCAL[i], V2),
                (IPV4[i], V1),
                (IPV6[i], V1),
                (LOCAL[i], V1),
            ]
        };
        let subset = |i, bits: u32| {
            let list: Vec<_> =
                all(i).into_iter().enumerate().filter(|(n, _)| bits >> n & 1 == 1).collect();
            gids(&list.into_iter().map(|(_, gid)| gid).collect::<Vec<_>>())
        };
        let mut chosen = 0;
        for (here, there) in (0..64).flat_map(|here| (0..64).map(move |there| (here, there))) {
            let (here, there) = (subset(0, here), subset(1, there));
            let found = here.choose(&there);
            assert_eq!(found, there.choose(&here).map(|(one, two)| (two, one)));
            if let Some((one, two)) = found {
                chosen += 1;
                assert_eq!(one.class, two.class);
                assert_eq!(one.family() == Family::Ipv4, two.family() == Family::Ipv4);
            }
        }
        assert!(chosen > 2000, "{chosen}");
    }

    #[test]
    fn the_best_class_that_both_have_is_chosen() {
        let both = gids(&[(IPV4[0], V2), (LOCAL[0], V2)]);
        let choose = |theirs: &[(&str, GidClass)]| {
            both.choose(&gids(theirs)).map(|(one, two)| (one.gid.to_string(), two.gid.to_string()))
        };
        let pair = |one: &str, two: &str| Some((one.to_owned(), two.to_owned()));
        assert_eq!(choose(&[(IPV4[1], V2), (LOCAL[1], V2)]), pair(IPV4[0], IPV4[1]));
        assert_eq!(choose(&[(LOCAL[1], V2)]), pair(LOCAL[0], LOCAL[1]));
        assert_eq!(choose(&[(IPV6[1], V2)]), pair(LOCAL[0], IPV6[1]));
        assert_eq!(choose(&[(IPV4[1], V1)]), None);
        // A GID without a version matches its whole family.
        assert_eq!(choose(&[(LOCAL[1], GidClass::Unspecified)]), pair(LOCAL[0], LOCAL[1]));
        assert_eq!(choose(&[]), None);
    }

    #[test]
    fn there_is_room_for_six() {
        let mut list = EndpointGids::default();
        let gid = EndpointGid { gid: IPV6[0].parse().unwrap(), class: V2 };
        assert!((0..MAX_GIDS).all(|_| list.push(gid)));
        assert!(!list.push(gid));
        assert!(list.push(EndpointGid::default()), "none takes no room");
        for class in GidClass::ALL {
            assert_eq!(GidClass::from_code(class.code()), Some(class));
        }
        assert_eq!(GidClass::from_code(4), None);
    }
}
