use ibverbs::{QueuePair, Result};

pub fn case(pair: &mut QueuePair<'_>) -> Result<()> {
    unsafe {
        pair.batch(|batch| {
            let kept = Some(batch);
            assert!(kept.is_some());
            Ok(())
        })
    }
}
