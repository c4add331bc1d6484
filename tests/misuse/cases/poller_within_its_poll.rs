use ibverbs::completion::{ExtendedCompletions, ExtendedPoller};
use ibverbs::Result;

pub fn case(poller: &mut ExtendedPoller<'_>) -> Result<()> {
    let body = |completions: &mut ExtendedCompletions<'_>| { //~ ERROR
        poller.poll(|others| others.next().map(drop))?; //~ ERROR
        completions.next().map(drop) //~ ERROR
    }; //~ ERROR
    poller.poll(|others| others.next().map(drop))?; //~ RIGHT
    let body = |completions: &mut ExtendedCompletions<'_>| completions.next().map(drop); //~ RIGHT
    poller.poll(body)
}
