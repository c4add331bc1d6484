use ibverbs::channel::OwnedWork;
use ibverbs::{Channel, PooledBuffer};

pub fn case(channel: &mut Channel<'_>, works: [OwnedWork<PooledBuffer>; 2]) {
    let [mut one, mut other] = works;
    std::thread::scope(|threads| {
        threads.spawn(|| one.wait(channel).is_ok()); //~ ERROR
        threads.spawn(|| other.wait(channel).is_ok()); //~ ERROR
        threads.spawn(|| one.wait(channel).is_ok() && other.wait(channel).is_ok()); //~ RIGHT
    });
}
