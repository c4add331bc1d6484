use ibverbs::completion::{ExtendedCompletions, ExtendedPoller};
use ibverbs::Result;

pub fn case(poller: &mut ExtendedPoller<'_>) -> Result<()> {
    let body = |completions: &mut ExtendedCompletions<'_>| {
        poller.poll(|others| others.next().map(drop))?;
        completions.next().map(drop)
    };
    poller.poll(body)
}

fn main() {}
