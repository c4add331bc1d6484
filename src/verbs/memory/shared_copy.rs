//! Copies to and from memory that a peer, or another thread, may write or read at the same time.
//!
//! Only atomic operations may access such memory: a read during a concurrent write then has an unspecified result,
//! but is not undefined behaviour. The unit of access is the alignment of the element, up to the machine's word:
//! a `u32` is copied by 4-byte accesses, a `[u8; 16]` byte by byte.
//!
//! Compilers do not merge atomic accesses, and byte-wise copies would be slow. So each access is one instruction
//! of assembly, as wide as the machine has. It counts as one access to each unit in it, because no processor
//! splits an aligned word (Go's `memmove` relies on that too): x86-64 splits at 8-byte boundaries at most, and
//! aarch64 accesses each aligned register of a pair at once. The accesses at the ends of a copy may overlap: they
//! read a unit twice, or write it twice with the same value.

use std::ptr;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicUsize, Ordering};

/// In bytes: a power of 2, up to the word.
const fn unit<T>() -> usize {
    if align_of::<T>() < size_of::<usize>() { align_of::<T>() } else { size_of::<usize>() }
}

const WORD: usize = size_of::<usize>();

/// Copies `count` elements out of shared memory.
///
/// # Safety
///
/// `from` is valid for reads of `count` elements, aligned, and accessed only by atomic operations of this size
/// and from outside of the program. `to` is valid for writes of them, aligned, and nothing else accesses it.
#[inline]
pub unsafe fn load<T>(from: *const T, to: *mut T, count: usize) {
    // SAFETY: the caller vouches for it.
    unsafe { copy::<T>(Load, from.cast(), to.cast(), count * size_of::<T>()) }
}

/// Copies `count` elements into shared memory.
///
/// # Safety
///
/// `to` is valid for writes of `count` elements, aligned, and accessed only by atomic operations of this size
/// and from outside of the program. `from` is valid for reads of them, aligned, and nothing writes it.
#[inline]
pub unsafe fn store<T>(from: *const T, to: *mut T, count: usize) {
    // SAFETY: the caller vouches for it.
    unsafe { copy::<T>(Store, from.cast(), to.cast(), count * size_of::<T>()) }
}

/// # Safety
///
/// As [`store`].
pub(crate) unsafe fn fill<T: Copy>(value: T, to: *mut T, count: usize) {
    // SAFETY: the caller vouches for all elements. A unit has no padding.
    unsafe {
        if size_of::<T>() == unit::<T>() {
            let mut units = [0_u8; WORD];
            for unit in units.chunks_exact_mut(size_of::<T>()) {
                unit.as_mut_ptr().cast::<T>().write_unaligned(value);
            }
            let way = Fill(usize::from_ne_bytes(units));
            copy::<T>(way, ptr::null(), to.cast(), count * size_of::<T>());
        } else if size_of::<T>() <= BLOCK {
            fill_by_blocks(value, to, count);
        } else {
            for at in 0..count {
                store(&raw const value, to.add(at), 1);
            }
        }
    }
}

const BLOCK: usize = 64;

/// Copies many small elements at a time. Not inlined: a block of large elements would overflow the stack.
///
/// # Safety
///
/// As [`store`].
#[inline(never)]
unsafe fn fill_by_blocks<T: Copy>(value: T, to: *mut T, count: usize) {
    let block = [value; BLOCK];
    for at in (0..count).step_by(BLOCK) {
        // SAFETY: the caller vouches for all elements.
        unsafe { store(block.as_ptr(), to.add(at), BLOCK.min(count - at)) };
    }
}

/// Where the bytes come from, and which side is shared.
trait Way: Copy {
    /// # Safety
    ///
    /// The shared side is as [`load`] or [`store`] says, and aligned for `P`; the other side may be unaligned.
    unsafe fn one<P: Piece>(self, from: *const u8, to: *mut u8);

    fn shared(self, _: *const u8, to: *mut u8) -> *const u8 {
        to
    }

