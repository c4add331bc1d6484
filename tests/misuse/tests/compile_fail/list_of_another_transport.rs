use ibverbs::operation::SendList;
use ibverbs::{Error, PreparedRequest, QueuePair, Rc, Ud};

pub fn case(pair: &mut QueuePair<'_, Rc>, one: PreparedRequest<'_, Ud>) -> Result<(), Error> {
    let mut entries = [one];
    let mut list = SendList::new(&mut entries)?;
    unsafe { Ok(pair.post_list(&mut list)?) }
}

fn main() {}
