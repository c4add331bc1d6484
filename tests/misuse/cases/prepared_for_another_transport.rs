use ibverbs::{PreparedRequest, QueuePair, Rc, Result, Ud}; //~ ERROR
use ibverbs::{PreparedRequest, QueuePair, Rc, Result}; //~ RIGHT

pub fn case(pair: &mut QueuePair<'_, Rc>, one: &mut PreparedRequest<'_, Ud>) -> Result<()> { //~ ERROR
pub fn case(pair: &mut QueuePair<'_, Rc>, one: &mut PreparedRequest<'_, Rc>) -> Result<()> { //~ RIGHT
    unsafe { pair.post_prepared(one, 0) }
}
