//! The faults of a device, as its handle gives them.

use std::io;

use super::verbs::{Verb, When};
use crate::device::Device;
use crate::ffi::ibv_event_type;
use crate::manager;
use crate::transport::completion_faults::MadeUpCompletion;

/// Faults, for tests: at any time, while programs use the device.
impl Device {
    /// Makes the next `count` calls of a verb fail with `errno`, before or after it took effect. An errno that is not positive
    /// counts as `EIO`. Calls of this function for the same verb add up, in their order.
    ///
    /// ```
    /// use ibverbs_software::{Device, Verb, When};
    ///
    /// let device = Device::new()?;
    /// let context = device.open()?;
    /// device.fail(Verb::AllocPd, 12, When::Before, 1); // ENOMEM
    /// assert_eq!(context.alloc_pd().unwrap_err().raw_os_error(), Some(12));
    /// assert!(context.alloc_pd().is_ok());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn fail(&self, verb: Verb, errno: i32, when: When, count: u32) {
        self.shared().failures().add(verb, errno, when, count);
    }

    /// Lets the next `count` calls of a verb through. It counts as a call of [`fail`](Self::fail): what is added later
    /// for the same verb comes after them.
    ///
    /// ```
    /// use ibverbs_software::{Device, Verb, When};
    ///
    /// let device = Device::new()?;
    /// let context = device.open()?;
    /// device.let_pass(Verb::AllocPd, 1);
    /// device.fail(Verb::AllocPd, 12, When::Before, 1); // the second one
    /// assert!(context.alloc_pd().is_ok());
    /// assert!(context.alloc_pd().is_err());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn let_pass(&self, verb: Verb, count: u32) {
        self.shared().failures().let_pass(verb, count);
    }

    /// Takes back all failures that are still to come.
    pub fn clear_failures(&self) {
        self.shared().failures().clear();
    }

    /// Holds all completions back from now on, until [`release_completions`](Self::release_completions) or
    /// [`shuffle_completions`](Self::shuffle_completions). The requests are carried out, and the peer sees so.
    pub fn hold_completions(&self) {
        self.lock().core.completion_faults.hold();
    }

    /// Lets the held completions come, in their order, and holds no more of them.
    pub fn release_completions(&self) {
        self.lock().core.release_completions(None);
    }

    /// Lets the held completions come in another order that hardware may choose, and holds no more of them: the
    /// sends of a queue pair stay in order, and so do its receives, but between these queues, and between queue
    /// pairs, `seed` decides the order.
    pub fn shuffle_completions(&self, seed: u64) {
        self.lock().core.release_completions(Some(seed));
    }

    /// Drops the next `count` completions: they never come, and the places of their requests stay occupied. No hardware
    /// should do this; a program should not wait for ever.
    pub fn drop_completions(&self, count: u32) {
        self.lock().core.completion_faults.drop_next(count);
    }

    /// Adds a completion of a request that has not completed, or does not exist.
    ///
    /// # Errors
    ///
    /// [`NotFound`](io::ErrorKind::NotFound): the device has no such queue pair.
    ///
    /// # Safety
    ///
    /// If the completion names a request that is in flight, the device still uses that request's memory. Nothing
    /// else uses the memory until the true completion has come, or the queue pair was reset or destroyed.
    pub unsafe fn make_up_completion(&self, completion: MadeUpCompletion) -> io::Result<()> {
        let mut engine = self.lock();
        let Some(qp) = engine.qps.get(completion.queue_pair) else {
            return Err(io::Error::new(io::ErrorKind::NotFound, "there is no such queue pair"));
        };
        let queue = if completion.is_receive { qp.receive_cq } else { qp.send_cq };
        engine.core.complete(queue, completion.completion());
        Ok(())
    }

    /// Removes the device, as pulling a card does. Contexts get the event `IBV_EVENT_DEVICE_FATAL`. A sleep until a
    /// completion wakes, and fails to arm the completion queue again.
    ///
    /// From now on every verb fails with `EIO`, destroy verbs included, and posts too. Nothing is sent, received or
    /// carried out, and no memory of the program is touched. Only polling works: it returns the completions that
    /// were there, and no new ones. Contexts can be closed. There is no way back.
    pub fn remove(&self) {
        let mut engine = self.lock();
        if self.shared().failures().is_removed() {
            return;
        }
        self.shared().failures().remove_device();
        engine.remove();
        engine.core.raise_in_all_contexts(ibv_event_type::IBV_EVENT_DEVICE_FATAL, 0);
        drop(engine);
        manager::removed(self.shared());
    }
}
