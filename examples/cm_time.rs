//! Measures connection times through the connection manager, step by step, as rdma-core's `cmtime` does:
//! opens many connections at once, and completes each step for all of them before the next. `cmtime`
//! (without `-s`) of rdma-core before 52 is the other side: later ones first meet their peer over TCP.
//!
//! ```text
//! cmtime -b 10.77.0.1 -p 7471                                                       # on one machine
//! cargo run --release --features rdmacm --example cm_time -- 10.77.0.1:7471 100     # on another
//! ```

use std::error::Error;
use std::time::{Duration, Instant};
use std::{env, process};

use ibverbs::Rc;
use ibverbs::rdmacm::{ConnectionEventKind, Route};

const TIME: Duration = Duration::from_secs(60);

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [address, count] = &arguments[..] else {
        eprintln!("usage: cm_time ADDRESS:PORT CONNECTIONS");
        process::exit(2);
    };
    let (address, count) = (address.parse()?, count.parse::<u32>()?.max(1));
    let _software = ibverbs_software::register_if_none()?; // a device, if the machine has none
    // The device is open before the clock runs, as for cmtime.
    let first = Route::resolve(address, Instant::now() + TIME)?;
    let context = first.open_device()?;
    let (domain, port) = (context.alloc_pd()?, first.port());
    let queue = context.create_cq(1)?;
    drop(first);

    let mut total = Duration::ZERO;
    let mut step = |name: &str, start: Instant| {
        let took = start.elapsed();
        total += took;
        let micros = took.as_secs_f64() * 1e6;
        println!(
            "{name:<12} {:10.2} ms {:10.2} us / conn",
            micros / 1e3,
            micros / f64::from(count)
        );
    };
    let all = || 0..count;

    let start = Instant::now();
    let begun: Vec<_> =
        all().map(|_| Route::to(address).begin(Instant::now() + TIME)).collect::<Result<_, _>>()?;
    let routes: Vec<_> =
        begun.into_iter().map(|resolution| resolution.finish()).collect::<Result<_, _>>()?;
    step("resolve", start);

    let start = Instant::now();
    let mut pending = Vec::new();
    for route in routes {
        let kind = Rc;
        let prepared = domain.create_qp(&queue, &queue, kind).port(port).build()?;
        pending.push(route.prepare(prepared).map_err(|(.., error)| error)?);
    }
    step("create qp", start);

    let start = Instant::now();
    let connecting: Vec<_> =
        pending.into_iter().map(|pending| pending.start(b"")).collect::<Result<_, _>>()?;
    let mut connections: Vec<_> = connecting
        .into_iter()
        .map(|one| one.finish(Instant::now() + TIME))
        .collect::<Result<_, _>>()?;
    step("connect", start);

    let start = Instant::now();
    for connection in &mut connections {
        connection.disconnect()?;
    }
    for connection in &mut connections {
        while connection.event_until(Instant::now() + TIME)?.kind()
            != ConnectionEventKind::Disconnected
        {}
    }
    step("disconnect", start);

    let start = Instant::now();
    drop(connections);
    step("destroy", start);
    let rate = f64::from(count) / total.as_secs_f64();
    println!("{:<12} {:10.2} ms {rate:10.2} connections / s", "total", total.as_secs_f64() * 1e3);
    Ok(())
}
