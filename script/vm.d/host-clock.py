#!/usr/bin/env python3
"""Prints the rate of the time stamp counter of this machine's processors, in kHz.

QEMU without KVM shows the guest this counter. No starvation spoils the number: each end is the shortest of many readings
of the counter between two of the clock.
"""
import ctypes
import mmap
import time

page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex("0f31 48c1e220 4809d0 c3"))  # rdtsc; shl rdx, 32; or rax, rdx; ret
counter = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(ctypes.c_char.from_buffer(page)))


def reading():
    """The clock in ns, and the counter at that time."""
    best = None
    for _ in range(1000):
        before = time.monotonic_ns()
        ticks = counter()
        after = time.monotonic_ns()
        if best is None or after - before < best[0]:
            best = after - before, (before + after) // 2, ticks
    return best[1:]


start, first = reading()
time.sleep(0.2)
end, second = reading()
print((second - first) * 1_000_000 // (end - start))
