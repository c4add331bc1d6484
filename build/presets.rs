//! Answers to checks of rdma-core's CMake files, which CMake then skips: each takes a start of the compiler.
//!
//! Left to CMake are the checks whose answer depends on the version of the compiler or of the C library:
//! whether `sys/random.h` and `stdatomic.h` are there, for example.

use std::env;

/// Checks that do not affect the static libraries: whether the compiler knows a warning (the build shows
/// none), what the linker can do (it makes no program and no shared library here), which programs exist for
/// tools and tests, and how to version a shared library (this check fails if the path contains spaces).
const WITHOUT_EFFECT: &[(&str, &str)] = &[
    ("HAVE_C_WARNINGS", "0"),
    ("HAVE_C_WMISSING_PROTOTYPES", "0"),
    ("HAVE_C_WMISSING_DECLARATIONS", "0"),
    ("HAVE_C_WWRITE_STRINGS", "0"),
    ("HAVE_C_WFORMAT_2", "0"),
    ("HAVE_C_WCAST_FUNCTION", "0"),
    ("HAVE_C_WFORMAT_NONLITERAL", "0"),
    ("HAVE_C_WDATE_TIME", "0"),
    ("HAVE_C_WNESTED_EXTERNS", "0"),
    ("HAVE_C_WSTRICT_PROTOTYPES", "0"),
    ("HAVE_C_WOLD_STYLE_DEFINITION", "0"),
    ("HAVE_C_WREDUNDANT_DECLS", "0"),
    ("HAVE_C_WORKING_SHADOW", "0"),
    ("HAVE_C_WORKING_MISSING_FIELD_INITIALIZERS", "1"),
    ("HAVE_C_VARIABLE_SIZE", "1"),
    ("HAVE_NO_VAR_TRACKING_ASSIGNMENTS", "0"),
    ("SUPPORTS_AS_NEEDED", "1"),
    ("SUPPORTS_NO_UNDEFINED", "1"),
    ("CMAKE_HAVE_LIBC_PTHREAD", "1"),
    ("LIBC_HAS_LIBRT", "1"),
    ("_LDSYMVER_SUCCESS", "1"),
    ("CMAKE_DISABLE_FIND_PACKAGE_UDev", "1"),
    ("CMAKE_DISABLE_FIND_PACKAGE_Systemd", "1"),
    ("DRM_INCLUDE_DIRS", "/nonexistent"),
    ("SYSTEMCTL_BIN", "/bin/systemctl"),
];

/// Features that every GCC and Clang, and every C library of a target that Rust's standard library supports, can do.
const EVERYWHERE: &[(&str, &str)] = &[
    ("HAVE_WORKING_WERROR", "1"),
    ("HAVE_NO_SPARSE", "1"),
    ("HAVE_NO_STRICT_ALIASING", "1"),
    ("HAVE_WORKING_STRICT_ALIASING", "1"), // the check looks for a warning, and all of these are off
    ("HAVE_FUNC_ATTRIBUTE_ALWAYS_INLINE", "1"),
    ("HAVE_STATIC_ASSERT", "1"),
    ("HAS_CLOEXEC", "1"),
];

/// Facts of these two processors, also in other trees of rdma-core: types of the kernel's headers, memory
/// barriers in `util/udma_barrier.h`, and that checks for i386 and s390 do not concern them.
const X86_64_AND_AARCH64: &[(&str, &str)] = &[
    ("HAVE_LONG_LONG_U64", "1"),
    ("HAVE_COHERENT_DMA", "1"),
    ("HAVE_TARGET_SSE", "1"),
    ("HAVE_GLIBC_HWCAP_S390_PCI_MIO", "1"),
];

/// Facts where `long` has 64 bits.
const LP64: &[(&str, &str)] =
    &[("HAVE_LARGE_FILES", "1"), ("HAVE_SIZEOF_LONG", "TRUE"), ("SIZEOF_LONG", "8")];

/// The answers for the target, as variables of CMake.
pub(crate) fn presets() -> impl Iterator<Item = (&'static str, &'static str)> {
    let target = |name: &str| env::var(format!("CARGO_CFG_TARGET_{name}")).unwrap_or_default();
    let arch = target("ARCH");
    let known = arch == "x86_64" || arch == "aarch64";
    let lp64 = known && target("POINTER_WIDTH") == "64"; // not x32
    [
        WITHOUT_EFFECT,
        EVERYWHERE,
        if known { X86_64_AND_AARCH64 } else { &[] },
        if lp64 { LP64 } else { &[] },
    ]
    .into_iter()
    .flatten()
    .copied()
}