    /// For a way without a source.
    #[allow(dead_code, reason = "used on x86-64 only")]
    fn word(self) -> Option<usize> {
        None
    }
}

#[derive(Clone, Copy)]
struct Load;

impl Way for Load {
    #[inline(always)]
    unsafe fn one<P: Piece>(self, from: *const u8, to: *mut u8) {
        // SAFETY: the caller vouches for it.
        unsafe { to.cast::<P>().write_unaligned(P::get(from)) }
    }

    #[inline(always)]
    fn shared(self, from: *const u8, _: *mut u8) -> *const u8 {
        from
    }
}

#[derive(Clone, Copy)]
struct Store;

impl Way for Store {
    #[inline(always)]
    unsafe fn one<P: Piece>(self, from: *const u8, to: *mut u8) {
        // SAFETY: the caller vouches for it.
        unsafe { from.cast::<P>().read_unaligned().put(to) }
    }
}

/// A word filled with copies of the unit.
#[derive(Clone, Copy)]
struct Fill(usize);

impl Way for Fill {
    #[inline(always)]
    unsafe fn one<P: Piece>(self, _: *const u8, to: *mut u8) {
        // SAFETY: the caller vouches for it.
        unsafe { P::of(self.0).put(to) }
    }

    #[inline(always)]
    fn word(self) -> Option<usize> {
        Some(self.0)
    }
}

/// A word that one access reads or writes.
trait Piece: Copy {
    /// # Safety
    ///
    /// `from` is shared memory, and as aligned as the implementation says.
    unsafe fn get(from: *const u8) -> Self;

    /// # Safety
    ///
    /// As [`get`](Self::get).
    unsafe fn put(self, to: *mut u8);

    /// The first bytes of the word, or copies of it.
    fn of(word: usize) -> Self;
}

/// Aligned to its size.
#[derive(Clone, Copy)]
struct Unit<U>(U);

macro_rules! impl_piece_of_unit {
    ($($integer:ty, $atomic:ty;)*) => {$(
        impl Piece for Unit<$integer> {
            #[inline(always)]
            unsafe fn get(from: *const u8) -> Self {
                // SAFETY: it is aligned, and accessed by atomic operations only.
                Self(unsafe { (*from.cast::<$atomic>()).load(Ordering::Relaxed) })
            }

            #[inline(always)]
            unsafe fn put(self, to: *mut u8) {
                // SAFETY: as above.
                unsafe { (*to.cast::<$atomic>()).store(self.0, Ordering::Relaxed) }
            }

            #[inline(always)]
            fn of(word: usize) -> Self {
                Self(word as $integer)
            }
        }
    )*};
}

impl_piece_of_unit! {
    u8, AtomicU8;
    u16, AtomicU16;
    u32, AtomicU32;
    usize, AtomicUsize;
}

/// # Safety
///
/// As [`load`] or [`store`], of elements of that many bytes together.
#[inline(always)]
unsafe fn copy<T>(way: impl Way, from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller vouches for it.
    unsafe {
        if !wide::HERE {
            return copy_units::<T>(way, from, to, bytes);
        }
        if wide::any_address(unit::<T>()) {
            return wide::copy(way, from, to, bytes);
        }
        // Units up to the first aligned word, words, and the remaining units.
        let head = ((way.shared(from, to) as usize).wrapping_neg() % WORD).min(bytes);
        let words = (bytes - head) / WORD * WORD;
        copy_units::<T>(way, from, to, head);
        wide::copy(way, from.wrapping_add(head), to.add(head), words);
        let done = head + words;
        copy_units::<T>(way, from.wrapping_add(done), to.add(done), bytes - done);
    }
}

/// # Safety
///
/// As [`copy`].
#[inline(always)]
unsafe fn copy_units<T>(way: impl Way, from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: each access is within what the caller vouches for, and aligned, as the elements are.
    unsafe {
        for at in (0..bytes).step_by(unit::<T>()) {
            let (from, to) = (from.wrapping_add(at), to.add(at));
            match unit::<T>() {
                1 => way.one::<Unit<u8>>(from, to),
                2 => way.one::<Unit<u16>>(from, to),
                4 => way.one::<Unit<u32>>(from, to),
                _ => way.one::<Unit<usize>>(from, to),
            }
        }
    }
}

