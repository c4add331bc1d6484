"""Succeeds if the build will find a libclang that works: loads it, and lets it read a header of its own.

It looks where bindgen looks (the rules are those of the crate clang-sys), and passes over the same
names: libclang-cpp is another library.
"""

import ctypes
import glob
import os
import re
import subprocess
import sys
import tempfile

NAMES = ["libclang.so", "libclang-*.so", "libclang.so.*", "libclang-*.so.*"]
FOLDERS = ["/usr/local/llvm*/lib*", "/usr/local/lib*/*/*", "/usr/local/lib*/*", "/usr/local/lib*"]
FOLDERS += ["/usr/lib*/*/*", "/usr/lib*/*", "/usr/lib*"]


def libraries_in(folder):
    found = (path for name in NAMES for path in sorted(glob.glob(os.path.join(glob.escape(folder), name))))
    return [path for path in found if "-cpp." not in os.path.basename(path) and is_for_us(path)]


def is_for_us(path):
    try:
        with open(path, "rb") as file:
            return file.read(5) == b"\x7fELF" + (b"\x02" if sys.maxsize > 2**32 else b"\x01")
    except OSError:
        return False


def version(path):
    name = os.path.basename(path)
    text = name[12:] if name.startswith("libclang.so.") else name[9:-3] if name.startswith("libclang-") else ""
    return [int(part) if re.fullmatch("[0-9]+", part) else 0 for part in text.split(".")] if text else []


def candidates():
    wanted = os.environ.get("LIBCLANG_PATH")
    if wanted is not None:
        beside = libraries_in(os.path.dirname(wanted) or ".")
        return [wanted] if wanted in beside else libraries_in(wanted)
    folders = []
    try:
        config = [os.environ.get("LLVM_CONFIG_PATH", "llvm-config"), "--prefix"]
        prefix = subprocess.run(config, capture_output=True, text=True, check=True).stdout.split("\n")[0]
        folders += [os.path.join(prefix, name) for name in ("bin", "lib", "lib64")]
    except (OSError, subprocess.CalledProcessError):
        pass  # it need not be there
    for variable in ("LD_LIBRARY_PATH", "LIBRARY_PATH"):
        folders += os.environ.get(variable, "").split(":")
    for pattern in FOLDERS:
        folders += sorted(glob.glob(pattern))
    return [path for folder in folders if os.path.isdir(folder) for path in libraries_in(folder)]


def parses(path):
    """Whether the library reads a header that clang itself has to bring: Debian packs those apart."""
    clang = ctypes.CDLL(path)
    clang.clang_createIndex.restype = ctypes.c_void_p
    clang.clang_parseTranslationUnit.restype = ctypes.c_void_p
    clang.clang_parseTranslationUnit.argtypes = [
        ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint,
    ]
    clang.clang_getNumDiagnostics.argtypes = [ctypes.c_void_p]
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "test.c")
        with open(source, "w", encoding="ascii") as file:
            file.write("#include <stddef.h>\nsize_t some;\n")
        unit = clang.clang_parseTranslationUnit(
            clang.clang_createIndex(0, 0), source.encode(), None, 0, None, 0, 0
        )
        return unit and clang.clang_getNumDiagnostics(unit) == 0


found = candidates()
# Of several, bindgen takes the one with the highest number, and of those the first.
best = max(found, key=version, default=None)
try:
    good = best is not None and parses(best)
except (AttributeError, OSError) as error:
    print(f"{best}: {error}")
    good = False
print(best)
sys.exit(0 if good else 1)
