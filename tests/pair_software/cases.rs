//! The table of cases, and the machine with the software device, which runs it.

use std::net::{IpAddr, TcpListener};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use ibverbs::{Context, QueuePairType};
use ibverbs_software::Device;

use crate::examples::{self, Managed};
use crate::exchange::Exchange;
use crate::kernel::Kernel;
use crate::memory::{Result, SILENCE};
use crate::multicast::a_group_hears_what_is_sent_to_it;
use crate::perftest::{Test, Transfer};
use crate::perftest_report::lacks_only_the_report;
use crate::ping_pong::PingPong;
use crate::two_machines::report;
use crate::{KERNEL, SECOND, SOFTWARE};

const MIB: usize = 1 << 20;
const FAMILIES: [&str; 3] = ["IPv4", "IPv6", "IPv6, link-local"];

#[derive(Clone, Copy, Debug)]
enum Play {
    PingPong(PingPong),
    Transfer(Transfer),
    Example(&'static str, &'static str),
    Managed(Managed),
}

/// Programs that meet by librdmacm: with both families, and with IPv4 only.
const MANAGED: [&[Managed]; 2] = [
    &[
        theirs("rping", "-s -a @ -C 5 -v", "-c -a @ -C 5 -v"),
        ours("cm", "[@]:7471", "[@]:7471 hello you"),
    ],
    &[
        theirs("ucmatose", "-b @ -c 4", "-s @ -c 4"),
        theirs("udaddy", "-b @ -c 2", "-s @ -c 2"),
        ours("async_cm", "@:7471", "@:7471 hello you"),
    ],
];

const fn theirs(name: &'static str, server: &'static str, client: &'static str) -> Managed {
    Managed { name, server, client, is_ours: false }
}

const fn ours(name: &'static str, server: &'static str, client: &'static str) -> Managed {
    Managed { name, server, client, is_ours: true }
}

struct Case {
    play: Play,
    /// An index of [`FAMILIES`].
    family: usize,
    /// The server is here; the kernel's side is the client.
    serves: bool,
}

/// All cases in both directions.
fn cases(long: bool, loss: u32) -> Vec<Case> {
    use QueuePairType::{
        ReliableConnected as Rc, UnreliableConnected as Uc, UnreliableDatagram as Ud,
    };
    let ping = |kind, shared, size, rounds| Play::PingPong(PingPong { kind, shared, size, rounds });
    let move_ = |test, size, count| Play::Transfer(Transfer { test, size, count });
    let tests = [Test::Send, Test::Write, Test::Read];
    let (mut both, mut one) = (Vec::new(), Vec::new()); // with both families; with IPv4 only
    let mut local = Vec::new(); // with addresses of the link
    if loss == 0 {
        local.extend([ping(Rc, 0, 5001, 20), ping(Ud, 0, 1001, 20)]);
        // The C programs wait for ever for a message that is lost: no loss for UC and UD.
        both.extend([ping(Uc, 0, 5001, 20), ping(Ud, 0, 1001, 20)]);
        // A lost message of the connection manager comes again after four seconds.
        both.extend(MANAGED[0].iter().copied().map(Play::Managed));
        one.extend(MANAGED[1].iter().copied().map(Play::Managed));
        if long {
            // Between devices of software: the step "any-program".
            one.push(Play::Managed(theirs(
                "rstream",
                "-b @ -S 65536 -I 3 -C 20",
                "-s @ -S 65536 -I 3 -C 20",
            )));
        }
    }
    both.extend([ping(Rc, 0, 5001, 20), ping(Rc, 16, 3000, 60)]);
    both.extend(tests.map(|test| move_(test, 5001, 40)));
    both.push(move_(Test::FetchAdd, 8, 100));
    let many_packets = if long { MIB } else { MIB / 8 };
    one.extend([ping(Rc, 0, many_packets, 2), move_(Test::Write, many_packets, 5)]);
    one.extend([
        Play::Example("channel", "-n 20"),
        Play::Example("stream", "-n 2"),
        Play::Example("remote_memory", "-n 10"),
    ]);
    if long {
        both.append(&mut one);
        // With each lost packet, rxe asks for the whole rest of a read again, which takes minutes with many losses.
        let reads = if loss < 5 { 20 } else { 5 };
        both.extend([move_(Test::Send, MIB, 20), move_(Test::Read, MIB, reads)]);
        if loss == 0 {
            both.extend([ping(Uc, 0, MIB, 5), ping(Ud, 0, 1, 500), ping(Ud, 0, 1024, 500)]);
        }
        both.extend([ping(Rc, 0, 1, 500), ping(Rc, 0, 65536, 50)]);
        both.extend([ping(Rc, 1, 3000, 100), ping(Rc, 16, 65536, 100)]);
        both.extend(tests.map(|test| move_(test, 65536, 200)));
        both.push(move_(Test::FetchAdd, 8, 1000));
    } else if loss > 0 {
        // IPv6 differs in nothing that has to do with losses.
        one = both.split_off(0);
    }
    let mut cases = Vec::new();
    for (families, plays) in [(0..2, both), (0..1, one), (2..3, local)] {
        for (number, play) in plays.into_iter().enumerate() {
            for family in families.clone() {
                for serves in [false, true] {
                    // In the short table IPv6 has one of the two directions, in turns; so have the slow programs.
                    let is_slow = matches!(play, Play::Managed(program) if !program.is_ours);
                    let has_both = long || family == 0 && !is_slow;
                    if has_both || serves == (number + family).is_multiple_of(2) {
                        cases.push(Case { play, family, serves });
                    }
                }
            }
        }
    }
    // rxe seems to count every NAK as a retry, until an acknowledgement comes: the six retries of the examples do not
    // last then. (The other programs set seven, which it takes for no limit.)
    cases.retain(|case| loss < 5 || !case.serves || !matches!(case.play, Play::Example(..)));
    cases
}

