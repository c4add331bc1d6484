use std::alloc::Layout;
use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::base::{Error, Handle, Leak, Result, debug, ffi, object, panics, resource};
use crate::verbs::device::{Context, ContextRef};

/// Where providers take the memory of queues from: see
/// [`ProtectionDomain::parent_domain_with_allocator`](crate::ProtectionDomain::parent_domain_with_allocator).
///
/// mlx5 calls it for queue pairs, completion queues, work queues and their doorbells, on the thread that creates or
/// destroys an object. The provider may hold locks: the methods must not call verbs of that device, nor what calls them
/// (posts, polls, waits, turns of a reactor, destruction of objects). Everything else is allowed, also on other
/// devices.
///
/// # Safety
///
/// Memory that [`alloc`](Self::alloc) returns has the layout, is zeroed, and stays valid for reads and writes by the
/// device and by any thread until [`free`](Self::free) is called with it: also after the allocator, and everything that
/// it borrows, was dropped. `fork` does not copy it (`MADV_DONTFORK`, or shared memory).
pub unsafe trait Allocator: Send + Sync {
    /// Allocates memory. `resource_type` is the provider's number of its use. A panic fails the allocation.
    fn alloc(&self, layout: Layout, resource_type: u64) -> Allocation;

    /// Frees memory. A panic leaks it.
    ///
    /// # Safety
    ///
    /// `alloc` returned the memory for this layout and type, and nothing uses it any more.
    unsafe fn free(&self, memory: NonNull<u8>, layout: Layout, resource_type: u64);
}

/// The result of [`Allocator::alloc`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Allocation {
    /// This memory.
    Memory(NonNull<u8>),
    /// Use the provider's allocator (`IBV_ALLOCATOR_USE_DEFAULT`).
    Default,
    /// Memory is used up: creating the object fails with `ENOMEM`.
    Failed,
}

pub(super) struct Registered<'a>(Arc<Callee<'a>>);

struct Callee<'a> {
    allocator: Box<dyn Allocator + 'a>,
    /// The layouts of what was given, by address: C does not pass the layout to `free`.
    given: Mutex<HashMap<usize, Layout>>,
}

impl Callee<'_> {
    fn given(&self) -> MutexGuard<'_, HashMap<usize, Layout>> {
        self.given.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// False if there is no memory for the note.
    fn note(&self, memory: NonNull<u8>, layout: Layout) -> bool {
        let mut given = self.given();
        let is_room = given.try_reserve(1).is_ok();
        if is_room {
            given.insert(memory.as_ptr() as usize, layout);
        }
        is_room
    }
}

impl<'a> Registered<'a> {
    pub(super) fn new(allocator: impl Allocator + 'a) -> Self {
        Self(Arc::new(Callee { allocator: Box::new(allocator), given: Mutex::default() }))
    }

    /// The allocator must outlive the domain.
    pub(super) fn register(&self, attributes: &mut ffi::ibv_parent_domain_init_attr) {
        use ffi::ibv_parent_domain_init_attr_mask as mask;

        attributes.comp_mask |= (mask::IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS
            | mask::IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT)
            .0;
        attributes.alloc = Some(alloc);
        attributes.free = Some(free);
        attributes.pd_context = Arc::as_ptr(&self.0).cast_mut().cast();
    }
}

impl Leak for Registered<'_> {
    /// Leaked objects of the domain may still free.
    fn leak(&self) {
        std::mem::forget(Arc::clone(&self.0));
    }
}

/// # Safety
///
/// `context` is that of a live registered allocator.
unsafe fn callee<'a>(context: *mut c_void) -> &'a Callee<'a> {
    // SAFETY: the caller vouches for the pointer, and the borrow ends before the box's content.
    unsafe { &*context.cast::<Callee<'a>>() }
}