#[cfg(all(
    any(target_arch = "x86_64", target_arch = "aarch64"),
    target_pointer_width = "64",
    not(miri)
))]
mod wide {
    use std::arch::asm;

    use super::{Piece, Way};

    pub(super) const HERE: bool = true;

    /// Whether accesses may begin at any multiple of the unit. On aarch64, an access to an unaligned word is one
    /// to each of its bytes.
    pub(super) const fn any_address(unit: usize) -> bool {
        cfg!(target_arch = "x86_64") || unit == 1 || unit == 8
    }

    #[cfg(target_arch = "x86_64")]
    type Double = std::arch::x86_64::__m128i;
    #[cfg(target_arch = "aarch64")]
    type Double = [u64; 2];

    #[derive(Clone, Copy)]
    struct Wide<U>(U);

    macro_rules! pieces {
        ($($type:ty, $arch:literal, $get:literal, $put:literal, $class:ident, $of:expr;)*) => {$(
            #[cfg(target_arch = $arch)]
            impl Piece for Wide<$type> {
                #[inline(always)]
                unsafe fn get(from: *const u8) -> Self {
                    let value;
                    // SAFETY: it only reads what the caller vouches for.
                    unsafe { asm!($get, v = out($class) value, p = in(reg) from, options(nostack, preserves_flags, readonly)) };
                    Self(value)
                }

                #[inline(always)]
                unsafe fn put(self, to: *mut u8) {
                    // SAFETY: it only writes what the caller vouches for.
                    unsafe { asm!($put, v = in($class) self.0, p = in(reg) to, options(nostack, preserves_flags)) };
                }

                #[inline(always)]
                fn of(word: usize) -> Self {
                    Self(($of)(word))
                }
            }
        )*};
    }

    pieces! {
        u8, "x86_64", "mov {v}, byte ptr [{p}]", "mov byte ptr [{p}], {v}", reg_byte, |word| word as u8;
        u16, "x86_64", "mov {v:x}, word ptr [{p}]", "mov word ptr [{p}], {v:x}", reg, |word| word as u16;
        u32, "x86_64", "mov {v:e}, dword ptr [{p}]", "mov dword ptr [{p}], {v:e}", reg, |word| word as u32;
        u64, "x86_64", "mov {v}, qword ptr [{p}]", "mov qword ptr [{p}], {v}", reg, |word| word as u64;
        Double, "x86_64", "movups {v}, xmmword ptr [{p}]", "movups xmmword ptr [{p}], {v}", xmm_reg, |word| {
            // SAFETY: both types are sixteen bytes, of which any values are valid.
            unsafe { std::mem::transmute::<[usize; 2], std::arch::x86_64::__m128i>([word; 2]) }
        };
        u8, "aarch64", "ldrb {v:w}, [{p}]", "strb {v:w}, [{p}]", reg, |word| word as u8;
        u16, "aarch64", "ldrh {v:w}, [{p}]", "strh {v:w}, [{p}]", reg, |word| word as u16;
        u32, "aarch64", "ldr {v:w}, [{p}]", "str {v:w}, [{p}]", reg, |word| word as u32;
        u64, "aarch64", "ldr {v}, [{p}]", "str {v}, [{p}]", reg, |word| word as u64;
    }

    #[cfg(target_arch = "aarch64")]
    impl Piece for Wide<Double> {
        #[inline(always)]
        unsafe fn get(from: *const u8) -> Self {
            let (a, b);
            // SAFETY: it only reads what the caller vouches for.
            unsafe {
                asm!("ldp {a}, {b}, [{p}]", a = out(reg) a, b = out(reg) b, p = in(reg) from, options(nostack, preserves_flags, readonly))
            };
            Self([a, b])
        }

