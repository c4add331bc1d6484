//! Random mutations of valid input.

use proptest::collection::vec;
use proptest::prelude::*;

/// One change to a message.
#[derive(Clone, Debug)]
pub(crate) enum Mutation {
    Flip { at: prop::sample::Index, bit: u8 },
    Set { at: prop::sample::Index, to: u8 },
    Insert { at: prop::sample::Index, byte: u8 },
    Remove { at: prop::sample::Index },
    Repeat { at: prop::sample::Index },
    Truncate { at: prop::sample::Index },
    Swap { one: prop::sample::Index, two: prop::sample::Index },
}

/// One to four changes; inserted bytes are of `alphabet`.
pub(crate) fn mutations(
    alphabet: impl Strategy<Value = u8> + Clone + 'static,
) -> impl Strategy<Value = Vec<Mutation>> {
    use Mutation::{Flip, Insert, Remove, Repeat, Set, Swap, Truncate};

    let at = any::<prop::sample::Index>;
    let one = prop_oneof![
        (at(), 0..8_u8).prop_map(|(at, bit)| Flip { at, bit }),
        (at(), alphabet.clone()).prop_map(|(at, to)| Set { at, to }),
        (at(), alphabet).prop_map(|(at, byte)| Insert { at, byte }),
        at().prop_map(|at| Remove { at }),
        at().prop_map(|at| Repeat { at }),
        at().prop_map(|at| Truncate { at }),
        (at(), at()).prop_map(|(one, two)| Swap { one, two }),
    ];
    vec(one, 1..=4)
}

/// The message after all changes.
pub(crate) fn mutated(mut message: Vec<u8>, mutations: &[Mutation]) -> Vec<u8> {
    for mutation in mutations {
        let len = message.len();
        match mutation {
            Mutation::Insert { at, byte } => message.insert(at.index(len + 1), *byte),
            _ if len == 0 => {}
            Mutation::Flip { at, bit } => message[at.index(len)] ^= 1 << bit,
            Mutation::Set { at, to } => message[at.index(len)] = *to,
            Mutation::Remove { at } => drop(message.remove(at.index(len))),
            Mutation::Repeat { at } => message.insert(at.index(len), message[at.index(len)]),
            Mutation::Truncate { at } => message.truncate(at.index(len)),
            Mutation::Swap { one, two } => message.swap(one.index(len), two.index(len)),
        }
    }
    message
}
