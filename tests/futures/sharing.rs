//! Receives that channels share, while channels come and go.

use std::thread;

use ibverbs::future::{Locked, PreparedAsyncChannel};
use ibverbs::{AsyncChannel, Channel, PooledBuffer, Reactor, settings::MaxRnrRetries};

use crate::rig::{ALL, Rig, poll, posted};

type Shared = Rig<Locked<PooledBuffer>>;

#[test]
fn receives_of_a_reactor_that_ended_are_refused() {
    use ibverbs::TransportError::{ReactorGone, Stopped};
    let rig = Shared::new();
    let context = rig.domain.context_parent().clone();
    for (is_stopped, error) in [(true, Stopped), (false, ReactorGone)] {
        let reactor = Reactor::new(context.clone(), 16).unwrap();
        let before = reactor.add_shared_receives(&rig.domain, 4).unwrap();
        before.post(rig.buffer(0)).unwrap();
        let mut all = vec![before];
        if is_stopped {
            reactor.stop(Stopped);
            all.push(reactor.add_shared_receives(&rig.domain, 4).unwrap());
        } else {
            drop(reactor);
        }
        for receives in &all {
            let refused = receives.post(rig.buffer(0)).unwrap_err();
            assert_eq!((refused.error, refused.buffer.is_some()), (error, true));
        }
        assert_eq!((all[0].posted(), rig.out()), (1, 1));
    }
    drop(context);
    rig.finish();
}

/// A device may give the number of a queue pair again as soon as that is destroyed.
#[test]
fn a_channel_with_the_number_of_one_that_ends_keeps_its_messages() {
    let rig = Shared::new();
    let receives = rig.reactor.add_shared_receives(&rig.domain, 4).unwrap();
    let builder = || {
        let builder = Channel::builder(&rig.domain).max_send_wr(2).max_recv_wr(2).access(ALL);
        builder.max_rnr_retries(MaxRnrRetries::UNLIMITED)
    };
    let sharing = || rig.reactor.prepare_sharing(builder(), &receives).unwrap();
    let connect = |one: PreparedAsyncChannel| -> [AsyncChannel; 2] {
        let two = rig.reactor.prepare(builder()).unwrap();
        let (to_one, to_two) = (one.endpoint(), two.endpoint());
        [one.handshake(to_two).unwrap(), two.handshake(to_one).unwrap()]
    };
    let message = |from: &AsyncChannel, to: &AsyncChannel, byte| {
        receives.post(rig.buffer(0)).unwrap();
        let mut send = posted(from.send(rig.buffer(byte)));
        rig.serve();
        poll(&mut send).expect("it has ended").unwrap();
        let message = poll(&mut Box::pin(to.next_message())).expect("it has arrived");
        assert_eq!(message.unwrap().0[0], byte);
    };
    let [old, peer] = connect(sharing());
    message(&peer, &old, 1);
    let number = old.number();
    rig.device.hold_verb("destroy_qp", true);
    let new = thread::scope(|threads| {
        let ending = threads.spawn(|| drop(old));
        while !rig.device.holds_verb("destroy_qp") {
            assert!(!ending.is_finished());
            thread::yield_now();
        }
        rig.device.next_qp_num(number);
        let new = sharing();
        rig.device.next_qp_num(number + 1000);
        rig.device.hold_verb("destroy_qp", false);
        ending.join().unwrap();
        new
    });
    let [new, other] = connect(new);
    assert_eq!(new.number(), number);
    message(&other, &new, 2);
    drop((peer, new, other, receives));
    let Shared { one, two, reactor, pool, domain, device } = rig;
    drop((one, two, reactor, pool, domain));
    device.assert_clean();
}
