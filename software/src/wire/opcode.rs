//! The opcodes of the base transport header: three bits of transport, five of operation.

pub(crate) const RC: u8 = 0x00;
pub(crate) const UC: u8 = 0x20;
pub(crate) const UD: u8 = 0x60;
pub(crate) const XRC: u8 = 0xa0;
/// These two are of the ranges that the specification leaves to manufacturers: only devices of software know them.
pub(crate) const SRD: u8 = 0xc0;
pub(crate) const DC: u8 = 0xe0;

/// The bits of the transport.
pub(crate) const TRANSPORT: u8 = 0xe0;

pub(crate) const SEND_FIRST: u8 = 0;
pub(crate) const SEND_MIDDLE: u8 = 1;
pub(crate) const SEND_LAST: u8 = 2;
pub(crate) const SEND_LAST_IMM: u8 = 3;
pub(crate) const SEND_ONLY: u8 = 4;
pub(crate) const SEND_ONLY_IMM: u8 = 5;
pub(crate) const WRITE_FIRST: u8 = 6;
pub(crate) const WRITE_MIDDLE: u8 = 7;
pub(crate) const WRITE_LAST: u8 = 8;
pub(crate) const WRITE_LAST_IMM: u8 = 9;
pub(crate) const WRITE_ONLY: u8 = 10;
pub(crate) const WRITE_ONLY_IMM: u8 = 11;
pub(crate) const READ_REQUEST: u8 = 12;
pub(crate) const READ_FIRST: u8 = 13;
pub(crate) const READ_MIDDLE: u8 = 14;
pub(crate) const READ_LAST: u8 = 15;
pub(crate) const READ_ONLY: u8 = 16;
pub(crate) const ACK: u8 = 17;
pub(crate) const ATOMIC_ACK: u8 = 18;
pub(crate) const COMPARE_SWAP: u8 = 19;
pub(crate) const FETCH_ADD: u8 = 20;
pub(crate) const SEND_LAST_INVALIDATE: u8 = 22;
pub(crate) const SEND_ONLY_INVALIDATE: u8 = 23;
pub(crate) const FLUSH: u8 = 28;
pub(crate) const ATOMIC_WRITE: u8 = 29;
/// The sender's flow has ended.
pub(crate) const DISCONNECT: u8 = 31;

/// The name of an opcode, as the InfiniBand specification has it.
pub(crate) fn name(opcode: u8) -> String {
    let transport = match opcode & TRANSPORT {
        RC => "RC",
        UC => "UC",
        UD => "UD",
        XRC => "XRC",
        SRD => "SRD",
        DC => "DC",
        _ => return format!("opcode {opcode:#04x}"),
    };
    let operation = match opcode & !TRANSPORT {
        SEND_FIRST => "SEND_FIRST",
        SEND_MIDDLE => "SEND_MIDDLE",
        SEND_LAST => "SEND_LAST",
        SEND_LAST_IMM => "SEND_LAST_WITH_IMMEDIATE",
        SEND_ONLY => "SEND_ONLY",
        SEND_ONLY_IMM => "SEND_ONLY_WITH_IMMEDIATE",
        WRITE_FIRST => "RDMA_WRITE_FIRST",
        WRITE_MIDDLE => "RDMA_WRITE_MIDDLE",
        WRITE_LAST => "RDMA_WRITE_LAST",
        WRITE_LAST_IMM => "RDMA_WRITE_LAST_WITH_IMMEDIATE",
        WRITE_ONLY => "RDMA_WRITE_ONLY",
        WRITE_ONLY_IMM => "RDMA_WRITE_ONLY_WITH_IMMEDIATE",
        READ_REQUEST => "RDMA_READ_REQUEST",
        READ_FIRST => "RDMA_READ_RESPONSE_FIRST",
        READ_MIDDLE => "RDMA_READ_RESPONSE_MIDDLE",
        READ_LAST => "RDMA_READ_RESPONSE_LAST",
        READ_ONLY => "RDMA_READ_RESPONSE_ONLY",
        ACK => "ACKNOWLEDGE",
        ATOMIC_ACK => "ATOMIC_ACKNOWLEDGE",
        COMPARE_SWAP => "COMPARE_SWAP",
        FETCH_ADD => "FETCH_ADD",
        SEND_LAST_INVALIDATE => "SEND_LAST_WITH_INVALIDATE",
        SEND_ONLY_INVALIDATE => "SEND_ONLY_WITH_INVALIDATE",
        FLUSH => "FLUSH",
        ATOMIC_WRITE => "ATOMIC_WRITE",
        DISCONNECT => "DISCONNECT",
        _ => return format!("{transport} opcode {opcode:#04x}"),
    };
    format!("{transport} {operation}")
}

