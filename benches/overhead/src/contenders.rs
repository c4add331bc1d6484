//! The list of contenders.

use ibverbs::PooledBuffer;
use ibverbs::future::{Local, Locked};

use crate::channel::{ChannelRig, DomainRig};
use crate::loops::{DatagramsRig, SendsRig, SharedRig};
use crate::memory::{CTwoRig, CopiesRig, PoolRig, TwoRig};
use crate::rails::RailsRig;
use crate::reactor::{PairRig, ReactorRig, SendRig, SleepingRig};
use crate::rig::{LENGTH, Rig};
use crate::senders::SenderRig;
use crate::server::CRig;
use crate::server_loop::LoopRig;
use crate::{
    c, channel, events, loops, many, memory, prepared, rails, reactor, rpc, senders, server,
    server_futures, server_loop, verbs,
};

/// One way to do one workload.
pub(crate) struct Contender {
    /// `W1` to `W27`, `W5x` for the extended interface; `W14-10` is with ten connections, `W16s` with small parts.
    pub(crate) workload: &'static str,
    pub(crate) layer: &'static str,
    pub(crate) sum: Sum,
    /// Sets up the contender. The result runs the given number of operations and adds up what completed.
    pub(crate) make: fn() -> Body,
}

/// The sum of a contender, which proves that it saw every completion.
pub(crate) enum Sum {
    /// The number of each operation, once for each of its completions.
    Numbers(u64),
    /// The bytes of each operation.
    Bytes,
}

pub(crate) type Body = Box<dyn FnMut(u64) -> u64>;

impl Contender {
    /// Whether a run allocates: it makes channels, or a thread.
    #[allow(dead_code, reason = "only the program that counts instructions asks")]
    pub(crate) fn allocates(&self) -> bool {
        matches!(self.workload, "W19" | "W23")
    }

    /// The expected sum.
    pub(crate) fn expected(&self, operations: u64) -> u64 {
        match self.sum {
            Sum::Numbers(times) => times * operations * (operations - 1) / 2,
            Sum::Bytes => operations * LENGTH as u64,
        }
    }
}

/// A contender that runs on a rig.
macro_rules! ours {
    ($workload:literal, $layer:literal, $sum:expr, $rig:expr, $function:path) => {
        Contender {
            workload: $workload,
            layer: $layer,
            sum: $sum,
            make: || {
                let mut rig = $rig;
                Box::new(move |operations| $function(&mut rig, operations).expect("it works"))
            },
        }
    };
}

/// A contender in C.
macro_rules! in_c {
    ($workload:literal, $layer:literal, $times:literal, $rig:expr, $function:ident) => {
        Contender {
            workload: $workload,
            layer: $layer,
            sum: Sum::Numbers($times),
            make: || {
                let mut rig = $rig;
                let mut handles = c::Handles::of(&mut rig);
                Box::new(move |operations| {
                    let _keep = &rig;
                    // SAFETY: the handles belong to the rig, which outlives the run.
                    unsafe { c::$function(&mut handles, operations) }.cast_unsigned()
                })
            },
        }
    };
}

/// The event servers with this number of connections.
macro_rules! servers {
    ($workload:literal, $connections:literal) => {
        [
            ours!($workload, "C plain", Sum::Bytes, CRig::new($connections), server::c_plain),
            ours!($workload, "C tuned", Sum::Bytes, CRig::new($connections), server::c_tuned),
            ours!(
                $workload,
                "loop",
                Sum::Bytes,
                LoopRig::new($connections),
                server_loop::loop_server
            ),
            ours!(
                $workload,
                "futures",
                Sum::Bytes,
                server_futures::tasks::<Locked<PooledBuffer>>($connections),
                server_futures::tasks_server
            ),
            ours!(
                $workload,
                "futures, one thread",
                Sum::Bytes,
                server_futures::tasks::<Local<PooledBuffer>>($connections),
                server_futures::tasks_server
            ),
        ]
    };
}

