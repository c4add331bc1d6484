//! The store on simulated hosts: a seed decides when clients die in the middle of a transfer, what the network loses, and
//! when the server crashes. `SEEDS=10000 cargo test --release --test simulated` tries many.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ibverbs_kv::client::Client;
use ibverbs_kv::{Accept, Connect, server};
use ibverbs_software::{Host, SimulatedListener, SimulatedStream, World, simulate};
use tokio::sync::Notify;
use tokio::time::sleep;

const PORT: u16 = 4000;

struct Listener(SimulatedListener);

impl Accept for Listener {
    type Stream = SimulatedStream;

    async fn accept(&mut self) -> io::Result<(SimulatedStream, SocketAddr)> {
        self.0.accept().await
    }
}

/// Connects one host to the server's.
struct Way(Host, Host);

impl Connect for Way {
    type Stream = SimulatedStream;

    async fn connect(&self) -> io::Result<SimulatedStream> {
        self.0.connect((self.1.address(), PORT)).await
    }
}

fn serve(host: &Host) {
    let listener = Listener(host.listen(PORT).unwrap());
    let context = host.device().unwrap().open().unwrap();
    host.start(server::run(context, listener, None, Arc::new(Notify::new()), 8, 0));
}

/// The values that the store may return for each key: the last one that it has acknowledged, and those that were on
/// their way since. `None`: it may have no value.
#[derive(Clone, Default)]
struct Model(Arc<Mutex<Values>>);

type Values = BTreeMap<Vec<u8>, Vec<Option<Vec<u8>>>>;

impl Model {
    fn keys(&self) -> MutexGuard<'_, Values> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self, key: &[u8], value: &Option<Vec<u8>>) {
        let mut keys = self.keys();
        keys.entry(key.to_vec()).or_insert_with(|| vec![None]).push(value.clone());
    }

    /// Forgets what was allowed before. The server may have crashed after its answer, which was on its way.
    fn done(&self, key: &[u8], value: &Option<Vec<u8>>) {
        let mut keys = self.keys();
        let values = keys.entry(key.to_vec()).or_default();
        let begun = values.iter().rposition(|begun| begun == value).unwrap_or(0);
        values.drain(..begun);
    }

    /// The server has crashed, and forgotten all.
    fn forget(&self) {
        self.keys().values_mut().for_each(|values| values.push(None));
    }

    fn check(&self, key: &[u8], value: &Option<Vec<u8>>) {
        let keys = self.keys();
        let allowed = keys.get(key).map_or(value.is_none(), |allowed| allowed.contains(value));
        let length = value.as_ref().map(Vec::len);
        assert!(allowed, "{}: {length:?} bytes that are wrong", String::from_utf8_lossy(key));
    }
}

/// Puts and gets keys of its own, and looks at what comes back.
async fn client(world: World, host: Host, server: Host, model: Model) {
    let context = host.device().unwrap().open().unwrap();
    let mut client = Client::new(context, Way(host.clone(), server)).unwrap();
    for _ in 0..8 {
        let key = format!("{} {}", host.name(), world.random(3)).into_bytes();
        match world.random(5) {
            0 | 1 => {
                if let Ok(value) = client.get(&key).await {
                    model.check(&key, &value);
                }
            }
            kind => {
                let length = [0, 200, 3_000, 40_000][world.random(4) as usize];
                let byte = world.random(256) as u8;
                let value = (kind > 2).then(|| vec![byte; length]);
                model.begin(&key, &value);
                let put = client.put(&key, value.as_deref()).await;
                // A put that failed may have been carried out.
                if put.is_ok() {
                    model.done(&key, &value);
                }
            }
        }
        sleep(Duration::from_micros(world.random(3000))).await;
    }
}

/// Returns the packets, and how long it took.
fn run(seed: u64) -> String {
    simulate(seed, async |world| {
        let mut conditions = world.conditions();
        conditions.loss = [0.0, 0.002, 0.02][world.random(3) as usize];
        conditions.jitter = Duration::from_micros(world.random(100));
        conditions.bandwidth = Some(100_000_000);
        world.set_conditions(conditions);
        let server = world.host("server");
        serve(&server);
        let clients = ["a", "b"].map(|name| world.host(name));
        let model = Model::default();
        let start = |host: &Host| {
            host.start(client(world.clone(), host.clone(), server.clone(), model.clone()))
        };
        let mut running = clients.each_ref().map(&start);
        for _ in 0..4 {
            sleep(Duration::from_micros(world.random(4000))).await;
            let victim = world.random(2) as usize;
            match world.random(8) {
                0..=2 => {
                    clients[victim].crash();
                    running[victim] = start(&clients[victim]);
                }
                3 => {
                    server.crash();
                    model.forget();
                    serve(&server);
                }
                4 => {
                    clients[victim].partition(&server);
                    sleep(Duration::from_millis(world.random(40))).await;
                    clients[victim].heal(&server);
                }
                _ => {}
            }
        }
        for running in running {
            running.await.unwrap();
        }
        // Another client reads what the model says.
        let reader = world.host("reader");
        let context = reader.device().unwrap().open().unwrap();
        let mut client = Client::new(context, Way(reader, server)).unwrap();
        let keys: Vec<_> = model.keys().keys().cloned().collect();
        for key in keys {
            let value = client.get(&key).await.unwrap();
            model.check(&key, &value);
        }
        format!("{:?}\n{}", world.now(), world.trace())
    })
}

#[test]
fn no_seed_shows_a_value_that_was_never_put_or_one_that_is_lost() {
    let seeds = std::env::var("SEEDS").map_or(60, |seeds| seeds.parse().expect("SEEDS: a number"));
    for seed in 0..seeds {
        run(seed);
    }
}

#[test]
fn a_seed_repeats_the_run() {
    for seed in 0..10 {
        assert!(run(seed) == run(seed), "seed {seed}");
    }
}