impl Case {
    fn name(&self) -> String {
        let (name, arguments) = match self.play {
            Play::PingPong(game) => (game.program(), game.arguments()),
            Play::Transfer(transfer) => (transfer.program(), transfer.arguments()),
            Play::Example(name, arguments) => (name, arguments.into()),
            Play::Managed(program) => (program.name, "by librdmacm".into()),
        };
        let direction = if self.serves { "to us" } else { "from us" };
        format!("{name} {arguments}, {}, {direction}", FAMILIES[self.family])
    }

    fn run(
        &self,
        context: &Context<'_>,
        kernel: &mut Kernel,
        gids: [u8; 3],
        port: u16,
    ) -> Result<()> {
        let theirs = gids[self.family];
        // The indexes of our GIDs are those of the addresses.
        let ours = self.family as u8;
        let command = match self.play {
            Play::PingPong(game) => format!("{} -g {theirs} {}", game.program(), game.arguments()),
            Play::Transfer(test) => format!("{} -x {theirs} {}", test.program(), test.arguments()),
            Play::Example(name, arguments) => {
                let arguments = format!("-p {port} {arguments}");
                return examples::run(kernel, name, &arguments, self.family, self.serves);
            }
            Play::Managed(program) => return program.run(kernel, self.family, self.serves),
        };
        let command = format!("{command} -d rxe1 -p {port}");
        let peer = if self.serves {
            let address = SOFTWARE[0];
            let listener = TcpListener::bind((address, port))?;
            kernel.start(&format!("{command} {address}"))?;
            Exchange::accept(&listener)?
        } else {
            kernel.start(&command)?;
            Exchange::connect(port)?
        };
        let finish = || {
            let output = kernel.finish().or_else(|error| match error.to_string() {
                output if lacks_only_the_report(&output) => Ok(output),
                _ => Err(error),
            })?;
            if output.contains("invalid data") { Err(output.into()) } else { Ok(()) }
        };
        match self.play {
            Play::PingPong(game) => game.play(context, ours, peer, finish),
            Play::Transfer(transfer) => transfer.play(context, ours, peer, finish),
            Play::Example(..) | Play::Managed(_) => Ok(()),
        }
    }
}

fn gid(address: IpAddr) -> ibverbs::Gid {
    match address {
        IpAddr::V4(v4) => v4.into(),
        IpAddr::V6(v6) => v6.into(),
    }
}

/// Lets the machine with Soft-RoCE end.
pub(crate) fn end() {
    Kernel::connect().unwrap().say_goodbye().unwrap();
}

