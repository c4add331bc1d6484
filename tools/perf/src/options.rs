//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use lexopt::prelude::*;

use crate::plan::{ATOMIC_SIZE, Layer, Length, MAX_SIZE, Measure, Operation, Plan, Transport};

pub(crate) const USAGE: &str = "\
Measures latency and bandwidth between two processes.

Usage:
  ibverbs-perf [OPTIONS]        be the server: wait for a client, and do as it says
  ibverbs-perf [OPTIONS] HOST   be the client: measure with the server at HOST, and say what came out

Options of both:
  -d, --ib-dev=DEV        the RDMA device [the first]
  -i, --ib-port=PORT      its port [1]
  -g, --gid-idx=INDEX     the index of our own GID [that which peers can reach]
  -p, --port=PORT         the TCP port by which both meet [18515]
  -h, --help              print this

What to measure (the client says it, and tells the server):
  -o, --operation=NAME    send, write, read, fetch-add or compare-swap [send]
  -M, --measure=NAME      latency or bandwidth [latency]
  -c, --connection=TYPE   RC: all operations; UC: send and write; UD: send, up to the MTU [RC]
      --layer=NAME        verbs: work requests that are prepared once and posted as lists; or
                          channel: safe code, RC, one queue pair [verbs]
  -s, --sizes=LIST        bytes of a message, such as 2,64,4k,1M (1 B to 4 MiB) [64 for latency,
                          64k for bandwidth; atomics have 8]
  -a, --all               all powers of two from 2 B to 4 MiB (of UD, to the MTU of 1024 bytes)
  -n, --iters=COUNT       iterations for each size, on each queue pair [1000]
  -D, --duration=SECONDS  measure each size for so long instead; 0.5 will do
  -w, --warm-up=COUNT     iterations that come first and do not count [100]

How to go about it:
  -q, --qp=COUNT          queue pairs (bandwidth) [1]
  -t, --tx-depth=COUNT    requests in the send queue of each [128; 1 for latency]
  -r, --rx-depth=COUNT    receives in the receive queue of each [512]
  -l, --post-list=COUNT   requests that are posted with one call (bandwidth) [1]
  -Q, --cq-mod=COUNT      of so many requests one has a completion (bandwidth) [100, or fewer with a
                          short queue; the list's length with lists; 1 if a size is above 8 KiB]
  -I, --inline=BYTES      up to this size data is copied into the request [0]
  -m, --mtu=BYTES         the path's MTU, 256 to 4096 [the smaller one of the two ports']
      --outs=COUNT        reads and atomics that a queue pair may have outstanding [16]
  -e, --events            sleep until something completes [poll]

What to say:
      --json              what was asked and what came out, as JSON on standard output
      --plot=FILE.svg     also draw percentiles of latency, or bandwidth, by size

Latency, in us:
  send, write   half of a round trip: the message there, and one of the same size back. A send has
                arrived when its receive has completed, a write when its last byte is seen in memory.
  read, atomics the whole operation, from posting it to its completion.
Each iteration counts; percentiles are exact to 0.1 %. One operation is outstanding at a time.

Bandwidth, from posting the first request to the last completion, as the client sees it:
  MiB/s         2^20 bytes per second, of messages alone.
  Mpps          millions of messages per second.
  lost          of sends on UC and UD: messages that did not arrive.

In the end: the queue pairs, regions and pinned bytes of the client, and what its port counted in the
meantime, such as retransmissions; of all programs that use the port. JSON has all counters.

As many requests are outstanding as the send queue takes. All definitions are those of perftest
(ib_send_lat, ib_write_bw ..).";

/// Options of one side only.
#[derive(Debug, Default)]
pub(crate) struct Side {
    /// The host of the server; `None`: this process is the server.
    pub(crate) host: Option<String>,
    pub(crate) tcp_port: u16,
    pub(crate) device: Option<String>,
    pub(crate) port: u8,
    pub(crate) gid_index: Option<u8>,
    pub(crate) json: bool,
    pub(crate) plot: Option<PathBuf>,
}

#[derive(Debug)]
pub(crate) enum Command {
    Help,
    Serve(Side),
    Measure(Side, Plan),
}

/// The plan's settings on the command line; the defaults of others depend on them.
#[derive(Debug, Default)]
struct Wishes {
    operation: Option<Operation>,
    measure: Option<Measure>,
    transport: Option<Transport>,
    layer: Option<Layer>,
    sizes: Option<Vec<u32>>,
    all: bool,
    length: Option<Length>,
    warm_up: Option<u64>,
    queue_pairs: Option<u32>,
    send_depth: Option<u32>,
    receive_depth: Option<u32>,
    list: Option<u32>,
    moderation: Option<u32>,
    inline: Option<u32>,
    mtu: Option<u32>,
    outstanding: Option<u8>,
    events: bool,
}

