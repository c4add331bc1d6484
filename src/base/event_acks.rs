//! Reading and acknowledging events while their objects are destroyed.
//!
//! libibverbs follows an event's pointer to its object when the event is read and acknowledged. A destroy verb waits
//! until the events that were read are acknowledged. It must not block threads that read events, so no lock is held
//! over either.
//!
//! In two cases a destroy verb frees the object without waiting: with `RDMAV_ALLOW_DISASSOC_DESTROY` in the
//! environment, libibverbs takes `EIO`, the kernel's answer for a removed device, for success; and ocrdma frees a queue
//! pair whose destroy verb failed. [`EventFile`] then keeps destroy verbs and reads of the context's events apart.

use std::ffi::c_int;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::base::ffi;

static SUBJECTS: Mutex<Subjects> = Mutex::new(Subjects { ending: Vec::new(), reads: Vec::new() });

/// A destroy verb or a read has ended.
static CHANGED: Condvar = Condvar::new();

/// Never locked while a verb runs.
struct Subjects {
    /// Objects whose destroy verb runs or has failed.
    ending: Vec<Ending>,
    /// Contexts whose events are being read: destroy verbs wait.
    reads: Vec<usize>,
}

struct Ending {
    object: usize,
    context: usize,
    verb: &'static str,
    /// The kernel may still raise events; the provider may have freed it.
    failed: bool,
}

fn subjects() -> MutexGuard<'static, Subjects> {
    SUBJECTS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wait(subjects: MutexGuard<'static, Subjects>) -> MutexGuard<'static, Subjects> {
    CHANGED.wait(subjects).unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn destroy<T>(
    name: &'static str,
    object: *mut T,
    context: *mut ffi::ibv_context,
    verb: impl FnOnce(*mut T) -> c_int,
) -> c_int {
    let context = context.addr();
    let mut subjects = subjects();
    let ending = Ending { object: object.addr(), context, verb: name, failed: false };
    subjects.ending.push(ending);
    while subjects.reads.contains(&context) {
        subjects = wait(subjects);
    }
    drop(subjects);
    let status = verb(object);
    if status == 0 {
        is_free(object);
    } else {
        let mut subjects = self::subjects();
        // Another thread may have the address by now.
        let ending = subjects.ending.iter_mut().find(|ending| ending.object == object.addr());
        if let Some(ending) = ending {
            ending.failed = true;
        }
    }
    CHANGED.notify_all();
    status
}

/// Forgets the address. A provider may free an object before its destroy verb fails, and another thread may get the
/// address before the verb returns.
pub(crate) fn is_free<T>(object: *mut T) {
    subjects().ending.retain(|ending| ending.object != object.addr());
}

pub(crate) fn failed_to_destroy(object: usize) -> bool {
    subjects().ending.iter().any(|ending| ending.failed && ending.object == object)
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct EventFile {
    /// The context, if destroy verbs and reads exclude each other.
    apart: Option<usize>,
    /// The verb that destroys the objects of the events. `None`: any.
    verb: Option<&'static str>,
}

impl EventFile {
    /// `apart`: objects may be freed without waiting for events.
    pub(crate) fn new(
        context: *mut ffi::ibv_context,
        verb: Option<&'static str>,
        apart: bool,
    ) -> Self {
        let apart = apart || destroys_without_waiting();
        Self { apart: apart.then(|| context.addr()), verb }
    }

    #[inline]
    pub(crate) fn read<R>(self, read: impl FnOnce() -> R) -> R {
        let _reading = self.apart.map(|context| Reading::begin(context, self.verb));
        read()
    }
}

struct Reading {
    context: usize,
}

impl Reading {
    #[cold]
    fn begin(context: usize, verb: Option<&str>) -> Self {
        let mut subjects = subjects();
        let runs = |ending: &Ending| {
            ending.context == context
                && !ending.failed
                && verb.is_none_or(|verb| verb == ending.verb)
        };
        while subjects.ending.iter().any(runs) {
            subjects = wait(subjects);
        }
        subjects.reads.push(context);
        Self { context }
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        let mut subjects = subjects();
        if let Some(at) = subjects.reads.iter().position(|&context| context == self.context) {
            subjects.reads.swap_remove(at);
        }
        drop(subjects);
        CHANGED.notify_all();
    }
}

/// libibverbs takes `EIO` of a destroy verb for success.
fn destroys_without_waiting() -> bool {
    static ALLOWED: OnceLock<bool> = OnceLock::new();
    // libibverbs reads the variable in the same way.
    *ALLOWED.get_or_init(|| {
        std::env::var_os("RDMAV_ALLOW_DISASSOC_DESTROY").is_some_and(|value| value != "0")
    })
}