/// W21: takes a buffer and gives it back, in a pool with this number of chunks.
macro_rules! pool {
    ($workload:literal, $chunks:literal) => {
        [
            in_c!($workload, "C plain", 1, Rig::new(), c_plain_w21),
            in_c!($workload, "C tuned", 1, Rig::new(), c_tuned_w21),
            ours!($workload, "pool", Sum::Bytes, PoolRig::new($chunks), memory::take_and_drop),
            ours!(
                $workload,
                "pool, cache",
                Sum::Bytes,
                PoolRig::new($chunks),
                memory::take_and_keep
            ),
        ]
    };
}

/// The servers of requests with this number of connections, and of receives of each.
macro_rules! rpc {
    ($workload:literal, $connections:literal, $receives:literal) => {
        [
            ours!(
                $workload,
                "C tuned",
                Sum::Bytes,
                rpc::CRig::new($connections, $receives),
                rpc::c_tuned
            ),
            ours!(
                $workload,
                "loop",
                Sum::Bytes,
                rpc::LoopRig::new($connections, $receives),
                rpc::on_loop
            ),
            ours!(
                $workload,
                "loop, cache",
                Sum::Bytes,
                rpc::LoopRig::new($connections, $receives),
                rpc::on_loop_with_cache
            ),
            ours!(
                $workload,
                "futures, one thread",
                Sum::Bytes,
                rpc::tasks::<Local<PooledBuffer>>($connections, $receives),
                server_futures::tasks_server
            ),
        ]
    };
}

/// W27: sends on this number of channels, in turn.
macro_rules! many {
    ($workload:literal, $channels:literal) => {
        [
            in_c_many!($workload, "C tuned", $channels, c_tuned_many),
            in_c_many!($workload, "C, a lock each", $channels, c_locked_many),
            ours!($workload, "loop", Sum::Bytes, many::LoopRig::new($channels), many::on_loop),
            ours!(
                $workload,
                "loop, a sender each",
                Sum::Bytes,
                many::SendersRig::new($channels),
                many::by_senders
            ),
        ]
    };
}

macro_rules! in_c_many {
    ($workload:literal, $layer:literal, $channels:literal, $function:ident) => {
        Contender {
            workload: $workload,
            layer: $layer,
            sum: Sum::Numbers(1),
            make: || {
                let mut rig = many::CRig::new($channels);
                Box::new(move |operations| rig.run(c::$function, operations))
            },
        }
    };
}

/// Writes of parts of this length over several devices.
macro_rules! rails {
    ($workload:literal, $len:expr) => {
        [
            in_c_rails!($workload, "C plain", $len, c_plain_rails),
            in_c_rails!($workload, "C tuned", $len, c_tuned_rails),
            in_c_rails!($workload, "C, the same job", $len, c_same_rails),
            ours!($workload, "rails", Sum::Bytes, RailsRig::new($len), rails::pieces),
        ]
    };
}

macro_rules! in_c_rails {
    ($workload:literal, $layer:literal, $len:expr, $function:ident) => {
        Contender {
            workload: $workload,
            layer: $layer,
            sum: Sum::Numbers(1),
            make: || {
                let mut rig = rails::CRig::new($len);
                Box::new(move |operations| rig.run(c::$function, operations))
            },
        }
    };
}

