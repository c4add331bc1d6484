"""extract-vmlinux.py BZIMAGE OUT: unpacks the kernel, so that QEMU can boot it directly (PVH)."""

import subprocess
import sys

# The compressions of a bzImage: the magic at the start of the stream, and the program that unpacks it.
FORMATS = (
    (b"\x28\xb5\x2f\xfd", ["zstd", "-dcq"]),
    (b"\xfd7zXZ\0", ["xz", "-dcq"]),
    (b"\x1f\x8b\x08", ["gzip", "-dcq"]),
)


def main(image, out):
    with open(image, "rb") as f:
        data = f.read()
    for magic, command in FORMATS:
        # The real-mode stub may contain the magic by chance: try every occurrence.
        at = data.find(magic, 512)
        while at >= 0:
            done = subprocess.run(
                command, input=data[at:], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            if done.stdout[:4] == b"\x7fELF":
                with open(out, "wb") as f:
                    f.write(done.stdout)
                return
            at = data.find(magic, at + 4)
    sys.exit(f"vm: no kernel found in {image} (are zstd, xz and gzip installed?)")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
