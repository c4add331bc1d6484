use ibverbs::device::Guid;
use ibverbs::Result;

pub fn case() -> Result<Guid> {
    let list = ibverbs::devices()?;
    let device = list.get(0).unwrap();
    let guid = device.guid(); //~ RIGHT
    drop(list);
    Ok(device.guid()) //~ ERROR
    Ok(guid) //~ RIGHT
}