/// Parses the command line. The error is a message for the user.
pub(crate) fn read(mut arguments: lexopt::Parser) -> Result<Command, lexopt::Error> {
    let mut side = Side { tcp_port: 18515, port: 1, ..Side::default() };
    let mut wishes = Wishes::default();
    // The first option that is valid only for a client.
    let mut of_client = None;
    while let Some(argument) = arguments.next()? {
        let name = match argument {
            Short(letter) => format!("-{letter}"),
            Long(name) => format!("--{name}"),
            Value(host) if side.host.is_none() => {
                side.host = Some(host.string()?);
                continue;
            }
            Value(_) => return Err(argument.unexpected()),
        };
        let mut a = Values(&mut arguments);
        match name.as_str() {
            "-d" | "--ib-dev" => side.device = Some(a.text()?),
            "-i" | "--ib-port" => side.port = a.number("a port")?,
            "-g" | "--gid-idx" => side.gid_index = Some(a.number("an index")?),
            "-p" | "--port" => side.tcp_port = a.number("a TCP port")?,
            "-h" | "--help" => return Ok(Command::Help),
            _ => {
                if !wish(&mut wishes, &mut side, &name, &mut a)? {
                    return Err(format!("there is no option {name}").into());
                }
                of_client.get_or_insert(name);
            }
        }
    }
    match (side.host.is_some(), of_client) {
        (true, _) => Ok(Command::Measure(side, wishes.plan()?)),
        (false, None) => Ok(Command::Serve(side)),
        (false, Some(name)) => {
            Err(format!("{name} is for the client, which tells the server; no host is given")
                .into())
        }
    }
}

/// Parses an option of a client; returns whether it is one.
fn wish(
    wishes: &mut Wishes,
    side: &mut Side,
    name: &str,
    a: &mut Values<'_>,
) -> Result<bool, lexopt::Error> {
    match name {
        "-o" | "--operation" => {
            wishes.operation = Some(a.one_of(Operation::NAMES, Operation::named)?);
        }
        "-M" | "--measure" => {
            wishes.measure = Some(a.one_of(Measure::NAMES, Measure::named)?);
        }
        "-c" | "--connection" => {
            wishes.transport = Some(a.one_of(Transport::NAMES, Transport::named)?);
        }
        "--layer" => wishes.layer = Some(a.one_of(Layer::NAMES, Layer::named)?),
        "-s" | "--sizes" => wishes.sizes = Some(sizes(&a.text()?)?),
        "-a" | "--all" => wishes.all = true,
        "-n" | "--iters" => {
            wishes.length = Some(Length::Iterations(a.number("a number of iterations")?));
        }
        "-D" | "--duration" => wishes.length = Some(Length::Time(a.seconds()?)),
        "-w" | "--warm-up" => wishes.warm_up = Some(a.number("a count")?),
        "-q" | "--qp" => wishes.queue_pairs = Some(a.number("a count")?),
        "-t" | "--tx-depth" => wishes.send_depth = Some(a.number("a count")?),
        "-r" | "--rx-depth" => wishes.receive_depth = Some(a.number("a count")?),
        "-l" | "--post-list" => wishes.list = Some(a.number("a count")?),
        "-Q" | "--cq-mod" => wishes.moderation = Some(a.number("a count")?),
        "-I" | "--inline" => wishes.inline = Some(bytes(&a.text()?)?),
        "-m" | "--mtu" => {
            let mtu = a.number("a number of bytes")?;
            ibverbs::settings::MaximumTransferUnit::from_bytes(mtu)
                .map_err(|error| lexopt::Error::Custom(Box::new(error)))?;
            wishes.mtu = Some(mtu);
        }
        "--outs" => wishes.outstanding = Some(a.number("a count up to 255")?),
        "-e" | "--events" => wishes.events = true,
        "--json" => side.json = true,
        "--plot" => side.plot = Some(a.0.value()?.into()),
        _ => return Ok(false),
    }
    Ok(true)
}

impl Wishes {
    fn plan(self) -> Result<Plan, lexopt::Error> {
        let operation = self.operation.unwrap_or(Operation::Send);
        let measure = self.measure.unwrap_or(Measure::Latency);
        let transport = self.transport.unwrap_or(Transport::Reliable);
        let layer = self.layer.unwrap_or(Layer::Verbs);
        if self.all && self.sizes.is_some() {
            return Err("--all and --sizes exclude each other".into());
        }
        let sizes = match self.sizes {
            Some(sizes) => sizes,
            None if operation.is_atomic() => vec![ATOMIC_SIZE],
            None if self.all => {
                let datagrams = transport == Transport::Datagram;
                let most = if datagrams { self.mtu.unwrap_or(1024) } else { MAX_SIZE };
                (1..=most.ilog2()).map(|power| 1 << power).collect()
            }
            None if measure == Measure::Latency => vec![64],
            None if transport == Transport::Datagram => vec![1024],
            None => vec![65536],
        };
        let simple = measure == Measure::Latency;
        let send_depth = self.send_depth.unwrap_or(if simple { 1 } else { 128 });
        let list = self.list.unwrap_or(1);
        let moderation = self.moderation.unwrap_or_else(|| match () {
            () if simple || layer == Layer::Channel => 1,
            () if list > 1 => list,
            // A completion for each large message costs almost nothing, and evens out the flow.
            () if sizes.iter().any(|&size| size > 8192) => 1,
            () => send_depth.clamp(1, 100),
        });
        let plan = Plan {
            operation,
            measure,
            transport,
            layer,
            sizes,
            length: self
                .length
                .unwrap_or(Length::Iterations(1000_u64.next_multiple_of(list.max(1).into()))),
            warm_up: self.warm_up.unwrap_or(100_u64.next_multiple_of(list.max(1).into())),
            queue_pairs: self.queue_pairs.unwrap_or(1),
            send_depth,
            receive_depth: self.receive_depth.unwrap_or(512),
            list,
            moderation,
            inline: self.inline.unwrap_or(0),
            mtu: self.mtu,
            outstanding: self.outstanding.unwrap_or(16),
            events: self.events,
        };
        plan.check().map_err(|refusal| lexopt::Error::Custom(Box::new(refusal)))?;
        Ok(plan)
    }
}

