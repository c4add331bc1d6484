use ibverbs::completion::ExtendedPoller;
use ibverbs::Result;

pub fn case(poller: &mut ExtendedPoller<'_>) -> Result<bool> {
    poller.poll(|completions| { //~ ERROR
        let poll = || completions.next().map(|completion| completion.is_some()); //~ ERROR
        std::thread::scope(|threads| threads.spawn(poll).join().unwrap()) //~ ERROR
    std::thread::scope(|threads| { //~ RIGHT
        let poll = || poller.poll(|completions| Ok(completions.next()?.is_some())); //~ RIGHT
        threads.spawn(poll).join().unwrap() //~ RIGHT
    })
}
