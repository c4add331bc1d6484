use ibverbs::completion::{ExtendedCompletions, ExtendedPoller};
use ibverbs::Result;

pub fn case(poller: &mut ExtendedPoller<'_>) -> Result<()> {
    poller.poll(|others| others.next().map(drop))?;
    let body = |completions: &mut ExtendedCompletions<'_>| completions.next().map(drop);
    poller.poll(body)
}
