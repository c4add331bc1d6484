//! Peers that send anything to the connection manager, while its program does what programs do.

use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex};

use super::*;
use crate::wire::management::{IpHeader, property};

/// The program: it remembers the connections that it has heard of.
#[derive(Debug, Default)]
struct Program(Mutex<Vec<u32>>);

impl Outlet for Program {
    fn tell(&self, _: u32, event: Event) {
        let number = match event {
            Event::Request(arrived) => arrived.connection,
            Event::ServiceRequest(arrived) => arrived.connection,
            _ => return,
        };
        self.0.lock().unwrap().push(number);
    }
}

/// How many requests wait.
const BACKLOG: u32 = 8;

/// One message, or one call, from up to 256 bytes: what to do, which message, which of its fields are to be right, and how
/// long it takes; then the message.
pub fn device_messages(data: &[u8]) {
    property::messages(data);
    let [own, peer] = [IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2])];
    let path = Path { from: own, to: peer };
    let program = Arc::new(Program::default());
    let owner = |id| Owner { id, outlet: program.clone() };
    let mut device = Connections::new(7, 1);
    let room = Arc::new(AtomicU32::new(BACKLOG));
    for (service, transport) in [(1, Transport::Rc), (2, Transport::Ud)] {
        device.listen(Listener {
            owner: owner(service as u32),
            service,
            transport: Some(transport),
            address: own,
            is_of_both: false,
            room: room.clone(),
        });
    }
    let mut numbers = Vec::new();
    let mut now = 1;
    for chunk in data.chunks(256) {
        let Some((&[what, kind, right, takes], body)) = chunk.split_first_chunk::<4>() else {
            break;
        };
        now += Time::from(takes) << 26;
        device.advance(now);
        device.outbox.clear();
        numbers.append(&mut program.0.lock().unwrap());
        let number = numbers.get(usize::from(kind) % numbers.len().max(1)).copied().unwrap_or(1);
        // Each may fail, by its state.
        let _ = match what {
            1 => device.accept(now, number, owner(9), 0, Reply { qpn: 5, ..Reply::default() }),
            2 => device.reject(number, 28, body, 2),
            3 => device.disconnect(now, number),
            4 => device.ready(number),
            5 => device.is_used(number),
            6 => device.answer(number, owner(9), ServiceReply::default()),
            7 => {
                device.abandon(now, number);
                Ok(())
            }
            8 => {
                let request = Request { service: 1, qpn: number & 0xff_ffff, ..Request::default() };
                numbers.push(device.connect(now, (path, owner(9)), 0, Transport::Rc, request));
                Ok(())
            }
            9 => {
                device.lose_peer(peer, now);
                Ok(())
            }
            _ => {
                let mut mad: Mad = [0; 256];
                mad[..4].copy_from_slice(&[1, 7, 2, 3]);
                mad[16..18].copy_from_slice(&[0, 0x10 + kind % 9]);
                let message = &mut mad[24..];
                message.iter_mut().zip(body).for_each(|(to, from)| *to = *from);
                if right & 1 != 0 {
                    message[4..8].copy_from_slice(&number.to_be_bytes());
                }
                if right & 2 != 0 {
                    message[8..16].copy_from_slice(&u64::from(right >> 4 & 3).to_be_bytes());
                }
                if right & 4 != 0 {
                    let at = if kind % 9 == 7 { 16 } else { 140 };
                    let header = IpHeader { port: 1, source: peer, destination: own };
                    message[at..at + IpHeader::SIZE].copy_from_slice(&header.bytes());
                }
                device.receive(now, path, &mad);
                Ok(())
            }
        };
        // One message, or call, is answered by few: of this length, so no stranger's packet grows.
        assert!(device.outbox.len() <= 2, "{:?}", device.outbox);
        device.outbox.clear();
        assert_eq!(
            device.waiting as usize,
            device.all.values().filter(|c| c.state.waits()).count()
        );
        assert_eq!(device.waiting, device.waiting_of.values().sum::<u32>());
        assert!(
            device.timers.len() <= device.all.len()
                && device.by_queue_pair.len() <= device.all.len()
        );
    }
    // Requests that nobody has read take no more room than there is.
    numbers.append(&mut program.0.lock().unwrap());
    let all: Vec<u32> = device.all.keys().copied().collect();
    assert!(all.len() <= numbers.len(), "each was told of, or asked for");
    all.into_iter().for_each(|number| device.abandon(now, number));
    while let Some(due) = device.due() {
        device.advance(due);
        device.outbox.clear();
    }
    assert_eq!((device.count(), device.by_remote.len(), device.by_queue_pair.len()), (0, 0, 0));
}
