//! What a channel finds beside what it asks for is told to the thread that waits for any channel of the queue.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ibverbs::{
    AccessFlags, BufferPool, Channel, ChannelBuilder, Inline, ProtectionDomain, ReceiveWorkRequest,
    SendWorkRequest, SharedCompletionQueue, TransportError, WriteWorkRequest,
};
use ibverbs_function_device::FunctionDevice;

use crate::pair::{ModelPair as Pair, builder, connect, soon};

const TOKEN: u64 = 7;

/// `one` is on a queue that a thread can wait for.
struct Watched {
    pair: Pair,
    queue: Arc<SharedCompletionQueue<'static>>,
    pool: BufferPool,
}

impl Watched {
    fn new(set: impl Fn(ChannelBuilder<'static>) -> ChannelBuilder<'static>) -> Self {
        let device = FunctionDevice::model();
        let context = Arc::new(device.context());
        let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
        let queue = Arc::new(SharedCompletionQueue::with_event_channel(&context, 64).unwrap());
        let shared = set(builder(&domain)).shared_completion_queue(&queue).token(TOKEN);
        let (one, two) = connect(shared, set(builder(&domain)));
        let pool = BufferPool::new(&domain, 8, 16, AccessFlags::empty()).unwrap();
        Self { pair: Pair { one, two, domain, device }, queue, pool }
    }

    /// Two messages are there, of which only the device knows, and which the program asks for by tokens.
    fn two_messages(&mut self) {
        let Pair { one, two, .. } = &mut self.pair;
        for token in 0..2 {
            let receive =
                one.post_owned(ReceiveWorkRequest::new(self.pool.take().unwrap())).unwrap();
            receive.into_token(one, token).unwrap();
        }
        for byte in 0..2 {
            two.send(Inline(&[byte; 8])).unwrap();
        }
    }

    /// The thread that waits for any channel wakes up, and finds both messages.
    #[track_caller]
    fn are_told(&mut self) {
        let late = Instant::now() + Duration::from_secs(3);
        let ready = self.queue.wait_until(late).unwrap();
        let one = &mut self.pair.one;
        let found = std::iter::from_fn(|| one.poll_token().unwrap()).map(|ended| ended.token);
        assert_eq!(found.collect::<Vec<_>>(), [0, 1]);
        assert_eq!(ready.expect("it slept on").token, TOKEN);
        assert_eq!(self.queue.poll().unwrap(), None);
    }

    fn finish(self) {
        let Self { pair, queue, pool } = self;
        drop((queue, pool));
        pair.finish();
    }
}

#[test]
fn a_post_that_finds_the_queue_full_tells() {
    let mut watched = Watched::new(|builder| builder);
    let target = watched.pair.shared(1);
    for _ in 0..3 {
        let write = |watched: &mut Watched| {
            let buffer = watched.pool.take().unwrap();
            watched.pair.one.post_owned(WriteWorkRequest::new(buffer, target.remote()))
        };
        let writes = [(); 4].map(|()| write(&mut watched).unwrap());
        watched.two_messages();
        let refused = write(&mut watched).unwrap_err();
        assert_eq!(refused.error, TransportError::QueueFull);
        watched.are_told();
        for mut write in writes {
            write.wait(&mut watched.pair.one).unwrap();
        }
    }
    drop(target);
    watched.finish();
}

#[test]
fn a_sign_of_life_tells() {
    let mut watched = Watched::new(|builder| builder);
    // While it waits for its receive, no probe is posted, whose end would be told.
    let message = SendWorkRequest::new(watched.pool.take().unwrap());
    let mut sending = watched.pair.one.post_owned(message).unwrap();
    for _ in 0..3 {
        watched.two_messages();
        watched.pair.one.keep_alive().unwrap();
        watched.are_told();
    }
    let mut region = watched.pair.region(8, 0);
    watched.pair.two.receive(region.slice_mut(..).unwrap()).unwrap();
    drop(region);
    sending.wait(&mut watched.pair.one).unwrap();
    drop(sending);
    watched.finish();
}

#[test]
fn a_send_that_is_refused_for_lack_of_credit_tells() {
    let mut watched = Watched::new(|builder| builder.flow_control(true));
    for _ in 0..3 {
        let send = |watched: &mut Watched| {
            let buffer = watched.pool.take().unwrap();
            watched.pair.one.post_owned(SendWorkRequest::new(buffer)).unwrap_err().error
        };
        assert_eq!(send(&mut watched), TransportError::NoCredit);
        watched.two_messages();
        // It polls, since it does not know the answer to its question yet. The answer to the next one comes late: its
        // completion would be told.
        let (device, completions) = (watched.pair.device.clone(), watched.queue.as_raw());
        device.hold_completions(completions, 0, true);
        assert_eq!(send(&mut watched), TransportError::NoCredit);
        watched.are_told();
        device.hold_completions(completions, 0, false);
        device.release_all(completions);
    }
    watched.finish();
}

/// Every way to wait, or to poll, for something else.
#[test]
fn whoever_polls_tells() {
    type Poll<'a> = &'a dyn Fn(&mut Channel<'static>, &BufferPool);
    let mut watched = Watched::new(|builder| builder);
    let target = watched.pair.shared(1);
    let remote = target.remote();
    let polls: [Poll<'_>; 9] = [
        &|one, _| _ = one.write(Inline(&[1; 8]), remote).unwrap(),
        &|one, pool| {
            one.post_owned(WriteWorkRequest::new(pool.take().unwrap(), remote))
                .unwrap()
                .wait(one)
                .map(drop)
                .unwrap()
        },
        &|one, pool| {
            let mut write =
                one.post_owned(WriteWorkRequest::new(pool.take().unwrap(), remote)).unwrap();
            while write.poll(one).unwrap().is_none() {}
        },
        &|one, pool| {
            let mut receive =
                one.post_owned(ReceiveWorkRequest::new(pool.take().unwrap())).unwrap();
            assert!(receive.wait_until(one, soon()).unwrap().is_none());
            receive.into_token(one, 2).unwrap();
        },
        // SAFETY: there is no memory.
        &|one, _| _ = unsafe { one.write_unpolled((), remote) }.unwrap().wait(one).unwrap(),
        &|one, _| {
            // SAFETY: as above.
            let mut write = unsafe { one.write_unpolled((), remote) }.unwrap();
            while write.poll(one).is_none() {}
        },
        &|one, _| one.scope(|s| s.post_write((), remote)?.wait().map(drop)).unwrap(),
        &|one, _| one.scope(|s| s.post_write((), remote)?.spin_poll().map(drop)).unwrap(),
        &|one, _| one.scope(|s| s.post_write((), remote).map(drop)).unwrap(),
    ];
    for (number, poll) in polls.iter().enumerate() {
        watched.two_messages();
        poll(&mut watched.pair.one, &watched.pool);
        watched.are_told();
        if number == 3 {
            // The receive that was waited for.
            watched.pair.two.send(Inline(&[2; 8])).unwrap();
            assert_eq!(watched.pair.one.wait_token(soon()).unwrap().unwrap().token, 2);
            assert_eq!(watched.queue.poll().unwrap(), None);
        }
    }
    drop(target);
    watched.finish();
}

/// A wait in a scope tells what it finds, and not only the end of the scope.
#[test]
fn a_wait_in_a_scope_tells_while_the_scope_goes_on() {
    let mut watched = Watched::new(|builder| builder);
    let target = watched.pair.shared(1);
    let remote = target.remote();
    watched.two_messages();
    let Watched { pair, queue, .. } = &mut watched;
    pair.one
        .scope(|s| {
            s.post_write((), remote)?.wait()?;
            assert_eq!(queue.poll().unwrap().expect("nobody was told").token, TOKEN);
            Ok::<_, TransportError>(())
        })
        .unwrap();
    let found = std::iter::from_fn(|| pair.one.poll_token().unwrap()).count();
    assert_eq!(found, 2);
    drop(target);
    watched.finish();
}
