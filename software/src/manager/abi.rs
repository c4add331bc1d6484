//! The commands and answers of `rdma_user_cm.h`, byte by byte.

use std::ffi::c_int;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::transport::queue_pair::Transport;

/// `struct rdma_ucm_cmd_hdr`
const HEADER: usize = 8;

/// The length of each command after its header; 0: there is none.
const LENGTHS: [usize; 25] = [
    24, 16, 40, 64, 8, 16, 288, 8, 296, 264, 4, 16, 8, 0, 24, 8, 48, 16, 16, 16, 136, 272, 152, 0,
    24,
];

/// The port spaces.
pub(super) const PS_IPOIB: u16 = 0x0002;
pub(super) const PS_TCP: u16 = 0x0106;
pub(super) const PS_UDP: u16 = 0x0111;
pub(super) const PS_IB: u16 = 0x013f;

/// `enum rdma_cm_event_type`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    AddressResolved = 0,
    AddressError = 1,
    RouteResolved = 2,
    ConnectRequest = 4,
    ConnectResponse = 5,
    Unreachable = 7,
    Rejected = 8,
    Established = 9,
    Disconnected = 10,
    DeviceRemoval = 11,
    MulticastJoin = 12,
    AddressChange = 14,
    TimewaitExit = 15,
}

/// A socket address, or what stands for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Address {
    None,
    Inet(SocketAddr),
    /// `AF_IB`
    Ib,
}

/// `struct rdma_ucm_conn_param`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Parameters<'a> {
    pub(super) qpn: u32,
    pub(super) data: &'a [u8],
    pub(super) srq: bool,
    pub(super) resources: u8,
    pub(super) depth: u8,
    pub(super) flow_control: bool,
    pub(super) retry: u8,
    pub(super) rnr_retry: u8,
    pub(super) is_valid: bool,
    /// `struct rdma_ucm_ece`
    pub(super) vendor: u32,
    pub(super) modifier: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Command<'a> {
    Create {
        uid: u64,
        space: u16,
        kind: u8,
    },
    Destroy,
    Bind(Address),
    Resolve {
        source: Address,
        destination: Address,
    },
    ResolveRoute {
        timeout: u32,
    },
    QueryRoute,
    Query {
        option: u32,
    },
    Connect(Parameters<'a>),
    Listen {
        backlog: u32,
    },
    Accept {
        uid: u64,
        parameters: Parameters<'a>,
    },
    Reject {
        reason: u8,
        data: &'a [u8],
    },
    Disconnect,
    Attributes {
        state: u32,
    },
    GetEvent,
    /// `value` is an address in the program.
    SetOption {
        level: u32,
        option: u32,
        value: u64,
        length: u32,
    },
    Notify {
        event: u32,
    },
    Join {
        uid: u64,
        address: Address,
    },
    Leave,
    Migrate {
        from: c_int,
    },
    WriteEvent {
        event: u32,
        status: u32,
        argument: [u8; 8],
    },
}

/// A command, what it is about, and where its answer goes in the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request<'a> {
    pub(super) command: Command<'a>,
    pub(super) id: u32,
    pub(super) response: u64,
    pub(super) room: u16,
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).copied().unwrap_or([0; N])
}

fn n16(bytes: &[u8], at: usize) -> u16 {
    u16::from_ne_bytes(array(bytes, at))
}

fn n32(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(array(bytes, at))
}

fn n64(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(array(bytes, at))
}