        #[inline(always)]
        unsafe fn put(self, to: *mut u8) {
            let [a, b] = self.0;
            // SAFETY: it only writes what the caller vouches for.
            unsafe {
                asm!("stp {a}, {b}, [{p}]", a = in(reg) a, b = in(reg) b, p = in(reg) to, options(nostack, preserves_flags))
            };
        }

        #[inline(always)]
        fn of(word: usize) -> Self {
            Self([word as u64; 2])
        }
    }

    /// # Safety
    ///
    /// As [`copy`](super::copy), of elements for which [`any_address`] is true, or with a shared side and a
    /// length that are multiples of the word.
    #[inline(always)]
    pub(super) unsafe fn copy(way: impl Way, from: *const u8, to: *mut u8, bytes: usize) {
        // SAFETY: all accesses are within these bytes. They begin a multiple of the unit after the first byte,
        // as both halves of a length do.
        unsafe {
            match bytes {
                0 => {}
                1 => way.one::<Wide<u8>>(from, to),
                2 | 3 => ends::<Wide<u16>>(way, from, to, bytes),
                4..8 => ends::<Wide<u32>>(way, from, to, bytes),
                8..16 => ends::<Wide<u64>>(way, from, to, bytes),
                16..=32 => ends::<Wide<Double>>(way, from, to, bytes),
                _ => longer(way, from, to, bytes),
            }
        }
    }

    /// The two may overlap or be the same.
    ///
    /// # Safety
    ///
    /// As [`copy`].
    #[inline(always)]
    unsafe fn ends<P: Piece>(way: impl Way, from: *const u8, to: *mut u8, bytes: usize) {
        // SAFETY: the caller vouches for it.
        unsafe {
            way.one::<P>(from, to);
            let last = bytes - size_of::<P>();
            if last > 0 {
                way.one::<P>(from.wrapping_add(last), to.add(last));
            }
        }
    }

    /// # Safety
    ///
    /// As [`copy`], of more than 32 bytes.
    #[inline(never)]
    unsafe fn longer(way: impl Way, from: *const u8, to: *mut u8, bytes: usize) {
        // SAFETY: all accesses are within these bytes, and begin as those of `copy` do.
        unsafe {
            if bytes <= 64 {
                ends::<Wide<Double>>(way, from, to, 32);
                let last = bytes - 32;
                return ends::<Wide<Double>>(way, from.wrapping_add(last), to.add(last), 32);
            }
            #[cfg(target_arch = "x86_64")]
            if is_x86_feature_detected!("avx") {
                return quads(way, from, to, bytes);
            }
            doubles(way, from, to, bytes);
        }
    }

    /// # Safety
    ///
    /// As [`copy`], of more than 64 bytes.
    unsafe fn doubles(way: impl Way, from: *const u8, to: *mut u8, bytes: usize) {
        let last = bytes - 64;
        // SAFETY: as in `longer`.
        unsafe {
            for at in (0..last).step_by(64) {
                four(way, from.wrapping_add(at), to.add(at));
            }
            four(way, from.wrapping_add(last), to.add(last));
        }
    }

    /// # Safety
    ///
    /// As [`copy`], of 64 bytes.
    #[inline(always)]
    unsafe fn four(way: impl Way, from: *const u8, to: *mut u8) {
        // SAFETY: the caller vouches for it.
        unsafe {
            for at in [0, 16, 32, 48] {
                way.one::<Wide<Double>>(from.wrapping_add(at), to.add(at));
            }
        }
    }

    /// Code that leaves the upper halves of all vector registers clear: nothing of the program's lives in those.
    #[cfg(target_arch = "x86_64")]
    macro_rules! vector_asm {
        ($($line:literal),+; $($operands:tt)+) => {
            asm!(
                $($line,)+
                "vzeroupper",
                $($operands)+
                out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
                out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
                out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
                out("xmm12") _, out("xmm13") _, out("xmm14") _, out("xmm15") _,
                options(nostack),
            )
        };
    }

