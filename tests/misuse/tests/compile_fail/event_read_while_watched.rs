use ibverbs::rdmacm::Connection;
use ibverbs::Channel;

fn watch(connection: &Connection<Channel<'_>>) {
    connection.event().unwrap();
}

fn main() {}
