use std::fmt;
use std::marker::PhantomData;
use std::ops::RangeBounds;

use super::remote_region::RemoteMemoryRegion;
use super::scatter_gather::{Element, resolve};
use crate::base::{Error, Result};

/// Memory of a peer that consists of elements of type `T`: a [`RemoteMemoryRegion`] with a type.
///
/// [`element`](Self::element) and [`slice`](Self::slice) count in elements; [`RemoteElement::field`] finds a
/// field of a struct. Requests take all of them as a [`RemoteMemoryRegion`].
///
/// ```
/// use ibverbs::memory::RemoteRegion;
/// use ibverbs::{RemoteMemoryRegion, field};
/// use zerocopy::{FromBytes, Immutable, IntoBytes};
///
/// #[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
/// #[repr(C)]
/// struct Entry {
///     key: u64,
///     version: u64,
///     value: [u8; 48],
/// }
///
/// let sent_by_the_peer = RemoteMemoryRegion::new(0x7f00_0000_0000, 1024, 0x1234)?;
/// let table: RemoteRegion<Entry> = sent_by_the_peer.typed()?;
/// assert_eq!(table.len(), 16);
/// let entry = table.element(3)?;
/// let version = entry.field(field!(Entry, version)); // a RemoteElement<u64>
/// let version = RemoteMemoryRegion::from(version);
/// assert_eq!((version.address(), version.length()), (0x7f00_0000_00c8, 8));
/// # Ok::<(), ibverbs::Error>(())
/// ```
///
/// With feature `serde` it has the form of a [`RemoteMemoryRegion`], without the type, on which both sides have
/// to agree. Deserialising fails if the length is not a multiple of the size of `T`.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(
    feature = "serde",
    serde(try_from = "RemoteMemoryRegion", into = "RemoteMemoryRegion", bound = "T: Element")
)]
pub struct RemoteRegion<T> {
    region: RemoteMemoryRegion,
    elements: PhantomData<fn() -> T>,
}

/// One value of type `T` in the memory of a peer: see [`RemoteRegion`].
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(
    feature = "serde",
    serde(try_from = "RemoteMemoryRegion", into = "RemoteMemoryRegion", bound = "T: Element")
)]
pub struct RemoteElement<T> {
    region: RemoteMemoryRegion,
    value: PhantomData<fn() -> T>,
}

/// A field of type `F` of the struct `T`, made by [`field!`](crate::field).
pub struct Field<T, F> {
    offset: usize,
    types: PhantomData<fn(T) -> F>,
}

/// A field of a struct, or of a struct in it: `field!(Entry, version)`, `field!(Entry, head.next)`.
///
/// The compiler finds its offset and type. Use it with [`RemoteElement::field`].
#[macro_export]
macro_rules! field {
    ($struct:ty, $($field:tt).+) => {
        $crate::memory::Field::<$struct, _>::__new(
            ::core::mem::offset_of!($struct, $($field).+),
            // For its type; nothing calls it.
            |value: &$struct| &raw const value.$($field).+,
        )
    };
}

impl<T, F> Field<T, F> {
    /// For the macro `field!` alone. Even a wrong offset stays within the peer's region.
    #[doc(hidden)]
    pub const fn __new(offset: usize, _: fn(&T) -> *const F) -> Self {
        Self { offset, types: PhantomData }
    }
}

impl RemoteMemoryRegion {
    /// Gives the region's elements the type `T`.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: its length is not a multiple of the size of `T`, or that size is 0.
    pub fn typed<T: Element>(self) -> Result<RemoteRegion<T>> {
        RemoteRegion::try_from(self)
    }
}

impl<T: Element> RemoteRegion<T> {
    /// The number of elements.
    #[inline]
    pub const fn len(&self) -> usize {
        (self.region.length() / size_of::<T>() as u64) as usize
    }

    /// Whether it has no elements.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The element at `index`.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: there are fewer elements.
    #[inline]
    pub fn element(&self, index: usize) -> Result<RemoteElement<T>> {
        let region = self.region.element::<T>(index as u64)?;
        Ok(RemoteElement { region, value: PhantomData })
    }

    /// The elements in `range`.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the range is out of bounds.
    #[inline]
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<Self> {
        let (range, size) = (resolve(range, self.len())?, size_of::<T>() as u64);
        let region =
            self.region.sub_region(range.start as u64 * size, range.len() as u64 * size)?;
        Ok(Self { region, elements: PhantomData })
    }
}

impl<T: Element> RemoteElement<T> {
    /// One of its fields.
    #[inline]
    pub fn field<F: Element>(&self, field: Field<T, F>) -> RemoteElement<F> {
        let RemoteMemoryRegion { address, rkey, .. } = self.region;
        debug_assert!(field.offset + size_of::<F>() <= size_of::<T>());
        // No overflow: the end of the element is an address.
        let (address, length) = (address + field.offset as u64, size_of::<F>() as u64);
        RemoteElement { region: RemoteMemoryRegion { address, length, rkey }, value: PhantomData }
    }
}

impl<T: Element, const N: usize> RemoteElement<[T; N]> {
    /// The elements of the array.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the size of `T` is 0.
    pub fn elements(&self) -> Result<RemoteRegion<T>> {
        self.region.typed()
    }
}

