use std::time::Instant;

use ibverbs::rdmacm::Route;
use ibverbs::{Channel, Context};

fn connect(context: &Context<'_>, route: Route) {
    let domain = context.alloc_pd().unwrap();
    let prepared = Channel::builder(&domain).build().unwrap();
    let connection = route.connect(prepared, b"", Instant::now()).unwrap();
    drop(connection); //~ RIGHT
    drop(domain);
    drop(connection); //~ ERROR
}
