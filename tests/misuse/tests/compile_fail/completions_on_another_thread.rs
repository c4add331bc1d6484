use ibverbs::completion::ExtendedPoller;
use ibverbs::Result;

pub fn case(poller: &mut ExtendedPoller<'_>) -> Result<bool> {
    poller.poll(|completions| {
        let poll = || completions.next().map(|completion| completion.is_some());
        std::thread::scope(|threads| threads.spawn(poll).join().unwrap())
    })
}

fn main() {}
