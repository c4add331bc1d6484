//! `rcopy` between two machines with Soft-RoCE, over two rails. One of them goes down in the middle of the copy and comes
//! up again. `script/soak pair` runs it.

#![forbid(unsafe_code)]

use std::path::Path;
use std::process::{Command, Stdio};

/// The commands that both machines run first. The two devices have links of their own on the one wire to the other
/// machine, and neither answers for the other's address. Their random numbers are the same, and so would be the links'
/// own addresses.
const PRELUDE: &str = "set -eu; node=$IBVERBS_VM_NODE; \
    for file in arp_ignore arp_announce; do echo 2 >/proc/sys/net/ipv4/conf/all/$file; done; \
    ip link add link eth0 name rail1 address 52:54:00:79:00:0$node type macvlan mode bridge; ip addr add 10.79.0.$node/24 dev rail1; \
    ip link set rail1 up; rdma link add rxe2 type rxe netdev rail1; cd /tmp; \
    file() { yes 'a line of the file' | head -c 200000000; }; \
    rcopy() { timeout 900 \"$RCOPY\" \"$1\" -d rxe1 -d rxe2 \"${@:2}\"; }; ";

fn example() -> String {
    // The example is beside the folder of this program.
    let program = std::env::current_exe().unwrap();
    let folder = program.parent().and_then(Path::parent).unwrap();
    folder.join("examples/rcopy").to_str().unwrap().to_owned()
}

/// Runs a command in each machine, both of which must succeed. Returns what they printed.
fn pair(first: &str, second: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let prelude = format!("export RCOPY='{}'; {PRELUDE}", example());
    let output = Command::new(root.join("script/vm"))
        .args(["pair", "-t", "1200"])
        .args(["--", &(prelude.clone() + first), "--", &(prelude + second)])
        .current_dir(&root)
        .stdin(Stdio::null())
        .output()
        .expect("script/vm");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    println!("{text}{errors}");
    assert!(output.status.success(), "script/vm pair: {}", output.status);
    text + &errors
}

#[test]
fn a_rail_goes_down_and_up_in_mid_copy() {
    let receiver = "rcopy receive copy 2>log & pid=$!; \
         until [ -s copy.part ] && grep -q 'rail rxe2 is up' log; do kill -0 $pid || { cat log; exit 1; }; sleep 0.1; done; \
         ip link set rail1 down; \
         until grep -q 'rail rxe2 is down' log; do kill -0 $pid || { cat log; exit 1; }; sleep 0.1; done; ip link set rail1 up; \
         wait $pid || { cat log; exit 1; }; cat log; file | cmp - copy; echo 'the copy is the same'";
    let sender = "file >original; rcopy send original $IBVERBS_VM_PEER 2>&1";
    let text = pair(receiver, sender);
    for line in ["rail rxe2 is down", "rail rxe2 is up", "the copy is the same", "rxe2 has carried"]
    {
        assert!(text.contains(line), "{line}");
    }
}