    /// # Safety
    ///
    /// As [`doubles`], on a processor with AVX.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn quads(way: impl Way, from: *const u8, to: *mut u8, bytes: usize) {
        if let Some(word) = way.word() {
            // SAFETY: the caller vouches for it.
            return unsafe { fill(word, to, bytes) };
        }
        if bytes <= 256 {
            // SAFETY: the caller vouches for the first and last 64 or 128 bytes. Only operands, vector
            // registers and flags change.
            unsafe {
                vector_asm!(
                    "vmovups ymm0, ymmword ptr [{from}]",
                    "vmovups ymm1, ymmword ptr [{from} + 32]",
                    "vmovups ymm2, ymmword ptr [{from} + {bytes} - 64]",
                    "vmovups ymm3, ymmword ptr [{from} + {bytes} - 32]",
                    "cmp {bytes}, 128",
                    "jbe 2f",
                    "vmovups ymm4, ymmword ptr [{from} + 64]",
                    "vmovups ymm5, ymmword ptr [{from} + 96]",
                    "vmovups ymm6, ymmword ptr [{from} + {bytes} - 128]",
                    "vmovups ymm7, ymmword ptr [{from} + {bytes} - 96]",
                    "vmovups ymmword ptr [{to} + 64], ymm4",
                    "vmovups ymmword ptr [{to} + 96], ymm5",
                    "vmovups ymmword ptr [{to} + {bytes} - 128], ymm6",
                    "vmovups ymmword ptr [{to} + {bytes} - 96], ymm7",
                    "2:",
                    "vmovups ymmword ptr [{to}], ymm0",
                    "vmovups ymmword ptr [{to} + 32], ymm1",
                    "vmovups ymmword ptr [{to} + {bytes} - 64], ymm2",
                    "vmovups ymmword ptr [{to} + {bytes} - 32], ymm3";
                    from = in(reg) from,
                    to = in(reg) to,
                    bytes = in(reg) bytes,
                );
            }
            return;
        }
        // The first 32 bytes, blocks of 128 from the first multiple of 32 on, and the last 128.
        let head = 32 - to as usize % 32;
        let blocks = (bytes - head - 1) / 128;
        // SAFETY: as above. There is at least one block.
        unsafe {
            vector_asm!(
                "vmovups ymm4, ymmword ptr [{from}]",
                "vmovups ymm5, ymmword ptr [{from} + {bytes} - 128]",
                "vmovups ymm6, ymmword ptr [{from} + {bytes} - 96]",
                "vmovups ymm7, ymmword ptr [{from} + {bytes} - 64]",
                "vmovups ymm8, ymmword ptr [{from} + {bytes} - 32]",
                "vmovups ymmword ptr [{to}], ymm4",
                "2:",
                "vmovups ymm0, ymmword ptr [{next}]",
                "vmovups ymm1, ymmword ptr [{next} + 32]",
                "vmovups ymm2, ymmword ptr [{next} + 64]",
                "vmovups ymm3, ymmword ptr [{next} + 96]",
                "vmovaps ymmword ptr [{block}], ymm0",
                "vmovaps ymmword ptr [{block} + 32], ymm1",
                "vmovaps ymmword ptr [{block} + 64], ymm2",
                "vmovaps ymmword ptr [{block} + 96], ymm3",
                "sub {next}, -128",
                "sub {block}, -128",
                "dec {blocks}",
                "jnz 2b",
                "vmovups ymmword ptr [{to} + {bytes} - 128], ymm5",
                "vmovups ymmword ptr [{to} + {bytes} - 96], ymm6",
                "vmovups ymmword ptr [{to} + {bytes} - 64], ymm7",
                "vmovups ymmword ptr [{to} + {bytes} - 32], ymm8";
                from = in(reg) from,
                next = inout(reg) from.wrapping_add(head) => _,
                to = in(reg) to,
                block = inout(reg) to.add(head) => _,
                bytes = in(reg) bytes,
                blocks = inout(reg) blocks => _,
            );
        }
    }

    /// # Safety
    ///
    /// As [`quads`].
    #[cfg(target_arch = "x86_64")]
    unsafe fn fill(word: usize, to: *mut u8, bytes: usize) {
        /// The length from which on the processor's own loop is faster.
        const LONG: usize = 4096;
        let head = 32 - to as usize % 32;
        // SAFETY: the caller vouches for the first 32 bytes, and for those from the head on, which is at most 32.
        // The direction flag is clear, as everywhere in Rust. Only operands, named registers and flags change.
        unsafe {
            if bytes >= LONG {
                for at in [0, 16] {
                    Wide::<Double>::of(word).put(to.add(at));
                }
                asm!(
                    "rep stosq",
                    in("rax") word,
                    inout("rdi") to.add(head) => _,
                    inout("rcx") (bytes - head) / 8 => _,
                    options(nostack, preserves_flags),
                );
                return Wide::<u64>::of(word).put(to.add(bytes - 8));
            }
            vector_asm!(
                "vmovq xmm0, {word}",
                "vpunpcklqdq xmm0, xmm0, xmm0",
                "vinsertf128 ymm0, ymm0, xmm0, 1",
                "vmovups ymmword ptr [{to}], ymm0",
                "vmovups ymmword ptr [{end} - 64], ymm0",
                "vmovups ymmword ptr [{end} - 32], ymm0",
                "cmp {block}, {last}",
                "jae 3f",
                "2:",
                "vmovaps ymmword ptr [{block}], ymm0",
                "vmovaps ymmword ptr [{block} + 32], ymm0",
                "add {block}, 64",
                "cmp {block}, {last}",
                "jb 2b",
                "3:";
                word = in(reg) word,
                to = in(reg) to,
                block = inout(reg) to.add(head) => _,
                end = in(reg) to.add(bytes),
                last = in(reg) to.add(bytes - 64),
            );
        }
    }

    #[cfg(test)]
    mod tests {
        use super::super::tests::in_every_alignment;
        use super::super::{Fill, Load, Store};
        use super::*;

        /// Tests the choice that [`longer`] makes on a processor without [`quads`].
        #[test]
        fn doubles_copy_and_fill_in_every_alignment() {
            in_every_alignment(65..200, |shared, private, back, length| {
                let word = usize::MAX / 255 * 7;
                // SAFETY: they are in arrays of this length.
                unsafe {
                    doubles(Fill(word), std::ptr::null(), shared, length);
                    for at in 0..length {
                        assert_eq!(shared.add(at).read(), 7);
                    }
                    doubles(Store, private, shared, length);
                    doubles(Load, shared, back, length);
                }
            });
        }
    }
}

