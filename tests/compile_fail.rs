//! Misuse does not compile, each for the one reason that is written down beside it.
//!
//! A case is `compile_fail/NAME.rs`, with what the compiler says about it in `NAME.stderr`, and
//! `compile_pass/NAME.rs`, which differs only in that it is right: so it is the mistake that the
//! compiler finds, and not something else. To add one, write both, name it below, and run this test
//! with `TRYBUILD=overwrite`.

use std::collections::BTreeSet;
use std::path::Path;

/// Compiles every right one, by making it a module of this test.
macro_rules! right {
    ($($name:ident)+) => {
        #[allow(dead_code, unreachable_pub, reason = "compiling is the test")]
        mod compile_pass {
            $(mod $name;)+
        }

        const NAMES: &[&str] = &[$(stringify!($name)),+];
    };
}

right! {
    buffer_of_the_closure
    channel_dropped_under_its_queue
    channel_outlives_context
    channel_outlives_domain
    channel_within_its_scope
    completion_escapes
    completion_kept
    domain_dropped_under_a_channel
    drop_in_flight
    handle_escapes
    handle_is_returned
    handle_on_another_thread
    move_in_flight
    poll_after_wait
    post_twice
    queue_dropped_under_its_poller
    read_in_flight
    read_the_half_in_flight
    receive_into_what_is_borrowed
    receive_into_what_is_read_only
    region_as_buffer
    scope_escapes
    scope_on_another_thread
    short_reborrow
    slice_twice
    unregistered_buffer
    write_in_flight
}

/// The names of the files of one kind.
fn names(folder: &str, extension: &str) -> BTreeSet<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(folder);
    let files = folder.read_dir().expect("the folder is there").map(|entry| entry.unwrap().path());
    files
        .filter(|path| path.extension().is_some_and(|other| other == extension))
        .map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned())
        .collect()
}

#[test]
fn every_case_is_complete_and_short() {
    let named: BTreeSet<_> = NAMES.iter().map(|&name| name.to_owned()).collect();
    for (folder, extension) in
        [("compile_fail", "rs"), ("compile_fail", "stderr"), ("compile_pass", "rs")]
    {
        assert_eq!(names(folder, extension), named, "{folder}/*.{extension}");
    }
    for name in NAMES {
        let read = |path: String| {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(path);
            std::fs::read_to_string(path).unwrap()
        };
        let case = read(format!("compile_fail/{name}.rs"));
        assert!(case.lines().count() <= 15, "{name} is too long");
        let said = read(format!("compile_fail/{name}.stderr"));
        let errors = said.lines().filter(|line| line.starts_with("error")).count();
        assert_eq!(errors, 1, "{name} fails for more than one reason");
    }
}

#[test]
fn misuse_does_not_compile() {
    // Nothing is linked: as on docs.rs, the headers of rdma-core are enough. Nothing is fetched.
    // SAFETY: the other test reads no variable.
    unsafe {
        std::env::set_var("DOCS_RS", "1");
        std::env::set_var("CARGO_NET_OFFLINE", "true");
    }
    trybuild::TestCases::new().compile_fail("tests/compile_fail/*.rs");
}
