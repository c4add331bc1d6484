use ibverbs::Context;

fn query(context: &Context<'_>) {
    let _ = context.query_efa(); //~ ERROR
    let _ = context.query_mlx5(); //~ RIGHT
}
