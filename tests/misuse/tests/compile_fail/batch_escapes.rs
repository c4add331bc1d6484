use ibverbs::{QueuePair, Result};

pub fn case(pair: &mut QueuePair<'_>) -> Result<()> {
    let mut kept = None;
    unsafe {
        pair.batch(|batch| {
            kept = Some(batch);
            Ok(())
        })
    }
}

fn main() {}
