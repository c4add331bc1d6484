use std::time::Instant;

use ibverbs::rdmacm::Route;

fn route(deadline: Instant) {
    let address = ([127, 0, 0, 1], 1).into();
    let _ = Route::to(address).resolve_on_tokio(deadline); //~ ERROR
    let _ = Route::to(address).resolve(deadline); //~ RIGHT
}
