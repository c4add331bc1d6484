use ibverbs::operation::SendList;
use ibverbs::{Error, QueuePair, Rc, Ud, operation::PreparedRequest}; //~ ERROR
use ibverbs::{Error, QueuePair, Rc, operation::PreparedRequest}; //~ RIGHT

pub fn case(pair: &mut QueuePair<'_, Rc>, one: PreparedRequest<'_, Ud>) -> Result<(), Error> { //~ ERROR
pub fn case(pair: &mut QueuePair<'_, Rc>, one: PreparedRequest<'_, Rc>) -> Result<(), Error> { //~ RIGHT
    let mut entries = [one];
    let mut list = SendList::new(&mut entries)?;
    unsafe { Ok(pair.post_list(&mut list)?) }
}
