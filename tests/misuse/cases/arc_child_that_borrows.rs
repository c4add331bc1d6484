use std::sync::Arc;

use ibverbs::{ProtectionDomain, Result};

pub fn case() -> Result<ProtectionDomain<'static>> {
    let context = Arc::new(ibverbs::open("rxe0")?);
    context.alloc_pd() //~ ERROR
    ProtectionDomain::new(&context) //~ RIGHT
}
