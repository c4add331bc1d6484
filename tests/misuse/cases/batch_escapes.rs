use ibverbs::{QueuePair, Result};

pub fn case(pair: &mut QueuePair<'_>) -> Result<()> {
    let mut kept = None; //~ ERROR
    unsafe {
        pair.batch(|batch| {
            kept = Some(batch); //~ ERROR
            let kept = Some(batch); //~ RIGHT
            assert!(kept.is_some()); //~ RIGHT
            Ok(())
        })
    }
}
