use std::sync::Arc;

use ibverbs::device::DeviceList;
use ibverbs::{ProtectionDomain, Result};

pub fn case(list: DeviceList) -> Result<()> {
    let context = Arc::new(list.get(0).unwrap().open()?);
    let _domain = ProtectionDomain::new(context)?; //~ ERROR
    let domain = ProtectionDomain::new(context)?; //~ RIGHT
    drop(domain); //~ RIGHT
    drop(list);
    Ok(())
}
