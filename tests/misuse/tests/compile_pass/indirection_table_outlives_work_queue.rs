use ibverbs::{IndirectionTable, Result, WorkQueue};

pub fn case(queue: WorkQueue<'_>) -> Result<()> {
    let table = IndirectionTable::new([&queue])?;
    drop(table);
    drop(queue);
    Ok(())
}
