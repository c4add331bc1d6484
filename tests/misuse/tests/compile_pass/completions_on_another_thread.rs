use ibverbs::completion::ExtendedPoller;
use ibverbs::Result;

pub fn case(poller: &mut ExtendedPoller<'_>) -> Result<bool> {
    std::thread::scope(|threads| {
        let poll = || poller.poll(|completions| Ok(completions.next()?.is_some()));
        threads.spawn(poll).join().unwrap()
    })
}
