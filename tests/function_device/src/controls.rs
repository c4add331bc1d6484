//! How a test controls the device.

use crate::{FunctionDevice, Progress, c_name, known, raw};
use ibverbs::ffi;
use std::ffi::{c_int, c_uint};

/// A fault being put in: see [`FunctionDevice::fail`]. Takes effect when dropped, at the latest.
#[derive(Debug)]
#[must_use = "call `times` or `always`"]
pub struct Fault<'a> {
    device: &'a FunctionDevice,
    verb: String,
    errno: c_int,
    skip: c_uint,
}

impl Fault<'_> {
    /// The error (EIO).
    pub fn errno(mut self, errno: c_int) -> Self {
        self.errno = errno;
        self
    }

    /// Lets this many calls through first (0).
    pub fn skip(mut self, calls: u32) -> Self {
        self.skip = calls;
        self
    }

    /// Lets this many calls fail; 0 takes the verb's fault away.
    ///
    /// # Panics
    ///
    /// When no verb has the name.
    #[track_caller]
    pub fn times(self, calls: u32) {
        let name = c_name(&self.verb);
        // SAFETY: the handle is valid, the name is NUL-terminated.
        let error = unsafe {
            raw::device_fail(self.device.as_raw(), name.as_ptr(), self.errno, self.skip, calls)
        };
        assert_eq!(error, 0, "no verb is named {}", self.verb);
    }

    /// All calls fail from now on.
    ///
    /// # Panics
    ///
    /// When no verb has the name.
    #[track_caller]
    pub fn always(self) {
        self.times(u32::MAX);
    }
}

/// Faults.
impl FunctionDevice {
    /// Makes calls of a verb fail. Verbs are named as in rdma-core's `struct verbs_context_ops`
    /// (`"modify_qp"`, `"dereg_mr"`, `"post_send"` ..), plus `"open_device"`,
    /// `"create_comp_channel"`, `"query_gid"`, `"query_gid_table"`, `"start_poll"`, `"next_poll"`
    /// and `"wr_complete"`; `"modify_to_err"` and `"modify_to_reset"`, which are `"modify_qp"` with this
    /// state alone; and `"ring_doorbell"`, with which `"post_send"` fails though it has queued
    /// all requests, and names none in `bad_wr`, as those of rxe and siw may; and `"lose_error"`, with which it
    /// returns 0 if it has queued a part of a list and refused the rest, as that of siw does. In `"post_send"`, `"post_recv"` and `"post_srq_recv"` each work request
    /// of a list counts as a call, so that a list can fail in its middle. `"poll_cq"` returns
    /// [-1](Self::poll_error) and sets `errno`. On a lean device the data path never fails.
    pub fn fail(&self, verb: &str) -> Fault<'_> {
        Fault { device: self, verb: verb.to_owned(), errno: libc::EIO, skip: 0 }
    }

    /// While on, one call of a verb that is not on the data path waits at its beginning. Others go through.
    ///
    /// # Panics
    ///
    /// When no verb has the name.
    #[track_caller]
    pub fn hold_verb(&self, verb: &str, on: bool) {
        let name = c_name(verb);
        // SAFETY: the handle is valid, the name is NUL-terminated.
        let error = unsafe { raw::device_hold_verb(self.as_raw(), name.as_ptr(), on) };
        assert_eq!(error, 0, "no verb is named {verb}");
    }

    /// Whether a call of the verb waits because of [`hold_verb`](Self::hold_verb).
    pub fn holds_verb(&self, verb: &str) -> bool {
        // SAFETY: the handle is valid, the name is NUL-terminated.
        unsafe { raw::device_holds_verb(self.as_raw(), c_name(verb).as_ptr()) }
    }

    /// Takes all faults away.
    pub fn clear_faults(&self) {
        // SAFETY: the handle is valid.
        unsafe { raw::device_clear_faults(self.as_raw()) }
    }

    /// The device dies: `IBV_EVENT_DEVICE_FATAL` on every context, all queue pairs flush, and every
    /// verb but polling and destroying fails with EIO from now on.
    pub fn kill(&self) {
        // SAFETY: the handle is valid.
        unsafe { raw::device_fatal(self.as_raw()) }
    }

    /// The device is pulled out: `IBV_EVENT_DEVICE_FATAL` on every context; nothing flushes or
    /// completes any more; every verb but polling and destroying fails with EIO; the channels of
    /// its completion queues come to their end, so that reading them fails. To destroy an object does not
    /// wait for the acknowledgement of its events. It is what the kernel
    /// does, if libibverbs was told (`RDMAV_ALLOW_DISASSOC_DESTROY=1`) that destroying is then
    /// success; otherwise let that [fail](Self::fail) too.
    pub fn remove(&self) {
        // SAFETY: the handle is valid.
        unsafe { raw::device_removed(self.as_raw()) }
    }

    /// Sets what a failing `poll_cq` returns: any negative number (-1; mlx5 has -2).
    pub fn poll_error(&self, value: i32) {
        // SAFETY: the handle is valid.
        unsafe { raw::device_set_poll_error(self.as_raw(), value) }
    }
}

