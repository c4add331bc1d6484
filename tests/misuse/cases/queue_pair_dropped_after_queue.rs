use ibverbs::*;

pub fn case(domain: &ProtectionDomain<'_>) -> Result<()> {
    let (_pair, queue); //~ ERROR
    let (queue, _pair); //~ RIGHT
    queue = domain.context().create_cq(1)?;
    _pair = domain.create_qp(&queue, &queue, Rc).build()?;
    Ok(())
}
