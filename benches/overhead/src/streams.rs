//! The cost of a byte stream: `streams [--check|--write FILE]` counts, with callgrind, the instructions of `ibverbs-stream` and
//! `ibverbs-bundled` that one side spends on a round trip: 64 bytes written, and 64 read. Those of the device, of tokio and of the
//! system are not in it. All is in virtual time, so the numbers repeat. So are their misses of data in caches of a given size, in the
//! first level and in the last, also with 1,000 streams in turn.
//!
//! `--write` writes them to a file. `--check` fails if instructions are more than 2 % above that, or misses 3 % and 0.5.

use std::collections::HashMap;
use std::error::Error;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use ibverbs_software::{Network, simulate};
use ibverbs_stream::{Hub, Role, Stream};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// The round trips of the shorter one of two runs. The other one has three times as many.
const TRIPS: usize = 1000;

/// What is counted: how many streams have their turns, and who waits.
const FORMS: [&str; 3] = ["threads", "threads, 1000 streams", "tasks"];

/// The same caches as `report` has for channels.
const CACHES: [&str; 4] =
    ["--cache-sim=yes", "--I1=32768,8,64", "--D1=32768,8,64", "--LL=8388608,16,64"];

/// Instructions, and misses in the first level and in the last.
type Costs = [f64; 3];

fn of_threads(trips: usize, streams: u32) -> Result<()> {
    let network = Network::new();
    let hub = || -> Result<Hub> {
        let context = Arc::new(network.device()?.open()?);
        Ok(Hub::builder(&context).chunk(4096).max_connections(streams).build()?)
    };
    let hubs = [hub()?, hub()?];
    let soon = Instant::now() + Duration::from_secs(600);
    let connect = |_| {
        let (one, two) = UnixStream::pair()?;
        thread::scope(|threads| -> Result<_> {
            let connects = threads.spawn(|| Stream::over(&hubs[0], one, Role::Connects, soon));
            let two = Stream::over(&hubs[1], two, Role::Accepts, soon)?;
            Ok((connects.join().map_err(|_| "it has panicked")??, two))
        })
    };
    let mut pairs = (0..streams).map(connect).collect::<Result<Vec<_>>>()?;
    let mut bytes = [7; 64];
    for trip in 0..trips {
        let (one, two) = &mut pairs[trip % streams as usize];
        one.write_all(&bytes)?;
        two.read_exact(&mut bytes)?;
        two.write_all(&bytes)?;
        one.read_exact(&mut bytes)?;
    }
    Ok(())
}

fn of_tasks(trips: usize) -> Result<()> {
    simulate(0, async |world| {
        let (server, client) = (world.host("server"), world.host("client"));
        let hub = |host: &ibverbs_software::Host| -> Result<Hub> {
            let context = Arc::new(host.device()?.open()?);
            Ok(Hub::builder(&context).max_connections(1).build()?)
        };
        let (of_server, of_client) = (hub(&server)?, hub(&client)?);
        let mut listener = server.listen(1)?;
        let serves = server.start(async move {
            let stream = listener.accept().await?.0;
            let mut stream =
                ibverbs_stream::tokio::Stream::over(&of_server, stream, Role::Accepts).await?;
            let mut bytes = [0; 64];
            for _ in 0..trips {
                stream.read_exact(&mut bytes).await?;
                stream.write_all(&bytes).await?;
            }
            stream.shutdown().await?;
            Result::Ok(())
        });
        let to = (server.address(), 1);
        let asks = client.clone().start(async move {
            let stream = client.connect(to).await?;
            let mut stream =
                ibverbs_stream::tokio::Stream::over(&of_client, stream, Role::Connects).await?;
            let mut bytes = [7; 64];
            for _ in 0..trips {
                stream.write_all(&bytes).await?;
                stream.read_exact(&mut bytes).await?;
            }
            stream.shutdown().await?;
            Result::Ok(())
        });
        serves.await??;
        asks.await?
    })
}

