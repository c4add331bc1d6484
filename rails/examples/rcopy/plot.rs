//! The throughput of four rails, one of which dies at second 3: a simulated network in virtual time.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use ibverbs::AccessFlags;
use ibverbs_rails::{Event, Rails, Transfer};
use ibverbs_software::{Device, Network};
use plotters::prelude::*;

use crate::Result;

const RAILS: usize = 4;
/// Bytes per second of each rail: 100 Mb/s.
const BANDWIDTH: u64 = 12_500_000;
const DIES: Duration = Duration::from_secs(3);
const RETURNS: Duration = Duration::from_secs(5);
const END: Duration = Duration::from_secs(8);
const SAMPLE: Duration = Duration::from_millis(50);
const STEP: Duration = Duration::from_millis(1);
/// The bytes of a transfer, and how many are under way: those that have a piece on the dead rail wait for a while.
const LENGTH: usize = 1 << 20;
const TRANSFERS: usize = 32;

/// Colours that colour-blind people can distinguish (Okabe and Ito).
const COLOURS: [RGBColor; RAILS] = [
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0xcc, 0x79, 0xa7),
];

fn devices(network: &Network, side: u8) -> Result<Vec<Device>> {
    let device = |rail: usize| {
        let address = format!("10.0.{rail}.{side}").parse()?;
        let name = format!("{}{rail}", ["send", "receive"][usize::from(side) - 1]);
        let device = Device::builder().network(network).address(address).name(name).build()?;
        device.register();
        Ok(device)
    };
    (0..RAILS).map(device).collect()
}

fn streams() -> io::Result<[TcpStream; 2]> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let streams = [TcpStream::connect(listener.local_addr()?)?, listener.accept()?.0];
    for stream in &streams {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
    }
    Ok(streams)
}

pub(crate) fn draw(file: &Path) -> Result<()> {
    let samples = measure()?;
    plot(file, &samples)?;
    Ok(())
}

/// The bytes that each rail has carried until then, every [`SAMPLE`].
fn measure() -> Result<Vec<[u64; RAILS]>> {
    let builder = Network::builder().manual().trace_bytes(0);
    let network = builder.delay(Duration::from_micros(5)).bandwidth(BANDWIDTH).build();
    let [senders, receivers] = [devices(&network, 1)?, devices(&network, 2)?];
    let build = |devices: &[Device]| {
        devices.iter().fold(Rails::builder(), |rails, it| rails.device(it.name())).build()
    };
    let (mut sender, mut receiver) = (build(&senders)?, build(&receivers)?);
    let [one, other] = streams()?;
    let peer = sender.connect_over(one)?;
    receiver.accept_over(other)?;
    let source = sender.allocate(LENGTH, AccessFlags::empty())?;
    let sink = receiver.allocate(LENGTH, AccessFlags::REMOTE_WRITE)?;
    let write = || source.slice(..).map(|source| Transfer::write(source, sink.remote()));

    let epoch = Instant::now();
    let mut start = None;
    let (mut samples, mut is_dead) = (Vec::new(), false);
    loop {
        network.advance(STEP);
        let now = epoch + network.now();
        receiver.turn(now);
        sender.turn(now);
        while let Some(event) = sender.next_event() {
            match event {
                Event::Connected(_) => {
                    start = Some(network.now());
                    for _ in 0..TRANSFERS {
                        sender.post(peer, write()?)?;
                    }
                }
                Event::Ended { result, .. } => {
                    result?;
                    sender.post(peer, write()?)?;
                }
                Event::Disconnected { error, .. } => return Err(error.into()),
                event => eprintln!("{:.2} s: {event:?}", network.now().as_secs_f64()),
            }
        }
        while receiver.next_event().is_some() {}
        let Some(time) = start.map(|start| network.now() - start) else { continue };
        let should_be_dead = (DIES..RETURNS).contains(&time);
        if is_dead != should_be_dead {
            is_dead = should_be_dead;
            match is_dead {
                true => network.partition(&senders[1], &receivers[1]),
                false => network.heal(&senders[1], &receivers[1]),
            }
        }
        if time >= SAMPLE * samples.len() as u32 {
            let bytes = sender.bytes_carried(peer);
            samples.push(std::array::from_fn(|rail| bytes[rail]));
        }
        if time >= END {
            return Ok(samples);
        }
    }
}

/// Draws the rails on top of each other.
fn plot(file: &Path, samples: &[[u64; RAILS]]) -> Result<()> {
    let per_second = |bytes: u64| bytes as f64 / SAMPLE.as_secs_f64() / 1e6;
    let rates: Vec<[f64; RAILS]> = samples
        .windows(2)
        .map(|two| std::array::from_fn(|rail| per_second(two[1][rail] - two[0][rail])))
        .collect();
    let area = SVGBackend::new(file, (800, 400)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption("four rails of 100 Mb/s; one is dead from second 3 to 5", ("sans-serif", 18))
        .margin(16)
        .x_label_area_size(40)
        .y_label_area_size(56)
        // To the right there is room for the names.
        .build_cartesian_2d(0.0..END.as_secs_f64() + 1.2, 0.0..56.0)?;
    chart
        .configure_mesh()
        .x_desc("seconds, in virtual time")
        .x_labels(9)
        .x_label_formatter(&|seconds| format!("{seconds:.0}"))
        .y_desc("MB/s")
        .y_label_formatter(&|rate| format!("{rate:.0}"))
        .light_line_style(WHITE)
        .bold_line_style(RGBColor(0xdd, 0xdd, 0xdd))
        .draw()?;
    // The highest first: the next one covers all but its own part.
    for rail in (0..RAILS).rev() {
        let points = rates.iter().zip(0_u32..).map(|(rates, number)| {
            ((SAMPLE * number).as_secs_f64(), rates[..=rail].iter().sum::<f64>())
        });
        let colour = COLOURS[rail];
        chart
            .draw_series(AreaSeries::new(points, 0.0, colour))?
            .label(format!("rail {rail}"))
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour.filled()));
    }
    chart.configure_series_labels().background_style(WHITE).border_style(BLACK).draw()?;
    area.present()?;
    Ok(())
}