/// Progress, on a model.
impl FunctionDevice {
    /// Changes when posted work is executed.
    pub fn progress(&self, progress: Progress) {
        // SAFETY: the handle is valid.
        unsafe { raw::device_set_progress(self.as_raw(), progress.to_raw()) }
    }

    /// Executes all that can be executed; returns how many work requests that was.
    pub fn run(&self) -> u32 {
        // SAFETY: the handle is valid.
        unsafe { raw::device_step(self.as_raw(), 0) }
    }

    /// Executes up to `max` work requests, of each queue pair in turn; returns how many.
    pub fn step(&self, max: u32) -> u32 {
        if max == 0 {
            return 0;
        }
        // SAFETY: the handle is valid.
        unsafe { raw::device_step(self.as_raw(), max) }
    }

    /// While paused, the sends of a queue pair are not executed.
    ///
    /// # Panics
    ///
    /// When the device has no such queue pair.
    #[track_caller]
    pub fn pause(&self, qp_num: u32, paused: bool) {
        // SAFETY: the handle is valid.
        known(unsafe { raw::device_pause(self.as_raw(), qp_num, paused) }, "queue pair");
    }

    /// The sends and receives in the queue pair's slots: posted, and not given back by a poll.
    ///
    /// # Panics
    ///
    /// When the device has no such queue pair.
    #[track_caller]
    pub fn outstanding(&self, qp_num: u32) -> (u32, u32) {
        let (mut sends, mut receives) = (0, 0);
        // SAFETY: the handle is valid, and so are the places for the results.
        let error =
            unsafe { raw::device_outstanding(self.as_raw(), qp_num, &mut sends, &mut receives) };
        known(error, "queue pair");
        (sends, receives)
    }

    /// The queue pair fails by itself: it is in ERR, and its requests flush.
    ///
    /// # Panics
    ///
    /// When the device has no such queue pair.
    #[track_caller]
    pub fn break_qp(&self, qp_num: u32) {
        // SAFETY: the handle is valid.
        known(unsafe { raw::device_qp_error(self.as_raw(), qp_num) }, "queue pair");
    }

    /// Memory is reached through the address seen when a request was posted, registered or not by
    /// the time of execution: what DMA in flight does. A buffer freed too early is then an invalid
    /// access that valgrind and AddressSanitizer report.
    pub fn stale_translation(&self, on: bool) {
        // SAFETY: the handle is valid.
        unsafe { raw::device_set_stale_translation(self.as_raw(), on) }
    }

    /// Completions stay in their queue when the queue pair is reset or destroyed, as on rxe; by
    /// default they are removed, as on mlx5.
    pub fn keep_stale_completions(&self, on: bool) {
        // SAFETY: the handle is valid.
        unsafe { raw::device_set_keep_stale(self.as_raw(), on) }
    }

    /// Threads that read an event of a completion queue stay between the read and the acknowledgement as long as this is on.
    pub fn hold_readers(&self, on: bool) {
        // SAFETY: the handle is valid.
        unsafe { raw::device_set_hold_readers(self.as_raw(), on) }
    }

    /// How many threads are held there.
    pub fn held_readers(&self) -> u32 {
        // SAFETY: the handle is valid.
        unsafe { raw::device_held_readers(self.as_raw()) }
    }

    /// The number of the next queue pair, to make numbers come again.
    pub fn next_qp_num(&self, number: u32) {
        // SAFETY: the handle is valid.
        unsafe { raw::device_set_next_qp_num(self.as_raw(), number) }
    }

    /// Queue pairs are granted one less than was asked of what these bits say: 1 for the sends, 2 for the receives, 4 and 8 for
    /// their elements, 16 for the inline data.
    pub fn grants_less(&self, of: u32) {
        // SAFETY: the handle is valid.
        unsafe { raw::device_set_grants_less(self.as_raw(), of) }
    }
}

/// Completions, on a model. All panic when the device does not know the completion queue.
impl FunctionDevice {
    /// Completions of one queue pair (0: of all) are held back from now on, or no longer; those
    /// held already stay so until [released](Self::release).
    #[track_caller]
    pub fn hold_completions(&self, cq: *mut ffi::ibv_cq, qp_num: u32, hold: bool) {
        // SAFETY: the handle is valid; the queue is looked up, not followed.
        let error = unsafe { raw::device_hold_completions(self.as_raw(), cq, qp_num, hold) };
        known(error, "completion queue or queue pair");
    }

