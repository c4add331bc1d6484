use ibverbs::{Channel, Connection};

fn watch(connection: &Connection<Channel<'_>>) {
    connection.event().unwrap();
}

fn main() {}
