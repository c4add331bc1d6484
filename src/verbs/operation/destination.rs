use super::sealed::{AddedOn, Kind, Post, Posted, PostedOn, Request};
use super::{Adds, Posts};
use crate::base::{Error, Result, err_from_call, ffi};
#[cfg(feature = "mlx5")]
use crate::base::{debug, direct};
use crate::verbs::memory::{GatherBuffer, RemoteMemoryRegion};
#[cfg(feature = "mlx5")]
use crate::verbs::queue_pair::Dci;
#[cfg(feature = "efa")]
use crate::verbs::queue_pair::Srd;
use crate::verbs::queue_pair::{
    AddressHandle, AddressVector, Addressed, AddressedBy, SendOperations, Ud, XrcSend, function,
};

/// Where a request goes: see [`SendWorkRequest::to`](crate::SendWorkRequest::to).
///
/// Sealed: [`DatagramPeer`], [`XrcPeer`] and, with feature `mlx5`, `DcPeer` have it.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a destination",
    label = "a `DatagramPeer`, a `DcPeer` or an `XrcPeer` is needed here"
)]
pub trait Destination: sealed::Destination {}

impl Destination for DatagramPeer<'_> {}
impl Destination for XrcPeer {}
#[cfg(feature = "mlx5")]
impl Destination for DcPeer<'_> {}

pub(super) mod sealed {
    use super::*;

    pub trait Destination: Copy {
        /// The setter's bit in the extended interface.
        fn function(&self) -> u64;

        /// # Errors
        ///
        ///  - `EINVAL`: the number has more than 24 bits.
        fn check(&self) -> Result<()>;

        /// # Safety
        ///
        /// The pointer is to a request, which may be uninitialised.
        unsafe fn fill(&self, request: *mut ffi::ibv_send_wr);

        /// # Safety
        ///
        /// As for `Kind::emit`, with [`function`](Self::function).
        unsafe fn emit(&self, queue_pair: *mut ffi::ibv_qp_ex);
    }
}

/// The destination of a datagram, on UD and SRD queue pairs. The contract of posting covers the address handle too.
#[derive(Clone, Copy, Debug)]
#[doc(alias = "ibv_wr_set_ud_addr")]
pub struct DatagramPeer<'p> {
    /// The path to the peer.
    pub path: &'p AddressHandle<'p>,
    /// The number of the peer's queue pair, of 24 bits.
    pub number: u32,
    /// The Q_Key of the peer's queue pair.
    pub qkey: u32,
}

impl<'p> DatagramPeer<'p> {
    /// All members of the multicast group at the end of this path: number 0xffffff.
    pub fn group(path: &'p AddressHandle<'p>, qkey: u32) -> Self {
        Self { path, number: DatagramDestination::MEMBERS, qkey }
    }
}

/// `struct rdma_ud_param`: a [`DatagramPeer`] as a value, to keep, compare and pass on.
#[cfg_attr(
    feature = "async",
    doc = "
[`Loop::send_to`](crate::Loop::send_to) and [`AsyncDatagrams::send_to`](crate::AsyncDatagrams::send_to) find the
address handle themselves."
)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[doc(alias = "rdma_ud_param")]
pub struct DatagramDestination {
    /// The path to the peer, or the group.
    pub path: AddressVector,
    /// The number of the peer's queue pair, of 24 bits, or [`MEMBERS`](Self::MEMBERS).
    pub number: u32,
    /// The Q_Key of the peer's queue pair.
    pub qkey: u32,
}

impl DatagramDestination {
    /// The number that stands for all members of a multicast group.
    pub const MEMBERS: u32 = 0xff_ffff;

    /// With an address handle of its path.
    pub fn by<'p>(&self, path: &'p AddressHandle<'p>) -> DatagramPeer<'p> {
        DatagramPeer { path, number: self.number, qkey: self.qkey }
    }
}

/// The number of the peer's shared receive queue ([`SharedReceiveQueue::number`](crate::SharedReceiveQueue::number)),
/// for requests on sending XRC queue pairs.
///
/// A write, read or atomic may reach the memory of that queue's protection domain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[doc(alias = "ibv_wr_set_xrc_srqn")]
pub struct XrcPeer(pub u32);