    /// How many completions are held.
    #[track_caller]
    pub fn held(&self, cq: *mut ffi::ibv_cq) -> u32 {
        let mut count = 0;
        // SAFETY: as in `hold_completions`.
        known(unsafe { raw::device_held(self.as_raw(), cq, &mut count) }, "completion queue");
        count
    }

    /// Lets out the held completion at `index`, the oldest being 0: any order is possible.
    #[track_caller]
    pub fn release(&self, cq: *mut ffi::ibv_cq, index: u32) {
        assert_ne!(index, u32::MAX);
        // SAFETY: as in `hold_completions`.
        known(
            unsafe { raw::device_release_held(self.as_raw(), cq, index) },
            "completion queue, or no completion is held there",
        );
    }

    /// Lets out all held completions in order.
    #[track_caller]
    pub fn release_all(&self, cq: *mut ffi::ibv_cq) {
        // SAFETY: as in `hold_completions`.
        known(unsafe { raw::device_release_held(self.as_raw(), cq, u32::MAX) }, "completion queue");
    }

    /// Puts in a completion as it is, whatever it says.
    #[track_caller]
    pub fn inject(&self, cq: *mut ffi::ibv_cq, completion: &ffi::ibv_wc) {
        // SAFETY: as in `hold_completions`; the completion is copied.
        known(unsafe { raw::device_inject(self.as_raw(), cq, completion) }, "completion queue");
    }

    /// Mixes what is in the queue, keeping the order of the sends and of the receives of each queue
    /// pair, as hardware does. The same seed gives the same order.
    #[track_caller]
    pub fn shuffle(&self, cq: *mut ffi::ibv_cq, seed: u64) {
        // SAFETY: as in `hold_completions`.
        known(unsafe { raw::device_shuffle(self.as_raw(), cq, seed) }, "completion queue");
    }
}

/// Events and ports.
impl FunctionDevice {
    /// Raises an asynchronous event about a port, or of a type that has no subject.
    ///
    /// # Panics
    ///
    /// When the context is not one of this device.
    #[track_caller]
    pub fn raise(&self, context: *mut ffi::ibv_context, event: ffi::ibv_event_type, port: u32) {
        self.raise_raw(context, event.0, port.into());
    }

    /// Raises an asynchronous event about a queue pair, a shared receive queue or a completion
    /// queue: `subject` is its `as_raw()`. Destroying it then waits for the acknowledgement.
    ///
    /// # Safety
    ///
    /// `subject` is a live object of the kind that the event type is about.
    ///
    /// # Panics
    ///
    /// When the context is not one of this device.
    #[track_caller]
    pub unsafe fn raise_about<T>(
        &self,
        context: *mut ffi::ibv_context,
        event: ffi::ibv_event_type,
        subject: *mut T,
    ) {
        self.raise_raw(context, event.0, subject as u64);
    }

    #[track_caller]
    fn raise_raw(&self, context: *mut ffi::ibv_context, event: u32, element: u64) {
        // SAFETY: the handle is valid; the context is looked up, not followed.
        known(
            unsafe { raw::device_raise_async(self.as_raw(), context, event, element) },
            "context",
        );
    }

    /// Puts an event of the completion queue into its channel, whether it was armed or not.
    ///
    /// # Panics
    ///
    /// When the device does not know the queue, or it has no channel.
    #[track_caller]
    pub fn raise_cq_event(&self, cq: *mut ffi::ibv_cq) {
        // SAFETY: the handle is valid; the queue is looked up before it is followed.
        known(
            unsafe { raw::device_raise_cq_event(self.as_raw(), cq) },
            "completion queue (with a channel)",
        );
    }

    /// Replaces a GID; all zeros empties the entry. `gid_type` is an `enum ibv_gid_type`.
    ///
    /// # Panics
    ///
    /// When there is no such port or index (0 to 7).
    #[track_caller]
    pub fn set_gid(&self, port: u32, index: u32, gid: [u8; 16], gid_type: u32) {
        let gid = ffi::ibv_gid { raw: gid };
        // SAFETY: the handle is valid, the GID is copied.
        known(
            unsafe { raw::device_set_gid(self.as_raw(), port, index, &gid, gid_type, 1) },
            "port or GID index",
        );
    }

    /// Changes what a port says of itself.
    ///
    /// # Panics
    ///
    /// When there is no such port.
    #[track_caller]
    pub fn change_port(&self, port: u32, change: impl FnOnce(&mut ffi::ibv_port_attr)) {
        let mut attr = ffi::ibv_port_attr::default();
        // SAFETY: the handle is valid, attr is written.
        known(unsafe { raw::device_get_port(self.as_raw(), port, &mut attr) }, "port");
        change(&mut attr);
        // SAFETY: the handle is valid, attr is copied.
        known(unsafe { raw::device_set_port(self.as_raw(), port, &attr) }, "port");
    }
}
