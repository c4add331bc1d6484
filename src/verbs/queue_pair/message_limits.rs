//! The limits that every layer checks before it posts. mlx5, mlx4 and rxe leave the checks to the device: its
//! completion says less, and the connection has ended.

use crate::base::ffi::ibv_wr_opcode as Opcode;
#[cfg(debug_assertions)]
use crate::base::mr_tracker::{DomainId, is_foreign};
use crate::base::{Error, Result, err_from_call, ffi};
use crate::verbs::domain::ProtectionDomain;
use crate::verbs::memory::PIECE;

const VERB: &str = "ibv_post_send";

pub(crate) const LONGEST_MESSAGE: u32 = 1 << 31;

/// Bytes that every port can send.
pub(crate) const ALWAYS_SENT: u64 = 256;

#[derive(Clone, Copy, Debug)]
pub struct MessageLimits {
    max_inline_data: u32,
    /// The port's `max_msg_sz`; for datagrams, its MTU.
    longest: u32,
    /// EFA limits reads and writes separately.
    longest_rdma: u32,
    /// On iWARP often 1.
    max_sge_rd: u32,
    is_datagram: bool,
    #[cfg(debug_assertions)]
    domain: Option<DomainId>,
}

impl MessageLimits {
    /// The limits while the queue pair is not known yet.
    pub(crate) const UNKNOWN: Self = Self::new(u32::MAX, 0);

    /// `max_msg_sz` is 0 if unknown.
    pub(crate) const fn new(max_inline_data: u32, max_msg_sz: u32) -> Self {
        let longest = if max_msg_sz == 0 || max_msg_sz > LONGEST_MESSAGE {
            LONGEST_MESSAGE
        } else {
            max_msg_sz
        };
        let (longest_rdma, max_sge_rd) = (longest, u32::MAX);
        Self {
            max_inline_data,
            longest,
            longest_rdma,
            max_sge_rd,
            is_datagram: false,
            #[cfg(debug_assertions)]
            domain: None,
        }
    }

    pub(crate) fn of_domain(self, _domain: &ProtectionDomain<'_>) -> Self {
        Self {
            // SAFETY: the domain is live.
            #[cfg(debug_assertions)]
            domain: Some(unsafe { DomainId::of(_domain.as_raw()) }),
            ..self
        }
    }

    /// Only debug builds check.
    #[inline(always)]
    pub(crate) fn check_domain(&self, _verb: &'static str, _list: &[ffi::ibv_sge]) -> Result<()> {
        #[cfg(debug_assertions)]
        if let Some(domain) = self.domain {
            let reason = "the memory is registered in another protection domain, or on another device, than that of the \
                          queue pair: register it in the domain that the queue pair is made with";
            Error::invalid_if(is_foreign(domain, _list), _verb, reason)?;
        }
        Ok(())
    }

    /// `max_sge_rd` is 0 if unknown.
    pub(crate) fn reads(self, max_sge_rd: u32) -> Self {
        Self { max_sge_rd: if max_sge_rd == 0 { u32::MAX } else { max_sge_rd }, ..self }
    }

    pub(crate) fn inline(self, max_inline_data: u32) -> Self {
        Self { max_inline_data, ..self }
    }

    pub(crate) fn datagram(mut self, mtu: u32) -> Self {
        self.longest = self.longest.min(mtu);
        self.is_datagram = true;
        self
    }

    #[cfg(feature = "efa")]
    pub(crate) fn rdma(mut self, longest: u32) -> Self {
        self.longest_rdma = longest;
        self
    }

    #[inline(always)]
    pub(crate) fn check_length(&self, opcode: Opcode, length: u64) -> Result<()> {
        match Moves::by(opcode) {
            // The compiler evaluates the first comparison where it knows the length.
            Some(moves) if length > ALWAYS_SENT && length > self.most(moves).into() => {
                err_from_call(self.too_long(length, self.most(moves)))
            }
            _ => Ok(()),
        }
    }

    #[inline(always)]
    fn most(&self, moves: Moves) -> u32 {
        match moves {
            Moves::Rdma => self.longest_rdma,
            Moves::Message => self.longest,
        }
    }

    #[inline]
    pub(crate) fn check_pieces_of_read(&self, count: usize) -> Result<()> {
        if count > self.max_sge_rd as usize {
            let about = &[VERB, "by the device's max_sge_rd, the number of pieces of a read"];
            return err_from_call(Error::beyond(about, count as u64, self.max_sge_rd.into()));
        }
        Ok(())
    }

    #[inline]
    pub(crate) fn check_message(&self, length: u64) -> Result<()> {
        self.check_length(Opcode::IBV_WR_SEND, length)
    }

    #[inline]
    pub(crate) fn check_inline(&self, length: u64) -> Result<()> {
        if length > self.max_inline_data.into() {
            let about = &[VERB, "by max_inline_data, the length of inline data"];
            return err_from_call(Error::beyond(about, length, self.max_inline_data.into()));
        }
        Ok(())
    }

    #[cold]
    #[inline(never)]
    fn too_long(&self, length: u64, most: u32) -> Error {
        let what = if self.is_datagram {
            "by the port's MTU, which a datagram has to fit, the length of the message"
        } else if most == self.longest {
            "by the port's max_msg_sz, the length of the message"
        } else {
            "by the device's max_rdma_size, the length of the message"
        };
        Error::out_of_range(VERB, what, length, 0, most.into())
    }

    /// A piece too long for C exceeds the message limit too: the error names that.
    #[cold]
    #[inline(never)]
    pub(crate) fn explain(&self, opcode: Opcode, error: Error) -> Error {
        match (error.excess(PIECE), Moves::by(opcode)) {
            (Some(length), Some(moves)) => self.too_long(length, self.most(moves)),
            _ => error,
        }
    }
}

#[derive(Clone, Copy)]
enum Moves {
    Message,
    Rdma,
}

impl Moves {
    /// Atomics have 8 bytes; segmented sends become many messages.
    const fn by(opcode: Opcode) -> Option<Self> {
        match opcode {
            Opcode::IBV_WR_SEND | Opcode::IBV_WR_SEND_WITH_IMM | Opcode::IBV_WR_SEND_WITH_INV => {
                Some(Self::Message)
            }
            Opcode::IBV_WR_RDMA_WRITE
            | Opcode::IBV_WR_RDMA_WRITE_WITH_IMM
            | Opcode::IBV_WR_RDMA_READ => Some(Self::Rdma),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smaller_limit_counts_and_is_named() {
        for (limits, most, name) in [
            (MessageLimits::new(0, 0), 1 << 31, "max_msg_sz"),
            (MessageLimits::new(0, u32::MAX), 1 << 31, "max_msg_sz"),
            (MessageLimits::new(0, 8928), 8928, "max_msg_sz"),
            (MessageLimits::new(0, 1 << 30).datagram(4096), 4096, "the port's MTU"),
        ] {
            assert_eq!(limits.check_message(most), Ok(()));
            let error = limits.check_message(most + 1).unwrap_err().to_string();
            let range = format!("is {}, and must be within 0..={most}", most + 1);
            assert!(error.contains(name) && error.contains(&range), "{error}");
        }
        let one = MessageLimits::new(0, 0).reads(1);
        let error = one.check_pieces_of_read(2).unwrap_err().to_string();
        assert!(error.contains("by the device's max_sge_rd, the number of pieces of a read is 2"));
        assert_eq!(MessageLimits::new(0, 0).reads(0).check_pieces_of_read(99), Ok(()));
    }
}
