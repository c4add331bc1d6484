use ibverbs_software::Builder;

fn configure(builder: Builder) {
    let _ = builder.mlx5(); //~ ERROR
    let _ = builder; //~ RIGHT
}
