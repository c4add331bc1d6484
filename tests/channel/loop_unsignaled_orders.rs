//! Sends of a loop without completions of their own, in every order that a program may choose.
//!
//! Whatever it does, each buffer comes back once, in the order of the posts, each call returns, and a queue whose operations
//! have come back has room.

use std::collections::VecDeque;
use std::panic::resume_unwind;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use ibverbs::{
    ChannelId, ReceiveWorkRequest, RemoteMemoryRegion, SharedMemoryRegion, TransportError,
    WriteWorkRequest,
};
use ibverbs_function_device::{FunctionDevice, Progress};

use crate::loops::{LEN, Loops};
use crate::pair::{ALL, TestDevice};

/// A call that never returns fails the test.
pub(crate) fn within_minutes(test: impl FnOnce() + Send + 'static) {
    let (done, is_done) = mpsc::channel::<()>();
    let thread = thread::spawn(move || {
        let _done = done;
        test();
    });
    let ended = is_done.recv_timeout(Duration::from_secs(300));
    assert_eq!(ended, Err(mpsc::RecvTimeoutError::Disconnected), "a call does not return");
    thread.join().unwrap_or_else(|panic| resume_unwind(panic));
}

struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % limit
    }
}

/// The token of receives.
const RECEIVE: u64 = u64::MAX;

/// A channel that writes to its peer.
struct Writer {
    loops: Loops<FunctionDevice>,
    memory: SharedMemoryRegion<'static, u8>,
    channel: ChannelId,
    /// What was posted, until it comes back.
    posted: VecDeque<u64>,
    receives: usize,
    next: u64,
    /// It was destroyed: what was in flight comes back in any order.
    in_any_order: bool,
}

impl Writer {
    fn new(depth: u32) -> Self {
        let device = FunctionDevice::make();
        device.progress(Progress::Manual);
        let mut loops = Loops::on(device);
        // No test waits for it.
        let prepare =
            |of| loops.prepare(of).max_send_wr(depth).settle_timeout(Duration::from_secs(600));
        let (one, two) = crate::pair::connect(prepare(&loops.here), prepare(&loops.peers));
        let channel = loops.here.add(one).unwrap();
        loops.peers.add(two).unwrap();
        let memory = SharedMemoryRegion::new(&loops.domain, LEN, ALL).unwrap();
        let (posted, receives, next) = Default::default();
        Self { loops, memory, channel, posted, receives, next, in_any_order: false }
    }

    fn post(&mut self, unsignaled: bool, target: RemoteMemoryRegion) -> Result<(), TransportError> {
        let token = self.next;
        let request = WriteWorkRequest::new(self.loops.filled(token as u8), target);
        let posted = match unsignaled {
            true => self.loops.here.post_unsignaled(self.channel, request, token),
            false => self.loops.here.post(self.channel, request, token),
        };
        if !posted.as_ref().is_err_and(|refused| refused.buffer.is_some()) {
            self.posted.push_back(token);
            self.next += 1;
        }
        posted.map_err(|refused| refused.error)
    }

    fn good(&mut self, unsignaled: bool) -> Result<(), TransportError> {
        self.post(unsignaled, self.memory.remote())
    }

    fn receive(&mut self) {
        let request = ReceiveWorkRequest::new(self.loops.filled(0));
        self.receives += usize::from(self.loops.here.post(self.channel, request, RECEIVE).is_ok());
    }

    fn take(&mut self) -> bool {
        let Some(ended) = self.loops.here.next_ended().unwrap() else { return false };
        assert_eq!(ended.channel, self.channel);
        if ended.token == RECEIVE {
            self.receives = self.receives.checked_sub(1).expect("a receive comes back once");
            return true;
        }
        let at = self.posted.iter().position(|&token| token == ended.token);
        let at = at.expect("a send comes back once");
        assert!(at == 0 || self.in_any_order, "{} comes before {}", ended.token, self.posted[0]);
        self.posted.remove(at);
        assert_eq!(ended.buffer[0], ended.token as u8);
        true
    }

    fn settle(&mut self) {
        self.loops.device.run();
        let most = self.posted.len() + self.receives;
        let taken = (0..=most).take_while(|_| self.take()).count();
        assert!(taken <= most);
        assert_eq!(self.loops.out(), self.posted.len() + self.receives);
    }

