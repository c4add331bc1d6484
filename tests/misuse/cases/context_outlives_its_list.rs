use ibverbs::{Context, Result};

pub fn case() -> Result<Context<'static>> {
    let list = ibverbs::devices()?;
    let device = list.get(0).unwrap();
    device.open() //~ ERROR
    ibverbs::open(device.name()) //~ RIGHT
}
