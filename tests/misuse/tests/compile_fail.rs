//! Misuse does not compile, and each case fails only for the expected reason.
//!
//! A case is `compile_fail/NAME.rs`, with what the compiler says about it in `NAME.stderr`, and
//! `compile_pass/NAME.rs`, which differs only by the correction. This proves that the compiler rejects the
//! mistake and nothing else. To add one, write both, name it below, and run this test
//! with `TRYBUILD=overwrite`.

use std::collections::BTreeSet;
use std::path::Path;

/// Compiles every right one, by making it a module of this test.
macro_rules! right {
    ($($name:ident)+) => {
        #[allow(dead_code, unreachable_pub, reason = "compiling is the test")]
        #[allow(clippy::undocumented_unsafe_blocks, reason = "nothing of it is ever run")]
        mod compile_pass {
            $(mod $name;)+
        }

        const NAMES: &[&str] = &[$(stringify!($name)),+];
    };
}

right! {
    ack_timeout_on_ud
    activate_on_rc
    address_handle_outlives_domain
    arc_child_that_borrows
    arc_dropped_after_what_it_borrows
    arc_grandchild_that_borrows
    arc_of_a_channel_in_a_thread
    arc_of_what_borrows
    batch_escapes
    batch_on_another_thread
    borrowed_child_in_a_struct
    borrowed_child_in_a_thread
    buffer_instead_of_a_request
    buffer_of_the_closure
    buffer_of_the_set_closure
    channel_dropped_under_its_queue
    channel_on_two_threads
    channel_outlives_context
    channel_outlives_domain
    channel_used_after_reset
    channel_within_its_scope
    close_in_flight
    close_of_what_others_share
    close_under_a_child
    completion_channel_outlives_context
    completion_escapes
    completion_kept
    completions_kept_across_a_poll
    completions_on_another_thread
    connecting_future_outlives_its_stream
    connection_outlives_domain
    context_dropped_after_its_owner
    context_outlives_its_list
    datagram_that_goes_nowhere
    destination_on_a_channel
    destination_on_rc
    device_outlives_its_list
    device_region_outlives_device_memory
    domain_dropped_after_context
    domain_dropped_under_a_channel
    domain_outlives_context
    domain_outlives_its_allocator
    domain_used_after_close
    drop_in_flight
    element_bool
    element_char
    element_reference
    element_with_invalid_values
    element_with_padding
    elements_of_one_request_overlap
    esp_action_outlives_context
    event_read_while_watched
    events_outlive_context
    flow_counters_outlive_context
    flow_outlives_its_action
    flow_outlives_its_counters
    flush_on_a_channel
    flush_without_a_batch
    future_buffer_in_use
    future_buffer_that_borrows
    future_of_a_borrowed_domain
    half_outlives_queue_pair
    handle_escapes
    handle_is_returned
    handle_on_another_thread
    handshake_on_ud
    handshake_twice
    index_into_shared_memory
    indirection_table_outlives_work_queue
    inline_list_in_a_window
    lent_buffer_in_flight
    list_of_another_transport
    local_region_for_a_peer
    move_in_flight
    opened_queue_pair_outlives_domain
    owned_buffer_in_a_scope
    owned_buffer_in_flight
    owned_buffer_that_borrows
    owned_parent_that_is_borrowed
    owned_work_after_its_channel
    owned_work_on_two_threads
    poll_after_wait
    poller_within_its_poll
    post_on_dci
    post_through_an_arc
    post_twice
    prepared_datagram_that_goes_nowhere
    prepared_request_outlives_its_elements
    queue_dropped_under_its_poller
    queue_outlives_context
    queue_pair_dropped_after_queue
    queue_pair_outlives_queue
    queue_pair_outlives_shared_receive_queue
    queue_pair_used_after_close
    queue_pair_used_while_split
    queue_pair_within_its_batch
    read_in_flight
    read_into_read_only_memory
    read_on_uc
    read_the_half_in_flight
    receive_in_a_batch
    receive_into_a_shared_slice
    receive_into_read_only_memory
    receive_into_what_is_borrowed
    receive_into_what_is_read_only
    receive_on_xrc_receive
    receives_in_a_window
    reference_to_shared_memory
    region_as_buffer
    region_dropped_after_domain
    region_outlives_domain
    region_used_after_close
    register_twice
    remote_field_of_another_type
    request_answered_twice
    request_outlives_its_region
    reregister_in_flight
    scaling_queue_pair_outlives_table
    scope_escapes
    scope_on_another_thread
    scoped_window_escapes
    send_what_is_received
    send_within_a_watch
    set_scope_escapes
    shared_receive_queue_outlives_domain
    shared_receives_of_a_borrowed_domain
    shared_region_outlives_domain
    short_reborrow
    slice_outlives_region
    slice_twice
    success_kept
    unregistered_buffer
    used_in_a_window
    vector_freed_while_registered
    vector_read_while_registered
    vector_resized_in_flight
    vector_written_while_read_only
    window_of_owned_buffers
    window_outlives_domain
    window_outlives_its_region
    work_queue_outlives_queue
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
        // The compiler may say several things of one place: each trait that a type lacks, for one.
        let places: BTreeSet<_> = said
            .split("\nerror")
            .map(|error| error.lines().find(|line| line.trim_start().starts_with("--> ")))
            .collect();
        assert_eq!(places.len(), 1, "{name} fails for more than one reason: {places:?}");
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
