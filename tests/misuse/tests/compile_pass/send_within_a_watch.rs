use ibverbs::{Channel, Connection, TransportError};

fn watch(connection: &mut Connection<Channel<'_>>) -> bool {
    let done = connection.scope(|scope| {
        
        Ok::<_, TransportError>(scope.can_post_send())
    });
    done.unwrap()
}


