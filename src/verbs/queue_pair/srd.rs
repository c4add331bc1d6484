//! SRD (feature `efa`): the reliable datagrams of EFA.

use super::address_vector::AddressHandle;
use super::builder::QueuePairBuilder;
use super::srd_options::{CREATE, SrdOptions};
use super::transport::{DriverTransport, Srd, Transport};
use crate::base::{Error, Result, direct, ffi};
use crate::verbs::device::efa::{self, EfaAttributes, EfaCapabilities};
use crate::verbs::queue_pair::SendOperations;

impl<'res> QueuePairBuilder<'res, Srd> {
    /// Sets the options of EFA's SRD (scalable reliable datagram), of type [`Driver`](crate::QueuePairType::Driver).
    /// [`build`](Self::build) calls `efadv_create_qp_ex(3)`, and fails with `EOPNOTSUPP` on
    /// other devices.
    ///
    /// As on UD, there is no peer: [`activate`](crate::PreparedQueuePair::activate) makes the queue pair ready, and
    /// each request goes to a [`DatagramPeer`](crate::operation::DatagramPeer). Unlike UD:
    ///
    /// - Each message arrives, or its completion reports the failure.
    /// - Messages arrive **in any order**.
    /// - No room for a global route header precedes a message.
    /// - There are reads and writes, where [the device has them](crate::device::EfaAttributes::send_operations).
    /// - There are no shared receive queues.
    ///
    /// There are no atomics and no memory windows. Without [`extended`](Self::extended), the queue pair gets all
    /// operations that the device has for [`batch`](crate::QueuePair::batch). [`post`](crate::QueuePair::post) can only
    /// send. The limits of the sizes are those of [`Context::query_efa`](crate::Context::query_efa), higher than those
    /// of [`Context::query_device`](crate::Context::query_device).
    ///
    /// ```no_run
    /// use ibverbs::queue_pair::Srd;
    /// use ibverbs::{WriteWorkRequest, operation::DatagramPeer, queue_pair::AddressVector};
    ///
    /// # fn main() -> ibverbs::Result<()> {
    /// let context = ibverbs::open("rdmap0s6")?;
    /// let domain = context.alloc_pd()?;
    /// let region = domain.allocate::<u8>(4096)?;
    /// let queue = context.create_cq(64)?;
    /// let prepared = domain.create_qp(&queue, &queue, Srd).max_send_wr(32).build()?;
    /// println!("tell the peer: {}", prepared.endpoint());
    /// # let shared = domain.allocate_shared::<u8>(1024, ibverbs::AccessFlags::REMOTE_WRITE)?;
    /// # let (peer, qkey, window) = (prepared.endpoint(), 0x1111_1111, shared.remote());
    /// let mut queue_pair = prepared.activate()?;
    ///
    /// // The peer has sent its endpoint, its Q_Key and a remote region.
    /// let path = domain.create_ah(&AddressVector::to_peer(&context, 1, &peer)?)?;
    /// let to = DatagramPeer { path: &path, number: peer.num(), qkey };
    /// let write = WriteWorkRequest::new(region.gather_element(..1024)?, window).to(to);
    /// // SAFETY: region and address handle stay until the completion of 7 was polled.
    /// unsafe { queue_pair.batch(|batch| batch.add(write, 7))? };
    /// # Ok(())
    /// # }
    /// ```
    #[doc(alias = "efadv_create_qp_ex")]
    #[doc(alias = "efadv_create_driver_qp")]
    pub fn srd(mut self, options: SrdOptions) -> Self {
        self.driver = Some(DriverTransport::Srd { options, rnr_retry: false });
        self
    }
}

impl<T: Transport> QueuePairBuilder<'_, T> {
    pub(super) fn prepare_srd(&mut self, options: SrdOptions) -> Result<()> {
        let device = self.parents.domain.context().query_efa()?;
        if self.inline_if_possible {
            let inline = &mut self.capacities.max_inline_data;
            *inline = (*inline).min(device.max_inline_data());
        }
        let c = &self.capacities;
        let limits = [
            ("max_send_wr", c.max_send_wr, device.max_send_wr()),
            ("max_recv_wr", c.max_recv_wr, device.max_recv_wr()),
            ("max_send_sge", c.max_send_sge, device.max_send_sge()),
            ("max_recv_sge", c.max_recv_sge, device.max_recv_sge()),
            ("max_inline_data", c.max_inline_data, device.max_inline_data()),
        ];
        for (what, value, high) in limits {
            Error::within(CREATE, what, value, 0, high)?;
        }
        Error::invalid_if(self.parents.srq.is_some(), CREATE, "EFA has no shared receive queues")?;
        let capabilities = device.capabilities();
        if options.unsolicited_write_receive
            && !capabilities.contains(EfaCapabilities::UNSOLICITED_WRITE_RECEIVE)
        {
            let reason = "the device cannot receive writes without consuming a receive";
            return Err(Error::with_reason(CREATE, libc::EOPNOTSUPP, reason));
        }
        let rnr_retry = capabilities.contains(EfaCapabilities::RNR_RETRY);
        self.driver = Some(DriverTransport::Srd { options, rnr_retry });
        self.extended.get_or_insert((device.send_operations(), false));
        Ok(())
    }
}

impl AddressHandle<'_> {
    /// `efadv_query_ah(3)`: the EFA device's number of this address handle. The completion of a
    /// receive names the sender's handle by it
    /// ([`WorkSuccess::source_lid`](crate::completion::WorkSuccess::source_lid)).
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`: this is no EFA device.
    #[doc(alias = "efadv_query_ah")]
    pub fn efa_number(&self) -> Result<u16> {
        const VERB: &str = "efadv_query_ah";
        let mut raw = ffi::efadv_ah_attr::default();
        // SAFETY: the handle is live.
        let returned = unsafe { direct::efadv_query_ah(self.as_raw(), &mut raw) };
        ffi::status(VERB, returned).map_err(|error| efa::explain(VERB, error))?;
        Ok(raw.ahn)
    }
}

impl EfaAttributes {
    /// The operations of an SRD queue pair on this device: sends, and the reads and writes that it has.
    pub fn send_operations(&self) -> SendOperations {
        use SendOperations as S;

        let (capabilities, mut operations) =
            (self.capabilities(), S::SEND | S::SEND_WITH_IMMEDIATE);
        operations.set(S::READ, capabilities.contains(EfaCapabilities::RDMA_READ));
        let writes = capabilities.contains(EfaCapabilities::RDMA_WRITE);
        operations.set(S::WRITE | S::WRITE_WITH_IMMEDIATE, writes);
        operations
    }
}
