use ibverbs::flow::{EspAction, EspParameters};
use ibverbs::{Context, Result};

pub fn case(context: Context<'_>, parameters: &EspParameters) -> Result<()> {
    let action = EspAction::new(&context, parameters)?;
    drop(action); //~ RIGHT
    drop(context);
    drop(action); //~ ERROR
    Ok(())
}