impl<'a> Request<'a> {
    /// # Errors
    ///
    /// `EINVAL`: it is too short, or no command. `ENOSYS`: one that is not answered here. `EAFNOSUPPORT`: an address of
    /// another family.
    pub(super) fn parse(bytes: &'a [u8]) -> Result<Self, c_int> {
        let (header, b) = bytes.split_at_checked(HEADER).ok_or(libc::EINVAL)?;
        let number = n32(header, 0) as usize;
        let length = *LENGTHS.get(number).ok_or(libc::EINVAL)?;
        if length == 0 {
            return Err(libc::ENOSYS);
        }
        let b = b.get(..length).ok_or(libc::EINVAL)?;
        // Where the identifier is, and the address of the answer, if there is one.
        let (id, response, command) = match number {
            0 => {
                let command = Command::Create { uid: n64(b, 0), space: n16(b, 16), kind: b[18] };
                (None, Some(8), command)
            }
            1 => (Some(8), Some(0), Command::Destroy),
            2 => (Some(36), None, Command::Bind(address(&b[8..36])?)),
            20 => (Some(0), None, Command::Bind(address(&b[8..])?)),
            3 => {
                let (source, destination) = (address(&b[..28])?, address(&b[28..56])?);
                (Some(56), None, Command::Resolve { source, destination })
            }
            21 => {
                let (source, destination) = (address(&b[16..144])?, address(&b[144..])?);
                (Some(0), None, Command::Resolve { source, destination })
            }
            4 => (Some(0), None, Command::ResolveRoute { timeout: n32(b, 4) }),
            5 => (Some(8), Some(0), Command::QueryRoute),
            19 => (Some(8), Some(0), Command::Query { option: n32(b, 12) }),
            6 => (Some(272), None, Command::Connect(parameters(&b[..272], &b[280..]))),
            7 => (Some(0), None, Command::Listen { backlog: n32(b, 4) }),
            8 => {
                let parameters = parameters(&b[8..280], &b[288..]);
                (Some(280), None, Command::Accept { uid: n64(b, 0), parameters })
            }
            9 => {
                let data = &b[8..8 + usize::from(b[4])];
                (Some(0), None, Command::Reject { reason: b[5], data })
            }
            10 => (Some(0), None, Command::Disconnect),
            11 => (Some(8), Some(0), Command::Attributes { state: n32(b, 12) }),
            12 => (None, Some(0), Command::GetEvent),
            14 => {
                let (level, option) = (n32(b, 12), n32(b, 16));
                let (value, length) = (n64(b, 0), n32(b, 20));
                (Some(8), None, Command::SetOption { level, option, value, length })
            }
            15 => (Some(0), None, Command::Notify { event: n32(b, 4) }),
            16 => {
                let address = address(&b[16..44])?;
                (Some(44), Some(0), Command::Join { uid: n64(b, 8), address })
            }
            22 => {
                let address = address(&b[24..])?;
                (Some(16), Some(0), Command::Join { uid: n64(b, 8), address })
            }
            17 => (Some(8), Some(0), Command::Leave),
            18 => (Some(8), Some(0), Command::Migrate { from: n32(b, 12) as c_int }),
            _ => {
                let (event, status, argument) = (n32(b, 8), n32(b, 12), array(b, 16));
                (Some(0), None, Command::WriteEvent { event, status, argument })
            }
        };
        Ok(Self {
            command,
            id: id.map_or(0, |at| n32(b, at)),
            response: response.map_or(0, |at| n64(b, at)),
            room: n16(header, 6),
        })
    }
}

fn parameters<'a>(b: &'a [u8], ece: &[u8]) -> Parameters<'a> {
    Parameters {
        qpn: n32(b, 0) & 0xff_ffff,
        data: &b[8..8 + usize::from(b[264])],
        srq: b[265] != 0,
        resources: b[266],
        depth: b[267],
        flow_control: b[268] != 0,
        retry: b[269].min(7),
        rnr_retry: b[270].min(7),
        is_valid: b[271] != 0,
        vendor: n32(ece, 0) & 0xff_ffff,
        modifier: n32(ece, 4),
    }
}

fn address(b: &[u8]) -> Result<Address, c_int> {
    const NONE: c_int = libc::AF_UNSPEC;
    const IB: c_int = 27;
    let port = u16::from_be_bytes(array(b, 2));
    match c_int::from(n16(b, 0)) {
        NONE => Ok(Address::None),
        libc::AF_INET => Ok(Address::Inet((Ipv4Addr::from(array::<4>(b, 4)), port).into())),
        libc::AF_INET6 => Ok(Address::Inet((Ipv6Addr::from(array::<16>(b, 8)), port).into())),
        IB => Ok(Address::Ib),
        _ => Err(libc::EAFNOSUPPORT),
    }
}

/// An answer that is made of zeros and what is put into it.
pub(super) struct Answer(pub(super) Vec<u8>);

impl Answer {
    pub(super) fn new(size: usize) -> Self {
        Self(vec![0; size])
    }

    pub(super) fn number(value: u32) -> Self {
        Self(value.to_ne_bytes().to_vec())
    }

    pub(super) fn nothing() -> Self {
        Self::new(0)
    }

    /// Leaves out bytes that do not fit: the code that fills an answer knows its size.
    pub(super) fn put(&mut self, at: usize, bytes: &[u8]) {
        let to = self.0.get_mut(at..).unwrap_or_default();
        to.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
    }

    pub(super) fn put32(&mut self, at: usize, value: u32) {
        self.put(at, &value.to_ne_bytes());
    }

    /// Writes a socket address, and returns its length.
    pub(super) fn put_address(&mut self, at: usize, address: Option<SocketAddr>) -> u16 {
        match address {
            None => 0,
            Some(SocketAddr::V4(v4)) => {
                self.put(at, &(libc::AF_INET as u16).to_ne_bytes());
                self.put(at + 2, &v4.port().to_be_bytes());
                self.put(at + 4, &v4.ip().octets());
                16
            }
            Some(SocketAddr::V6(v6)) => {
                self.put(at, &(libc::AF_INET6 as u16).to_ne_bytes());
                self.put(at + 2, &v6.port().to_be_bytes());
                self.put(at + 8, &v6.ip().octets());
                28
            }
        }
    }
}