/// The costs of each function of a program's run, without those that it calls.
fn counted(form: &str, trips: usize) -> Result<HashMap<String, Costs>> {
    let file = env::temp_dir().join(format!("streams-{}", std::process::id()));
    let status = Command::new("valgrind")
        .args(["--quiet", "--tool=callgrind"])
        .args(CACHES)
        .arg(format!("--callgrind-out-file={}", file.display()))
        .arg(env::current_exe()?)
        .args(["run", form, &trips.to_string()])
        .status()?;
    if !status.success() {
        return Err(format!("callgrind: {status}").into());
    }
    let text = fs::read_to_string(&file)?;
    fs::remove_file(&file)?;
    let (mut names, mut counts) = (HashMap::new(), HashMap::<String, Costs>::new());
    let events = text.lines().find_map(|line| line.strip_prefix("events: ")).ok_or("no events")?;
    let events: Vec<&str> = events.split(' ').collect();
    let kinds: [&[&str]; 3] = [&["Ir"], &["D1mr", "D1mw"], &["DLmr", "DLmw"]];
    let (mut current, mut is_call) = (String::new(), false);
    for line in text.lines() {
        if let Some(name) = line.strip_prefix("fn=") {
            // A name is written out where it comes first.
            let (number, rest) = name.split_once(')').ok_or("a name without a number")?;
            if !rest.trim().is_empty() {
                names.insert(number.to_owned(), rest.trim().to_owned());
            }
            current = names.get(number).ok_or("a number without a name")?.clone();
        } else if let Some(name) = line.strip_prefix("cfn=") {
            if let Some((number, rest)) = name.split_once(')')
                && !rest.trim().is_empty()
            {
                names.insert(number.to_owned(), rest.trim().to_owned());
            }
        } else if line.starts_with("calls=") {
            is_call = true;
        } else if line
            .starts_with(['+', '-', '*', '0', '1', '2', '3', '4', '5', '6', '7', '8', '9'])
        {
            // After a call comes what it has cost.
            if std::mem::take(&mut is_call) {
                continue;
            }
            let numbers: Vec<f64> = line.split(' ').skip(1).flat_map(str::parse).collect();
            let costs = counts.entry(current.clone()).or_default();
            for (cost, kinds) in costs.iter_mut().zip(kinds) {
                // Zeros at the end of a line are left out.
                let of = events.iter().zip(&numbers).filter(|(event, _)| kinds.contains(event));
                *cost += of.map(|(_, number)| number).sum::<f64>();
            }
        }
    }
    Ok(counts)
}

/// The device copies by functions of `ibverbs-bundled`.
fn is_own(name: &str) -> bool {
    (name.contains("ibverbs_stream") || name.contains("ibverbs::"))
        && !name.contains("ibverbs_software")
        && !name.contains("::shared_copy::")
}

/// What one side spends on a round trip, by function.
fn own(form: &str) -> Result<Vec<(String, Costs)>> {
    let (few, many) = (counted(form, TRIPS)?, counted(form, 3 * TRIPS)?);
    let each = many.into_iter().filter(|(name, _)| is_own(name)).map(|(name, costs)| {
        let before = few.get(&name).copied().unwrap_or_default();
        let of = |which: usize| (costs[which] - before[which]) / (4 * TRIPS) as f64;
        (name, [of(0), of(1), of(2)])
    });
    let mut each: Vec<_> = each.filter(|(_, costs)| costs[0] >= 0.5).collect();
    each.sort_by(|one, two| two.1[0].total_cmp(&one.1[0]));
    Ok(each)
}

fn main() -> Result<()> {
    let args: Vec<String> = env::args().skip(1).collect();
    let (check, write) = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["run", "threads", trips] => return of_threads(trips.parse()?, 1),
        ["run", "threads, 1000 streams", trips] => return of_threads(trips.parse()?, 1000),
        ["run", "tasks", trips] => return of_tasks(trips.parse()?),
        [] => (None, None),
        ["--check", file] => (Some(file), None),
        ["--write", file] => (None, Some(file)),
        _ => return Err("usage: streams [--check|--write FILE]".into()),
    };
    let mut table = String::new();
    for form in FORMS {
        let each = own(form)?;
        let of = |which: usize| each.iter().map(|(_, costs)| costs[which]).sum::<f64>();
        let [instructions, first, last] = [of(0), of(1), of(2)];
        println!(
            "{form}: {instructions:.0}; {first:.1} misses in the first level, {last:.1} in the last"
        );
        for (name, costs) in each.iter().take_while(|(_, costs)| costs[0] >= 10.0) {
            println!("  {:6.0} {:5.1}  {name}", costs[0], costs[1]);
        }
        table += &format!("{form}\t{instructions:.0}\t{first:.1}\t{last:.1}\n");
    }
    if let Some(file) = write {
        fs::write(file, &table)?;
    }
    let before = check.map(fs::read_to_string).transpose()?.unwrap_or_default();
    if check.is_some() && before.lines().count() != FORMS.len() {
        return Err("the file has other lines: --write writes it".into());
    }
    for (is, was) in table.lines().zip(before.lines()) {
        let numbers =
            |line: &str| line.split('\t').skip(1).flat_map(str::parse).collect::<Vec<f64>>();
        let most = |at: usize, was: f64| if at == 0 { was * 1.02 } else { was * 1.03 + 0.5 };
        let (is_now, was_then) = (numbers(is), numbers(was));
        let is_worse = (0..3).any(|at| is_now[at] > most(at, was_then[at]));
        if is_worse || is.split('\t').next() != was.split('\t').next() {
            return Err(format!("{is}, and before {was}").into());
        }
    }
    Ok(())
}
