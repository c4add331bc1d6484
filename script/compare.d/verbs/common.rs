//! The programs of `script/compare verbs` share this: it reads what they are asked for, and the process's heap.

/// send, pair or keep; and how many.
pub fn arguments() -> (String, usize) {
    let mut args = std::env::args().skip(1);
    let (what, count) = (args.next().expect("send|pair|keep"), args.next().expect("a number"));
    (what, count.parse().expect("a number"))
}

#[repr(C)]
struct Mallinfo2 {
    arena: usize,
    ordblks: usize,
    smblks: usize,
    hblks: usize,
    hblkhd: usize,
    usmblks: usize,
    fsmblks: usize,
    uordblks: usize,
    fordblks: usize,
    keepcost: usize,
}

unsafe extern "C" {
    safe fn mallinfo2() -> Mallinfo2;
}

/// Prints how many bytes of the heap are in use.
pub fn print_heap() {
    let info = mallinfo2();
    println!("heap {}", info.uordblks + info.hblkhd);
}
