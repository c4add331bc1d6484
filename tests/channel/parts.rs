//! Messages that are shorter than their buffers.

use ibverbs::channel::ScopeError;
use ibverbs::{TransportError, WorkStatus};

use crate::pair::Pair;

#[test]
fn buffers_come_back_whole_from_messages_of_any_length() {
    let mut pair = Pair::new();
    let mut regions = (pair.region(16, 0), pair.region(16, 0));
    let (one, two) = (&mut pair.one, &mut pair.two);
    let mut source = regions.0.slice_mut(..).unwrap();
    let mut sink = regions.1.slice_mut(..).unwrap();
    one.scope(|one| {
        two.scope(|two| {
            // Shorter and longer messages by turns: the previous length must not limit the next message.
            for message in 0..100_u8 {
                let length = usize::from(message) * 7 % 17;
                let start = usize::from(message) % (17 - length);
                source.fill(0xff);
                source[start..start + length].fill(message);
                sink.fill(0xee);
                // A receive of the same length does not change anything beyond it.
                let coming = two.post_receive(sink.part(start..start + length)?)?;
                let sending = one.post_send(source.part(start..start + length)?)?;
                source = sending.wait()?.0.into_whole();
                let (received, success) = coming.wait()?;
                assert_eq!(success.byte_len() as usize, length);
                assert_eq!(&received[..], &vec![message; length][..]);
                sink = received.into_whole();
                assert_eq!((source.len(), sink.len()), (16, 16));
                for (at, &byte) in sink.iter().enumerate() {
                    let within = (start..start + length).contains(&at);
                    assert_eq!(byte, if within { message } else { 0xee }, "{at} of {message}");
                }
            }
            Ok::<_, ScopeError<TransportError>>(())
        })
    })
    .unwrap();
    drop(regions);
    pair.finish();
}

#[test]
fn a_message_that_is_longer_than_the_part_fails_and_leaves_the_rest_alone() {
    let mut pair = Pair::new();
    let (mut source, mut sink) = (pair.region(8, 1), pair.region(8, 0));
    let (one, two) = (&mut pair.one, &mut pair.two);
    let result = two.scope(|two| {
        let coming = two.post_receive(sink.slice_mut(..)?.part(..4)?)?;
        let sent = one.send(&source.slice_mut(..)?.part(..5)?);
        assert!(sent.is_err(), "{sent:?}");
        coming.wait().map(drop)
    });
    let Err(ScopeError::Closure(TransportError::Work(error))) = result else {
        panic!("{result:?}");
    };
    assert_eq!(error.status(), WorkStatus::LocalLength);
    assert_eq!(sink[4..], [4, 5, 6, 7]);
    drop((source, sink));
    pair.finish();
}
