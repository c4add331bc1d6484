use ibverbs::completion::ExtendedPoller;
use ibverbs::Result;

pub fn case(poller: &mut ExtendedPoller<'_>) -> Result<()> {
    poller.poll(|completions| {
        let first = completions.next()?; //~ ERROR
        let first = completions.next()?.map(|completion| completion.wr_id()); //~ RIGHT
        let second = completions.next()?;
        println!("{first:?} {second:?}");
        Ok(())
    })
}
