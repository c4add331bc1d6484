use ibverbs::rdmacm::Connection;
use ibverbs::{Channel, TransportError};

fn watch(connection: &mut Connection<Channel<'_>>) -> bool {
    let done = connection.scope(|scope| {
        connection.event().unwrap(); //~ ERROR
         //~ RIGHT
        Ok::<_, TransportError>(scope.can_post_send())
    });
    done.unwrap()
}
//~ RIGHT
//~ RIGHT
