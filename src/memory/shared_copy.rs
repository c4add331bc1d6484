//! Copies to and from memory that a peer, or another thread, may write or read at the same time.
//!
//! Only atomic operations may access such memory: then the result of reading during a concurrent write
//! is unspecified, but not undefined behaviour. The unit of access is the alignment of the element, up
//! to the machine's word: a `u32` is copied by 4-byte accesses, a `[u8; 16]` byte by byte. Byte-wise
//! atomic copies would be slow, and compilers do not merge atomic accesses. So the bulk is copied in
//! words, in assembly: one access to an aligned word counts as one access to each unit in it, because
//! the hardware accesses all of them at once, which is one of the permitted orders.

use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicUsize, Ordering};

/// The size of one access for elements of `T`, in bytes: a power of 2, up to the word.
const fn unit<T>() -> usize {
    if align_of::<T>() < size_of::<usize>() { align_of::<T>() } else { size_of::<usize>() }
}

const WORD: usize = size_of::<usize>();

/// Shorter copies are not aligned first, as that would cost more than it saves.
const BULK: usize = 2 * WORD;

/// Copies `count` elements out of shared memory.
///
/// # Safety
///
/// `from` is valid for reads of `count` elements, aligned, and accessed only by atomic operations of
/// this size and from outside of the program. `to` is valid for writes of `count` elements, and nothing
/// else accesses it.
pub unsafe fn load<T>(from: *const T, to: *mut T, count: usize) {
    let bytes = count * size_of::<T>();
    let (from, to) = (from.cast::<u8>(), to.cast::<u8>());
    // SAFETY: the three parts make up the whole, which the caller vouches for; `from` is aligned to
    // the unit, and all three lengths are multiples of it.
    unsafe {
        let (head, words) = split(from, bytes);
        load_units::<T>(from, to, head);
        copy_words(from.add(head), to.add(head), words);
        let done = head + words * WORD;
        load_units::<T>(from.add(done), to.add(done), bytes - done);
    }
}

/// Copies `count` elements into shared memory.
///
/// # Safety
///
/// `to` is valid for writes of `count` elements, aligned, and accessed only by atomic operations of
/// this size and from outside of the program. `from` is valid for reads of `count` elements, and
/// nothing writes it.
pub unsafe fn store<T>(from: *const T, to: *mut T, count: usize) {
    let bytes = count * size_of::<T>();
    let (from, to) = (from.cast::<u8>(), to.cast::<u8>());
    // SAFETY: as in `load`, with the roles exchanged.
    unsafe {
        let (head, words) = split(to, bytes);
        store_units::<T>(from, to, head);
        copy_words(from.add(head), to.add(head), words);
        let done = head + words * WORD;
        store_units::<T>(from.add(done), to.add(done), bytes - done);
    }
}

/// The number of bytes before the first aligned word of the shared memory, and the number of words to
/// copy from there on.
fn split(shared: *const u8, bytes: usize) -> (usize, usize) {
    let head = (shared as usize).wrapping_neg() % WORD;
    if HAVE_WORDS && bytes >= BULK { (head, (bytes - head) / WORD) } else { (bytes, 0) }
}

macro_rules! units {
    ($atomic:ident, $integer:ty, $from:ident, $to:ident, $bytes:ident, load) => {
        for at in (0..$bytes).step_by(size_of::<$integer>()) {
            let value = (*$from.add(at).cast::<$atomic>()).load(Ordering::Relaxed);
            $to.add(at).cast::<$integer>().write_unaligned(value);
        }
    };
    ($atomic:ident, $integer:ty, $from:ident, $to:ident, $bytes:ident, store) => {
        for at in (0..$bytes).step_by(size_of::<$integer>()) {
            let value = $from.add(at).cast::<$integer>().read_unaligned();
            (*$to.add(at).cast::<$atomic>()).store(value, Ordering::Relaxed);
        }
    };
}

/// # Safety
///
/// As [`load`]; `bytes` is a multiple of the unit of `T`, to which `from` is aligned.
unsafe fn load_units<T>(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: each access is within what the caller vouches for. The shared side is aligned and
    // accessed by atomic operations of this size; the other side may be unaligned.
    unsafe {
        match unit::<T>() {
            1 => units!(AtomicU8, u8, from, to, bytes, load),
            2 => units!(AtomicU16, u16, from, to, bytes, load),
            4 => units!(AtomicU32, u32, from, to, bytes, load),
            _ => units!(AtomicUsize, usize, from, to, bytes, load),
        }
    }
}

/// # Safety
///
/// As [`store`]; `bytes` is a multiple of the unit of `T`, to which `to` is aligned.
unsafe fn store_units<T>(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: as in `load_units`.
    unsafe {
        match unit::<T>() {
            1 => units!(AtomicU8, u8, from, to, bytes, store),
            2 => units!(AtomicU16, u16, from, to, bytes, store),
            4 => units!(AtomicU32, u32, from, to, bytes, store),
            _ => units!(AtomicUsize, usize, from, to, bytes, store),
        }
    }
}

/// Whether [`copy_words`] is implemented for this target.
const HAVE_WORDS: bool = cfg!(all(
    any(target_arch = "x86_64", target_arch = "aarch64"),
    target_pointer_width = "64",
    not(miri)
));

/// From this many words on, the processor's own loop is faster: 50 GiB/s where the loop of four words has 32.
#[cfg(all(target_arch = "x86_64", target_pointer_width = "64", not(miri)))]
const LONG: usize = 128;