/// `mlx5dv_wr_set_dc_addr`: the destination of a request on a DC initiator ([`Dci`](crate::queue_pair::Dci)): a
/// [`DcTarget`](crate::queue_pair::DcTarget) of the peer.
///
/// The contract of posting covers the address handle too.
#[cfg(feature = "mlx5")]
#[derive(Clone, Copy, Debug)]
#[doc(alias = "mlx5dv_wr_set_dc_addr")]
#[doc(alias = "mlx5dv_wr_set_dc_addr_stream")]
pub struct DcPeer<'p> {
    /// The path to the peer.
    pub path: &'p AddressHandle<'p>,
    /// The number of the target, of 24 bits.
    pub number: u32,
    /// The access key of the target.
    pub access_key: u64,
    /// One of the initiator's [streams](crate::queue_pair::DcStreams). The device carries out its requests in order.
    pub stream: Option<u16>,
}

/// A [`DcPeer`] as a value, to keep, compare and pass on.
#[cfg_attr(
    feature = "async",
    doc = "
[`Loop::post_to`](crate::Loop::post_to) finds the address handle itself."
)]
#[cfg(feature = "mlx5")]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct DcDestination {
    /// The path to the peer.
    pub path: AddressVector,
    /// The number of the target, of 24 bits.
    pub number: u32,
    /// The access key of the target.
    pub access_key: u64,
}

#[cfg(feature = "mlx5")]
debug! {
    DcDestination, self,
    // Without the secret key.
    path: self.path, number: self.number, ..
}

#[inline]
fn check_number(number: u32) -> Result<()> {
    if number > 0xff_ffff {
        let about = &[VERB, "the number of the remote queue pair"];
        return err_from_call(Error::beyond(about, number.into(), 0xff_ffff));
    }
    Ok(())
}

impl sealed::Destination for DatagramPeer<'_> {
    #[inline(always)]
    fn function(&self) -> u64 {
        function::SET_UD_ADDRESS
    }

    #[inline(always)]
    fn check(&self) -> Result<()> {
        check_number(self.number)
    }

    #[inline(always)]
    unsafe fn fill(&self, request: *mut ffi::ibv_send_wr) {
        // SAFETY: the caller vouches for the pointer.
        unsafe {
            (*request).wr.ud = ffi::ibv_send_wr__bindgen_ty_2__bindgen_ty_3 {
                ah: self.path.as_raw(),
                remote_qpn: self.number,
                remote_qkey: self.qkey,
            };
        }
    }

    #[inline(always)]
    unsafe fn emit(&self, queue_pair: *mut ffi::ibv_qp_ex) {
        // SAFETY: the caller vouches for queue pair and function.
        unsafe {
            let set = (*queue_pair).wr_set_ud_addr.unwrap_unchecked();
            set(queue_pair, self.path.as_raw(), self.number, self.qkey);
        }
    }
}

impl sealed::Destination for XrcPeer {
    #[inline(always)]
    fn function(&self) -> u64 {
        function::SET_XRC_SRQ
    }

    #[inline(always)]
    fn check(&self) -> Result<()> {
        Ok(())
    }

    #[inline(always)]
    unsafe fn fill(&self, request: *mut ffi::ibv_send_wr) {
        // SAFETY: the caller vouches for the pointer.
        unsafe { (*request).qp_type.xrc.remote_srqn = self.0 };
    }

    #[inline(always)]
    unsafe fn emit(&self, queue_pair: *mut ffi::ibv_qp_ex) {
        // SAFETY: the caller vouches for queue pair and function.
        unsafe { (*queue_pair).wr_set_xrc_srqn.unwrap_unchecked()(queue_pair, self.0) }
    }
}

