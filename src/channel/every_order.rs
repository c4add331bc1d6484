//! Handles that are dropped on other threads, in every order.

use std::cell::Cell;

use super::handles::{Entry, Owned};
use crate::sync::in_every_order;

/// Handles that are dropped on other threads, and the channel that looks for them now and then.
struct Handles {
    owned: Owned,
    entries: [Entry; 2],
    /// How many of the present connection the channel has noticed.
    noticed: Cell<u32>,
}

// SAFETY: one thread at a time is the channel, and only that touches more than the entries' atomics.
unsafe impl Sync for Handles {}

impl Handles {
    fn new() -> Self {
        let entries = [(); 2].map(|()| Entry::new());
        Self { owned: Owned::new(), entries, noticed: Cell::new(0) }
    }

    /// The number of the request in a slot, in one of the channel's connections.
    fn number(connection: u64, index: usize) -> u64 {
        connection << 32 | index as u64
    }

    fn drop_handle(&self, connection: u64, index: usize) {
        self.owned.mark_dropped(&self.entries[index], Self::number(connection, index));
    }

    /// As `Core::release_dropped`, in the second connection.
    fn look(&self) {
        if self.owned.any_dropped() {
            self.owned.take_dropped(
                |index| self.entries.get(index),
                |index| {
                    let dropped = self.entries[index].take_dropped(Self::number(2, index));
                    self.noticed.set(self.noticed.get() + u32::from(dropped));
                },
            );
        }
    }

    fn check(&self) {
        self.look();
        assert_eq!(self.noticed.get(), 2);
        assert!(!self.owned.any_dropped());
    }
}

/// No handle that was dropped is overlooked, also if one of an earlier connection had the same place.
#[test]
fn every_handle_that_is_dropped_is_noticed() {
    let channel = |handles: &Handles| {
        handles.look();
        handles.look();
    };
    let [early, first, second]: [fn(&Handles); 3] =
        [|it| it.drop_handle(1, 0), |it| it.drop_handle(2, 0), |it| it.drop_handle(2, 1)];
    let both = |handles: &Handles| {
        handles.drop_handle(2, 0);
        handles.drop_handle(2, 1);
    };
    let runs = in_every_order(Handles::new, [channel, first, second], Handles::check);
    assert!(runs > 10, "{runs}");
    in_every_order(Handles::new, [channel, early, both], Handles::check);
}