/// Copies aligned words from or to shared memory, each by one access to it.
///
/// # Safety
///
/// As [`load`] or [`store`]; the shared side is aligned to the word.
#[cfg(all(target_arch = "x86_64", target_pointer_width = "64", not(miri)))]
unsafe fn copy_words(from: *const u8, to: *mut u8, words: usize) {
    if words == 0 {
        return;
    }
    if words >= LONG {
        // SAFETY: as below; the flag of the direction is clear, as everywhere in Rust.
        unsafe {
            std::arch::asm!(
                "rep movsq",
                inout("rsi") from => _,
                inout("rdi") to => _,
                inout("rcx") words => _,
                options(nostack, preserves_flags),
            );
        }
        return;
    }
    // Four words at a time, then the rest one by one.
    // SAFETY: it reads and writes that many words, which the caller vouches for. It changes no
    // registers except its operands and the flags, and does not use the stack.
    unsafe {
        std::arch::asm!(
            "cmp {left}, 4",
            "jb 3f",
            "2:",
            "mov {a}, qword ptr [{from}]",
            "mov {b}, qword ptr [{from} + 8]",
            "mov {c}, qword ptr [{from} + 16]",
            "mov {d}, qword ptr [{from} + 24]",
            "mov qword ptr [{to}], {a}",
            "mov qword ptr [{to} + 8], {b}",
            "mov qword ptr [{to} + 16], {c}",
            "mov qword ptr [{to} + 24], {d}",
            "add {from}, 32",
            "add {to}, 32",
            "sub {left}, 4",
            "cmp {left}, 4",
            "jae 2b",
            "3:",
            "test {left}, {left}",
            "jz 5f",
            "4:",
            "mov {a}, qword ptr [{from}]",
            "mov qword ptr [{to}], {a}",
            "add {from}, 8",
            "add {to}, 8",
            "dec {left}",
            "jnz 4b",
            "5:",
            from = inout(reg) from => _,
            to = inout(reg) to => _,
            left = inout(reg) words => _,
            a = out(reg) _,
            b = out(reg) _,
            c = out(reg) _,
            d = out(reg) _,
            options(nostack),
        );
    }
}

/// Copies aligned words from or to shared memory, each by one access to it.
///
/// # Safety
///
/// As [`load`] or [`store`]; the shared side is aligned to the word.
#[cfg(all(target_arch = "aarch64", target_pointer_width = "64", not(miri)))]
unsafe fn copy_words(from: *const u8, to: *mut u8, words: usize) {
    if words == 0 {
        return;
    }
    // SAFETY: it reads and writes that many words, which the caller vouches for; the side that is not
    // shared may be unaligned, which this machine allows for normal memory. It changes no registers
    // except its operands and the flags, and does not use the stack.
    unsafe {
        std::arch::asm!(
            "2:",
            "ldr {word}, [{from}], #8",
            "str {word}, [{to}], #8",
            "subs {words}, {words}, #1",
            "b.ne 2b",
            from = inout(reg) from => _,
            to = inout(reg) to => _,
            words = inout(reg) words => _,
            word = out(reg) _,
            options(nostack),
        );
    }
}

/// Never called with words to copy, see [`HAVE_WORDS`].
///
/// # Safety
///
/// `words` is 0.
#[cfg(not(all(
    any(target_arch = "x86_64", target_arch = "aarch64"),
    target_pointer_width = "64",
    not(miri)
)))]
unsafe fn copy_words(_from: *const u8, _to: *mut u8, words: usize) {
    debug_assert_eq!(words, 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Copies between memory like that of regions, whose elements nothing holds a reference to, and
    /// checks the result.
    fn check<T: Copy + PartialEq + std::fmt::Debug>(value: impl Fn(usize) -> T) {
        // Miri takes a hundred times as long, and a few words and their edges suffice for it.
        const LEN: usize = if cfg!(miri) { 14 } else { 70 };
        let mut shared = [value(0); LEN];
        let shared = shared.as_mut_ptr();
        for start in 0..10 {
            for count in 0..LEN - start {
                let fresh: Vec<T> = (0..count).map(|i| value(start + count + i)).collect();
                let mut back = vec![value(0); count + 2];
                // SAFETY: `start + count` elements are in the array, and `back` is longer; both are
                // ours alone.
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

    #[test]
    fn the_unit_follows_the_alignment() {
        assert_eq!((unit::<u8>(), unit::<[u8; 16]>(), unit::<u16>()), (1, 1, 2));
        assert_eq!((unit::<[u32; 3]>(), unit::<u64>(), unit::<u128>()), (4, WORD, WORD));
    }

    /// No reader sees an aligned element of at most a word half-written.
    #[test]
    fn aligned_elements_do_not_tear() {
        use std::sync::atomic::AtomicBool;
        struct Shared(*mut u64);
        // SAFETY: what it points to is accessed by `load` and `store` only.
        unsafe impl Sync for Shared {}
        // For both loops of `copy_words`.
        const LEN: usize = if cfg!(miri) { 33 } else { 140 };
        let mut memory = [0_u64; LEN];
        let shared = Shared(memory.as_mut_ptr());
        let shared = &shared;
        let stop = AtomicBool::new(false);
        let lengths = || [33, LEN].into_iter().cycle();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for (n, length) in (1_u64..).zip(lengths()) {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let value = [n << 32 | n; LEN];
                    // SAFETY: both are `LEN` elements; all accesses to the other side are made by
                    // `load` and `store`.
                    unsafe { store(value.as_ptr(), shared.0, length) };
                }
            });
            for length in lengths().take(if cfg!(miri) { 5 } else { 20_000 }) {
                let mut seen = [0; LEN];
                // SAFETY: as above.
                unsafe { load(shared.0, seen.as_mut_ptr(), length) };
                for value in seen {
                    assert_eq!(value >> 32, value & 0xffff_ffff, "{value:#x}");
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}