/// The position of a packet of a SEND or a WRITE in its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) write: bool,
    pub(crate) first: bool,
    pub(crate) last: bool,
    pub(crate) immediate: bool,
    pub(crate) invalidate: bool,
}

impl Part {
    /// `None`: the operation is neither SEND nor WRITE.
    pub(crate) fn of(operation: u8) -> Option<Self> {
        let (write, first, last, immediate, invalidate) = match operation {
            SEND_FIRST => (false, true, false, false, false),
            SEND_MIDDLE => (false, false, false, false, false),
            SEND_LAST => (false, false, true, false, false),
            SEND_LAST_IMM => (false, false, true, true, false),
            SEND_ONLY => (false, true, true, false, false),
            SEND_ONLY_IMM => (false, true, true, true, false),
            WRITE_FIRST => (true, true, false, false, false),
            WRITE_MIDDLE => (true, false, false, false, false),
            WRITE_LAST => (true, false, true, false, false),
            WRITE_LAST_IMM => (true, false, true, true, false),
            WRITE_ONLY => (true, true, true, false, false),
            WRITE_ONLY_IMM => (true, true, true, true, false),
            SEND_LAST_INVALIDATE => (false, false, true, false, true),
            SEND_ONLY_INVALIDATE => (false, true, true, false, true),
            _ => return None,
        };
        Some(Self { write, first, last, immediate, invalidate })
    }

    pub(crate) fn operation(self) -> u8 {
        let Self { write, first, last, immediate, invalidate } = self;
        match (write, first, last) {
            (false, true, false) => SEND_FIRST,
            (false, false, false) => SEND_MIDDLE,
            (false, false, true) if invalidate => SEND_LAST_INVALIDATE,
            (false, false, true) if immediate => SEND_LAST_IMM,
            (false, false, true) => SEND_LAST,
            (false, true, true) if invalidate => SEND_ONLY_INVALIDATE,
            (false, true, true) if immediate => SEND_ONLY_IMM,
            (false, true, true) => SEND_ONLY,
            (true, true, false) => WRITE_FIRST,
            (true, false, false) => WRITE_MIDDLE,
            (true, false, true) if immediate => WRITE_LAST_IMM,
            (true, false, true) => WRITE_LAST,
            (true, true, true) if immediate => WRITE_ONLY_IMM,
            (true, true, true) => WRITE_ONLY,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_and_operations_agree() {
        let mut parts = 0;
        for operation in 0..=0x1f {
            if let Some(part) = Part::of(operation) {
                assert_eq!(part.operation(), operation);
                parts += 1;
            }
        }
        assert_eq!(parts, 14);
    }

    #[test]
    fn operations_have_the_names_of_the_specification() {
        let names = [
            "SEND_FIRST",
            "SEND_MIDDLE",
            "SEND_LAST",
            "SEND_LAST_WITH_IMMEDIATE",
            "SEND_ONLY",
            "SEND_ONLY_WITH_IMMEDIATE",
            "RDMA_WRITE_FIRST",
            "RDMA_WRITE_MIDDLE",
            "RDMA_WRITE_LAST",
            "RDMA_WRITE_LAST_WITH_IMMEDIATE",
            "RDMA_WRITE_ONLY",
            "RDMA_WRITE_ONLY_WITH_IMMEDIATE",
            "RDMA_READ_REQUEST",
            "RDMA_READ_RESPONSE_FIRST",
            "RDMA_READ_RESPONSE_MIDDLE",
            "RDMA_READ_RESPONSE_LAST",
            "RDMA_READ_RESPONSE_ONLY",
            "ACKNOWLEDGE",
            "ATOMIC_ACKNOWLEDGE",
            "COMPARE_SWAP",
            "FETCH_ADD",
            "opcode 0x15",
            "SEND_LAST_WITH_INVALIDATE",
            "SEND_ONLY_WITH_INVALIDATE",
        ];
        for (number, operation) in (0..).zip(names) {
            assert_eq!(name(RC | number), format!("RC {operation}"));
        }
        let others =
            [UC | FLUSH, UD | ATOMIC_WRITE, XRC | SEND_ONLY, 0x5f, SRD | ACK, 0xff].map(name);
        let names = ["UC FLUSH", "UD ATOMIC_WRITE", "XRC SEND_ONLY", "opcode 0x5f"];
        assert_eq!(others[..4], names);
        assert_eq!(others[4..], ["SRD ACKNOWLEDGE", "DC DISCONNECT"]);
    }
}
