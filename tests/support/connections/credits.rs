//! Channels with flow control that the connection manager connects.

use std::thread;
use std::time::{Duration, Instant};

use ibverbs::rdmacm::{ConnectionError, Listener, Route};
use ibverbs::{Channel, ErrorKind, PreparedChannel, Rc, TransportError, settings::MaxRnrRetries};

use crate::managed::{Device, Managed, TIME, is_iwarp, listen, nothing_is_left, transfer};
use crate::vm::alone;

/// A channel that does not survive a single message without a receive.
fn prepare(device: &Device, flow_control: bool) -> PreparedChannel<'static> {
    let builder = Channel::builder(&device.domain).flow_control(flow_control);
    builder.max_rnr_retries(MaxRnrRetries::NONE).build().unwrap()
}

/// Two connected sides with flow control. The private data of both arrive.
fn pair(device: &Device, listener: &mut Listener) -> [Managed; 2] {
    let address = listener.local_addr().unwrap();
    thread::scope(|scope| {
        let one = scope.spawn(|| {
            let route = Route::resolve(address, Instant::now() + TIME).unwrap();
            route.connect(prepare(device, true), b"from one", Instant::now() + TIME).unwrap()
        });
        let request = listener.next_until(Instant::now() + TIME).unwrap();
        assert_eq!(request.private_data().trim_end(), b"from one");
        let two =
            request.accept(prepare(device, true), b"from two", Instant::now() + TIME).unwrap();
        let one = one.join().unwrap();
        assert_eq!(one.private_data().trim_end(), b"from two");
        [one, two]
    })
}

#[test]
fn a_sender_waits_for_the_receives_of_its_peer() {
    let _alone = alone("credits", 120);
    {
        let device = Device::first();
        let (mut listener, _) = listen();
        let [one, two] = pair(&device, &mut listener);
        let (mut one, mut two) = ((one, device.clone()), (two, device.clone()));
        for round in 0..10 {
            let (from, to) =
                if round % 2 == 0 { (&mut one, &mut two) } else { (&mut two, &mut one) };
            let soon = Instant::now() + Duration::from_millis(50);
            let refused = from.0.wait_for_credit_until(soon).unwrap_err();
            assert_eq!(refused, TransportError::NoCredit);
            transfer(from, to, format!("round {round}").as_bytes());
        }
    }
    nothing_is_left();
}

/// The side that accepts notices, and can answer with another channel.
#[test]
fn only_one_side_with_flow_control_is_an_error() {
    let _alone = alone("one side with credits", 120);
    {
        let device = Device::first();
        let (mut listener, address) = listen();
        for flow_control in [false, true] {
            thread::scope(|scope| {
                let device = &device;
                let one = scope.spawn(move || {
                    let route = Route::resolve(address, Instant::now() + TIME).unwrap();
                    route
                        .connect(prepare(device, flow_control), b"one", Instant::now() + TIME)
                        .unwrap()
                });
                let request = listener.next_until(Instant::now() + TIME).unwrap();
                let refused = request.prepare(prepare(device, !flow_control));
                let (mut request, _, error) = refused.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
                assert!(error.to_string().contains("both sides need it"), "{error}");
                if flow_control {
                    let queue = device.domain.context().create_cq(2).unwrap();
                    let kind = Rc;
                    let builder = device.domain.create_qp(&queue, &queue, kind);
                    let refused = request.prepare(builder.build().unwrap());
                    let error;
                    (request, _, error) = refused.unwrap_err();
                    assert!(error.to_string().contains("flow_control"), "{error}");
                }
                let two = request
                    .accept(prepare(device, flow_control), b"two", Instant::now() + TIME)
                    .unwrap();
                let one = one.join().unwrap();
                assert_eq!(one.private_data().trim_end(), b"two");
                assert_eq!(
                    (one.credits(), two.credits()),
                    match flow_control {
                        true => (Some(0), Some(0)),
                        false => (None, None),
                    }
                );
            });
        }
    }
    nothing_is_left();
}

#[test]
fn the_word_takes_up_room_of_the_private_data() {
    let _alone = alone("room of credits", 60);
    {
        let device = Device::first();
        let (_listener, address) = listen();
        let room = if is_iwarp() { 228 } else { 32 };
        let route = Route::resolve(address, Instant::now() + TIME).unwrap();
        let pending = route.prepare(prepare(&device, true)).map_err(|(.., error)| error).unwrap();
        let error = pending.start(&vec![1; room + 1]).unwrap_err();
        assert!(matches!(error, ConnectionError::Verbs(_)), "{error}");
        assert!(error.to_string().contains(&format!("is {}", room + 1)), "{error}");
        let route = Route::resolve(address, Instant::now() + TIME).unwrap();
        let pending = route.prepare(prepare(&device, true)).map_err(|(.., error)| error).unwrap();
        drop(pending.start(&vec![1; room]).unwrap());
    }
    nothing_is_left();
}
