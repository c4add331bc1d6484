//! Sends packets by few system calls: several messages by one, and several datagrams as one message.
//!
//! The kernel carries a message of up to 64 datagrams through its network stack once, and cuts it into datagrams of
//! equal length at the end, or hands it over whole (`UDP_SEGMENT`). That copies what is here: each datagram has its
//! own headers and its own CRC. On IPv4 the datagrams get ascending identifications from 0 on, which the invariant CRC covers:
//! so it is changed for those that leave this machine. Within it the receiver is a socket, which cannot see the
//! identification (see `icrc`).

use std::ffi::{c_int, c_void};
use std::mem::{MaybeUninit, size_of, zeroed};
use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;

use super::socket::{Socket, write_address};
use crate::wire::Packet;

/// The most messages, and packets, of one system call.
const MESSAGES: usize = 32;
const PARTS: usize = 64;

/// The most datagrams and bytes of a message.
const MOST: usize = 64;
const BYTES: usize = 64_000;

/// The length of the datagrams of a message. Missing in some C libraries' headers.
const UDP_SEGMENT: c_int = 103;

/// A control message with room for a `u16`, aligned as C has it.
#[derive(Clone, Copy)]
#[repr(C)]
struct Control {
    header: libc::cmsghdr,
    length: [u8; 8],
}

/// Whether the CRC covers an identification that somebody sees. If a group of IPv4 stands for one of IPv6, it covers none.
fn is_identified((from, to): (IpAddr, IpAddr)) -> bool {
    from.is_ipv4() && to.is_ipv4() && !to.is_loopback()
}

/// How many of the packets, which are not none, make up the next message.
fn group(packets: &[Packet]) -> usize {
    let (to, length) = (packets[0].addresses, packets[0].bytes.len());
    if length == 0 {
        return 1;
    }
    let most = packets.len().min(MOST).min(BYTES / length).max(1);
    let fits = |packet: &&Packet| packet.addresses == to && packet.bytes.len() == length;
    let equal = packets[..most].iter().take_while(fits).count();
    // The last one may be shorter.
    let shorter = |packet: &Packet| packet.addresses == to && packet.bytes.len() < length;
    equal + usize::from(equal < most && shorter(&packets[equal]))
}

/// Sends packets of one source address, without blocking, until the kernel has no room; returns how many. One that the
/// kernel refuses for another reason counts as lost; the protocol sends it again.
pub(super) fn send(socket: &Socket, packets: &mut [Packet]) -> usize {
    let mut all = 0;
    while all < packets.len() {
        let (sent, is_full) = send_some(socket, &mut packets[all..]);
        all += sent;
        if is_full {
            break;
        }
    }
    all
}

/// Sends some of the packets; returns how many, and whether the kernel has no room for more.
fn send_some(socket: &Socket, packets: &mut [Packet]) -> (usize, bool) {
    // Only what is used is filled in: that is little for a round trip, and all of it is 8 KiB.
    let mut headers = [const { MaybeUninit::<libc::mmsghdr>::uninit() }; MESSAGES];
    let mut names = [const { MaybeUninit::<libc::sockaddr_storage>::uninit() }; MESSAGES];
    let mut controls = [const { MaybeUninit::<Control>::uninit() }; MESSAGES];
    let mut parts = [const { MaybeUninit::<libc::iovec>::uninit() }; PARTS];
    // How many packets each message has.
    let mut counts = [0; MESSAGES];
    let count = PARTS.min(packets.len());
    let packets = &mut packets[..count];
    let segments = socket.segments.load(Ordering::Relaxed);
    let (mut messages, mut used) = (0, 0);
    while messages < MESSAGES && used < packets.len() {
        let count = if segments { group(&packets[used..]) } else { 1 };
        let message = &mut packets[used..used + count];
        let length = message[0].bytes.len();
        // SAFETY: all zeros is a valid value of this C structure.
        let header = &mut headers[messages].write(unsafe { zeroed() }).msg_hdr;
        if let Some((_, to)) = message[0].addresses {
            // SAFETY: as above.
            let name = names[messages].write(unsafe { zeroed() });
            header.msg_namelen = write_address(socket.destination(to), name);
            header.msg_name = (&raw mut *name).cast();
        }
        if message[0].addresses.is_some_and(is_identified) {
            message.iter_mut().zip(0..).for_each(|(packet, nth)| packet.identify(nth));
        }
        for (part, packet) in parts[used..].iter_mut().zip(message) {
            let iov_base = packet.bytes.as_mut_ptr().cast::<c_void>();
            part.write(libc::iovec { iov_base, iov_len: packet.bytes.len() });
        }
        header.msg_iov = parts[used..].as_mut_ptr().cast();
        header.msg_iovlen = count as _;
        if count > 1 {
            // SAFETY: as above.
            let control = controls[messages].write(unsafe { zeroed() });
            // SAFETY: arithmetic only.
            control.header.cmsg_len = unsafe { libc::CMSG_LEN(2) } as _;
            control.header.cmsg_level = libc::IPPROTO_UDP;
            control.header.cmsg_type = UDP_SEGMENT;
            control.length[..2].copy_from_slice(&(length as u16).to_ne_bytes());
            header.msg_control = (&raw mut *control).cast();
            header.msg_controllen = size_of::<Control>() as _;
        }
        counts[messages] = count;
        (messages, used) = (messages + 1, used + count);
    }
    let mut done = 0;
    while done < messages {
        let fd = socket.socket.as_raw_fd();
        let first: *mut libc::mmsghdr = headers[done..].as_mut_ptr().cast();
        // SAFETY: the headers from `done` to `messages` are filled in; names, parts, controls and packets live.
        let sent = unsafe {
            match messages - done {
                // A call of its own takes less time. It returns bytes.
                1 => libc::sendmsg(fd, &raw const (*first).msg_hdr, libc::MSG_DONTWAIT).min(1) as _,
                more => libc::sendmmsg(fd, first, more as _, libc::MSG_DONTWAIT as _),
            }
        };
        if let Ok(sent @ 1..) = usize::try_from(sent) {
            done += sent;
            continue;
        }
        let sent = counts[..done].iter().sum();
        match errno() {
            // The network device has as much of this socket's as the socket may have sent.
            libc::EAGAIN => return (sent, true),
            // The kernel or the network device cannot cut messages: one by one from now on.
            libc::EINVAL | libc::EIO | libc::EMSGSIZE | libc::EOPNOTSUPP if counts[done] > 1 => {
                socket.segments.store(false, Ordering::Relaxed);
                return (sent, false);
            }
            // A message that cannot be sent is skipped.
            _ => done += 1,
        }
    }
    (used, false)
}

