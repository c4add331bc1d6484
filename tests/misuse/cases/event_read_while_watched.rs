use ibverbs::rdmacm::Connection;
use ibverbs::Channel;

fn watch(connection: &Connection<Channel<'_>>) { //~ ERROR
fn watch(connection: &mut Connection<Channel<'_>>) { //~ RIGHT
    connection.event().unwrap();
}
//~ RIGHT
//~ RIGHT
