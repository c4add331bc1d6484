use ibverbs::completion::ExtendedPoller;
use ibverbs::Result;

pub fn case(poller: &mut ExtendedPoller<'_>) -> Result<()> {
    poller.poll(|completions| {
        let first = completions.next()?;
        let second = completions.next()?;
        println!("{first:?} {second:?}");
        Ok(())
    })
}

fn main() {}
