//! A machine whose RDMA devices are gone. To be run by `script/test rxe`, in a separate machine of
//! `script/vm`, because it removes the devices.

#[path = "support/vm/mod.rs"]
mod vm;

use ibverbs::ErrorKind;

#[test]
fn there_is_no_device() {
    let before = ibverbs::devices().unwrap();
    assert_eq!(before.len(), 2);
    vm::run("rdma link delete rxe0; rdma link delete rxe1");

    let list = ibverbs::devices().unwrap();
    assert!(list.is_empty() && list.iter().next().is_none() && list.get(0).is_none(), "{list:?}");
    let error = ibverbs::open("rxe0").unwrap_err();
    assert_eq!((error.kind(), error.raw_os_error()), (ErrorKind::NotFound, Some(libc::ENODEV)));
    assert!(error.to_string().contains("there is no RDMA device"), "{error}");

    // Devices of an earlier list still have their names, but do not open.
    for device in &before {
        assert!(device.name().starts_with("rxe"));
        let error = device.open().unwrap_err();
        assert_eq!(
            (error.kind(), error.verb()),
            (ErrorKind::NotFound, "ibv_open_device"),
            "{error}"
        );
    }
}
