use ibverbs::work_queue::{IndirectionTable, WorkQueue};
use ibverbs::Result;

pub fn case(queue: WorkQueue<'_>) -> Result<()> {
    let table = IndirectionTable::new([&queue])?;
    drop(table);
    drop(queue);
    Ok(())
}
