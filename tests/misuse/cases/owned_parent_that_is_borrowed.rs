use ibverbs::{ProtectionDomain, Result};

pub struct Server(pub ProtectionDomain<'static>);

pub fn case() -> Result<Server> {
    let context = ibverbs::open("rxe0")?;
    Ok(Server(ProtectionDomain::new(&context)?)) //~ ERROR
    Ok(Server(ProtectionDomain::new(context)?)) //~ RIGHT
}
