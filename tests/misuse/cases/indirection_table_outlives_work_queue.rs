use ibverbs::work_queue::{IndirectionTable, WorkQueue};
use ibverbs::Result;

pub fn case(queue: WorkQueue<'_>) -> Result<()> {
    let table = IndirectionTable::new([&queue])?;
    drop(table); //~ RIGHT
    drop(queue);
    drop(table); //~ ERROR
    Ok(())
}
