use std::time::Instant;

use ibverbs::rdmacm::ConnectionRequest;
use ibverbs::PreparedChannel;

fn answer(request: ConnectionRequest, prepared: PreparedChannel<'_>, deadline: Instant) {
    let _connection = request.accept(prepared, b"yes", deadline).unwrap();
    request.reject(b"no").unwrap(); //~ ERROR
    let _ = deadline; //~ RIGHT
}
