use std::time::Instant;

use ibverbs_stream::{Hub, Stream};

fn connect(hub: &Hub, deadline: Instant) {
    let _ = Stream::connect_rdmacm(hub, "192.0.2.1:1", deadline); //~ ERROR
    let _ = Stream::connect(hub, "192.0.2.1:1", deadline); //~ RIGHT
}
