//! A kernel whose interface this release does not know: libibverbs looks at files that this test has written.

use std::process::Command;
use std::{env, fs};

#[test]
fn an_unknown_version_is_one_error_at_each_call_and_nothing_is_printed() {
    if env::var_os("SYSFS_PATH").is_some() {
        for _ in 0..3 {
            let errors = [
                ibverbs::devices().unwrap_err(),
                ibverbs::open("mlx5_9").unwrap_err(),
                ibverbs::open_first().unwrap_err(),
            ];
            for error in errors {
                assert_eq!(error.kind(), ibverbs::ErrorKind::Unsupported);
                let text = "abi_version) is 99, and must be within 3..=6";
                assert!(error.to_string().contains(text), "{error}");
            }
        }
        // A device of this process needs no kernel.
        let device = ibverbs_software::Device::builder().build().unwrap();
        device.register();
        assert_eq!(ibverbs::devices().unwrap().len(), 1);
        return;
    }
    let folder = env::temp_dir().join(format!("ibverbs-abi-{}", std::process::id()));
    let class = folder.join("class");
    fs::create_dir_all(class.join("infiniband/mlx5_9")).unwrap();
    fs::create_dir_all(class.join("infiniband_verbs/uverbs9")).unwrap();
    fs::write(class.join("infiniband_verbs/abi_version"), "99\n").unwrap();
    fs::write(class.join("infiniband_verbs/uverbs9/ibdev"), "mlx5_9\n").unwrap();
    fs::write(class.join("infiniband_verbs/uverbs9/dev"), "231:201\n").unwrap();
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", "an_unknown_version_is_one_error_at_each_call_and_nothing_is_printed"])
        .arg("--nocapture")
        .env("SYSFS_PATH", &folder)
        .output()
        .unwrap();
    fs::remove_dir_all(folder).unwrap();
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}");
    assert_eq!(printed, "");
}
