use ibverbs::completion::ExtendedPoller;
use ibverbs::Result;

pub fn case(poller: &mut ExtendedPoller<'_>) -> Result<()> {
    let mut kept: Option<u64> = None;
    poller.poll(|completions| {
        kept = completions.next()?.map(|completion| completion.wr_id());
        assert!(kept.is_none());
        Ok(())
    })
}
