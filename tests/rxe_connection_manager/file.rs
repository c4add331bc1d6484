//! A `/dev/infiniband/rdma_cm` that is missing, of the wrong kind, or not accessible.

use std::env;
use std::process::Command;

use ibverbs::rdmacm::Listener;

use crate::managed::here;
use crate::vm::{alone, run};

const FILE: &str = "/dev/infiniband/rdma_cm";

#[test]
#[ignore = "a role, which the other test starts"]
fn role() {
    let error = Listener::bind(here(0))
        .err()
        .map(|error| (error.raw_os_error().unwrap_or(0), error.to_string()));
    println!("said: {error:?}");
}

/// The output of a program that finds the file as `prepare` makes it.
fn says(prepare: &str, user: Option<u32>) -> String {
    run(&format!("mv {FILE} {FILE}.away; {prepare}"));
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "file::role", "--nocapture"]);
    if let Some(user) = user {
        use std::os::unix::process::CommandExt as _;
        command.uid(user);
    }
    let output = command.output();
    run(&format!("rm -f {FILE}; mv {FILE}.away {FILE}"));
    let output = output.unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let said = text.lines().find_map(|line| Some(line.split_once("said: ")?.1.to_owned()));
    said.unwrap_or_else(|| panic!("{text}{}", String::from_utf8_lossy(&output.stderr)))
}

#[test]
#[ignore = "Soft-RoCE: the kernel's file is moved away"]
fn the_file_and_its_module_are_named() {
    let _alone = alone("the file", 120);
    let said = says("true", None);
    assert!(said.starts_with(&format!("Some(({}", libc::ENOENT)), "{said}");
    assert!(said.contains("no file /dev/infiniband/rdma_cm"), "{said}");
    assert!(said.contains("modprobe rdma_ucm"), "{said}");
    let said = says(&format!("echo > {FILE}"), None);
    assert!(said.starts_with(&format!("Some(({}", libc::ENXIO)), "{said}");
    assert!(said.contains("modprobe rdma_ucm"), "{said}");
    let said = says(&format!("cp -a {FILE}.away {FILE}; chmod 600 {FILE}"), Some(65534));
    assert!(said.contains("may not open /dev/infiniband/rdma_cm"), "{said}");
    assert_eq!(says(&format!("cp -a {FILE}.away {FILE}"), None), "None", "as it should be");
}
