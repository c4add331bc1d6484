//! The counters of a device.

/// Counts since the device was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Packets that were sent, including those that were sent again.
    pub packets_sent: u64,
    /// All packets that arrived.
    pub packets_received: u64,
    /// Packets that were not RoCE v2, or had a wrong invariant CRC.
    pub packets_malformed: u64,
    /// Packets for a queue pair that does not exist, or from an address that is not its peer's.
    pub packets_unexpected: u64,
    /// The number of times that a queue pair sent again: a timer expired, or the peer missed a packet.
    pub retransmissions: u64,
    /// Unreliable messages for which no receive was posted. This counter and the following ones are of packets that are
    /// dropped without an answer, for a reason that a program can mend: in [strict mode](crate::Builder::strict) the first of
    /// each kind and queue pair is a line on the standard error output.
    pub dropped_without_receive: u64,
    /// Unreliable messages that were longer than their receive. A datagram needs 40 bytes more than its data.
    pub dropped_too_long: u64,
    /// Datagrams with another Q_Key than the queue pair's, and unreliable writes that the R_Key, the region's rights or the
    /// queue pair's do not allow.
    pub dropped_wrong_key: u64,
    /// Unreliable packets whose length does not fit the queue pair's MTU: the two ends have different ones.
    pub dropped_wrong_mtu: u64,
    /// Requests for a queue pair in a state in which it receives nothing.
    pub dropped_wrong_state: u64,
    /// Requests for a queue pair that does not exist, or is of another transport.
    pub dropped_without_queue_pair: u64,
    /// Requests from an address that is not that of the queue pair's peer.
    pub dropped_wrong_peer: u64,
    /// Packets of another partition.
    pub dropped_wrong_partition: u64,
    /// Datagrams to a multicast group that no queue pair is attached to, or to a group with another queue pair number than
    /// 0xffffff. A device of a simulated network counts those that it has sent too.
    pub dropped_without_group: u64,
    /// Requests that this device has carried out in the memory of the peer's process: see
    /// [`Builder::one_sided`](crate::Builder::one_sided).
    pub one_sided: u64,
    /// Sends whose data the program had changed when they completed: see [`Builder::strict`](crate::Builder::strict).
    pub changed_sends: u64,
}

/// Counts of one port since the device was created, as monitoring reads them. Requests that the device has carried out
/// [itself](Counters::one_sided) are not among them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PortCounters {
    /// Packets that were sent, including those that were sent again.
    pub packets_sent: u64,
    /// Their bytes, from the base transport header to the invariant CRC.
    pub bytes_sent: u64,
    /// All packets that arrived. A device with several ports counts those to a multicast group at the first.
    pub packets_received: u64,
    /// Their bytes.
    pub bytes_received: u64,
    /// Packets that were not RoCE v2, or had a wrong invariant CRC.
    pub packets_malformed: u64,
}
