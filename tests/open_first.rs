//! `open_first` goes on to the next device that opens. In one test, since devices are registered for the whole process.

use ibverbs_software::{Device, Verb, When};

#[test]
fn devices_that_do_not_open_are_passed_over() {
    let devices = ["first0", "second0"].map(|name| {
        let device = Device::builder().name(name).build().unwrap();
        device.register();
        device
    });
    devices[0].fail(Verb::OpenDevice, libc::EACCES, When::Before, 1);
    assert_eq!(ibverbs::open_first().unwrap().name(), "second0");

    devices[0].fail(Verb::OpenDevice, libc::EACCES, When::Before, 1);
    devices[1].fail(Verb::OpenDevice, libc::EIO, When::Before, 1);
    match ibverbs::open_first() {
        Err(error) => {
            assert_eq!(error.raw_os_error(), Some(libc::EACCES));
            for part in ["no device can be opened", "first0: ", "second0: "] {
                assert!(error.to_string().contains(part), "{error}");
            }
        }
        Ok(context) => assert!(!["first0", "second0"].contains(&context.name()), "the kernel's"),
    }
    assert_eq!(ibverbs::open_first().unwrap().name(), "first0");
}
