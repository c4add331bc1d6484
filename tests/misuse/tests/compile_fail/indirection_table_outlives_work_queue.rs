use ibverbs::{IndirectionTable, Result, WorkQueue};

pub fn case(queue: WorkQueue<'_>) -> Result<()> {
    let table = IndirectionTable::new([&queue])?;
    drop(queue);
    drop(table);
    Ok(())
}

fn main() {}
