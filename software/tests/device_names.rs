//! The errors of opening a device that is not there. One test, since the list of devices is the process's.

use ibverbs_software::{Device, register_if_none};

#[track_caller]
fn says<T>(opened: ibverbs::Result<T>, words: &[&str]) {
    let error = opened.err().expect("it is not there");
    assert!([Some(libc::ENODEV), Some(libc::ENOSYS)].contains(&error.raw_os_error()), "{error}");
    let said = error.to_string();
    words.iter().for_each(|word| assert!(said.contains(word), "{word:?} is not in: {said}"));
}

#[test]
fn the_error_names_the_device_and_those_that_there_are() {
    if ibverbs::devices().is_ok_and(|devices| !devices.is_empty()) {
        // A machine with an adapter: the lists below would have it too.
        says(ibverbs::open("nobody"), &["\"nobody\"", "there are: "]);
        return;
    }
    let kept = &["ibverbs-software", "dropping the guard of `register_if_none` takes it away"];
    says(ibverbs::open_first(), kept);
    says(ibverbs::open("mlx5_0"), kept);
    // The mistake.
    let _ = register_if_none().unwrap();
    says(ibverbs::open_first(), kept);
    // A guard that is kept is right.
    let software = register_if_none().unwrap();
    assert_eq!(software.len(), 1);
    drop(ibverbs::open_first().unwrap());
    let second = Device::builder().name("second").build().unwrap();
    second.register();
    says(ibverbs::open("thrid"), &["\"thrid\"", "there are: ", &software[0].name(), "second"]);
    // However long what was called is.
    says(ibverbs::open(&"x".repeat(5000)), &["there are: "]);
    // The last guard takes the device away, as each test of a program has its own.
    let shared = register_if_none().unwrap();
    assert_eq!(shared[0].name(), software[0].name());
    drop((software, second));
    drop(ibverbs::open_first().unwrap());
    drop(shared);
    says(ibverbs::open_first(), kept);
    std::thread::scope(|threads| {
        for _ in 0..8 {
            threads.spawn(|| {
                for _ in 0..20 {
                    let guard = register_if_none().unwrap();
                    drop(ibverbs::open_first().unwrap());
                    drop(guard);
                }
            });
        }
    });
    says(ibverbs::open_first(), kept);
}