/// All contenders, by workload, those in C first; also those that take long to make, and that no check compares, if they
/// are wanted.
pub(crate) fn contenders(with_large: bool) -> Vec<Contender> {
    use Sum::{Bytes, Numbers};
    let mut contenders = vec![
        in_c!("W1", "C plain", 1, Rig::new(), c_plain_w1),
        in_c!("W1", "C tuned", 1, Rig::new(), c_tuned_w1),
        ours!("W1", "verbs", Numbers(1), Rig::new(), verbs::w1),
        ours!("W1", "verbs prepared", Numbers(1), Rig::new(), prepared::w1),
        in_c!("W2", "C plain", 2, Rig::new(), c_plain_w2),
        in_c!("W2", "C tuned", 2, Rig::new(), c_tuned_w2),
        ours!("W2", "verbs", Numbers(2), Rig::new(), verbs::w2),
        ours!("W2", "verbs prepared", Numbers(2), Rig::new(), prepared::w2),
        in_c!("W3", "C plain", 1, Rig::new(), c_plain_w3),
        in_c!("W3", "C tuned", 1, Rig::new(), c_tuned_w3),
        ours!("W3", "verbs", Numbers(1), Rig::new(), verbs::w3),
        ours!("W3", "verbs prepared", Numbers(1), Rig::new(), prepared::w3),
        in_c!("W4", "C plain", 1, Rig::new(), c_plain_w4),
        in_c!("W4", "C tuned", 1, Rig::new(), c_tuned_w4),
        ours!("W4", "verbs", Numbers(1), Rig::new(), verbs::w4),
        ours!("W4", "verbs prepared", Numbers(1), Rig::new(), prepared::w4),
        in_c!("W5", "C plain", 1, Rig::new(), c_plain_w5),
        in_c!("W5", "C tuned", 1, Rig::new(), c_tuned_w5),
        ours!("W5", "verbs prepared", Numbers(1), Rig::new(), prepared::w5),
        in_c!("W5x", "C plain", 1, Rig::extended(), c_plain_w5_ex),
        in_c!("W5x", "C tuned", 1, Rig::extended(), c_tuned_w5_ex),
        ours!("W5x", "verbs", Numbers(1), Rig::extended(), prepared::w5_extended),
        // W6 is W1 in safe code.
        in_c!("W6", "C plain", 1, Rig::new(), c_plain_w1),
        in_c!("W6", "C tuned", 1, Rig::new(), c_tuned_w1),
        ours!("W6", "channel blocking", Bytes, ChannelRig::new(), channel::w6),
        ours!("W6", "channel scoped", Bytes, ChannelRig::new(), channel::w6_scoped),
        ours!("W6", "channel scope each", Bytes, ChannelRig::new(), channel::w6_per_scope),
        ours!("W6", "channel scope waits", Bytes, ChannelRig::new(), channel::w6_left),
        ours!("W6", "loop", Bytes, SendsRig::new(1), loops::sends),
        in_c!("W7", "C plain", 1, Rig::new(), c_plain_w7),
        in_c!("W7", "C tuned", 1, Rig::new(), c_tuned_w7),
        ours!("W7", "channel scoped", Bytes, ChannelRig::new(), channel::w7),
        in_c!("W8", "C plain", 1, Rig::with_events(), c_plain_w8),
        in_c!("W8", "C tuned", 1, Rig::with_events(), c_tuned_w8),
        ours!("W8", "verbs", Numbers(1), Rig::with_events(), events::w8),
        // W2 and W3 in safe code.
        in_c!("W9", "C tuned", 2, Rig::new(), c_tuned_w2),
        ours!("W9", "channel scoped", Bytes, ChannelRig::new(), channel::ping_pong),
        ours!("W9", "loop", Bytes, SendsRig::new(1), loops::pairs),
        ours!("W9", "futures", Bytes, PairRig::<Locked<PooledBuffer>>::new(), reactor::pairs),
        ours!(
            "W9",
            "futures, one thread",
            Bytes,
            PairRig::<Local<PooledBuffer>>::new(),
            reactor::pairs
        ),
        in_c!("W10", "C tuned", 1, Rig::new(), c_tuned_w3),
        ours!("W10", "channel scoped", Bytes, ChannelRig::new(), channel::window),
        ours!("W10", "channel all at once", Bytes, ChannelRig::new(), channel::window_at_once),
        ours!("W10", "channel scope each", Bytes, ChannelRig::new(), channel::window_per_scope),
        ours!("W10", "loop", Bytes, SendsRig::new(1), loops::sixteen),
        in_c!("W11", "C tuned", 1, Rig::new(), c_tuned_w1),
        ours!("W11", "loop, 1 channel", Bytes, SendsRig::new(1), loops::sends),
        ours!("W11", "loop, 100 channels", Bytes, SendsRig::new(100), loops::sends),
        in_c!("W12", "C tuned", 1, Rig::new(), c_tuned_w1),
        ours!("W12", "futures, 1 channel", Bytes, ReactorRig::new(1), reactor::sends),
        ours!("W12", "futures, 10 channels", Bytes, ReactorRig::new(10), reactor::sends),
        ours!("W12", "futures, 100 channels", Bytes, ReactorRig::new(100), reactor::sends),
        ours!("W12", "futures, 1000 channels", Bytes, ReactorRig::new(1000), reactor::sends),
        ours!("W12", "futures, 10000 channels", Bytes, ReactorRig::new(10_000), reactor::sends),
        ours!(
            "W12",
            "futures, one task",
            Bytes,
            SendRig::<Locked<PooledBuffer>>::new(),
            reactor::sends_of_one
        ),
        ours!(
            "W12",
            "futures, one task on one thread",
            Bytes,
            SendRig::<Local<PooledBuffer>>::new(),
            reactor::sends_of_one
        ),
        in_c!("W13", "C tuned", 1, Rig::with_events(), c_tuned_w13),
        ours!("W13", "futures", Bytes, SleepingRig::new(), reactor::sends_asleep),
        in_c!("W17", "C tuned", 1, Rig::of_pages(), c_tuned_w17),
        ours!("W17", "channel scoped", Bytes, channel::PagesRig::new(), channel::reads),
        ours!("W17", "loop", Bytes, loops::PagesRig::new(), loops::reads),
        in_c!("W18", "C tuned", 1, Rig::new(), c_tuned_w18),
        ours!("W18", "loop", Bytes, SendsRig::new(1), loops::empty),
        ours!("W18", "futures", Bytes, SendRig::<Locked<PooledBuffer>>::new(), reactor::empty),
        ours!(
            "W18",
            "futures, one thread",
            Bytes,
            SendRig::<Local<PooledBuffer>>::new(),
            reactor::empty
        ),
        in_c!("W19", "C tuned", 1, Rig::new(), c_tuned_w19),
        ours!("W19", "channel", Bytes, DomainRig::new(), channel::made),
        ours!("W19", "loop", Bytes, DomainRig::new(), channel::made_for_loop),
        in_c!("W22", "C tuned", 1, Rig::of_shared_receives(), c_tuned_w22),
        ours!("W22", "loop, 1 channel", Bytes, SharedRig::new(1), loops::shared),
        ours!("W22", "loop, 1000 channels", Bytes, SharedRig::new(1000), loops::shared),
        Contender {
            workload: "W23",
            layer: "C tuned",
            sum: Numbers(1),
            make: || {
                let mut rigs = CTwoRig::new();
                Box::new(move |operations| rigs.run(operations))
            },
        },
        ours!("W23", "loop", Bytes, TwoRig::new(), memory::two_threads),
        in_c!("W24", "C tuned", 1, Rig::of_pages(), c_tuned_w24),
        ours!("W24", "shared memory", Bytes, CopiesRig::new(), memory::copies),
        in_c!("W25", "C tuned", 1, Rig::new(), c_tuned_w1),
        ours!("W25", "loop", Bytes, DatagramsRig::new(false), loops::datagrams),
        ours!("W25", "loop, SRD", Bytes, DatagramsRig::new(true), loops::datagrams),
        in_c!("W26", "C tuned", 1, Rig::new(), c_tuned_w26),
        ours!("W26", "loop, sender", Bytes, SenderRig::new(), senders::sends),
    ];
    contenders.extend(many!("W27-10", 10));
    contenders.extend(many!("W27-1000", 1000));
    contenders.extend(many!("W27-10000", 10_000));
    contenders.extend(pool!("W21-64", 64));
    contenders.extend(pool!("W21-1000", 1000));
    contenders.extend(pool!("W21-100000", 100_000));
    contenders.extend(rails!("W16", 64 << 10));
    contenders.extend(rails!("W16s", 1 << 10));
    contenders.extend(servers!("W14-1", 1));
    contenders.extend(servers!("W14-10", 10));
    contenders.extend(servers!("W14-100", 100));
    contenders.extend(servers!("W14-1000", 1000));
    contenders.extend(rpc!("W20-1", 1, 1));
    contenders.extend(rpc!("W20-100", 100, 1));
    contenders.extend(rpc!("W20-1000", 1000, 1));
    contenders.extend(rpc!("W20-1000x16", 1000, 16));
    contenders.extend(rpc!("W20-10000", 10_000, 1));
    if with_large {
        contenders.extend(servers!("W14-10000", 10_000));
    }
    contenders
}
