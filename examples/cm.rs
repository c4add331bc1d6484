//! Connects by IP address through the connection manager, and exchanges messages with an echo server.
//!
//! ```text
//! cargo run --features rdmacm --example cm -- 0.0.0.0:7471             # on one machine
//! cargo run --features rdmacm --example cm -- 10.77.0.1:7471 hello you # on another
//! ```
//!
//! Without an RDMA device, both run on one machine, on devices of software, and the address is 127.0.0.1:7471.
//!
//! With an address alone it listens there, and echoes what each peer sends, one peer after the other.
//! With messages it connects to that address, sends them, and prints what comes back.
//!
//! On iWARP a message must find a receive that was posted before. On InfiniBand and RoCE the device retries
//! if there is none yet, and this example relies on that.

use std::error::Error;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use std::{env, process, thread};

use ibverbs::rdmacm::{ConnectionRequest, Listener, Route};
use ibverbs::{Channel, ErrorKind, TransportError};

const TIME: Duration = Duration::from_secs(10);

/// How long to wait when a resource has run out.
const PAUSE: Duration = Duration::from_millis(100);

/// The maximum length of a message.
const LONGEST: usize = 4096;

type Outcome = Result<(), Box<dyn Error>>;

#[allow(dead_code, reason = "a test calls the two sides")]
fn main() -> Outcome {
    let mut arguments = env::args().skip(1);
    let Some(address) = arguments.next() else {
        eprintln!("usage: cm ADDRESS:PORT [MESSAGE...]");
        process::exit(2);
    };
    let (address, messages) = (address.parse()?, arguments.collect::<Vec<_>>());
    let _software = ibverbs_software::register_if_none()?; // a device, if the machine has none
    if messages.is_empty() { listen(address) } else { connect(address, &messages) }
}

pub(crate) fn connect(address: SocketAddr, messages: &[String]) -> Outcome {
    let route = Route::resolve(address, Instant::now() + TIME)?;
    let context = route.open_device()?;
    let domain = context.alloc_pd()?;
    let prepared = Channel::builder(&domain).port(route.port()).build()?;
    let mut channel =
        route.connect(prepared, &(messages.len() as u32).to_be_bytes(), Instant::now() + TIME)?;

    println!("{} says {:?}", address, String::from_utf8_lossy(channel.private_data().trim_end()));
    let mut sent = domain.allocate::<u8>(LONGEST)?;
    let mut echoed = domain.allocate::<u8>(LONGEST)?;
    for message in messages {
        let bytes = message.as_bytes().get(..LONGEST).unwrap_or(message.as_bytes());
        sent[..bytes.len()].copy_from_slice(bytes);
        let (message, room) = (sent.slice(..bytes.len())?, echoed.slice_mut(..)?);
        channel.scope(|scope| {
            let receive = scope.post_receive(room)?;
            scope.post_send(message)?.wait()?;
            let (echo, completion) = receive.wait_until(Instant::now() + TIME)?;
            println!("{}", String::from_utf8_lossy(&echo[..completion.byte_len() as usize]));
            Ok::<_, TransportError>(())
        })?;
    }
    channel.disconnect()?;
    Ok(())
}

pub(crate) fn listen(address: SocketAddr) -> Outcome {
    let mut listener = Listener::bind(address)?;
    println!("listening at {}", listener.local_addr().unwrap_or(address));
    loop {
        let request = match listener.next() {
            // Such as too many open files.
            Err(error) if error.kind() == ErrorKind::Resource => {
                println!("{error}");
                thread::sleep(PAUSE);
                continue;
            }
            request => request?,
        };
        let peer = request.peer_addr();
        println!("{peer:?} connects through {:?}", request.device_name());
        match echo(request) {
            Ok(()) => println!("{peer:?} is done"),
            Err(error) => println!("{peer:?}: {error}"),
        }
    }
}

fn echo(request: ConnectionRequest) -> Outcome {
    let count = request.private_data().first_chunk().map_or(0, |bytes| u32::from_be_bytes(*bytes));
    let context = request.open_device()?;
    let domain = context.alloc_pd()?;
    let mut buffer = domain.allocate::<u8>(LONGEST)?;
    let prepared = Channel::builder(&domain).port(request.port()).build()?;

    let mut channel =
        request.accept(prepared, b"an echo of up to 4096 bytes", Instant::now() + TIME)?;
    for _ in 0..count {
        let received = channel.until(Instant::now() + TIME).receive(&mut buffer.slice_mut(..)?)?;
        channel.send(buffer.slice(..received.byte_len() as usize)?)?;
    }
    channel.event_until(Instant::now() + TIME)?; // the peer disconnects
    Ok(())
}