#[cfg(feature = "mlx5")]
impl sealed::Destination for DcPeer<'_> {
    #[inline(always)]
    fn function(&self) -> u64 {
        if self.stream.is_some() { function::SET_DC_STREAM } else { function::SET_DC_ADDRESS }
    }

    #[inline(always)]
    fn check(&self) -> Result<()> {
        check_number(self.number)
    }

    #[inline(always)]
    unsafe fn fill(&self, _: *mut ffi::ibv_send_wr) {
        // A DC initiator always has the extended interface.
    }

    #[inline]
    unsafe fn emit(&self, queue_pair: *mut ffi::ibv_qp_ex) {
        let (path, number, key) = (self.path.as_raw(), self.number, self.access_key);
        // SAFETY: the caller vouches for queue pair and function, which is one of mlx5.
        unsafe {
            let direct = direct::mlx5dv_qp_ex_from_ibv_qp_ex(queue_pair);
            match self.stream {
                None => (*direct).wr_set_dc_addr.unwrap_unchecked()(direct, path, number, key),
                Some(stream) => {
                    let set = (*direct).wr_set_dc_addr_stream.unwrap_unchecked();
                    set(direct, path, number, key, stream);
                }
            }
        }
    }
}

/// A request with its destination: see [`SendWorkRequest::to`](crate::SendWorkRequest::to).
#[must_use = "a request does nothing until it is posted"]
#[derive(Clone, Copy, Debug)]
pub struct To<R, A> {
    request: R,
    destination: A,
}

impl<R, A> To<R, A> {
    #[inline(always)]
    pub(crate) fn new(request: R, destination: A) -> Self {
        Self { request, destination }
    }

    #[cfg(feature = "channel")]
    pub(crate) fn into_request(self) -> R {
        self.request
    }
}

/// The operation of a request with a destination.
#[derive(Clone, Copy, Debug)]
pub struct ToOperation<K, A>(K, A);

impl<R: Request<Operation: Kind>, A: Destination> Request for To<R, A> {
    type Operation = ToOperation<R::Operation, A>;
    type Buffer = R::Buffer;

    #[inline(always)]
    fn split(self) -> (Self::Operation, R::Buffer) {
        let (operation, buffer) = self.request.split();
        (ToOperation(operation, self.destination), buffer)
    }

    #[inline(always)]
    fn join(ToOperation(operation, destination): Self::Operation, buffer: R::Buffer) -> Self {
        Self { request: R::join(operation, buffer), destination }
    }

    #[inline(always)]
    fn list(buffer: &mut R::Buffer) -> Result<<R::Buffer as GatherBuffer>::List> {
        R::list(buffer)
    }
}

impl<R, A, T> Posts<T> for To<R, A>
where
    Self: Request<Operation: Post>,
    R: PostedOn<T>,
    T: AddressedBy<A>,
{
}

impl<R, A, T> Adds<T> for To<R, A>
where
    Self: Request<Operation: Kind>,
    R: AddedOn<T>,
    T: AddressedBy<A>,
{
}

impl<K: Kind, A: Destination> Kind for ToOperation<K, A> {
    const OPCODE: ffi::ibv_wr_opcode = K::OPCODE;
    const EXTENDED: SendOperations = K::EXTENDED;
    const HAS_DATA: bool = K::HAS_DATA;
    const NEEDS_PEER: bool = false;
    const WRITES: bool = K::WRITES;
    const RELIABLE: bool = K::RELIABLE;

    #[inline(always)]
    fn flags(&self) -> u32 {
        self.0.flags()
    }

    #[inline(always)]
    fn is_allowed(&self, reliable: bool, private_reads: bool) -> bool {
        self.0.is_allowed(reliable, private_reads)
    }

    #[inline(always)]
    fn fits(&self, bytes: u64) -> Result<()> {
        self.1.check()?;
        self.0.fits(bytes)
    }

    #[inline(always)]
    unsafe fn fill(&self, request: *mut ffi::ibv_send_wr) {
        // SAFETY: the caller vouches for the pointer.
        unsafe {
            self.0.fill(request);
            self.1.fill(request);
        }
    }

    #[inline(always)]
    unsafe fn emit(&self, queue_pair: *mut ffi::ibv_qp_ex) {
        // SAFETY: the caller vouches for the queue pair.
        unsafe { self.0.emit(queue_pair) }
    }

    #[inline(always)]
    fn destination_function(&self) -> u64 {
        self.1.function()
    }

