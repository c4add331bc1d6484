use ibverbs::{QueuePair, Rc, Result, Ud, operation::PreparedRequest}; //~ ERROR
use ibverbs::{QueuePair, Rc, Result, operation::PreparedRequest}; //~ RIGHT

pub fn case(pair: &mut QueuePair<'_, Rc>, one: &mut PreparedRequest<'_, Ud>) -> Result<()> { //~ ERROR
pub fn case(pair: &mut QueuePair<'_, Rc>, one: &mut PreparedRequest<'_, Rc>) -> Result<()> { //~ RIGHT
    unsafe { pair.post_prepared(one, 0) }
}
