use ibverbs::*;
use ibverbs::work_queue::{IndirectionTable, ReceiveHash, ReceiveHashFields, ReceiveScalingQueuePair};

pub fn case(domain: &ProtectionDomain<'_>, table: IndirectionTable<'_>) -> Result<()> {
    let kind = QueuePairType::RawPacket;
    let hash = ReceiveHash::toeplitz([7; 40], ReceiveHashFields::SOURCE_IPV4)?;
    let queue_pair = ReceiveScalingQueuePair::new(domain, &table, kind, &hash)?;
    drop(queue_pair); //~ RIGHT
    drop(table);
    drop(queue_pair); //~ ERROR
    Ok(())
}
