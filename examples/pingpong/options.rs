//! The command line, which is that of `ibv_rc_pingpong`.

use ibverbs::settings::MaximumTransferUnit;
use ibverbs::settings::ServiceLevel;
use lexopt::prelude::*;

pub(crate) const USAGE: &str = "\
Usage:
  pingpong            start a server and wait for connection
  pingpong <host>     connect to server at <host>

Options:
  -p, --port=<port>      listen on/connect to port <port> (default 18515)
  -d, --ib-dev=<dev>     use IB device <dev> (default first device found)
  -i, --ib-port=<port>   use port <port> of IB device (default 1)
  -s, --size=<size>      size of message to exchange (default 4096)
  -m, --mtu=<size>       path MTU (default 1024)
  -r, --rx-depth=<dep>   number of receives to post at a time (default 500, at least 2;
                         fewer of large messages, for each has a buffer of its own)
  -n, --iters=<iters>    number of exchanges (default 1000)
  -l, --sl=<sl>          service level value
  -e, --events           sleep on CQ events (default poll)
  -g, --gid-idx=<index>  local port gid index (default: the one that peers can reach)
  -o, --odp              use on demand paging
  -c, --chk              validate received buffer
  -N, --new_send         use new post send WR API
  -h, --help             print this";

pub(crate) struct Options {
    pub(crate) server: Option<String>,
    pub(crate) tcp_port: u16,
    pub(crate) device: Option<String>,
    pub(crate) port: u8,
    pub(crate) size: usize,
    pub(crate) mtu: MaximumTransferUnit,
    pub(crate) rx_depth: u32,
    pub(crate) iterations: u64,
    pub(crate) service_level: ServiceLevel,
    pub(crate) events: bool,
    pub(crate) gid_index: Option<u8>,
    pub(crate) on_demand: bool,
    pub(crate) check: bool,
    pub(crate) new_send: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            server: None,
            tcp_port: 18515,
            device: None,
            port: 1,
            size: 4096,
            mtu: MaximumTransferUnit::Mtu1024,
            rx_depth: 500,
            iterations: 1000,
            service_level: ServiceLevel::default(),
            events: false,
            gid_index: None,
            on_demand: false,
            check: false,
            new_send: false,
        }
    }
}

pub(crate) fn parse() -> std::result::Result<Option<Options>, lexopt::Error> {
    let mut o = Options::default();
    let mut arguments = lexopt::Parser::from_env();
    while let Some(argument) = arguments.next()? {
        match argument {
            Short('p') | Long("port") => o.tcp_port = arguments.value()?.parse()?,
            Short('d') | Long("ib-dev") => o.device = Some(arguments.value()?.string()?),
            Short('i') | Long("ib-port") => o.port = arguments.value()?.parse()?,
            Short('s') | Long("size") => o.size = arguments.value()?.parse()?,
            Short('m') | Long("mtu") => {
                let bytes = arguments.value()?.parse()?;
                o.mtu = MaximumTransferUnit::from_bytes(bytes).map_err(custom)?;
            }
            Short('r') | Long("rx-depth") => o.rx_depth = arguments.value()?.parse()?,
            Short('n') | Long("iters") => o.iterations = arguments.value()?.parse()?,
            Short('l') | Long("sl") => {
                let level = arguments.value()?.parse()?;
                o.service_level = ServiceLevel::new(level).map_err(custom)?;
            }
            Short('e') | Long("events") => o.events = true,
            Short('g') | Long("gid-idx") => o.gid_index = Some(arguments.value()?.parse()?),
            Short('o') | Long("odp") => o.on_demand = true,
            Short('c') | Long("chk") => o.check = true,
            Short('N') | Long("new_send") => o.new_send = true,
            Short('h') | Long("help") => return Ok(None),
            Value(host) if o.server.is_none() => o.server = Some(host.string()?),
            other => return Err(other.unexpected()),
        }
    }
    if o.iterations == 0 {
        return Err("at least one exchange is needed".into());
    }
    if o.size == 0 || o.size > ibverbs::memory::MAX_SGE_LENGTH {
        return Err("the size of a message is within 1..=4294967295".into());
    }
    Ok(Some(o))
}

fn custom(error: ibverbs::Error) -> lexopt::Error {
    lexopt::Error::Custom(Box::new(error))
}
