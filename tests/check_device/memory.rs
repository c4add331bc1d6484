//! Every kind of memory region.

use ibverbs::memory::{HugePages, MemoryWindowType};
use ibverbs::{AccessFlags, ErrorKind, RegionOptions};

use crate::device::{open, supported};
use crate::transport::nothing_is_left;

#[test]
fn is_registered_with_every_option() {
    {
        let context = open();
        let domain = context.alloc_pd().unwrap();
        let access = AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
        let options = RegionOptions::new().access(access);
        for (what, options) in [
            ("remote access", options),
            ("an alignment", options.alignment(1 << 16)),
            ("whole pages", options.page_aligned()),
            ("relaxed ordering", options.access(AccessFlags::RELAXED_ORDERING)),
            ("transparent huge pages", options.huge_pages(HugePages::Transparent)),
            ("zero-based", options.iova(0)),
            ("an IOVA", options.iova(0x1234_5000)),
            ("remote atomics", options.access(access | AccessFlags::REMOTE_ATOMIC)),
            ("memory windows", options.access(AccessFlags::MW_BIND)),
        ] {
            let region = domain.allocate_shared::<u8>(3 << 20, options);
            // Devices have no errno of their own for what they lack.
            match region {
                Err(error) if error.kind() == ErrorKind::InvalidInput => {
                    crate::unsupported(&format!("{what}: {error}"));
                }
                region => {
                    let Some(region) = supported(what, region) else { continue };
                    region.write(0, b"bytes").unwrap();
                    assert_eq!(region.slice(..6).unwrap().to_vec(), b"bytes\0");
                    assert_eq!(region.remote().length(), 3 << 20);
                }
            }
        }
        let read_only = domain.register_read_only(b"anything").unwrap();
        assert_eq!(read_only.len(), 8);
        drop(read_only);
        for kind in [MemoryWindowType::Type1, MemoryWindowType::Type2] {
            supported(&format!("memory windows of {kind:?}"), domain.alloc_mw(kind));
        }
    }
    nothing_is_left();
}

#[test]
fn beyond_the_limit_is_refused() {
    let context = open();
    let domain = context.alloc_pd().unwrap();
    let longest = context.query_device().unwrap().max_mr_size();
    // Memory of this size is more than anybody has, and more than the device takes.
    let error = domain.allocate::<u8>(usize::MAX / 4).map(drop).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Resource | ErrorKind::InvalidInput), "{error}");
    if longest < 1 << 30 {
        let error = domain.allocate::<u8>(longest as usize + 1).map(drop).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Resource | ErrorKind::InvalidInput), "{error}");
    }
}
