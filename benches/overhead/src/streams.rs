//! The cost of a byte stream: `streams [--check|--write FILE]` counts, with callgrind, the instructions of `ibverbs-stream` and
//! `ibverbs-bundled` that one side spends on a round trip: 64 bytes written, and 64 read. Those of the device, of tokio and of the
//! system are not in it. All is in virtual time, so the numbers repeat.
//!
//! `--write` writes them to a file, and `--check` fails if one is more than 2 % above that.

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

fn of_threads(trips: usize) -> Result<()> {
    let network = Network::new();
    let hub = || -> Result<Hub> {
        let context = Arc::new(network.device()?.open()?);
        Ok(Hub::builder(&context).max_connections(1).build()?)
    };
    let (hubs, (one, two)) = ([hub()?, hub()?], UnixStream::pair()?);
    let soon = Instant::now() + Duration::from_secs(60);
    let (mut one, mut two) = thread::scope(|threads| -> Result<_> {
        let connects = threads.spawn(|| Stream::over(&hubs[0], one, Role::Connects, soon));
        let two = Stream::over(&hubs[1], two, Role::Accepts, soon)?;
        Ok((connects.join().map_err(|_| "it has panicked")??, two))
    })?;
    let mut bytes = [7; 64];
    for _ in 0..trips {
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

/// The instructions of each function of a program's run, without those that it calls.
fn counted(form: &str, trips: usize) -> Result<HashMap<String, u64>> {
    let file = env::temp_dir().join(format!("streams-{}", std::process::id()));
    let status = Command::new("valgrind")
        .args(["--quiet", "--tool=callgrind"])
        .arg(format!("--callgrind-out-file={}", file.display()))
        .arg(env::current_exe()?)
        .args(["run", form, &trips.to_string()])
        .status()?;
    if !status.success() {
        return Err(format!("callgrind: {status}").into());
    }
    let text = fs::read_to_string(&file)?;
    fs::remove_file(&file)?;
    let (mut names, mut counts) = (HashMap::new(), HashMap::new());
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
            let count = line.split(' ').nth(1).and_then(|count| count.parse::<u64>().ok());
            if let (Some(count), false) = (count, std::mem::take(&mut is_call)) {
                *counts.entry(current.clone()).or_default() += count;
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

/// The instructions that one side spends on a round trip, by function.
fn own(form: &str) -> Result<Vec<(String, f64)>> {
    let (few, many) = (counted(form, TRIPS)?, counted(form, 3 * TRIPS)?);
    let each = many.into_iter().filter(|(name, _)| is_own(name)).map(|(name, count)| {
        let before = few.get(&name).copied().unwrap_or_default();
        (name, (count as f64 - before as f64) / (4 * TRIPS) as f64)
    });
    let mut each: Vec<_> = each.filter(|(_, count)| *count >= 0.5).collect();
    each.sort_by(|one, two| two.1.total_cmp(&one.1));
    Ok(each)
}

fn main() -> Result<()> {
    let args: Vec<String> = env::args().skip(1).collect();
    let (check, write) = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["run", "threads", trips] => return of_threads(trips.parse()?),
        ["run", "tasks", trips] => return of_tasks(trips.parse()?),
        [] => (None, None),
        ["--check", file] => (Some(file), None),
        ["--write", file] => (None, Some(file)),
        _ => return Err("usage: streams [--check|--write FILE]".into()),
    };
    let mut table = String::new();
    for form in ["threads", "tasks"] {
        let each = own(form)?;
        let all: f64 = each.iter().map(|(_, count)| count).sum();
        println!("{form}: {all:.0}");
        for (name, count) in each.iter().take_while(|(_, count)| *count >= 10.0) {
            println!("  {count:6.0}  {name}");
        }
        table += &format!("{form}\t{all:.0}\n");
    }
    if let Some(file) = write {
        fs::write(file, &table)?;
    }
    for line in check.map(fs::read_to_string).transpose()?.unwrap_or_default().lines() {
        let (form, most) = line.split_once('\t').ok_or("a line without a number")?;
        let most: f64 = most.parse()?;
        let is = table.lines().find_map(|line| line.strip_prefix(form)?.trim().parse::<f64>().ok());
        let is = is.ok_or_else(|| format!("nothing is called {form}"))?;
        if is > most * 1.02 {
            return Err(format!("{form}: {is} instructions, and {most} before").into());
        }
    }
    Ok(())
}
