//! Faults that a test gives to a device: verbs that fail, completions that are held, dropped or made up,
//! events that are made up, and a device that is removed.

mod device;
mod events;
pub(crate) mod verbs;

pub use crate::transport::completion_faults::MadeUpCompletion;
pub use events::EventSubject;
pub use verbs::{Verb, When};
