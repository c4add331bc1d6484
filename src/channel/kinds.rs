//! The kinds of requests on the send queue.

use super::operation::Limits;
use crate::error::Result;
use crate::ffi;
use crate::memory::RemoteMemoryRegion;
use crate::queue_pair::work_request::remote::{atomic, check_atomic, check_remote, rdma};

/// The kind of a request on the send queue.
pub(super) trait Kind: Copy {
    /// The index of its prepared request.
    const INDEX: usize;
    /// Whether it needs a reliable connection.
    const RELIABLE: bool;

    /// Whether the transport has it.
    #[inline]
    fn is_allowed(&self, limits: &Limits) -> bool {
        !Self::RELIABLE || limits.reliable
    }

    /// Checks that the peer's memory has room for `bytes` bytes.
    fn fits(&self, bytes: u64) -> Result<()>;

    /// Writes the fields that this kind has beyond the common ones.
    fn fill(&self, request: &mut ffi::ibv_send_wr);
}

#[inline]
fn immediate(request: &mut ffi::ibv_send_wr, value: u32) {
    request.__bindgen_anon_1.imm_data = value.to_be();
}

/// Defines kinds of requests: the opcode, whether it needs a reliable connection, the fields, the check
/// of the peer's memory, and how the fields are written to the request.
macro_rules! kinds {
    ($($(#[$meta:meta])* $name:ident { $($field:ident: $type:ty),* } = $opcode:ident,
       reliable $reliable:literal, $fits:expr, $fill:expr $(, allowed $allowed:expr)?;)+) => {
        /// The kinds, in order.
        #[derive(Clone, Copy)]
        enum Index { $($name),+ }

        /// The opcode of each kind.
        pub(super) const OPCODES: [ffi::ibv_wr_opcode; KINDS] = [$(ffi::ibv_wr_opcode::$opcode),+];

        /// The number of kinds.
        pub(super) const KINDS: usize = [$(Index::$name),+].len();

        $(
        $(#[$meta])*
        #[derive(Clone, Copy)]
        pub(super) struct $name { $(pub(crate) $field: $type),* }

        impl Kind for $name {
            const INDEX: usize = Index::$name as usize;
            const RELIABLE: bool = $reliable;

            $(
            #[inline]
            fn is_allowed(&self, limits: &Limits) -> bool {
                let allowed: fn(&Self, &Limits) -> bool = $allowed;
                allowed(self, limits)
            }
            )?

            #[inline]
            fn fits(&self, bytes: u64) -> Result<()> {
                let fits: fn(&Self, u64) -> Result<()> = $fits;
                fits(self, bytes)
            }

            #[inline]
            fn fill(&self, request: &mut ffi::ibv_send_wr) {
                let fill: fn(&Self, &mut ffi::ibv_send_wr) = $fill;
                fill(self, request)
            }
        }
    )+};
}

kinds! {
    Send {} = IBV_WR_SEND, reliable false, |_, _| Ok(()), |_, _| {};
    SendWithImmediate { immediate: u32 } = IBV_WR_SEND_WITH_IMM, reliable false,
        |_, _| Ok(()), |this, request| immediate(request, this.immediate);
    Write { remote: RemoteMemoryRegion } = IBV_WR_RDMA_WRITE, reliable false,
        |this, bytes| check_remote(&this.remote, bytes), |this, request| request.wr.rdma = rdma(&this.remote);
    WriteWithImmediate { remote: RemoteMemoryRegion, immediate: u32 } = IBV_WR_RDMA_WRITE_WITH_IMM,
        reliable false,
        |this, bytes| check_remote(&this.remote, bytes),
        |this, request| {
            request.wr.rdma = rdma(&this.remote);
            immediate(request, this.immediate);
        };
    /// `shared`: peers may be allowed to write the memory that it fills, as far as its type tells.
    Read { remote: RemoteMemoryRegion, shared: bool } = IBV_WR_RDMA_READ, reliable true,
        |this, bytes| check_remote(&this.remote, bytes), |this, request| request.wr.rdma = rdma(&this.remote),
        allowed |this, limits| if this.shared { limits.reliable } else { limits.private_reads };
    CompareSwap { remote: RemoteMemoryRegion, compare: u64, swap: u64 } = IBV_WR_ATOMIC_CMP_AND_SWP,
        reliable true,
        |this, bytes| check_atomic(&this.remote, bytes),
        |this, request| request.wr.atomic = atomic(&this.remote, this.compare, this.swap);
    FetchAdd { remote: RemoteMemoryRegion, add: u64 } = IBV_WR_ATOMIC_FETCH_AND_ADD,
        reliable true,
        |this, bytes| check_atomic(&this.remote, bytes),
        |this, request| request.wr.atomic = atomic(&this.remote, this.add, 0);
}
