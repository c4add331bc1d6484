//! A log that three hosts keep, on simulated hosts: none of its entries is lost that a majority has, although hosts crash in
//! the middle of a transfer. `SEEDS=10000 cargo test --release --features tokio --test replicated_log` tries many seeds.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ibverbs::{
    AccessFlags, BufferPool, Channel, ChannelBuilder, ProtectionDomain, Reactor,
    settings::MaxRnrRetries,
};
use ibverbs_software::{Host, World, simulate};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const PORT: u16 = 1;
const ENTRIES: usize = 12;
/// Some packets long, so that a crash meets a part of an entry.
const LENGTH: usize = 10_000;
const PATIENCE: Duration = Duration::from_millis(50);

/// The disk of a host: the numbers of the entries, which outlast a crash.
type Disk = Arc<Mutex<Vec<u64>>>;

/// The RDMA side of a program.
struct Side {
    domain: Arc<ProtectionDomain<'static>>,
    reactor: Arc<Reactor>,
    pool: BufferPool,
}

impl Side {
    fn new(host: &Host) -> Result<Self> {
        let context = Arc::new(host.device()?.open()?);
        let domain = Arc::new(ProtectionDomain::new(&context)?);
        let reactor = Arc::new(Reactor::new(&context, 64)?);
        let pool = BufferPool::new(&domain, LENGTH, 8, AccessFlags::empty())?;
        let run = reactor.clone();
        tokio::spawn(async move { run.run_on_tokio().await });
        Ok(Self { domain, reactor, pool })
    }

    fn builder(&self) -> ChannelBuilder<'static> {
        let builder = Channel::builder(&self.domain).max_send_wr(4).max_recv_wr(4);
        builder.max_rnr_retries(MaxRnrRetries::UNLIMITED)
    }
}

/// Receives entries, puts them on the disk, and says how many are there.
async fn follow(host: Host, disk: Disk) -> Result {
    let side = Arc::new(Side::new(&host)?);
    let mut listener = host.listen(PORT)?;
    loop {
        let (mut stream, _) = listener.accept().await?;
        let length = disk.lock().unwrap().len() as u64;
        let prepared = side.reactor.prepare(side.builder())?;
        let accepted = timeout(PATIENCE, prepared.accept(&mut stream, &length.to_le_bytes())).await;
        let Ok(Ok((channel, _))) = accepted else { continue };
        // A leader that comes back has given up the old connection.
        let follow = async {
            loop {
                let (mut entry, _) = channel.receive(side.pool.take().ok_or("no buffer")?).await?;
                let number = u64::from_le_bytes(entry[..8].try_into()?);
                assert!(
                    entry[8..].iter().all(|&byte| byte == number as u8),
                    "entry {number} is torn"
                );
                let length = {
                    let mut disk = disk.lock().unwrap();
                    assert_eq!(disk.len() as u64, number, "an entry is missing");
                    disk.push(number);
                    disk.len() as u64
                };
                entry.clear();
                entry.extend_from_slice(&length.to_le_bytes())?;
                channel.send(entry).await?;
            }
        };
        let _: Result = timeout(Duration::from_millis(200), follow).await.unwrap_or(Ok(()));
    }
}

/// The state of the leader.
struct Leader {
    disk: Disk,
    /// How many entries each follower has on its disk.
    copied: [AtomicUsize; 2],
    grown: [Notify; 2],
    progress: Notify,
}

/// Keeps one follower up to date.
async fn replicate(host: Host, side: Arc<Side>, follower: Host, leader: Arc<Leader>, nth: usize) {
    loop {
        let connected: Result = async {
            let mut stream = timeout(PATIENCE, host.connect((follower.address(), PORT))).await??;
            let prepared = side.reactor.prepare(side.builder())?;
            let (channel, told) = timeout(PATIENCE, prepared.connect(&mut stream, b"")).await??;
            let mut next = u64::from_le_bytes(told[..].try_into()?) as usize;
            loop {
                leader.copied[nth].store(next, Ordering::Relaxed);
                leader.progress.notify_one();
                while leader.disk.lock().unwrap().len() <= next {
                    leader.grown[nth].notified().await;
                }
                let entry = vec![next as u8; side.pool.chunk_len()];
                let mut entry = side.pool.take_from(&entry)?.ok_or("no buffer")?;
                entry[..8].copy_from_slice(&(next as u64).to_le_bytes());
                let room = side.pool.take().ok_or("no buffer")?;
                let exchange =
                    async { tokio::try_join!(channel.send(entry), channel.receive(room)) };
                let (_, (answer, _)) = timeout(PATIENCE, exchange).await??;
                next = u64::from_le_bytes(answer[..8].try_into()?) as usize;
            }
        }
        .await;
        drop(connected);
        sleep(Duration::from_millis(1)).await;
    }
}

