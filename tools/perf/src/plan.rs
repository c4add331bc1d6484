//! The plan of a measurement, and the checks of whether it is possible. The client makes a plan and sends it
//! to the server; both check it.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Operation {
    Send,
    Write,
    Read,
    FetchAdd,
    CompareSwap,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Measure {
    Latency,
    Bandwidth,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Transport {
    #[serde(rename = "RC")]
    Reliable,
    #[serde(rename = "UC")]
    Unreliable,
    #[serde(rename = "UD")]
    Datagram,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Layer {
    Verbs,
    Channel,
}

/// The length of the measurement of one size.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Length {
    /// A number of iterations on each queue pair.
    Iterations(u64),
    Time(Duration),
}

/// Defines how a value is parsed from the command line and printed.
macro_rules! names {
    ($name:ident: $($value:ident = $text:literal),+) => {
        impl $name {
            pub(crate) const NAMES: &str = names!(@join $($text),+);

            pub(crate) fn named(text: &str) -> Option<Self> {
                match text {
                    $($text => Some(Self::$value),)+
                    _ => None,
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self {
                    $(Self::$value => $text),+
                })
            }
        }
    };
    (@join $first:literal $(, $rest:literal)*) => { concat!($first $(, ", ", $rest)*) };
}

names!(Operation: Send = "send", Write = "write", Read = "read", FetchAdd = "fetch-add",
    CompareSwap = "compare-swap");
names!(Measure: Latency = "latency", Bandwidth = "bandwidth");
names!(Transport: Reliable = "RC", Unreliable = "UC", Datagram = "UD");
names!(Layer: Verbs = "verbs", Channel = "channel");

impl Operation {
    pub(crate) fn is_atomic(self) -> bool {
        matches!(self, Self::FetchAdd | Self::CompareSwap)
    }

    fn goes_by(self, transport: Transport) -> bool {
        match transport {
            Transport::Reliable => true,
            Transport::Unreliable => matches!(self, Self::Send | Self::Write),
            Transport::Datagram => self == Self::Send,
        }
    }
}

/// The largest message.
pub(crate) const MAX_SIZE: u32 = 4 << 20;
/// The size of atomics, in bytes.
pub(crate) const ATOMIC_SIZE: u32 = 8;
/// The most requests in a queue: few devices have longer queues.
const MAX_DEPTH: u32 = 32_768;
const MAX_QUEUE_PAIRS: u32 = 256;
/// The most memory for all queue pairs of one side, in bytes.
const MAX_MEMORY: u64 = 1 << 30;
const MAX_INLINE: u32 = 4096;
const MAX_TIME: Duration = Duration::from_secs(3600);

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub(crate) operation: Operation,
    pub(crate) measure: Measure,
    pub(crate) transport: Transport,
    pub(crate) layer: Layer,
    /// The sizes of messages, in bytes.
    pub(crate) sizes: Vec<u32>,
    pub(crate) length: Length,
    /// Iterations on each queue pair that come first and do not count.
    pub(crate) warm_up: u64,
    pub(crate) queue_pairs: u32,
    pub(crate) send_depth: u32,
    pub(crate) receive_depth: u32,
    /// The number of requests that one call posts.
    pub(crate) list: u32,
    /// Moderation: one in this many requests has a completion.
    pub(crate) moderation: u32,
    /// The largest message, in bytes, that is sent inline.
    pub(crate) inline: u32,
    /// The path MTU in bytes; `None`: the smaller one of the two ports.
    pub(crate) mtu: Option<u32>,
    /// The number of reads and atomics that a queue pair may have outstanding.
    pub(crate) outstanding: u8,
    /// Whether to sleep on events instead of polling.
    pub(crate) events: bool,
}

