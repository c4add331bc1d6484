//! Simulations leave nothing: a loop over seeds has as many files open at its end as at its beginning. It counts those of
//! the process, so this test is alone in its binary.

use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use ibverbs::Reactor;
use ibverbs_software::simulate;
use tokio::io::AsyncReadExt;
use tokio::time::sleep;

fn run(seed: u64) {
    simulate(seed, async |world| {
        let (one, other) = (world.host("one"), world.host("other"));
        let (server, client) = (one.clone(), other.clone());
        one.start(async move {
            let context = Arc::new(server.device().unwrap().open().unwrap());
            let reactor = Arc::new(Reactor::new(&context, 4).unwrap());
            tokio::spawn(async move { reactor.run_on_tokio().await });
            let _stream = server.listen(1).unwrap().accept().await.unwrap();
            pending::<()>().await;
        });
        let address = (one.address(), 1);
        other.start(async move {
            client.connect(address).await.unwrap().read_u8().await.unwrap_err();
        });
        sleep(Duration::from_millis(3)).await;
        one.crash();
        sleep(Duration::from_millis(3)).await;
    });
}

#[test]
fn a_loop_over_seeds_leaves_no_file_open() {
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    run(0);
    let before = open();
    (1..20).for_each(run);
    assert_eq!(open(), before);
}
