//! The programs of the page "Testing RDMA code without RDMA" (docs/testing.md).

#[cfg(feature = "tokio")]
#[path = "testing_page/hosts.rs"]
mod hosts;
#[path = "testing_page/loss.rs"]
mod loss;
#[path = "testing_page/partition.rs"]
mod partition;
#[path = "testing_page/unit.rs"]
mod unit;

/// The programs that the page shows are compiled and run here.
#[test]
fn the_page_shows_these_programs() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/testing.md");
    let page = std::fs::read_to_string(path).unwrap();
    let blocks: Vec<&str> = page
        .split("```rust\n")
        .skip(1)
        .map(|rest| rest.split_once("```").expect("its end").0)
        .collect();
    let programs = [
        include_str!("testing_page/unit.rs"),
        include_str!("testing_page/loss.rs"),
        include_str!("testing_page/partition.rs"),
        include_str!("testing_page/hosts.rs"),
    ];
    for (i, program) in programs.iter().enumerate() {
        assert!(blocks.contains(program), "program {i} is not on the page as it is here");
    }
    let test = programs[0].split_once("#[test]\n").unwrap().1;
    assert!(test.lines().count() <= 20, "a unit test of {} lines", test.lines().count());
}