/// What programs say of a request that was refused as invalid: perftest, the ping-pongs, and our examples.
///
/// When Soft-RoCE (Linux 6.12) goes back a second time before it has sent anything again, it begins with the packet after the last one
/// that was acknowledged, as if that were the first of its message. What follows has wrong numbers: a message whose first
/// packet had the number 0x4dbc26 came again from 0x4dbc27 on. Going back takes a lost packet, or a host that is busy.
const INVALID_REQUEST: [&str; 3] =
    ["Failed status 9", "remote invalid request error", "IBV_WC_REM_INV_REQ_ERR"];

/// The number of parts of the long table.
pub(crate) const PARTS: u32 = 6;

/// Runs the cases of a table at a loss; of the long table, those of one part.
pub(crate) fn run(table: &str, loss: u32, part: u32) {
    let mut kernel = Kernel::connect().unwrap();
    kernel.lose(loss).unwrap();
    let own = |name: &str| {
        std::fs::read_to_string("/proc/self/status")
            .unwrap()
            .lines()
            .find_map(|line| line.strip_prefix(name).map(|value| value.trim().to_owned()))
    };
    assert_eq!(own("CapEff:").as_deref(), Some("0000000000000000"), "without any capability");
    // SAFETY: a plain system call.
    assert_ne!(unsafe { libc::geteuid() }, 0, "not as root");
    let gids = KERNEL.map(|address| kernel.gid_index(gid(address.parse().unwrap())).unwrap());
    let (mut passed, mut failed) = (0, Vec::new());
    // Only here is an interface with a route for groups.
    if loss == 0 {
        let contexts = [SOFTWARE[1], SECOND].map(|address| {
            let device = Device::builder().address(address.parse().unwrap());
            device.build().unwrap().open().unwrap()
        });
        for group in ["ff02::1:2", "ff0e::1234"] {
            a_group_hears_what_is_sent_to_it(&contexts, 0, group.parse().unwrap());
        }
        println!("ok: multicast groups of IPv6");
    }
    let long = table == "long";
    let mut cases = cases(long, loss);
    if long {
        let mut number = 0..;
        // The parts take cases in turns: neighbours in the table are alike, and take as long.
        cases.retain(|_| number.next().is_some_and(|number: u32| number % PARTS == part));
    }
    for (number, case) in cases.iter().enumerate() {
        let start = Instant::now();
        // These programs make a device of their own, at the same address.
        let device = Device::builder().port(SOFTWARE.map(|address| address.parse().unwrap()));
        let device = match case.play {
            Play::Example(..) | Play::Managed(_) => None,
            _ => Some(device.build().unwrap()),
        };
        let empty = Device::new().unwrap();
        let context = device.as_ref().unwrap_or(&empty).open().unwrap();
        let mut attempts = 0..3;
        let result = loop {
            let port = 20_000 + 1_000 * attempts.next().unwrap_or_default() + number as u16;
            let run = || case.run(&context, &mut kernel, gids, port);
            let result = catch_unwind(AssertUnwindSafe(run));
            let result = result.unwrap_or_else(|_| Err("panicked".into()));
            let Err(error) = result else { break Ok(()) };
            let said = format!("{error} {}", kernel.kill());
            let reason = if INVALID_REQUEST.iter().any(|text| said.contains(text)) {
                "Soft-RoCE has numbered a message anew"
            } else if said.contains(SILENCE) {
                // On a crowded machine, one program stood still, once; 1,100 more runs of it did not show why. The counters
                // say which side has stopped.
                "a program stands still"
            } else {
                break Err(said);
            };
            let counters = device.as_ref().map(Device::counters);
            println!("{reason}: {}: {said} ({counters:?})", case.name());
            if attempts.is_empty() {
                break Err(said);
            }
        };
        let seconds = start.elapsed().as_secs_f64();
        let counters = device.as_ref().map(Device::counters);
        let again = counters.map_or(0, |counters| counters.retransmissions);
        let name = format!("{}, loss {loss} %", case.name());
        match result {
            Ok(()) => {
                println!("ok: {name} ({seconds:.2} s, sent again {again} times)");
                passed += 1;
            }
            Err(error) => {
                println!("FAILED: {name}: {error} ({seconds:.2} s, {counters:?})");
                failed.push(format!("{name}: {error}").replace('\n', "; "));
            }
        }
    }
    let verdict = if failed.is_empty() { "passed" } else { "failed" };
    let count = passed + failed.len();
    let failed = failed.join(" | ");
    report(&format!("{verdict}: {passed} of {count} at a loss of {loss} % {failed}"));
}
