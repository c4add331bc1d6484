use ibverbs::rdmacm::Connection;
use ibverbs::Channel;

fn watch(connection: &mut Connection<Channel<'_>>) {
    connection.event().unwrap();
}


