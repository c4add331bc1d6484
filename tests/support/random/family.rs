//! The objects that must be live: those that are held, those that were forgotten, and the parents of
//! both, which shared ownership keeps alive.

/// What the devices count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Context,
    Domain,
    Queue,
    Region,
    QueuePair,
}

/// For each side, how many objects of each kind are live.
pub(crate) type Counts = [[u32; 5]; 2];

/// An object, by its number.
pub(crate) type Member = usize;

#[derive(Debug)]
struct Node {
    kind: Kind,
    side: usize,
    parents: Vec<Member>,
    held: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Family(Vec<Node>);

impl Family {
    /// A new object, that is held.
    pub(crate) fn add(&mut self, kind: Kind, side: usize, parents: &[Member]) -> Member {
        self.0.push(Node { kind, side, parents: parents.to_vec(), held: true });
        self.0.len() - 1
    }

    /// It is not held any more. (Who forgets something holds it for ever, and does not call this.)
    pub(crate) fn let_go(&mut self, member: Member) {
        assert!(self.0[member].held, "{member} is let go of twice");
        self.0[member].held = false;
    }

    /// How many objects are live.
    pub(crate) fn live(&self) -> Counts {
        let mut live: Vec<bool> = self.0.iter().map(|node| node.held).collect();
        // Parents are older than their children.
        for (member, node) in self.0.iter().enumerate().rev() {
            if live[member] {
                node.parents.iter().for_each(|&parent| live[parent] = true);
            }
        }
        let mut counts = Counts::default();
        for (node, _) in self.0.iter().zip(live).filter(|&(_, live)| live) {
            counts[node.side][node.kind as usize] += 1;
        }
        counts
    }
}