/// The reason why a plan cannot be carried out.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Refusal {
    Transport(Operation, Transport),
    AtomicSize(u32),
    NoSizes,
    /// A number out of range: its value, its name and its bounds.
    Bounds(&'static str, u64, u64, u64),
    /// This value must be a multiple of the list's length.
    NoMultiple(&'static str, u64, u32),
    LatencyNeedsOne(&'static str),
    EventsOnMemory,
    Channel(&'static str),
    Datagram {
        size: u32,
        mtu: u32,
    },
    Memory(u64),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Transport(operation, Transport::Unreliable) => {
                write!(f, "UC has no {operation}: it has send and write")
            }
            Self::Transport(operation, transport) => {
                write!(f, "{transport} has no {operation}: it has send alone")
            }
            Self::AtomicSize(size) => {
                write!(f, "atomics work on {ATOMIC_SIZE} bytes, not on {size}")
            }
            Self::NoSizes => write!(f, "no message size is given"),
            Self::Bounds(what, value, low, high) => {
                write!(f, "{what} is {value}, and must be within {low}..={high}")
            }
            Self::NoMultiple(what, value, list) => {
                write!(f, "{what} is {value}, which is no multiple of the list's length, {list}")
            }
            Self::LatencyNeedsOne(what) => write!(f, "latency is measured with one {what}"),
            Self::EventsOnMemory => write!(
                f,
                "the latency of writes is that of seeing them in memory, of which no event tells"
            ),
            Self::Channel(what) => write!(f, "the channel layer has no {what}"),
            Self::Datagram { size, mtu } => {
                write!(f, "a datagram of {size} bytes does not fit the MTU of {mtu} bytes")
            }
            Self::Memory(bytes) => write!(
                f,
                "so many queue pairs and such large messages take {bytes} bytes of memory, more \
                 than {MAX_MEMORY}"
            ),
        }
    }
}

impl std::error::Error for Refusal {}

fn within(
    what: &'static str,
    value: impl Into<u64>,
    low: u64,
    high: impl Into<u64>,
) -> Result<(), Refusal> {
    let (value, high) = (value.into(), high.into());
    if (low..=high).contains(&value) {
        return Ok(());
    }
    Err(Refusal::Bounds(what, value, low, high))
}

impl Plan {
    pub(crate) fn max_size(&self) -> u32 {
        self.sizes.iter().copied().max().unwrap_or(0)
    }

    /// Whether data of this size is sent inline.
    pub(crate) fn is_inline(&self, size: u32) -> bool {
        matches!(self.operation, Operation::Send | Operation::Write) && size <= self.inline
    }

    /// Whether lost messages are detected, by counting receives.
    pub(crate) fn can_lose(&self) -> bool {
        self.transport != Transport::Reliable && self.operation == Operation::Send
    }

    /// Bytes of memory of one queue pair: one half to send from, the other to receive into, which
    /// has room for what comes before a datagram.
    pub(crate) fn memory(&self) -> usize {
        2 * self.half()
    }

    pub(crate) fn half(&self) -> usize {
        (self.max_size() as usize + crate::rig::ROUTE).next_multiple_of(64)
    }

    /// A rough weight of a size relative to the others: a message of 4 KiB takes about twice as long as an
    /// empty one.
    pub(crate) fn weight(&self, size: u32) -> f64 {
        match self.length {
            Length::Time(_) => 1.0,
            Length::Iterations(_) => 4096.0 + f64::from(size),
        }
    }

    /// Checks the plan for consistency, and that its transport supports it. A server checks the client's plan.
    pub(crate) fn check(&self) -> Result<(), Refusal> {
        if !self.operation.goes_by(self.transport) {
            return Err(Refusal::Transport(self.operation, self.transport));
        }
        if self.sizes.is_empty() {
            return Err(Refusal::NoSizes);
        }
        within("the number of sizes", self.sizes.len() as u64, 1, 1000_u32)?;
        for &size in &self.sizes {
            within("the size of a message", size, 1, MAX_SIZE)?;
            if self.operation.is_atomic() && size != ATOMIC_SIZE {
                return Err(Refusal::AtomicSize(size));
            }
        }
        match self.length {
            Length::Iterations(count) => {
                within("the number of iterations", count, 1, u64::from(u32::MAX))?;
                self.multiple("the number of iterations", count)?;
            }
            Length::Time(time) => {
                let (millis, most) = (time.as_millis() as u64, MAX_TIME.as_millis() as u64);
                within("the duration in ms", millis, 1, most)?;
            }
        }
        within("the number of iterations to warm up", self.warm_up, 0, u32::MAX)?;
        self.multiple("the number of iterations to warm up", self.warm_up)?;
        within("the number of queue pairs", self.queue_pairs, 1, MAX_QUEUE_PAIRS)?;
        within("the depth of the send queue", self.send_depth, 1, MAX_DEPTH)?;
        within("the depth of the receive queue", self.receive_depth, 1, MAX_DEPTH)?;
        within("the length of a list", self.list, 1, self.send_depth)?;
        within("the moderation of completions", self.moderation, 1, self.send_depth)?;
        self.multiple("the moderation of completions", self.moderation.into())?;
        within("the number of bytes inline", self.inline, 0, MAX_INLINE)?;
        within("the number of outstanding reads", self.outstanding, 1, u8::MAX)?;
        let memory = self.memory() as u64 * u64::from(self.queue_pairs);
        if memory > MAX_MEMORY {
            return Err(Refusal::Memory(memory));
        }
        self.check_measure()?;
        self.check_layer()
    }

    fn multiple(&self, what: &'static str, value: u64) -> Result<(), Refusal> {
        if value.is_multiple_of(self.list.max(1).into()) {
            return Ok(());
        }
        Err(Refusal::NoMultiple(what, value, self.list))
    }

    fn check_measure(&self) -> Result<(), Refusal> {
        if self.measure == Measure::Bandwidth {
            return Ok(());
        }
        for (what, value) in [
            ("queue pair", self.queue_pairs),
            ("request at a time, without a list", self.list),
            ("request at a time, without moderation", self.moderation),
        ] {
            if value != 1 {
                return Err(Refusal::LatencyNeedsOne(what));
            }
        }
        if self.events && self.operation == Operation::Write {
            return Err(Refusal::EventsOnMemory);
        }
        Ok(())
    }

    fn check_layer(&self) -> Result<(), Refusal> {
        if self.layer == Layer::Verbs {
            return Ok(());
        }
        for (what, is_asked) in [
            ("transport here but RC", self.transport != Transport::Reliable),
            ("lists of requests", self.list != 1),
            ("requests without completions", self.moderation != 1),
            ("more than one queue pair", self.queue_pairs != 1),
            ("inline data out of registered memory", self.inline != 0),
        ] {
            if is_asked {
                return Err(Refusal::Channel(what));
            }
        }
        Ok(())
    }

    /// Checks that messages fit the path. Its MTU is known once the sides are connected.
    pub(crate) fn check_path(&self, mtu: u32) -> Result<(), Refusal> {
        let size = self.max_size();
        if self.transport == Transport::Datagram && size > mtu {
            return Err(Refusal::Datagram { size, mtu });
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn plan() -> Plan {
        Plan {
            operation: Operation::Send,
            measure: Measure::Bandwidth,
            transport: Transport::Reliable,
            layer: Layer::Verbs,
            sizes: vec![2, 64],
            length: Length::Iterations(1000),
            warm_up: 100,
            queue_pairs: 2,
            send_depth: 128,
            receive_depth: 512,
            list: 10,
            moderation: 10,
            inline: 0,
            mtu: None,
            outstanding: 16,
            events: false,
        }
    }

    fn refusal(change: impl FnOnce(&mut Plan)) -> String {
        let mut plan = plan();
        change(&mut plan);
        plan.check().unwrap_err().to_string()
    }

    #[test]
    fn each_transport_has_its_operations() {
        use Operation::{CompareSwap, FetchAdd, Read, Send, Write};
        use Transport::{Datagram, Reliable, Unreliable};
        for (transport, has) in [
            (Reliable, [true, true, true, true, true]),
            (Unreliable, [true, true, false, false, false]),
            (Datagram, [true, false, false, false, false]),
        ] {
            for (operation, has) in [Send, Write, Read, FetchAdd, CompareSwap].into_iter().zip(has)
            {
                let mut plan = Plan { operation, transport, ..plan() };
                if operation.is_atomic() {
                    plan.sizes = vec![8];
                }
                let expected =
                    if has { Ok(()) } else { Err(Refusal::Transport(operation, transport)) };
                assert_eq!(plan.check(), expected);
            }
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        assert_eq!(plan().check(), Ok(()));
        assert_eq!(refusal(|p| p.sizes.clear()), "no message size is given");
        assert!(refusal(|p| p.sizes.push(0)).contains("within 1..=4194304"));
        assert!(refusal(|p| p.sizes.push(MAX_SIZE + 1)).contains("is 4194305"));
        assert!(
            refusal(|p| p.operation = Operation::FetchAdd).contains("work on 8 bytes, not on 2")
        );
        assert!(refusal(|p| p.length = Length::Iterations(0)).contains("iterations is 0"));
        assert!(refusal(|p| p.length = Length::Iterations(15)).contains("no multiple"));
        assert!(refusal(|p| p.length = Length::Time(MAX_TIME * 2)).contains("duration in ms"));
        assert!(refusal(|p| p.queue_pairs = 0).contains("queue pairs is 0"));
        assert!(refusal(|p| p.send_depth = 9).contains("length of a list is 10"));
        assert!(refusal(|p| p.list = 0).contains("length of a list is 0"));
        assert!(refusal(|p| p.moderation = 15).contains("no multiple of the list's length, 10"));
        assert!(refusal(|p| p.moderation = 130).contains("within 1..=128"));
        assert!(refusal(|p| p.measure = Measure::Latency).contains("with one queue pair"));
        let huge = refusal(|p| (p.sizes, p.queue_pairs) = (vec![MAX_SIZE], MAX_QUEUE_PAIRS));
        assert!(huge.contains("bytes of memory"), "{huge}");
        assert!(refusal(|p| p.layer = Layer::Channel).contains("no lists of requests"));
        let simple = |p: &mut Plan| {
            (p.measure, p.queue_pairs, p.list, p.moderation) = (Measure::Latency, 1, 1, 1);
        };
        let by_events = refusal(|p| {
            simple(p);
            (p.operation, p.events) = (Operation::Write, true);
        });
        assert!(by_events.contains("seeing them in memory"));
    }

    #[test]
    fn datagrams_fit_the_path() {
        let plan = Plan { transport: Transport::Datagram, sizes: vec![2, 1025], ..plan() };
        assert_eq!(plan.check_path(1024), Err(Refusal::Datagram { size: 1025, mtu: 1024 }));
        assert_eq!(plan.check_path(2048), Ok(()));
        assert_eq!(Plan { transport: Transport::Reliable, ..plan }.check_path(1024), Ok(()));
    }
}