/// Never called.
#[cfg(not(all(
    any(target_arch = "x86_64", target_arch = "aarch64"),
    target_pointer_width = "64",
    not(miri)
)))]
mod wide {
    pub(super) const HERE: bool = false;

    pub(super) const fn any_address(_: usize) -> bool {
        false
    }

    pub(super) unsafe fn copy(_: impl super::Way, _: *const u8, _: *mut u8, _: usize) {
        unreachable!()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Copies to and from memory to whose elements no reference exists, like that of regions.
    fn check<T: Copy + PartialEq + std::fmt::Debug>(value: impl Fn(usize) -> T) {
        // Miri takes a hundred times as long.
        const LEN: usize = if cfg!(miri) { 14 } else { 70 };
        let mut shared = [value(0); LEN];
        let shared = shared.as_mut_ptr();
        for start in (0..10).step_by(if cfg!(miri) { 3 } else { 1 }) {
            for count in 0..LEN - start {
                let fresh: Vec<T> = (0..count).map(|i| value(start + count + i)).collect();
                let mut back = vec![value(0); count + 2];
                // SAFETY: `start + count` elements are in the array, and `back` is longer; both are ours alone.
                unsafe {
                    for i in 0..LEN {
                        shared.add(i).write(value(0));
                    }
                    store(fresh.as_ptr(), shared.add(start), count);
                    load(shared.add(start), back.as_mut_ptr().add(1), count);
                    let inside = start..start + count;
                    for i in (0..LEN).filter(|i| !inside.contains(i)) {
                        assert_eq!(shared.add(i).read(), value(0), "outside of {inside:?}");
                    }
                }
                assert_eq!(back[1..=count], fresh, "{start} {count}");
                assert_eq!((back[0], back[count + 1]), (value(0), value(0)));
            }
        }
    }

    #[test]
    fn copies_are_whole_and_stay_inside() {
        check(|i| i as u8);
        check(|i| i as u16 * 259);
        check(|i| i as u32 * 0x0102_0305);
        check(|i| i as u64 * 0x0102_0304_0506_0709);
        check(|i| i as u128 * 0x0102_0304_0506_0708_090a_0b0c_0d0e_0f11);
        check(|i| [i as u8, 1, 2]);
        check(|i| [i as u16, 1, 2]);
        check(|i| [i as u64, 1, 2]);
    }

    /// `copy(shared, private, back, length)` is to copy `private` to `shared` and that to `back`. Runs it in
    /// every alignment to 64, and checks that it changes nothing else.
    pub(super) fn in_every_alignment(
        lengths: impl Iterator<Item = usize> + Clone,
        mut copy: impl FnMut(*mut u8, *const u8, *mut u8, usize),
    ) {
        const ROOM: usize = if cfg!(miri) { 200 } else { 5000 };
        const PRIVATE: &[usize] =
            if cfg!(miri) { &[0, 3] } else { &[0, 1, 2, 4, 7, 8, 11, 16, 24, 31, 32, 63] };
        let fresh: Vec<u8> = (0..ROOM).map(|i| (i * 7 + i / 256) as u8 | 1).collect();
        let mut memory = vec![0_u8; 2 * ROOM];
        let start = memory.as_ptr().align_offset(64);
        let shared = memory[start..].as_mut_ptr();
        for at in (0..64).step_by(if cfg!(miri) { 13 } else { 1 }) {
            for &private in PRIVATE {
                for length in lengths.clone() {
                    let inside = at..at + length;
                    let mut back = vec![0; private + length + 1];
                    // SAFETY: all of it is in the vectors, and ours alone.
                    let seen = unsafe {
                        shared.write_bytes(0, length + 200);
                        let (from, to) = (fresh[private..].as_ptr(), back[private..].as_mut_ptr());
                        copy(shared.add(at), from, to, length);
                        std::slice::from_raw_parts(shared, length + 200)
                    };
                    let expected = &fresh[private..private + length];
                    assert!(seen[inside.clone()] == *expected, "{inside:?} of {private}");
                    assert!(seen[..at].iter().chain(&seen[inside.end..]).all(|&byte| byte == 0));
                    assert!(
                        back[private..private + length] == *expected,
                        "{inside:?} to {private}"
                    );
                    assert_eq!(back[private + length], 0);
                }
            }
        }
    }

    #[test]
    fn bytes_are_copied_in_every_alignment() {
        const LONG: &[usize] =
            if cfg!(miri) { &[] } else { &[511, 512, 513, 1000, 1500, 4095, 4096, 4500] };
        let short = if cfg!(miri) { 40 } else { 420 };
        let step = if cfg!(miri) { 7 } else { 1 };
        let lengths = (0..80.min(short)).step_by(step).chain((80..short).step_by(3));
        in_every_alignment(lengths.chain(LONG.iter().copied()), |shared, private, back, length| {
            // SAFETY: they are in arrays of this length.
            unsafe {
                store(private, shared, length);
                load(shared, back, length);
            }
        });
    }

    fn fills<T: Copy + PartialEq + std::fmt::Debug>(value: T, other: T) {
        const LEN: usize = if cfg!(miri) { 20 } else { 1100 };
        const ROOM: usize = LEN + if cfg!(miri) { 4 } else { 70 };
        const STEP: usize = if cfg!(miri) { 3 } else { 1 };
        let (mut expected, mut shared) = (vec![other; ROOM], vec![other; ROOM]);
        let shared = shared.as_mut_ptr();
        for start in 0..if cfg!(miri) { 3 } else { 64 } {
            for count in (0..LEN).step_by(STEP).filter(|n| *n < 70 || n % 83 < 2) {
                // SAFETY: the elements are in the vector, and ours alone.
                let seen = unsafe {
                    fill(other, shared, ROOM);
                    fill(value, shared.add(start), count);
                    std::slice::from_raw_parts(shared, ROOM)
                };
                expected[start..][..count].fill(value);
                assert!(*seen == expected, "{count} at {start}: {seen:?}");
                expected[start..][..count].fill(other);
            }
        }
    }

    #[test]
    fn fills_are_whole_and_stay_inside() {
        fills(7_u8, 1);
        fills(0x0102_u16, 3);
        fills(0x0102_0304_u32, 5);
        fills(0x0102_0304_0506_0709_u64, 0);
        fills([1_u8, 2, 3, 4], [0; 4]);
        fills([1_u16, 2, 3], [0; 3]);
        const LONG: usize = if cfg!(miri) { 20 } else { 100 };
        fills([9_u8; LONG], [0; LONG]);
    }

    #[test]
    fn a_fill_with_large_elements_needs_little_stack() {
        const LEN: usize = if cfg!(miri) { 300 } else { 1 << 16 };
        let thread = std::thread::Builder::new().stack_size(LEN * 16).spawn(|| {
            let mut shared = vec![[0_u8; LEN]; 2];
            // SAFETY: the elements are in the vector, and ours alone.
            unsafe { fill([7; LEN], shared.as_mut_ptr(), 2) };
            assert!(shared.iter().flatten().all(|byte| *byte == 7));
        });
        thread.unwrap().join().unwrap();
    }

    #[test]
    fn the_unit_follows_the_alignment() {
        assert_eq!((unit::<u8>(), unit::<[u8; 16]>(), unit::<u16>()), (1, 1, 2));
        assert_eq!((unit::<[u32; 3]>(), unit::<u64>(), unit::<u128>()), (4, WORD, WORD));
    }

    /// No reader sees an aligned element of at most a word half-written.
    fn does_not_tear<T: Copy + Ord + std::fmt::Debug + Send + Sync>(
        value: impl Fn(u8) -> T + Sync,
    ) {
        use std::sync::atomic::AtomicBool;
        struct Memory<T>(*mut T);
        // SAFETY: what it points to is accessed by `load`, `store` and `fill` only.
        unsafe impl<T> Sync for Memory<T> {}
        // Lengths for all ways to copy.
        const LENGTHS: &[usize] =
            if cfg!(miri) { &[3, 17] } else { &[1, 3, 7, 14, 33, 70, 140, 1100] };
        const LEN: usize = if cfg!(miri) { 20 } else { 1108 };
        let mut memory = vec![value(0); LEN];
        let shared = Memory(memory.as_mut_ptr());
        let shared = &shared;
        let stop = AtomicBool::new(false);
        let values: Vec<T> = (0..=255).map(&value).collect();
        let places =
            || LENGTHS.iter().flat_map(|&length| (0..3).map(move |start| (start, length))).cycle();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for (n, (start, length)) in (0_usize..).zip(places()) {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let value = values[n % 256];
                    // SAFETY: the elements are in the vector; only these functions access it.
                    unsafe {
                        match n % 3 {
                            0 => fill(value, shared.0.add(start), length),
                            _ => store(vec![value; length].as_ptr(), shared.0.add(start), length),
                        }
                    }
                }
            });
            for (start, length) in places().take(if cfg!(miri) { 6 } else { 12_000 }) {
                let mut seen = vec![values[0]; length];
                // SAFETY: as above.
                unsafe { load(shared.0.add(start), seen.as_mut_ptr(), length) };
                for element in seen {
                    assert!(values.binary_search(&element).is_ok(), "{element:x?}");
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn aligned_elements_do_not_tear() {
        does_not_tear(|n| u16::from(n) * 0x0101);
        does_not_tear(|n| u32::from(n) * 0x0101_0101);
        does_not_tear(|n| u64::from(n) * 0x0101_0101_0101_0101);
    }
}
