use ibverbs::device::Guid;
use ibverbs::Result;

pub fn case() -> Result<Guid> {
    let list = ibverbs::devices()?;
    let device = list.get(0).unwrap();
    drop(list);
    Ok(device.guid())
}

fn main() {}
