//! The passive side.

use std::collections::VecDeque;

use ibverbs::{AccessFlags, Channel, MemoryRegion, SharedMemoryRegion, TransportError};

use crate::two_machines::{Peer, assert_nothing_left, pattern, short_name};
use crate::wire::{QUIT, RECEIVE, RECONNECT, SUM, Sum, connect, counts, deadline, reconnect};
use crate::{LENGTH, PARTS, WINDOW};

/// Executes the client's requests until the client ends.
pub(crate) fn serve() {
    {
        let context = ibverbs::open("rxe1").unwrap();
        let domain = context.alloc_pd().unwrap();
        let mut buffers = domain.allocate::<u64>(WINDOW * LENGTH).unwrap();
        let access =
            AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
        let shared = SharedMemoryRegion::<u64>::new(&domain, PARTS * LENGTH, access).unwrap();
        let mut peer = Peer::meet(18515);
        let mut channel = connect(&domain, &mut peer);
        let () = peer.exchange(shared.remote());
        let (mut received, mut sum) = (0_u64, Sum::new());
        loop {
            let (command, until): (u8, u64) = peer.exchange(());
            match command {
                RECEIVE => {
                    let ended = receive(&mut channel, &mut buffers, &mut received, until, &mut sum);
                    let () = peer.exchange((received, sum.0, failure(ended)));
                }
                RECONNECT => channel = reconnect(channel, &mut peer),
                SUM => {
                    let mut sum = Sum::new();
                    sum.add(&shared.to_vec());
                    let () = peer.exchange(sum.0);
                }
                QUIT => break,
                command => panic!("what is {command}?"),
            }
        }
        let () = peer.exchange(counts());
        peer.part();
    }
    assert_nothing_left("rxe1");
}

/// Receives messages until all have come, or something fails.
fn receive(
    channel: &mut Channel<'_>,
    buffers: &mut MemoryRegion<'_, u64>,
    received: &mut u64,
    until: u64,
    sum: &mut Sum,
) -> Result<(), TransportError> {
    channel.manual_scope(|scope| {
        let mut idle: Vec<_> = buffers.slice_mut(..)?.chunks(LENGTH)?.collect();
        let mut flying = VecDeque::with_capacity(WINDOW);
        while *received < until {
            let missing = (until - *received) as usize;
            while flying.len() < WINDOW.min(missing) {
                flying.push_back(scope.post_receive(idle.pop().unwrap())?);
            }
            let (buffer, completion) = flying.pop_front().unwrap().wait_until(deadline())?;
            if completion.byte_len() == 0 {
                // The kernel sends this message of its own: see "empty message" in script/vm.d/README.md.
                println!("an empty message, which the peer has not posted");
                idle.push(buffer);
                continue;
            }
            assert_eq!(completion.byte_len() as usize, crate::BYTES);
            // Wrong data, a message twice or a missing message would show here.
            let wrong = (0..LENGTH).find(|&index| buffer[index] != pattern(*received, index));
            assert_eq!(wrong, None, "in message {received}");
            sum.add(&buffer);
            *received += 1;
            idle.push(buffer);
        }
        Ok(())
    })
}

/// The answer to the client.
pub(crate) fn failure(ended: Result<(), TransportError>) -> String {
    match ended {
        Ok(()) => String::new(),
        Err(error) => short_name(&error),
    }
}
