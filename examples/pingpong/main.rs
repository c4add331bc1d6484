//! Two processes that send a message back and forth. Either end can be rdma-core's `ibv_rc_pingpong`: the
//! options, the exchange of addresses over TCP and the closing lines are the same.
//!
//! With `--chk` every byte of every message is checked: the client sends messages that differ from each
//! other, and expects each one back unchanged; the server knows the messages of the client. (The C tool
//! checks only one byte per page of the last message.)

mod address;
#[path = "../common/broken_pipe.rs"]
mod broken_pipe;
mod game;
mod messages;
mod options;

use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use ibverbs::queue_pair::SendOperations;
use ibverbs::{
    AccessFlags, CompletionQueue, MemoryRegion, Rc, RegionOptions, settings::PacketSequenceNumber,
};

use address::{Address, answer, meet};
use game::Game;
use messages::{FILLING, Messages};
use options::{Options, USAGE, parse};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// The longest time to wait for the peer.
const PATIENCE: Duration = Duration::from_secs(60);

/// The most memory for receives.
const RECEIVE_MEMORY: usize = 64 << 20;

fn main() -> ExitCode {
    broken_pipe::end_quietly();
    match parse() {
        Ok(None) => println!("{USAGE}"),
        Ok(Some(options)) => {
            if let Err(error) = run(&options) {
                eprintln!("pingpong: {error}");
                return ExitCode::FAILURE;
            }
        }
        Err(error) => {
            eprintln!("pingpong: {error}\n{USAGE}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

fn run(options: &Options) -> Result<()> {
    // A software device, if the machine has no RDMA device.
    let _software = ibverbs_software::register_if_none()?;
    let context = options.device.as_deref().map_or_else(ibverbs::open_first, ibverbs::open)?;
    let domain = context.alloc_pd()?;

    // A message that arrives while the last one is still being sent back needs a second receive.
    let affordable = u32::try_from(RECEIVE_MEMORY / options.size)?;
    let receives = options.rx_depth.min(affordable).max(2);
    let mut builder = CompletionQueue::builder(&context, receives + 1);
    if options.events {
        builder = builder.own_channel();
    }
    let queue = builder.build()?;
    let access = if options.on_demand { AccessFlags::ON_DEMAND } else { AccessFlags::empty() };
    let whole_pages = RegionOptions::from(access).page_aligned(); // as ibv_rc_pingpong's: QEMU's pvrdma takes no other
    let mut source = MemoryRegion::with_options(&domain, options.size, whole_pages)?;
    let all = options.size * receives as usize;
    let mut target = MemoryRegion::with_options(&domain, all, whole_pages)?;
    source.fill(FILLING);

    let mut builder = domain
        .create_qp(&queue, &queue, Rc)
        .max_send_wr(1)
        .max_recv_wr(receives)
        .port(options.port)
        .path_mtu(options.mtu)
        .service_level(options.service_level);
    if let Some(index) = options.gid_index {
        builder = builder.gid_index(index);
    }
    if options.new_send {
        builder = builder.extended(SendOperations::SEND);
    }
    let psn = random_psn();
    let prepared = builder.send_psn(psn).build()?;
    let local = Address { endpoint: prepared.endpoint(), psn };
    local.print("local address: ");
    let (remote, client) = meet(&local, options)?;
    remote.print("remote address:");
    let queue_pair = prepared.receive_psn(remote.psn).handshake(remote.endpoint)?;
    let mut game = Game {
        options,
        queue: &queue,
        source: &mut source,
        target: &mut target,
        queue_pair,
        messages: Messages::new(if options.check { options.size } else { 0 }),
    };
    for slot in 0..receives as usize {
        game.post_receive(slot)?;
    }
    if let Some(client) = client {
        answer(client, &local)?;
    }
    let time = game.play()?;

    let (bytes, seconds) = (options.size as u64 * options.iterations * 2, time.as_secs_f64());
    let megabits = bytes as f64 * 8. / seconds / 1e6;
    println!("{bytes} bytes in {seconds:.2} seconds = {megabits:.2} Mbit/sec");
    let each = seconds * 1e6 / options.iterations as f64;
    println!("{} iters in {seconds:.2} seconds = {each:.2} usec/iter", options.iterations);
    Ok(())
}

/// A random number, for which the standard library's hash keys are good enough.
fn random_psn() -> PacketSequenceNumber {
    use std::hash::{BuildHasher, Hasher, RandomState};
    let number = RandomState::new().build_hasher().finish() as u32;
    PacketSequenceNumber::new(number & PacketSequenceNumber::MAX.value()).unwrap_or_default()
}
