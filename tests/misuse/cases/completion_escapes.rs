use ibverbs::completion::{ExtendedCompletion, ExtendedPoller}; //~ ERROR
use ibverbs::completion::ExtendedPoller; //~ RIGHT
use ibverbs::Result;

pub fn case(poller: &mut ExtendedPoller<'_>) -> Result<()> {
    let mut kept: Option<ExtendedCompletion<'_>> = None; //~ ERROR
    let mut kept: Option<u64> = None; //~ RIGHT
    poller.poll(|completions| {
        kept = completions.next()?; //~ ERROR
        kept = completions.next()?.map(|completion| completion.wr_id()); //~ RIGHT
        assert!(kept.is_none()); //~ RIGHT
        Ok(())
    })
}
