//! Streams on simulated hosts, whose network loses, doubles and reorders packets, is cut, and whose hosts crash, as a seed says.
//! `SEEDS=10000 cargo test --release -p ibverbs-stream --features tokio --test simulated` tries many; `FIRST=n SEEDS=1` one.

use std::io::{self, ErrorKind};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ibverbs_software::{Conditions, Host, Trace, World, simulate};
use ibverbs_stream::tokio::Stream;
use ibverbs_stream::{Hub, Role};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{sleep, timeout};

const PORT: u16 = 1;

/// Longer than a peer that is silent is waited for.
const LONG: Duration = Duration::from_secs(30);

fn byte(index: usize) -> u8 {
    (index * 7 + index / 251) as u8
}

/// One side's view of a stream.
#[derive(Clone, Default, Debug)]
struct Seen {
    written: usize,
    read: usize,
    /// Whether the direction that it writes was shut down, and the peer has everything.
    shut: Option<Result<(), ErrorKind>>,
    /// The end of what it reads, or why there is no more.
    end: Option<Result<(), ErrorKind>>,
}

type Log = Arc<Mutex<Seen>>;

fn seen(log: &Log) -> std::sync::MutexGuard<'_, Seen> {
    log.lock().unwrap()
}

#[derive(Clone, Copy, Debug)]
struct Plan {
    chunk: usize,
    receives: u32,
    shared: u32,
    len: usize,
    piece: usize,
    /// The time after which a write is given up, in microseconds.
    patience: u64,
}

fn hub(host: &Host, plan: Plan) -> Hub {
    let builder = Hub::builder(&Arc::new(host.device().unwrap().open().unwrap()));
    let builder = builder.chunk(plan.chunk).receives(plan.receives).shared_receives(plan.shared);
    builder.max_connections(4).keep_alive(Duration::from_secs(1)).build().unwrap()
}

fn checked(bytes: &[u8], log: &Log) {
    let mut seen = seen(log);
    for &got in bytes {
        assert_eq!(got, byte(seen.read), "byte {} is another one", seen.read);
        seen.read += 1;
    }
}

/// Reads to the end, which it notes.
async fn reads(mut from: impl AsyncReadExt + Unpin, log: Log) {
    let mut bytes = [0; 700];
    let end = loop {
        match from.read(&mut bytes).await {
            Ok(0) => break Ok(()),
            Ok(len) => checked(&bytes[..len], &log),
            Err(error) => break Err(error.kind()),
        }
    };
    seen(&log).end = Some(end);
}

/// Sends back what comes, and ends when that does.
async fn serve(host: Host, plan: Plan, log: Log) -> io::Result<()> {
    let hub = hub(&host, plan);
    let (stream, _) = host.listen(PORT)?.accept().await?;
    let mut stream = Stream::over(&hub, stream, Role::Accepts).await?;
    let mut bytes = vec![0; plan.piece];
    let end = loop {
        match stream.read(&mut bytes).await {
            Ok(0) => break Ok(()),
            Ok(len) => {
                checked(&bytes[..len], &log);
                // Whether or not it can be answered, all that has arrived is there to be read.
                let written = stream.write_all(&bytes[..len]).await;
                let mut seen = seen(&log);
                match written {
                    Ok(()) if seen.shut.is_none() => seen.written += len,
                    Ok(()) => panic!("a stream that had failed takes bytes"),
                    Err(error) => seen.shut = Some(Err(error.kind())),
                }
            }
            Err(error) => break Err(error.kind()),
        }
    };
    seen(&log).end = Some(end);
    if end.is_ok() {
        let shut = stream.shutdown().await.map_err(|error| error.kind());
        seen(&log).shut = Some(shut);
    }
    // The host lives on until the test has looked at what was read.
    drop(stream);
    sleep(LONG).await;
    Ok(())
}

async fn ask(host: Host, to: Host, plan: Plan, log: Log) -> io::Result<()> {
    let hub = hub(&host, plan);
    let stream = loop {
        // The server may not listen yet.
        match host.connect((to.address(), PORT)).await {
            Ok(stream) => break stream,
            Err(_) => sleep(Duration::from_millis(1)).await,
        }
    };
    let (read, mut write) = Stream::over(&hub, stream, Role::Connects).await?.into_split();
    let reading = tokio::spawn(reads(read, log.clone()));
    let mut at = 0;
    while at < plan.len {
        let end = (at + 1 + at * 31 % plan.piece).min(plan.len);
        let bytes: Vec<u8> = (at..end).map(byte).collect();
        // A write that is given up is not sent, or its bytes would be there twice.
        match timeout(Duration::from_micros(plan.patience), write.write(&bytes)).await {
            Ok(Ok(len)) => {
                at += len;
                seen(&log).written = at;
            }
            Ok(Err(error)) => {
                seen(&log).shut = Some(Err(error.kind()));
                break;
            }
            Err(_) => {}
        }
    }
    if at == plan.len {
        let shut = write.shutdown().await.map_err(|error| error.kind());
        seen(&log).shut = Some(shut);
    }
    reading.await.unwrap();
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    Nothing,
    /// The network is cut for a time in which devices try again.
    ShortCut,
    Cut,
    ServerCrashes,
    ClientCrashes,
}