/// `struct rdma_ucm_event_resp`
pub(super) struct EventAnswer(pub(super) Answer);

/// Where its union is: `struct rdma_ucm_conn_param`, or `struct rdma_ucm_ud_param`.
const PARAMETERS: usize = 20;

impl EventAnswer {
    pub(super) fn new(uid: u64, id: u32, kind: u32, status: i32) -> Self {
        let mut answer = Answer::new(336);
        answer.put(0, &uid.to_ne_bytes());
        answer.put32(8, id);
        answer.put32(12, kind);
        answer.put(16, &status.to_ne_bytes());
        Self(answer)
    }

    pub(super) fn argument(&mut self, argument: &[u8; 8]) {
        self.0.put(PARAMETERS, argument);
    }

    /// Private data of a connection, all that the message has room for.
    pub(super) fn data(&mut self, data: &[u8]) {
        self.0.put(PARAMETERS + 8, data);
        self.0.put(PARAMETERS + 264, &[data.len() as u8]);
    }

    /// The peer's queue pair, and what it asks for.
    pub(super) fn connection(&mut self, qpn: u32, parameters: [u8; 6], ece: (u32, u32)) {
        self.0.put32(PARAMETERS, qpn);
        self.0.put(PARAMETERS + 265, &parameters);
        self.0.put32(328, ece.0);
        self.0.put32(332, ece.1);
    }

    /// The queue pair of datagrams, and how to reach it.
    pub(super) fn datagrams(&mut self, qpn: u32, qkey: u32, vector: &[u8; 32]) {
        self.0.put32(PARAMETERS, qpn);
        self.0.put32(PARAMETERS + 4, qkey);
        self.0.put(PARAMETERS + 8, vector);
    }

    /// The private data of datagrams.
    pub(super) fn datagram_data(&mut self, data: &[u8]) {
        self.0.put(PARAMETERS + 40, data);
        self.0.put(PARAMETERS + 296, &[data.len() as u8]);
    }
}

/// The kind of a queue pair, as verbs number it.
pub(super) fn transport(kind: u8) -> Option<Transport> {
    match kind {
        2 => Some(Transport::Rc),
        3 => Some(Transport::Uc),
        4 => Some(Transport::Ud),
        9 => Some(Transport::XrcSend),
        10 => Some(Transport::XrcReceive),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(number: u32, body: &[u8]) -> Vec<u8> {
        let mut all = number.to_ne_bytes().to_vec();
        all.extend_from_slice(&[0, 0, 16, 0]);
        all.extend_from_slice(body);
        all
    }

    #[test]
    fn commands_that_are_too_short_or_unknown_are_refused() {
        for (number, length) in LENGTHS.into_iter().enumerate() {
            let whole =
                Request::parse(&bytes(number as u32, &vec![0; length]).clone()).map(|r| r.room);
            assert_eq!(whole, if length == 0 { Err(libc::ENOSYS) } else { Ok(16) }, "{number}");
            if length > 0 {
                let short = bytes(number as u32, &vec![0; length - 1]);
                assert_eq!(Request::parse(&short), Err(libc::EINVAL), "{number}");
            }
        }
        for (bytes, errno) in [(bytes(25, &[0; 400]), libc::EINVAL), (vec![0; 7], libc::EINVAL)] {
            assert_eq!(Request::parse(&bytes), Err(errno));
        }
    }

    /// Lengths of private data, which a program gives, name no byte outside the command.
    #[test]
    fn no_length_in_a_command_leads_out_of_it() {
        for number in 0..LENGTHS.len() as u32 {
            for fill in [1, 0x7f, 0xff] {
                let _ = Request::parse(&bytes(number, &vec![fill; 300]));
            }
        }
        let mut reject = [0; 264];
        (reject[4], reject[5]) = (255, 28);
        let reject = bytes(9, &reject);
        let Ok(Request { command: Command::Reject { data, reason }, .. }) = Request::parse(&reject)
        else {
            panic!()
        };
        assert_eq!((data.len(), reason), (255, 28));
    }

    #[test]
    fn addresses_are_of_two_families() {
        let mut bind = [0; 136];
        bind[8..16].copy_from_slice(&[2, 0, 0x12, 0x34, 10, 0, 0, 1]);
        let inet = bytes(20, &bind);
        let expected: SocketAddr = "10.0.0.1:4660".parse().unwrap();
        assert_eq!(Request::parse(&inet).unwrap().command, Command::Bind(Address::Inet(expected)));
        bind[8] = 1;
        assert_eq!(Request::parse(&bytes(20, &bind)), Err(libc::EAFNOSUPPORT));
        bind[8] = 27;
        assert_eq!(Request::parse(&bytes(20, &bind)).unwrap().command, Command::Bind(Address::Ib));
    }
}
