//! Connecting over TCP between two machines: both are ready, and each notices the other's end, also when
//! the other machine loses its power. `script/soak pair` runs it.
//!
//! Machine 1 accepts, machine 2 connects.

#[path = "support/two_machines.rs"]
mod two_machines;

use std::net::TcpListener;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use ibverbs::tcp::ExchangeError;
use ibverbs::{Channel, PreparedChannel, ProtectionDomain, settings::AckTimeout};
use two_machines::{PATIENCE, assert_nothing_left, pair, pattern, report, role};

const PORT: u16 = 18515;
/// Messages each way, and the numbers in each: 8 KiB.
const MESSAGES: u64 = 20;
const LENGTH: usize = 1024;
/// Printed when all messages have arrived.
const CONNECTED: &str = "all messages have arrived";

fn main() -> ExitCode {
    let tests: &[(&str, fn())] =
        &[("both_are_ready", both_are_ready), ("a_machine_without_power", without_power)];
    two_machines::main(tests, |role, arguments| {
        {
            let context = ibverbs::open("rxe1").unwrap();
            let domain = context.alloc_pd().unwrap();
            match role {
                "accept" => accept(&domain, arguments == ["stays"]),
                "connect" => connect(&domain, arguments == ["waits"]),
                role => panic!("{role} is not a role"),
            }
        }
        assert_nothing_left("rxe1");
    })
}

fn both_are_ready() {
    let reports = pair(&[], &role("accept"), &role("connect"));
    assert_eq!(reports.len(), 2, "{reports:?}");
}

/// Nothing is sent any more: only the TCP stream shows that the peer is gone.
fn without_power() {
    let options = ["--kill", "1", "--when", CONNECTED];
    let reports = pair(&options, &role("accept stays"), &role("connect waits"));
    assert_eq!(reports.len(), 1, "{reports:?}");
}

fn prepare<'pd>(domain: &'pd ProtectionDomain<'pd>) -> PreparedChannel<'pd> {
    // A machine that gets no processor for some seconds is not gone.
    Channel::builder(domain).ack_timeout(AckTimeout::new(20).unwrap()).build().unwrap()
}

fn numbers(message: u64) -> impl Iterator<Item = u64> {
    (0..LENGTH).map(move |index| pattern(message, index))
}

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

fn accept<'pd>(domain: &'pd ProtectionDomain<'pd>, stays: bool) {
    let listener = TcpListener::bind(("0.0.0.0", PORT)).unwrap();
    let (mut channel, told) = prepare(domain).accept(&listener, b"from 1", soon()).unwrap();
    assert_eq!(told, b"from 2");
    let mut region = domain.allocate::<u64>(LENGTH).unwrap();
    for message in 0..MESSAGES {
        channel.until(soon()).receive(region.slice_mut(..).unwrap()).unwrap();
        assert!(region.iter().copied().eq(numbers(message)), "message {message}");
        region.iter_mut().for_each(|number| *number = !*number);
        channel.until(soon()).send(region.slice(..).unwrap()).unwrap();
    }
    if stays {
        std::thread::sleep(2 * PATIENCE);
        panic!("nobody has cut the power");
    }
    assert!(channel.wait_until_peer_is_gone(soon()).unwrap());
    report("the peer has closed");
}

fn connect<'pd>(domain: &'pd ProtectionDomain<'pd>, waits: bool) {
    let address = format!("{}:{PORT}", std::env::var("IBVERBS_VM_PEER").unwrap());
    let start = Instant::now();
    let mut prepared = prepare(domain);
    let (mut channel, told) = loop {
        match prepared.connect(&address[..], b"from 2", soon()) {
            Ok(connected) => break connected,
            // The other machine does not listen yet.
            Err(failed) => {
                assert!(
                    matches!(failed.error, ExchangeError::NoConnection { .. }),
                    "{}",
                    failed.error
                );
                assert!(start.elapsed() < PATIENCE, "{}", failed.error);
                prepared = failed.object;
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    };
    assert_eq!(told, b"from 1");
    let mut region = domain.allocate::<u64>(LENGTH).unwrap();
    for message in 0..MESSAGES {
        region.iter_mut().zip(numbers(message)).for_each(|(to, from)| *to = from);
        channel.until(soon()).send(region.slice(..).unwrap()).unwrap();
        channel.until(soon()).receive(region.slice_mut(..).unwrap()).unwrap();
        let answer = numbers(message).map(|number| !number);
        assert!(region.iter().copied().eq(answer), "the answer to message {message}");
    }
    println!("{CONNECTED}");
    if !waits {
        drop(channel);
        report("closed");
        return;
    }
    assert!(channel.wait_until_peer_is_gone(soon()).unwrap());
    report(&format!("the peer is gone after {:.0} s", start.elapsed().as_secs_f64()));
}
