//! The objects that must be live: those that are held, those that were forgotten, and the parents of both,
//! which shared ownership keeps alive.

/// The kinds of objects that devices count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Context,
    Domain,
    Queue,
    Region,
    QueuePair,
}

/// For each side, the number of live objects of each kind.
pub(crate) type Counts = [[u32; 5]; 2];

/// An object, by its number.
pub(crate) type Member = usize;

#[derive(Debug)]
struct Node {
    kind: Kind,
    side: usize,
    parents: Vec<Member>,
    held: bool,
    /// The object could not be destroyed: it is held without end, and so are its parents.
    leaked: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Family(Vec<Node>);

impl Family {
    /// Adds an object, which is held.
    pub(crate) fn add(&mut self, kind: Kind, side: usize, parents: &[Member]) -> Member {
        self.0.push(Node { kind, side, parents: parents.to_vec(), held: true, leaked: false });
        self.0.len() - 1
    }

    /// Ends the hold of an object. A forgotten object is held without end, so this is not called for it.
    pub(crate) fn let_go(&mut self, member: Member) {
        assert!(self.0[member].held, "{member} is let go of twice");
        self.0[member].held = self.0[member].leaked;
    }

    /// The destroy verb of an object has failed.
    pub(crate) fn leak(&mut self, member: Member) {
        assert!(self.0[member].held, "{member} was let go of");
        let node = &mut self.0[member];
        if !std::mem::replace(&mut node.leaked, true) {
            for parent in node.parents.clone() {
                // A parent that was let go of lives on, since this one holds it.
                self.0[parent].held = true;
                self.leak(parent);
            }
        }
    }

    /// Whether the object can no longer be destroyed.
    pub(crate) fn is_leaked(&self, member: Member) -> bool {
        self.0[member].leaked
    }

    /// The number of live objects.
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