/// Appends entries. `copies`: how many disks have one when it is acknowledged.
async fn lead(
    host: Host,
    followers: [Host; 2],
    disk: Disk,
    copies: usize,
    acknowledged: Arc<AtomicUsize>,
) -> Result {
    let side = Arc::new(Side::new(&host)?);
    let leader = Arc::new(Leader {
        disk,
        copied: Default::default(),
        grown: Default::default(),
        progress: Notify::new(),
    });
    for (nth, follower) in followers.into_iter().enumerate() {
        tokio::spawn(replicate(host.clone(), side.clone(), follower, leader.clone(), nth));
    }
    for entry in 0..ENTRIES {
        leader.disk.lock().unwrap().push(entry as u64);
        leader.grown.iter().for_each(Notify::notify_one);
        let has_it = |count: &&AtomicUsize| count.load(Ordering::Relaxed) > entry;
        while 1 + leader.copied.iter().filter(has_it).count() < copies {
            leader.progress.notified().await;
        }
        acknowledged.store(entry + 1, Ordering::Relaxed);
    }
    std::future::pending().await
}

/// Whether all entries that the leader has acknowledged outlast it, and what the network saw.
fn run(seed: u64, copies: usize) -> (bool, String) {
    simulate(seed, async |world: World| {
        let mut conditions = world.conditions();
        conditions.loss = [0.0, 0.005, 0.03][world.random(3) as usize];
        conditions.jitter = Duration::from_micros(world.random(200));
        conditions.bandwidth = Some(50_000_000);
        world.set_conditions(conditions);
        let hosts = ["leader", "one", "other"].map(|name| world.host(name));
        hosts[1].set_clock(Duration::ZERO, world.random(2_000) as i32 - 1_000);
        let disks = [(); 3].map(|()| Disk::default());
        let follow = |nth: usize| hosts[nth].start(follow(hosts[nth].clone(), disks[nth].clone()));
        follow(1);
        follow(2);
        let acknowledged = Arc::new(AtomicUsize::new(0));
        let [_, one, other] = hosts.clone();
        let (disk, known) = (disks[0].clone(), acknowledged.clone());
        hosts[0].start(lead(hosts[0].clone(), [one, other], disk, copies, known));
        for _ in 0..world.random(4) {
            sleep(Duration::from_micros(world.random(3000))).await;
            let victim = 1 + world.random(2) as usize;
            if world.random(2) == 0 {
                hosts[victim].crash();
                sleep(Duration::from_micros(world.random(3000))).await;
                follow(victim);
            } else {
                hosts[0].partition(&hosts[victim]);
                sleep(Duration::from_millis(world.random(20))).await;
                hosts[0].heal(&hosts[victim]);
            }
        }
        sleep(Duration::from_micros(world.random(5000))).await;
        hosts[0].crash();
        let acknowledged = acknowledged.load(Ordering::Relaxed);
        sleep(Duration::from_millis(5)).await;
        // The next leader is the one that has most.
        let kept = disks[1..].iter().map(|disk| disk.lock().unwrap().len()).max().unwrap_or(0);
        (acknowledged <= kept, format!("{acknowledged} {kept}\n{}", world.trace()))
    })
}

#[test]
fn what_a_majority_has_is_never_lost() {
    let seeds = std::env::var("SEEDS").map_or(100, |seeds| seeds.parse().expect("SEEDS: a number"));
    for seed in 0..seeds {
        let (is_kept, trace) = run(seed, 2);
        assert!(is_kept, "seed {seed}: {trace}");
    }
}

#[test]
fn an_acknowledgement_before_the_majority_is_found_by_a_seed_that_repeats_it() {
    let seed = (0..100).find(|&seed| !run(seed, 1).0).expect("a seed that shows the fault");
    assert!(run(seed, 1) == run(seed, 1));
    println!("an entry is lost: this repeats it: run({seed}, 1)");
}

#[test]
fn a_seed_repeats_the_run() {
    for seed in 0..10 {
        assert!(run(seed, 2) == run(seed, 2), "seed {seed}");
    }
    assert!(run(0, 2) != run(1, 2));
}
