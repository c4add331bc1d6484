use std::time::Duration;

use ibverbs_software::simulate;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::sleep;

#[test]
fn a_server_that_loses_its_power_is_missed() {
    for seed in 0..10 {
        simulate(seed, async |world| {
            let (server, client) = (world.host("server"), world.host("client"));
            let mut listener = server.listen(7).unwrap();
            server.start(async move {
                let (mut stream, _) = listener.accept().await.unwrap();
                stream.write_all(b"hello").await.unwrap();
                std::future::pending::<()>().await;
            });
            let mut stream = client.connect((server.address(), 7)).await.unwrap();
            let mut text = [0; 5];
            stream.read_exact(&mut text).await.unwrap();
            assert_eq!(&text, b"hello");
            sleep(Duration::from_micros(world.random(1000))).await;
            server.crash();
            assert!(stream.read_u8().await.is_err());
        });
    }
}
