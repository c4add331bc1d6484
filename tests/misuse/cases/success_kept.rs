use ibverbs::completion::ExtendedPoller;
use ibverbs::Result;

pub fn case(poller: &mut ExtendedPoller<'_>) -> Result<()> {
    poller.poll(|completions| {
        let completion = completions.next()?.unwrap();
        let first = completion.result();
        println!("{first:?}"); //~ RIGHT
        completions.next()?;
        println!("{first:?}"); //~ ERROR
        Ok(())
    })
}
