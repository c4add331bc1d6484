use std::time::Duration;

use ibverbs::{Channel, Context, Route};

fn connect(context: &Context<'_>, route: Route) {
    let domain = context.alloc_pd().unwrap();
    let prepared = Channel::builder(&domain).build().unwrap();
    let connection = route.connect(prepared, b"", Duration::MAX).unwrap();
    drop(domain);
    drop(connection);
}

fn main() {}
