use ibverbs::{
    IndirectionTable, ProtectionDomain, QueuePairType, ReceiveHash, ReceiveScalingQueuePair, Result,
};

pub fn case(domain: &ProtectionDomain<'_>, table: IndirectionTable<'_>, hash: &ReceiveHash) -> Result<()> {
    let kind = QueuePairType::RawPacket;
    let queue_pair = ReceiveScalingQueuePair::new(domain, &table, kind, hash)?;
    drop(queue_pair);
    drop(table);
    Ok(())
}
