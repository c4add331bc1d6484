//! Whether a socket of this machine has datagrams that were not received.

use std::net::IpAddr;

use crate::wire::PORT;

/// An address as the kernel writes it into `/proc/net/udp`: words of 32 bits, each in the byte order of the machine.
fn hexadecimal(address: IpAddr) -> String {
    let bytes = match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    };
    let words = bytes.chunks_exact(4).map(|word| word.try_into().map_or(0, u32::from_ne_bytes));
    words.map(|word| format!("{word:08X}")).collect()
}

/// Whether the table, which is that of `/proc/net/udp`, has such a socket at this address.
fn is_in(table: &str, address: IpAddr) -> bool {
    let socket = format!("{}:{PORT:04X}", hexadecimal(address));
    table.lines().any(|line| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let queues = (fields.next() == Some(&socket)).then(|| fields.nth(2)).flatten();
        let unread = queues.and_then(|queues| queues.split_once(':'));
        unread.is_some_and(|(_, received)| received.bytes().any(|digit| digit != b'0'))
    })
}

/// Whether the socket of this address and RoCE's port, if it is in this network namespace, has datagrams that were not
/// received. It takes the kernel some time to list all sockets: this is for when an answer is overdue.
pub(super) fn is_unread(address: IpAddr) -> bool {
    let table = if address.is_ipv4() { "udp" } else { "udp6" };
    let table = std::fs::read_to_string(format!("/proc/thread-self/net/{table}"));
    table.is_ok_and(|table| is_in(&table, address))
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;
    use crate::link::own_address;

    #[test]
    fn a_socket_has_unread_datagrams_until_they_are_received() {
        for address in [own_address(12), "::1".parse().unwrap()] {
            // Another test of this machine may have this one.
            let Ok(socket) = UdpSocket::bind((address, PORT)) else {
                assert!(address.is_ipv6());
                continue;
            };
            assert!(!is_unread(address));
            let sender = UdpSocket::bind((address, 0)).unwrap();
            sender.send_to(&[1], (address, PORT)).unwrap();
            assert!(is_unread(address), "{address}");
            socket.recv(&mut [0]).unwrap();
            assert!(!is_unread(address));
        }
        assert!(!is_unread("192.0.2.1".parse().unwrap()), "it is not of this machine");
    }
}
