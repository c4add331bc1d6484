use std::time::Duration;

use ibverbs::{ConnectionRequest, PreparedChannel};

fn answer(request: ConnectionRequest, prepared: PreparedChannel<'_>, time: Duration) {
    let _connection = request.accept(prepared, b"yes", time).unwrap();
    request.reject(b"no").unwrap();
}

fn main() {}