fn errno() -> c_int {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::receive::Receiver;
    use crate::link::udp::UdpLink;
    use crate::link::{Link, no_process_starts, own_address};
    use crate::wire::LONGEST;
    use crate::wire::PORT;

    fn packet(addresses: (IpAddr, IpAddr), length: usize, number: usize) -> Packet {
        let bytes = (0..length).map(|i| (i * 7 + number * 31) as u8).collect();
        Packet { addresses: Some(addresses), bytes, is_sealed: true, identification: 0 }
    }

    fn exchange([from, to]: [IpAddr; 2], segments: bool) {
        let mut link = UdpLink::new(&[from], true).unwrap();
        let other = UdpLink::new(&[to], true).unwrap();
        let mut receiver = Receiver::new(other.sockets(), other.inbox()).unwrap();
        for socket in link.own() {
            socket.segments.store(segments, Ordering::Relaxed);
        }
        // Runs of equal lengths, a shorter and a longer one behind them, and more than one message holds.
        let lengths = [20, 1056, 1040, 1040, 1040, 500, 1040, 1040, 1056, 16, 20, 20, 20, LONGEST];
        let mut lengths = lengths.to_vec();
        lengths.extend([1040; 70]);
        lengths.extend([4112; 20]);
        let packets = lengths.iter().enumerate();
        let mut packets: Vec<_> = packets.map(|(i, &n)| packet((from, to), n, i)).collect();
        let mut arrived = Vec::new();
        for few in packets.chunks_mut(40) {
            link.send(few);
            receiver.receive(|source, own, bytes| {
                assert_eq!((source.address.ip(), source.address.port(), own), (from, PORT, to));
                arrived.push(bytes.to_vec());
            });
        }
        while receiver.receive(|_, _, bytes| arrived.push(bytes.to_vec())) > 0 {}
        assert_eq!(arrived.len(), packets.len());
        for (number, (packet, arrived)) in packets.iter().zip(&arrived).enumerate() {
            assert!(packet.bytes == *arrived, "packet {number}");
        }
        let still = link.own().iter().all(|socket| socket.segments.load(Ordering::Relaxed));
        assert_eq!(still, segments, "the kernel has refused nothing");
    }

    #[test]
    fn packets_arrive_as_they_were_sent() {
        let _files = no_process_starts();
        exchange([0, 1].map(own_address), true);
        exchange([0, 1].map(own_address), false);
    }

    /// What the kernel writes into datagrams that it cuts, whether a message was sent before in another one or not.
    #[test]
    fn datagrams_of_a_message_have_ascending_identifications() {
        use crate::wire::icrc;
        let [from, to]: [IpAddr; 2] = ["192.0.2.1", "192.0.2.2"].map(|a| a.parse().unwrap());
        let bytes = vec![9; 1040];
        let mut packets: Vec<Packet> = (0..5)
            .map(|_| Packet {
                addresses: Some((from, to)),
                bytes: bytes.clone(),
                ..Packet::default()
            })
            .collect();
        packets.iter_mut().for_each(Packet::seal);
        let sealed = packets[0].bytes.clone();
        assert!(is_identified((from, to)) && !is_identified((from, "127.0.0.1".parse().unwrap())));
        for order in [[0, 1, 2, 3, 4], [3, 4, 0, 1, 2], [0; 5]] {
            for (packet, identification) in packets.iter_mut().zip(order) {
                packet.identify(identification);
                let (inside, crc) = packet.bytes.split_at(bytes.len() - icrc::SIZE);
                let crc = u32::from_le_bytes(crc.try_into().unwrap());
                assert!(icrc::matches((from, PORT), (to, PORT), inside, crc));
                assert_eq!(packet.bytes == sealed, identification == 0);
            }
        }
    }

    #[test]
    fn messages_hold_packets_of_one_length_and_destination() {
        let [one, other, far] = ["127.0.0.1", "127.0.0.2", "192.0.2.1"].map(|a| a.parse().unwrap());
        let packets = |to: IpAddr, lengths: &[usize]| -> Vec<Packet> {
            lengths.iter().map(|&length| packet((one, to), length, 0)).collect()
        };
        assert_eq!(group(&packets(other, &[8, 8, 8])), 3);
        assert_eq!(group(&packets(other, &[8, 8, 4, 4])), 3, "one shorter one at the end");
        assert_eq!(group(&packets(other, &[8, 12, 8])), 1);
        assert_eq!(group(&packets(other, &[8; 100])), MOST);
        assert_eq!(group(&packets(other, &[4112; 100])), BYTES / 4112);
        assert_eq!(group(&packets(far, &[8, 8, 8])), 3);
        let mut mixed = packets(other, &[8, 8]);
        mixed.extend(packets(one, &[8]));
        assert_eq!(group(&mixed), 2);
    }
}