    /// One more send brings all back.
    fn end(&mut self) {
        self.settle();
        let last = self.good(false);
        self.settle();
        assert_ne!(last, Err(TransportError::QueueFull));
        assert_eq!(self.posted, [], "{last:?}");
        assert_eq!(self.loops.here.in_flight(self.channel), self.receives);
        assert_eq!(self.good(false).is_ok(), last.is_ok());
        self.settle();
        assert_eq!(self.posted, []);
    }

    fn finish(mut self) {
        if let Ok(()) = self.loops.here.remove(self.channel) {
            self.settle();
        }
        assert_eq!((self.posted.len(), self.receives, self.loops.out()), (0, 0, 0));
        drop(self.memory);
        self.loops.finish();
    }
}

#[test]
fn in_queues_of_every_depth_each_nth_may_have_a_completion() {
    within_minutes(|| {
        for (depth, period, pause) in (1..=6)
            .flat_map(|depth| (1..=8).map(move |period| (depth, period)))
            .flat_map(|(depth, period)| (1..=7).map(move |pause| (depth, period, pause)))
        {
            let mut writer = Writer::new(depth);
            for n in 1..=60 {
                let unsignaled = n % period != 0;
                if let Err(error) = writer.good(unsignaled) {
                    assert_eq!(error, TransportError::QueueFull);
                    writer.settle();
                    assert_eq!(writer.posted, [], "what fills a queue comes back");
                    writer.good(unsignaled).unwrap();
                }
                if n % pause == 0 {
                    writer.settle();
                }
            }
            writer.end();
            writer.finish();
        }
    });
}

/// The channel is out of the loop, which goes on.
fn take_out(writer: &mut Writer, numbers: &mut Numbers) -> bool {
    let device = writer.loops.device.clone();
    // The write that brings them back may be refused. A later post does, then.
    let is_lost = numbers.below(4) == 0;
    device.fail("post_send").times(u32::from(is_lost));
    let detached = writer.loops.here.take_out(writer.channel).unwrap();
    device.clear_faults();
    let stops = numbers.below(2) == 0;
    if stops {
        detached.stop().unwrap();
    }
    if stops || numbers.below(2) == 0 {
        writer.settle();
        assert!(is_lost || writer.posted.is_empty());
        let in_flight = writer.loops.here.in_flight(writer.channel);
        assert_eq!(in_flight, writer.posted.len() + writer.receives);
    }
    if numbers.below(2) == 0 {
        writer.in_any_order = true;
        writer.loops.here.end_destroyed(detached.destroy()).unwrap();
        writer.settle();
        return false;
    }
    writer.loops.here.put_back(detached).unwrap();
    true
}

/// Returns whether the channel is still there.
fn step(writer: &mut Writer, numbers: &mut Numbers) -> bool {
    let device = writer.loops.device.clone();
    match numbers.below(200) {
        0..60 => drop(writer.good(true)),
        60..90 => drop(writer.good(false)),
        90..120 => drop(device.step(1 + numbers.below(3) as u32)),
        120..160 => drop(writer.take()),
        160..175 => writer.settle(),
        175..178 => {
            let nowhere = RemoteMemoryRegion::new(0x1000, LEN as u64, 1).unwrap();
            let _ = writer.post(numbers.below(2) == 0, nowhere);
        }
        178..188 => {
            let verb = ["post_send", "ring_doorbell"][usize::from(numbers.below(5) == 0)];
            // The write of nothing that follows may fail, too.
            device.fail(verb).errno(libc::EACCES).times(1 + numbers.below(2) as u32);
            let _ = writer.good(numbers.below(2) == 0);
            device.clear_faults();
        }
        188..192 => drop(writer.loops.here.keep_alive(writer.channel)),
        192..195 => writer.receive(),
        195..197 => {
            let most = writer.posted.len() + writer.receives;
            assert!(writer.loops.here.stop(writer.channel).unwrap() <= most);
            writer.settle();
            assert_eq!((writer.posted.len(), writer.receives), (0, 0));
        }
        197..199 => return take_out(writer, numbers),
        _ => {
            writer.loops.here.remove(writer.channel).unwrap();
            writer.settle();
            return false;
        }
    }
    true
}

#[test]
fn whatever_a_program_does_each_comes_back_once() {
    within_minutes(|| {
        for seed in 1..=1000 {
            let mut numbers = Numbers(0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(seed));
            let mut writer = Writer::new(1 + numbers.below(6) as u32);
            let is_there = (0..numbers.below(150)).all(|_| step(&mut writer, &mut numbers));
            if is_there {
                writer.end();
            }
            writer.finish();
        }
    });
}
