use ibverbs::operation::SendList;
use ibverbs::{Error, PreparedRequest, QueuePair, Rc};

pub fn case(pair: &mut QueuePair<'_, Rc>, one: PreparedRequest<'_, Rc>) -> Result<(), Error> {
    let mut entries = [one];
    let mut list = SendList::new(&mut entries)?;
    unsafe { Ok(pair.post_list(&mut list)?) }
}
