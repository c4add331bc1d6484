//! A program implements the public traits: as it should, and as badly as safe code can.

mod allocators;
mod buffers;
#[path = "../../../support/by_hand.rs"]
mod by_hand;
#[path = "../../../support/software.rs"]
mod software;
mod streams;
