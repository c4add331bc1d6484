use ibverbs::{Channel, Connection};

fn watch(connection: &mut Connection<Channel<'_>>) {
    connection.event().unwrap();
}