unsafe extern "C" fn alloc(
    _: *mut ffi::ibv_pd,
    context: *mut c_void,
    size: usize,
    alignment: usize,
    resource_type: u64,
) -> *mut c_void {
    let Ok(layout) = Layout::from_size_align(size, alignment.max(1)) else {
        return ptr::null_mut();
    };
    // SAFETY: libibverbs passes the context that was registered; the domain keeps the allocator.
    let callee = unsafe { callee(context) };
    match panics::catch(|| callee.allocator.alloc(layout, resource_type)) {
        Ok(Allocation::Memory(memory)) if callee.note(memory, layout) => memory.as_ptr().cast(),
        Ok(Allocation::Memory(memory)) => {
            // SAFETY: `alloc` has just returned it, for this layout and type.
            let free = || unsafe { callee.allocator.free(memory, layout, resource_type) };
            let _ = panics::catch(free);
            ptr::null_mut()
        }
        // IBV_ALLOCATOR_USE_DEFAULT, a macro without binding.
        Ok(Allocation::Default) => ptr::without_provenance_mut(usize::MAX),
        Ok(Allocation::Failed) | Err(_) => ptr::null_mut(),
    }
}

unsafe extern "C" fn free(
    _: *mut ffi::ibv_pd,
    context: *mut c_void,
    memory: *mut c_void,
    resource_type: u64,
) {
    let Some(memory) = NonNull::new(memory.cast::<u8>()) else { return };
    // SAFETY: as in `alloc`.
    let callee = unsafe { callee(context) };
    let Some(layout) = callee.given().remove(&(memory.as_ptr() as usize)) else { return };
    // SAFETY: providers free what `alloc` has returned, once.
    let _ = panics::catch(|| unsafe { callee.allocator.free(memory, layout, resource_type) });
}

object!(ibv_td, ibv_dealloc_td);

/// `struct ibv_td`: a promise that one thread at a time uses the objects created with it, through
/// [`ProtectionDomain::parent_domain`](crate::ProtectionDomain::parent_domain). The provider need not lock them.
#[doc(alias = "ibv_td")]
pub struct ThreadDomain<'ctx> {
    raw: Handle<ffi::ibv_td>,
    context: ContextRef<'ctx>,
}

resource! {
    /// `ibv_dealloc_td`: deallocates the domain and reports a failure, which a drop ignores.
    ///
    /// # Errors
    ///
    /// The domain is then [leaked](crate::_guide::verbs#when-a-resource-cannot-be-destroyed), with its context.
    ///
    ///  - `EBUSY`: an object still uses it.
    #[doc(alias = "ibv_dealloc_td")]
    ThreadDomain<'ctx>: raw of ibv_td, context
}

// Threads may share it: creating objects with it, which the promise is about, is `unsafe`.

impl<'ctx> ThreadDomain<'ctx> {
    /// `ibv_alloc_td`: allocates a thread domain.
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`: the device has no thread domains.
    ///  - `ENOMEM`: out of memory.
    #[doc(alias = "ibv_alloc_td")]
    pub fn new(context: impl Into<ContextRef<'ctx>>) -> Result<Self> {
        let context = context.into();
        let mut attributes = ffi::ibv_td_init_attr::default();
        // SAFETY: the context is live; a domain that comes back is ours alone.
        let raw = unsafe {
            let raw = ffi::ibv_alloc_td(context.as_raw(), &mut attributes);
            Handle::new("ibv_alloc_td", raw)
        }?;
        Ok(Self { raw, context })
    }

    /// Takes over a thread domain that other code allocated, such as a C library.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the pointer is null, or of another context.
    ///
    /// # Safety
    ///
    /// `raw` is null or a live thread domain that nothing else deallocates. Its objects are used as
    /// [`ProtectionDomain::parent_domain`](crate::ProtectionDomain::parent_domain) demands.
    pub unsafe fn from_raw(
        raw: *mut ffi::ibv_td,
        context: impl Into<ContextRef<'ctx>>,
    ) -> Result<Self> {
        const VERB: &str = "ibv_alloc_td";
        let context = context.into();
        // SAFETY: the caller vouches for the pointer.
        let is_foreign = raw.is_null() || unsafe { (*raw).context } != context.as_raw();
        Error::invalid_if(is_foreign, VERB, "not a thread domain of this context")?;
        // SAFETY: the caller hands over a live domain.
        Ok(Self { raw: unsafe { Handle::new(VERB, raw) }?, context })
    }

    /// The context that it was allocated from.
    pub fn context(&self) -> &Context<'ctx> {
        &self.context
    }
}

debug! { ThreadDomain<'_>, self, device: self.context.name(), .. }
