use std::time::Instant;

use ibverbs::{ConnectionRequest, PreparedChannel};

fn answer(request: ConnectionRequest, prepared: PreparedChannel<'_>, deadline: Instant) {
    let _connection = request.accept(prepared, b"yes", deadline).unwrap();
    let _ = deadline;
}
