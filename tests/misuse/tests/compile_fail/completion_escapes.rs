use ibverbs::completion::{ExtendedCompletion, ExtendedPoller};
use ibverbs::Result;

pub fn case(poller: &mut ExtendedPoller<'_>) -> Result<()> {
    let mut kept: Option<ExtendedCompletion<'_>> = None;
    poller.poll(|completions| {
        kept = completions.next()?;
        Ok(())
    })
}

fn main() {}
