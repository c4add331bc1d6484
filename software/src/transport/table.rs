//! Objects by number, as hardware keeps them: an array. Each number contains a tag that changes whenever
//! the place is reused, so that the number of a destroyed object is invalid.

use std::collections::VecDeque;

/// The position of the 8-bit tag in a number of up to 32 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tag {
    /// Above 16 bits of index: numbers of 24 bits, as queue pairs have them.
    High,
    /// Below 24 bits of index: keys of memory.
    Low,
}

#[derive(Debug)]
struct Slot<T> {
    tag: u8,
    value: Option<T>,
}

#[derive(Debug)]
pub(crate) struct Table<T> {
    slots: Vec<Slot<T>>,
    /// Free places; the one that was released first is reused first.
    free: VecDeque<u32>,
    tag: Tag,
    /// The index of the first place.
    first: u32,
    limit: u32,
}

impl<T> Table<T> {
    pub(crate) fn new(tag: Tag, first: u32, limit: u32) -> Self {
        let indices = match tag {
            Tag::High => 0xffff,
            Tag::Low => 0xff_ffff,
        };
        Self {
            slots: Vec::new(),
            free: VecDeque::new(),
            tag,
            first,
            limit: limit.min(indices - first),
        }
    }

    fn split(&self, number: u32) -> (Option<usize>, u8) {
        let (index, tag) = match self.tag {
            Tag::High => (number & 0xffff, (number >> 16) as u8),
            Tag::Low => (number >> 8, number as u8),
        };
        (index.checked_sub(self.first).map(|index| index as usize), tag)
    }

    fn number(&self, index: usize, tag: u8) -> u32 {
        let (index, tag) = (index as u32 + self.first, u32::from(tag));
        match self.tag {
            Tag::High => tag << 16 | index,
            Tag::Low => index << 8 | tag,
        }
    }

    /// How many objects there are.
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Puts in an object, made from its number; `None` when the table is full.
    pub(crate) fn insert(&mut self, make: impl FnOnce(u32) -> T) -> Option<u32> {
        if self.len() >= self.limit as usize {
            return None;
        }
        let index = match self.free.pop_front() {
            Some(index) => index as usize,
            None => {
                self.slots.push(Slot { tag: 0, value: None });
                self.slots.len() - 1
            }
        };
        let number = self.number(index, self.slots[index].tag);
        self.slots[index].value = Some(make(number));
        Some(number)
    }

    pub(crate) fn get(&self, number: u32) -> Option<&T> {
        let (index, tag) = self.split(number);
        let slot = self.slots.get(index?)?;
        if slot.tag == tag { slot.value.as_ref() } else { None }
    }

    pub(crate) fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        let (index, tag) = self.split(number);
        let slot = self.slots.get_mut(index?)?;
        if slot.tag == tag { slot.value.as_mut() } else { None }
    }

    /// Whether there was an object of this number, which is gone: as far as its tag tells, which counts to 256.
    pub(crate) fn is_gone(&self, number: u32) -> bool {
        let (index, tag) = self.split(number);
        let slot = index.and_then(|index| self.slots.get(index));
        slot.is_some_and(|slot| (1..=128).contains(&slot.tag.wrapping_sub(tag)))
    }

    /// Finds an object by the index in the number, and ignores the tag.
    pub(crate) fn get_untagged(&self, number: u32) -> Option<&T> {
        self.slots.get(self.split(number).0?)?.value.as_ref()
    }

    pub(crate) fn get_untagged_mut(&mut self, number: u32) -> Option<&mut T> {
        let index = self.split(number).0?;
        self.slots.get_mut(index)?.value.as_mut()
    }

    pub(crate) fn remove(&mut self, number: u32) -> Option<T> {
        let (index, tag) = self.split(number);
        let index = index?;
        let slot = self.slots.get_mut(index)?;
        if slot.tag != tag {
            return None;
        }
        let value = slot.value.take()?;
        slot.tag = slot.tag.wrapping_add(1);
        self.free.push_back(index as u32);
        Some(value)
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.slots.iter_mut().filter_map(|slot| slot.value.as_mut())
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        self.slots
            .iter()
            .enumerate()
            .filter_map(|(index, slot)| Some((self.number(index, slot.tag), slot.value.as_ref()?)))
    }
}

/// Compared with a map: a number that was given back names nothing, until its place was used 256 times.
#[cfg(any(test, fuzzing))]
pub(crate) mod model {
    use std::collections::BTreeMap;

    use super::*;

    /// Two bytes for each call: which, and of which number.
    pub fn device_objects(data: &[u8]) {
        for (tag, bits) in [(Tag::High, 24), (Tag::Low, 32)] {
            let (mut table, limit) = (Table::new(tag, 0x11, 5), 5);
            let (mut live, mut gone) = (BTreeMap::new(), Vec::new());
            for (step, bytes) in data.chunks_exact(2).enumerate() {
                let pick = |from: usize| usize::from(bytes[1]) % from;
                match bytes[0] % 4 {
                    0 | 1 => match table.insert(|number| (number, step)) {
                        Some(number) => {
                            assert!(u64::from(number) < 1 << bits && number > 1);
                            assert_eq!(live.insert(number, (number, step)), None);
                        }
                        None => assert_eq!(live.len(), limit),
                    },
                    2 if !live.is_empty() => {
                        let (&number, &value) = live.iter().nth(pick(live.len())).unwrap();
                        assert_eq!(table.remove(number), Some(value));
                        live.remove(&number);
                        gone.push(number);
                    }
                    _ if !gone.is_empty() => {
                        // Old numbers may be in use again.
                        let recent = gone.len().saturating_sub(250);
                        let number = gone[recent + pick(gone.len() - recent)];
                        assert_eq!(table.get(number), None, "{number:#x}");
                        assert_eq!(table.remove(number), None);
                    }
                    _ => {}
                }
                assert_eq!(table.len(), live.len());
                let all = table.iter().map(|(number, value)| (number, *value));
                assert_eq!(all.collect::<BTreeMap<_, _>>(), live);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_is_gone_names_nothing() {
        for tag in [Tag::High, Tag::Low] {
            let mut table = Table::new(tag, 0x10, 3);
            let numbers: Vec<u32> = (0..3).map(|i| table.insert(|_| i).unwrap()).collect();
            assert_eq!(table.insert(|_| 9), None);
            assert_eq!(table.remove(numbers[1]), Some(1));
            assert_eq!(table.get(numbers[1]), None);
            assert_eq!(table.remove(numbers[1]), None);
            let next = table.insert(|number| number as i32).unwrap();
            assert_ne!(next, numbers[1]);
            assert_eq!(table.get(next), Some(&(next as i32)));
            assert_eq!(table.len(), 3);
            for number in [0, 1, u32::MAX, 0x10 << 8 | 0xff, 0xff_ffff] {
                assert_eq!(table.get(number), None, "{number:#x}");
            }
        }
    }

    #[test]
    fn queue_pair_numbers_have_24_bits() {
        let mut table = Table::new(Tag::High, 0x11, 1);
        for _ in 0..600 {
            let number = table.insert(|_| ()).unwrap();
            assert!((0x11..=0xff_ffff).contains(&number) && number & 0xffff == 0x11);
            table.remove(number);
        }
    }
}