impl<T: Element> TryFrom<RemoteMemoryRegion> for RemoteRegion<T> {
    type Error = Error;

    fn try_from(region: RemoteMemoryRegion) -> Result<Self> {
        match region.length().checked_rem(size_of::<T>() as u64) {
            Some(0) if usize::try_from(region.length()).is_ok() => {
                Ok(Self { region, elements: PhantomData })
            }
            Some(_) => {
                let reason = "the remote region's length is not a multiple of the element's size";
                Err(Error::invalid("ibv_send_wr", reason))
            }
            None => Err(Error::invalid("ibv_send_wr", "the element has a size of 0")),
        }
    }
}

impl<T: Element> TryFrom<RemoteMemoryRegion> for RemoteElement<T> {
    type Error = Error;

    fn try_from(region: RemoteMemoryRegion) -> Result<Self> {
        let reason = "the remote region's length is not the size of the element";
        Error::invalid_if(region.length() != size_of::<T>() as u64, "ibv_send_wr", reason)?;
        Ok(Self { region, value: PhantomData })
    }
}

macro_rules! plain_data {
    ($($name:ident),+) => {$(
        impl<T> From<$name<T>> for RemoteMemoryRegion {
            fn from(typed: $name<T>) -> Self {
                typed.region
            }
        }

        impl<T> Clone for $name<T> {
            fn clone(&self) -> Self {
                *self
            }
        }

        impl<T> Copy for $name<T> {}

        impl<T> PartialEq for $name<T> {
            fn eq(&self, other: &Self) -> bool {
                self.region == other.region
            }
        }

        impl<T> Eq for $name<T> {}

        impl<T> fmt::Debug for $name<T> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "<{}>"), std::any::type_name::<T>())?;
                write!(f, "({:?})", self.region)
            }
        }
    )+};
}

plain_data!(RemoteRegion, RemoteElement);

impl<T, F> Clone for Field<T, F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T, F> Copy for Field<T, F> {}

impl<T, F> fmt::Debug for Field<T, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Field<{}>({})", std::any::type_name::<F>(), self.offset)
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::{FromBytes, Immutable, IntoBytes};

    use super::*;

    #[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
    #[repr(C)]
    struct Head {
        next: u32,
        count: u32,
    }

    #[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
    #[repr(C, packed)]
    struct Entry {
        tag: u8,
        head: Head,
        values: [u64; 3],
    }

    fn table() -> RemoteRegion<Entry> {
        let bytes = 4 * size_of::<Entry>() as u64;
        RemoteMemoryRegion::new(0x1000, bytes, 7).unwrap().typed().unwrap()
    }

    fn place(of: impl Into<RemoteMemoryRegion>) -> (u64, u64, u32) {
        let region = of.into();
        (region.address(), region.length(), region.rkey())
    }

    #[test]
    fn fields_are_where_the_compiler_puts_them() {
        let second = table().element(1).unwrap();
        assert_eq!(place(second), (0x1021, 33, 7));
        assert_eq!(place(second.field(field!(Entry, tag))), (0x1021, 1, 7));
        assert_eq!(place(second.field(field!(Entry, head.count))), (0x1026, 4, 7));
        let values: RemoteElement<[u64; 3]> = second.field(field!(Entry, values));
        assert_eq!(place(values), (0x102a, 24, 7));
        assert_eq!(place(values.elements().unwrap().element(2).unwrap()), (0x103a, 8, 7));
        let head = second.field(field!(Entry, head));
        assert_eq!(head.field(field!(Head, next)), second.field(field!(Entry, head.next)));
        const COUNT: Field<Head, u32> = field!(Head, count);
        assert_eq!(place(head.field(COUNT)), (0x1026, 4, 7));
    }

    #[test]
    fn elements_stay_inside() {
        let table = table();
        assert_eq!((table.len(), table.is_empty()), (4, false));
        assert!(table.element(4).is_err() && table.element(usize::MAX).is_err());
        assert_eq!(place(table.slice(1..3).unwrap()), (0x1021, 66, 7));
        assert!(table.slice(..5).is_err());
        assert!(table.slice(4..).unwrap().is_empty());
        let odd = RemoteMemoryRegion::new(0x1000, 12, 7).unwrap();
        let error = odd.typed::<u64>().unwrap_err();
        assert!(error.to_string().contains("not a multiple"), "{error}");
        assert!(odd.typed::<[u64; 0]>().is_err());
        assert!(RemoteElement::<u64>::try_from(odd).is_err());
    }

    #[cfg(feature = "serde")]
    #[test]
    fn serde_has_the_form_of_the_region() {
        let config = bincode::config::legacy();
        let bytes = bincode::serde::encode_to_vec(table(), config).unwrap();
        let plain = bincode::serde::encode_to_vec(RemoteMemoryRegion::from(table()), config);
        assert_eq!(bytes, plain.unwrap());
        let (back, _): (RemoteRegion<Entry>, usize) =
            bincode::serde::decode_from_slice(&bytes, config).unwrap();
        assert_eq!(back, table());
        assert!(
            bincode::serde::decode_from_slice::<RemoteRegion<[u8; 100]>, _>(&bytes, config)
                .is_err()
        );
    }
}
