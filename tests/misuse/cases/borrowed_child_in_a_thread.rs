use ibverbs::{Context, Result};

pub fn case(context: Context<'static>) -> Result<()> {
    let queue = context.create_cq(8)?;
    std::thread::spawn(move || drop(queue)).join().unwrap(); //~ ERROR
    std::thread::scope(|threads| threads.spawn(move || drop(queue)).join()).unwrap(); //~ RIGHT
    Ok(())
}
