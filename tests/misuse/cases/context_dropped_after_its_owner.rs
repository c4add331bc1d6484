use ibverbs::{Context, Result, ffi};

pub struct Owner(Box<*mut ffi::ibv_context>);

pub fn open(owner: &Owner) -> Result<Context<'_>> {
    unsafe { Context::from_raw(*owner.0) }
}

pub fn case(owner: Owner) -> Result<()> {
    let _context = open(&owner)?; //~ ERROR
    let context = open(&owner)?; //~ RIGHT
    drop(context); //~ RIGHT
    drop(owner);
    Ok(())
}
