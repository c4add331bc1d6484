//! How a resource holds its parent.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use crate::base::Leak;

/// The parent of a resource, from which it was made: borrowed, or shared through an [`Arc`].
///
/// A resource must be destroyed before its parent. With a **borrowed** parent, `ProtectionDomain::new(&context)`, the
/// compiler enforces that, at no cost. With a **shared** one, `ProtectionDomain::new(Arc::new(context))`, the child
/// keeps its parent alive and is `'static`: both can move into one struct or thread.
///
/// Constructors take `impl Into<Parent<..>>`:
///
/// | argument | the child |
/// |---|---|
/// | `&P` | borrows its parent |
/// | `P` | owns its parent, and destroys it after itself |
/// | `Arc<P>`, `&Arc<P>` | shares its parent |
/// | `Parent<P>`, `&Parent<P>` | holds its parent as that one does |
///
/// ```
/// use std::sync::Arc;
/// use ibverbs::{Context, ProtectionDomain};
///
/// # fn main() -> ibverbs::Result<()> {
/// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
/// # rxe0.register();
/// let context = ibverbs::open("rxe0")?;
/// let borrowing = ProtectionDomain::new(&context)?;
///
/// struct Server {
///     domain: ProtectionDomain<'static>,
/// }
/// let server = Server { domain: ProtectionDomain::new(ibverbs::open("rxe0")?)? };
/// std::thread::spawn(move || drop(server)).join().unwrap();
///
/// let context = Arc::new(ibverbs::open("rxe0")?);
/// let servers = [
///     Server { domain: ProtectionDomain::new(&context)? },
///     Server { domain: ProtectionDomain::new(&context)? },
/// ];
/// # Ok(())
/// # }
/// ```
pub struct Parent<'a, P>(Inner<'a, P>);

enum Inner<'a, P> {
    Borrowed(&'a P),
    Shared(Arc<P>),
}

impl<P> Drop for Parent<'_, P> {
    /// Empty, but makes drop check keep the parent alive until the child's destroy verb has run. Dropping a reference
    /// or an `Arc` is no use of the parent, so the compiler would else allow dropping the parent first.
    #[inline]
    fn drop(&mut self) {}
}

impl<P> Deref for Parent<'_, P> {
    type Target = P;

    fn deref(&self) -> &P {
        match &self.0 {
            Inner::Borrowed(parent) => parent,
            Inner::Shared(parent) => parent,
        }
    }
}

impl<P> Clone for Parent<'_, P> {
    fn clone(&self) -> Self {
        Self(match &self.0 {
            Inner::Borrowed(parent) => Inner::Borrowed(parent),
            Inner::Shared(parent) => Inner::Shared(Arc::clone(parent)),
        })
    }
}

impl<P: Leak> Leak for Parent<'_, P> {
    fn leak(&self) {
        (**self).leak();
    }
}

impl<P: fmt::Debug> fmt::Debug for Parent<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

impl<'a, P> From<&'a P> for Parent<'a, P> {
    fn from(parent: &'a P) -> Self {
        Self(Inner::Borrowed(parent))
    }
}

impl<P> From<P> for Parent<'_, P> {
    /// The child owns its parent.
    fn from(parent: P) -> Self {
        Self(Inner::Shared(Arc::new(parent)))
    }
}

impl<'a, P> From<&Parent<'a, P>> for Parent<'a, P> {
    fn from(parent: &Parent<'a, P>) -> Self {
        parent.clone()
    }
}

impl<P> From<Arc<P>> for Parent<'_, P> {
    fn from(parent: Arc<P>) -> Self {
        Self(Inner::Shared(parent))
    }
}

impl<P> From<&Arc<P>> for Parent<'_, P> {
    fn from(parent: &Arc<P>) -> Self {
        Self(Inner::Shared(Arc::clone(parent)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Child<'a>(Parent<'a, String>);

    impl<'a> Child<'a> {
        fn new(parent: impl Into<Parent<'a, String>>) -> Self {
            Self(parent.into())
        }
    }

    #[test]
    fn borrowed_and_shared_read_alike() {
        let text = String::from("parent");
        let shared = Arc::new(text.clone());
        let owned = Parent::from(text.clone());
        for child in [
            Child::new(&text),
            Child::new(text.clone()),
            Child::new(&shared),
            Child::new(Arc::clone(&shared)),
            Child::new(&owned),
            Child::new(owned.clone()),
        ] {
            assert_eq!(*child.0, "parent");
        }
    }

    #[test]
    fn a_shared_parent_lives_as_long_as_its_child() {
        let shared = Arc::new(String::from("parent"));
        let child: Child<'static> = Child::new(&shared);
        let gone = Arc::downgrade(&shared);
        drop(shared);
        assert_eq!(*child.0.clone(), "parent");
        drop(child);
        assert!(gone.upgrade().is_none());
    }
}
