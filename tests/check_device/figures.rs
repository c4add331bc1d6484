//! Figures for the report: how long a message takes from a device to itself, and how many instructions a post and a poll.

use std::fs::File;
use std::io::Read;
use std::os::fd::FromRawFd;
use std::time::{Duration, Instant};

use ibverbs::{WorkCompletion, completion::WorkSuccess};

use crate::device::{has_reliable, open, reliable};
use crate::transport;
use crate::vm::{PATIENCE, alone};
use crate::{figure, unsupported};

/// Counts the instructions of this thread in user space, if the kernel lets us, and the processor counts.
fn instructions() -> std::io::Result<File> {
    // struct perf_event_attr, of the size that every kernel takes: type, size, config, .., flags.
    let mut attributes = [0_u64; 8];
    attributes[0] = 64 << 32; // PERF_TYPE_HARDWARE, 64 bytes
    attributes[1] = 1; // PERF_COUNT_HW_INSTRUCTIONS
    attributes[5] = 1 << 5 | 1 << 6; // exclude_kernel, exclude_hv
    let own = 0;
    // SAFETY: the structure is as long as it says, and the call only reads it.
    let file =
        unsafe { libc::syscall(libc::SYS_perf_event_open, attributes.as_ptr(), own, -1, -1, 0) };
    if file < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new, and ours.
    Ok(unsafe { File::from_raw_fd(file as i32) })
}

fn count(counter: &mut File) -> u64 {
    let mut bytes = [0; 8];
    counter.read_exact(&mut bytes).expect("a counter has eight bytes");
    u64::from_ne_bytes(bytes)
}

#[test]
fn of_messages() {
    /// The most messages to send; they are fewer where one takes long.
    const MOST: u32 = 2000;
    const LONG: Duration = Duration::from_secs(5);
    let _alone = alone("figures", 240);
    let context = open();
    if !has_reliable(&context) {
        return;
    }
    let domain = context.alloc_pd().unwrap();
    let [to_one, to_two] = [(); 2].map(|()| context.create_cq(16).unwrap());
    let mut room = domain.allocate::<u8>(128).unwrap();
    let message = domain.allocate::<u8>(64).unwrap();
    let (one, two) = (reliable(&domain, &to_one), reliable(&domain, &to_two));
    let (mut one, mut two) = transport::queue_pairs(one.build().unwrap(), two.build().unwrap());
    let mut counter = instructions();
    let (mut posts, mut polls) = (0, 0);
    let mut found = [WorkCompletion::default(); 1];
    let began = Instant::now();
    // Messages go from one to two, then from two to one.
    let mut rounds = 0;
    while rounds < MOST && began.elapsed() < LONG {
        let (near, far) = if rounds % 2 == 0 { (&mut one, &mut two) } else { (&mut two, &mut one) };
        // SAFETY: the regions are not touched before the completions.
        unsafe { far.post_receive(&mut room, .., 1) }.unwrap();
        let before = counter.as_mut().map_or(0, count);
        // SAFETY: as above.
        unsafe { near.post_send(&message, .., 2) }.unwrap();
        posts += counter.as_mut().map_or(0, count) - before;
        for queue in [far.receive_cq(), near.send_cq()] {
            loop {
                let before = counter.as_mut().map_or(0, count);
                let done = !queue.poll(&mut found).unwrap().is_empty();
                let spent = counter.as_mut().map_or(0, count) - before;
                if done {
                    polls += spent;
                    break;
                }
                assert!(began.elapsed() < PATIENCE, "message {rounds}");
                if counter.is_err() {
                    std::thread::yield_now(); // a device of software may need the processor
                }
            }
            let _: WorkSuccess = found[0].result().unwrap();
        }
        rounds += 1;
    }
    let each = began.elapsed().as_secs_f64() * 1e6 / f64::from(rounds);
    let built = if cfg!(debug_assertions) { ", not optimized" } else { "" };
    figure("64 B to itself", &format!("{each:.2} us: receive, send, both completions{built}"));
    let average = |sum: u64, times: u32| sum as f64 / f64::from(times);
    match counter {
        Ok(mut counter) => {
            // Reading the counter itself costs instructions.
            let (first, second) = (count(&mut counter), count(&mut counter));
            let own = (second - first) as f64;
            let (post, poll) = (average(posts, rounds) - own, average(polls, 2 * rounds) - own);
            figure(
                "instructions",
                &format!("{post:.0} of a post, {poll:.0} of a poll that finds one"),
            );
        }
        Err(error) => unsupported(&format!("counting instructions: {error}")),
    }
}
