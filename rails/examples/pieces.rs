//! Writes many pieces over two rails with two queue pairs each, in virtual time: for callgrind, see the README.

#![forbid(unsafe_code)]

use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use ibverbs::AccessFlags;
use ibverbs_rails::{Event, Rails, Transfer};
use ibverbs_software::{Device, Network};

/// A part of a list is a piece at least.
const PIECE: usize = 1024;
const PARTS: usize = 1024;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let rounds = std::env::args().nth(1).map_or(Ok(1), |number| number.parse())?;
    let network = Network::builder().manual().trace_bytes(0).build();
    let devices = |side: u8| -> Result<Vec<Device>, Box<dyn std::error::Error>> {
        let device = |rail: u8| {
            let address = format!("10.0.{rail}.{side}").parse()?;
            let builder = Device::builder().network(&network).address(address);
            let device = builder.name(format!("pieces{side}{rail}")).build()?;
            device.register();
            Ok(device)
        };
        (0..2).map(device).collect()
    };
    let [senders, receivers] = [devices(1)?, devices(2)?];
    let build = |devices: &[Device]| {
        let rails = devices.iter().fold(Rails::builder(), |rails, it| rails.device(it.name()));
        rails.queue_pairs(2).build()
    };
    let (mut sender, mut receiver) = (build(&senders)?, build(&receivers)?);
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let streams = [TcpStream::connect(listener.local_addr()?)?, listener.accept()?.0];
    streams.iter().try_for_each(|stream| stream.set_nonblocking(true))?;
    let [one, other] = streams;
    let peer = sender.connect_over(one)?;
    receiver.accept_over(other)?;
    let source = sender.allocate(PIECE * PARTS, AccessFlags::empty())?;
    let sink = receiver.allocate(PIECE * PARTS, AccessFlags::REMOTE_WRITE)?;
    let transfer = || {
        let parts = (0..PARTS).map(|part| {
            let range = part * PIECE..(part + 1) * PIECE;
            Ok((source.slice(range.clone())?, sink.remote().slice(range)?))
        });
        let parts = parts.collect::<ibverbs_rails::Result<Vec<_>>>()?;
        Ok::<_, ibverbs_rails::RailsError>(Transfer::write_list(parts))
    };
    let epoch = Instant::now();
    let mut done = 0;
    while done < rounds {
        network.advance(Duration::from_micros(50));
        let now = epoch + network.now();
        sender.turn(now);
        receiver.turn(now);
        while let Some(event) = sender.next_event() {
            match event {
                Event::Connected(_) => drop(sender.post(peer, transfer()?)?),
                Event::Ended { result, .. } => {
                    result?;
                    done += 1;
                    sender.post(peer, transfer()?)?;
                }
                Event::Disconnected { error, .. } => return Err(error.into()),
                _ => {}
            }
        }
        while receiver.next_event().is_some() {}
    }
    println!("{} pieces", rounds * PARTS);
    Ok(())
}
