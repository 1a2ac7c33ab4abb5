//! Clients that never read cannot take more than their memory, and no processor time. Alone in its process, which
//! it measures.

use std::io::Write;
use std::time::Duration;

use crate::nbd_common::{Fixture, Setup, Style};
use vmstrata_export::nbd::Limits;
use vmstrata_export::nbd::protocol::CommandFlags;
use vmstrata_export::nbd::protocol::request::{Command, Request};

/// Resident memory of this process, in bytes.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

/// Processor time of this process so far, in clock ticks of 10 ms.
fn ticks() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<_> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
fn clients_that_never_read_cost_their_limit_and_no_more() {
    let limits = Limits { payload_bytes: 4 << 20, ..Limits::default() };
    let fixture = Fixture::chain_with(Setup { limits: Some(limits), ..Setup::default() });
    let mut bytes = Vec::new();
    for cookie in 0..100_000 {
        let flags = CommandFlags::empty();
        Request { flags, command: Command::Read, cookie, offset: 0, length: 3 << 20 }
            .encode(false, &mut bytes);
    }
    let mut greedy: Vec<_> = (0..8).map(|_| fixture.client(Style::Simple)).collect();
    let before = resident();
    for client in &mut greedy {
        client.socket.set_nonblocking(true).unwrap();
        // Until the socket is full: the server takes up no more than it can hold.
        let (mut sent, mut refusals) = (0, 0);
        while refusals < 20 {
            match client.socket.write(&bytes[sent..]) {
                Ok(len) => sent += len,
                Err(_) => {
                    refusals += 1;
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
        }
        assert!(sent < bytes.len(), "the server went on reading");
    }
    let grown = resident().saturating_sub(before);
    // Eight times 4 MiB and a receive buffer, and something for the threads.
    assert!(grown < 40 << 20, "grew by {} KiB", grown >> 10);
    let before = ticks();
    std::thread::sleep(Duration::from_millis(500));
    let spent = ticks() - before;
    assert!(spent <= 5, "{spent} ticks spent on clients that wait");
    assert_eq!(fixture.client(Style::Structured).read(0, 1).unwrap(), [0x11]);
}
