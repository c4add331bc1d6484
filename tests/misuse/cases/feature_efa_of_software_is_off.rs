use ibverbs_software::Builder;

fn configure(builder: Builder) {
    let _ = builder.efa(()); //~ ERROR
    let _ = builder; //~ RIGHT
}