fn is_gone(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::ConnectionReset | ErrorKind::TimedOut | ErrorKind::BrokenPipe)
}

async fn run(world: World) -> Trace {
    let pick = |values: &[usize]| values[world.random(values.len() as u64) as usize];
    let plan = Plan {
        chunk: pick(&[64, 300, 1024, 4096]),
        receives: pick(&[1, 2, 8]) as u32,
        shared: pick(&[0, 0, 16]) as u32,
        len: pick(&[0, 1, 5000, 20_000]),
        piece: pick(&[1, 100, 3000]).max(7),
        patience: pick(&[20, 200, 100_000]) as u64,
    };
    let percent = |most: u64| world.random(most + 1) as f64 / 100.0;
    let mut conditions = Conditions::PERFECT;
    conditions.loss = percent(10);
    conditions.duplicate = percent(5);
    conditions.reorder = percent(5);
    conditions.corrupt = percent(1);
    conditions.delay = Duration::from_micros(1 + world.random(20));
    conditions.jitter = Duration::from_micros(world.random(20));
    world.set_conditions(conditions);
    let (server, client) = (world.host("server"), world.host("client"));
    let (served, asked) = (Log::default(), Log::default());
    server.start(serve(server.clone(), plan, served.clone()));
    let asking = client.start(ask(client.clone(), server.clone(), plan, asked.clone()));
    let faults =
        [Fault::Nothing, Fault::ShortCut, Fault::Cut, Fault::ServerCrashes, Fault::ClientCrashes];
    let fault = faults[world.random(5) as usize];
    sleep(Duration::from_micros(world.random(40_000))).await;
    match fault {
        Fault::Nothing => {}
        Fault::ShortCut => {
            server.partition(&client);
            sleep(Duration::from_micros(world.random(50_000))).await;
            server.heal(&client);
        }
        Fault::Cut => server.partition(&client),
        Fault::ServerCrashes => server.crash(),
        Fault::ClientCrashes => client.crash(),
    }
    let asking = timeout(LONG, asking).await.expect("the client never ends");
    sleep(Duration::from_secs(5)).await;
    let (served, asked) = (seen(&served).clone(), seen(&asked).clone());
    let context = format!("{fault:?}, {plan:?}: {served:?}, {asked:?}");
    if matches!(fault, Fault::Nothing | Fault::ShortCut) {
        assert!(matches!(asking, Ok(Ok(()))), "{asking:?}, {context}");
        for side in [&served, &asked] {
            assert_eq!((side.read, side.written), (plan.len, plan.len), "{context}");
            assert_eq!((side.shut, side.end), (Some(Ok(())), Some(Ok(()))), "{context}");
        }
    }
    // Whatever has happened: an end is the end of everything, and what is not there is an error.
    assert!(served.read <= asked.written.max(served.read.min(plan.len)), "{context}");
    assert!(asked.read <= plan.len && asked.read <= served.written + plan.piece, "{context}");
    if served.end == Some(Ok(())) {
        assert_eq!(served.read, plan.len, "an end that was not sent: {context}");
    }
    if asked.end == Some(Ok(())) {
        assert_eq!(asked.read, plan.len, "an end that was not sent: {context}");
    }
    // All bytes before a shutdown are with the peer, unless it has crashed.
    if asked.shut == Some(Ok(())) && fault != Fault::ServerCrashes {
        assert_eq!(served.read, plan.len, "{context}");
    }
    for kind in [served.end, served.shut, asked.end, asked.shut]
        .into_iter()
        .flatten()
        .filter_map(Result::err)
    {
        assert!(is_gone(kind), "{kind}: {context}");
    }
    // Neither side waits for a peer that is gone.
    let is_connected = served.read + asked.read > 0;
    if is_connected && fault != Fault::ServerCrashes {
        assert!(served.end.is_some(), "the server waits: {context}");
    }
    if is_connected && fault != Fault::ClientCrashes {
        assert!(asked.end.is_some() && asked.shut.is_some(), "the client waits: {context}");
    }
    world.trace()
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
}

#[test]
fn no_byte_is_lost_doubled_or_moved_and_no_failure_is_an_end() {
    let first = number("FIRST", 0);
    for seed in first..first + number("SEEDS", 20) {
        let trace = simulate(seed, run);
        if seed % 20 == 0 {
            assert_eq!(trace, simulate(seed, run), "seed {seed} is two runs");
        }
    }
}