    #[inline(always)]
    unsafe fn emit_destination(&self, queue_pair: *mut ffi::ibv_qp_ex) {
        // SAFETY: the caller vouches for the queue pair.
        unsafe { self.1.emit(queue_pair) }
    }
}

impl<K: Posted> Posted for ToOperation<K, DatagramPeer<'_>> {}
impl<K: Posted> Posted for ToOperation<K, XrcPeer> {}

impl Addressed<DatagramPeer<'_>> for Ud {}
#[cfg(feature = "efa")]
impl Addressed<DatagramPeer<'_>> for Srd {}
impl Addressed<XrcPeer> for XrcSend {}
#[cfg(feature = "mlx5")]
impl Addressed<DcPeer<'_>> for Dci {}

const VERB: &str = "ibv_post_send";

/// In bytes, on both sides.
const ATOMIC: u64 = 8;

#[inline]
pub(crate) fn check_remote(remote: &RemoteMemoryRegion, length: u64) -> Result<()> {
    if length > remote.length() {
        return err_from_call(Error::beyond(TOO_SMALL, length, remote.length()));
    }
    Ok(())
}

const TOO_SMALL: &[&str; 2] = &[VERB, "the length, for the remote region,"];

#[inline]
pub(crate) fn check_atomic(remote: &RemoteMemoryRegion, local: u64) -> Result<()> {
    if local != ATOMIC || remote.length() < ATOMIC || !remote.address().is_multiple_of(ATOMIC) {
        return err_from_call(not_atomic(remote, local));
    }
    Ok(())
}

#[cold]
fn not_atomic(remote: &RemoteMemoryRegion, local: u64) -> Error {
    if local != ATOMIC {
        let what = "the length in bytes of an atomic's buffer";
        Error::out_of_range(VERB, what, local, ATOMIC as u32, ATOMIC)
    } else if remote.length() < ATOMIC {
        Error::beyond(TOO_SMALL, ATOMIC, remote.length())
    } else {
        Error::invalid(VERB, "the remote address of an atomic is not a multiple of 8")
    }
}

#[inline]
pub(crate) fn rdma(remote: &RemoteMemoryRegion) -> ffi::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 {
    ffi::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 {
        remote_addr: remote.address(),
        rkey: remote.rkey(),
    }
}

#[inline]
pub(crate) fn atomic(
    remote: &RemoteMemoryRegion,
    compare_add: u64,
    swap: u64,
) -> ffi::ibv_send_wr__bindgen_ty_2__bindgen_ty_2 {
    ffi::ibv_send_wr__bindgen_ty_2__bindgen_ty_2 {
        remote_addr: remote.address(),
        compare_add,
        swap,
        rkey: remote.rkey(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_has_24_bits() {
        assert!(check_number(0xff_ffff).is_ok());
        let error = check_number(0x100_0000).unwrap_err().to_string();
        assert!(error.contains("the number of the remote queue pair"), "{error}");
    }
}

#[cfg(test)]
mod remote_tests {
    use super::*;

    fn remote(address: u64, length: u64) -> RemoteMemoryRegion {
        RemoteMemoryRegion::new(address, length, 0xabc).unwrap()
    }

    #[test]
    fn a_message_fits_into_the_remote_region() {
        assert!(check_remote(&remote(0x7000, 24), 24).is_ok());
        assert!(check_remote(&remote(0x7000, 0), 0).is_ok());
        let error = check_remote(&remote(0x7000, 24), 25).unwrap_err().to_string();
        let text = "the length, for the remote region, is 25, and must be within 0..=24";
        assert!(error.ends_with(text), "{error}");
    }

    #[test]
    fn an_atomic_has_8_aligned_bytes_on_both_sides() {
        assert!(check_atomic(&remote(0x7000, 8), 8).is_ok());
        for (region, local, text) in [
            (remote(0x7000, 8), 4, "of an atomic's buffer is 4, and must be within 8..=8"),
            (remote(0x7000, 7), 8, "must be within 0..=7"),
            (remote(0x7004, 8), 8, "not a multiple of 8"),
        ] {
            let error = check_atomic(&region, local).unwrap_err().to_string();
            assert!(error.ends_with(text), "{error}");
        }
    }
}