/// The value of an option, checked.
struct Values<'p>(&'p mut lexopt::Parser);

impl Values<'_> {
    fn text(&mut self) -> Result<String, lexopt::Error> {
        self.0.value()?.string()
    }

    fn number<T: std::str::FromStr>(&mut self, what: &str) -> Result<T, lexopt::Error> {
        let text = self.text()?;
        text.parse().map_err(|_| format!("'{text}' is not {what}").into())
    }

    fn one_of<T>(
        &mut self,
        names: &str,
        named: impl FnOnce(&str) -> Option<T>,
    ) -> Result<T, lexopt::Error> {
        let text = self.text()?;
        named(&text).ok_or_else(|| format!("'{text}' is none of {names}").into())
    }

    fn seconds(&mut self) -> Result<Duration, lexopt::Error> {
        let text = self.text()?;
        let seconds =
            text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        seconds.ok_or_else(|| format!("'{text}' is not a number of seconds").into())
    }
}

fn sizes(text: &str) -> Result<Vec<u32>, lexopt::Error> {
    text.split(',').map(bytes).collect()
}

/// `64`, `4k` or `1M`, the latter two of 2^10 and 2^20 bytes.
fn bytes(text: &str) -> Result<u32, lexopt::Error> {
    let (digits, unit) = match text.strip_suffix(['k', 'K']) {
        Some(digits) => (digits, 1 << 10),
        None => match text.strip_suffix('M') {
            Some(digits) => (digits, 1 << 20),
            None => (text, 1),
        },
    };
    let number = digits.parse().ok().and_then(|number: u32| number.checked_mul(unit));
    number.ok_or_else(|| format!("'{text}' is not a number of bytes, such as 64, 4k or 1M").into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(line: &str) -> Result<Command, lexopt::Error> {
        read(lexopt::Parser::from_args(line.split_whitespace()))
    }

    fn plan(line: &str) -> Plan {
        match command(line) {
            Ok(Command::Measure(_, plan)) => plan,
            other => panic!("{other:?}"),
        }
    }

    fn error(line: &str) -> String {
        command(line).unwrap_err().to_string()
    }

    #[test]
    fn what_is_not_said_is_as_perftest_has_it() {
        let latency = plan("host");
        assert_eq!((latency.sizes.as_slice(), latency.send_depth), ([64].as_slice(), 1));
        let flood = plan("-M bandwidth host");
        assert_eq!((flood.sizes.as_slice(), flood.moderation), ([65536].as_slice(), 1));
        let flood = plan("-M bandwidth -s 2,4k host");
        assert_eq!((flood.send_depth, flood.moderation, flood.list), (128, 100, 1));
        assert_eq!(plan("-M bandwidth -s 64 -l 32 host").moderation, 32);
        assert_eq!(plan("-M bandwidth -s 64 -t 20 host").moderation, 20);
        assert_eq!(plan("-o fetch-add host").sizes, [8]);
        assert_eq!(plan("-a host").sizes.len(), 22);
        assert_eq!(plan("-a -c UD host").max_size(), 1024);
        assert_eq!(plan("-D 0.5 host").length, Length::Time(Duration::from_millis(500)));
        assert_eq!(plan("-s 1M,4K,3 host").sizes, [1 << 20, 4096, 3]);
    }

    #[test]
    fn what_is_wrong_is_said() {
        assert!(matches!(command("-d rxe0 -p 5"), Ok(Command::Serve(side)) if side.tcp_port == 5));
        assert!(error("-n 5").contains("-n is for the client"));
        assert!(error("-n x host").contains("'x' is not a number of iterations"));
        assert!(
            error("-o push host").contains("none of send, write, read, fetch-add, compare-swap")
        );
        assert!(error("-s 64,9999999k host").contains("is not a number of bytes"));
        assert!(error("-D -3 host").contains("is not a number of seconds"));
        assert!(error("-c UC -o read host").contains("UC has no read"));
        assert!(error("-m 1000 host").contains("path_mtu"));
        assert!(error("--nothing host").contains("no option --nothing"));
        assert!(error("-a -s 2 host").contains("exclude each other"));
        assert!(command("host other").is_err() && command("-n").is_err());
    }
}
