//! Clients that mean harm, or only do harm: each loses its own connection, and the others are served meanwhile.

use std::io::{Read, Write};
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::nbd_common::{Client, Fixture, SIZE, Setup, Style, chain_content};
use crate::wait::wait_until;
use proptest::prelude::*;
use rustix::net::{RecvFlags, recv};
use vmstrata_export::nbd::Limits;
use vmstrata_export::nbd::protocol::CommandFlags as F;
use vmstrata_export::nbd::protocol::request::{Command, Request};

/// Runs `harm` while a decent client reads and checks; the decent one must make progress throughout.
fn while_serving(fixture: &Fixture, harm: impl FnOnce()) {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let decent = scope.spawn(|| {
            let mut client = fixture.client(Style::Structured);
            let (content, mut slowest) = (chain_content(), Duration::ZERO);
            let mut rounds = 0;
            while !over.load(Ordering::Relaxed) || rounds < 10 {
                let started = Instant::now();
                assert!(client.read(1 << 20, 70_000).unwrap() == content[1 << 20..(1 << 20) + 70_000]);
                slowest = slowest.max(started.elapsed());
                rounds += 1;
            }
            slowest
        });
        let outcome = std::panic::catch_unwind(AssertUnwindSafe(harm));
        over.store(true, Ordering::Relaxed);
        if let Err(panic) = outcome {
            std::panic::resume_unwind(panic);
        }
        let slowest = decent.join().unwrap();
        assert!(slowest < Duration::from_secs(5), "a decent client waited for {slowest:?}");
    });
}

/// Waits until only `count` connections are open.
fn wait_for_connections(fixture: &Fixture, count: usize) {
    wait_until("connections end", || fixture.server().connections() <= count);
}

#[test]
fn garbage_ends_the_connection() {
    let fixture = Fixture::chain();
    while_serving(&fixture, || {
        for style in [Style::Simple, Style::Extended] {
            let mut client = fixture.client(style);
            client.socket.write_all(&[0xaa; 1000]).unwrap();
            assert!(client.is_hung_up());
        }
    });
    wait_for_connections(&fixture, 0);
}

#[test]
fn a_client_that_goes_away_in_the_middle_leaves_nothing_behind() {
    let fixture = Fixture::chain();
    while_serving(&fixture, || {
        for cut in [1, 27, 28, 29, 5000] {
            let mut client = fixture.client(Style::Simple);
            let mut bytes = Vec::new();
            let request = Request {
                flags: F::empty(),
                command: Command::Write,
                cookie: 1,
                offset: 5 << 20,
                length: 1 << 20,
            };
            request.encode(false, &mut bytes);
            bytes.resize(5000, 0xee);
            client.socket.write_all(&bytes[..cut]).unwrap();
        }
        // With replies under way that nobody takes.
        let mut client = fixture.client(Style::Structured);
        for _ in 0..200 {
            client.send(Command::Read, F::empty(), 0, SIZE);
        }
    });
    wait_for_connections(&fixture, 0);
    let mut client = fixture.client(Style::Simple);
    assert!(client.read(5 << 20, 1 << 20).unwrap().iter().all(|byte| *byte == 0), "half a write is none");
}

#[test]
fn silent_clients_block_only_themselves() {
    let fixture = Fixture::chain();
    let mut half = fixture.client(Style::Structured);
    half.socket.write_all(&[0x25, 0x60, 0x95]).unwrap();
    let mut payload = fixture.client(Style::Structured);
    payload.send_with(Command::Write, F::empty(), 0, 32 << 20, &[1; 100_000]);
    while_serving(&fixture, || std::thread::sleep(Duration::from_millis(300)));
    wait_for_connections(&fixture, 2);
    assert_eq!(fixture.server().connections(), 2, "both still wait");
}

#[test]
fn a_slow_reader_gets_everything_in_the_end() {
    let fixture = Fixture::chain();
    let mut slow = fixture.client(Style::Simple);
    let cookies: Vec<_> = (0..20).map(|_| slow.send(Command::Read, F::empty(), 0, SIZE)).collect();
    while_serving(&fixture, || std::thread::sleep(Duration::from_millis(200)));
    let content = chain_content();
    for _ in cookies {
        let chunk = slow.chunk();
        assert!(chunk.payload[8..] == content);
    }
}

#[test]
fn lengths_near_the_limits_of_their_fields_are_refused() {
    let fixture = Fixture::chain();
    while_serving(&fixture, || {
        let mut client = fixture.client(Style::Structured);
        for command in
            [Command::Read, Command::Trim, Command::Cache, Command::WriteZeroes, Command::BlockStatus]
        {
            assert!(client.call(command, F::empty(), 0, u32::MAX.into()).is_err());
            assert!(client.call(command, F::empty(), u64::MAX, u32::MAX.into()).is_err());
        }
        client.send(Command::Write, F::empty(), 0, u32::MAX.into());
        assert!(client.is_hung_up(), "four gigabytes of payload are not waited for");
        let mut client = fixture.client(Style::Extended);
        for command in
            [Command::Read, Command::Trim, Command::Cache, Command::WriteZeroes, Command::BlockStatus]
        {
            assert!(client.call(command, F::empty(), 1, u64::MAX).is_err());
        }
        client.send(Command::Write, F::PAYLOAD_LEN, 0, u64::MAX);
        assert!(client.is_hung_up());
    });
}

#[test]
fn a_crowd_is_turned_away_and_the_next_is_let_in() {
    let limits = Limits { connections: 5, ..Limits::default() };
    let fixture = Fixture::chain_with(Setup { limits: Some(limits), ..Setup::default() });
    let mut inside: Vec<_> = (0..5).map(|_| fixture.client(Style::Simple)).collect();
    for _ in 0..20 {
        assert!(Client::connect_raw(&fixture.socket()).is_hung_up());
    }
    assert_eq!(inside[4].read(0, 1).unwrap(), [0x11]);
    inside.pop();
    wait_for_connections(&fixture, 4);
    assert_eq!(fixture.client(Style::Simple).read(0, 1).unwrap(), [0x11]);
}

#[test]
fn silent_clients_keep_nobody_out() {
    let limits = Limits { connections: 5, ..Limits::default() };
    let fixture = Fixture::chain_with(Setup { limits: Some(limits), ..Setup::default() });
    let mut inside = fixture.client(Style::Simple);
    let silent: Vec<_> = (0..20).map(|_| Client::connect_raw(&fixture.socket())).collect();
    assert_eq!(fixture.client(Style::Simple).read(0, 1).unwrap(), [0x11]);
    assert_eq!(inside.read(0, 1).unwrap(), [0x11], "one that has chosen stays");
    drop(silent);
    wait_for_connections(&fixture, 1);
}

/// Reads all of the disk in one reply, which is in memory as a whole until the client has taken it.
fn ask_for_everything(client: &mut Client) {
    client.send(Command::Read, F::empty(), 0, SIZE);
}

/// Whether a reply has begun to arrive; waits for it unless told not to.
fn has_reply(client: &Client, flags: RecvFlags) -> bool {
    matches!(recv(&client.socket, &mut [0u8; 1], flags | RecvFlags::PEEK), Ok((1, 1)))
}

#[test]
fn requests_wait_for_memory_and_others_go_on() {
    let limits = Limits { budget_bytes: 0, stall: Duration::from_secs(3600), ..Limits::default() };
    let fixture = Fixture::chain_with(Setup { limits: Some(limits), ..Setup::default() });
    // At least 32 MiB: five of these, which take 8 each less their own 2, leave too little for a sixth.
    let mut holders: Vec<_> = (0..5).map(|_| fixture.client(Style::Simple)).collect();
    holders.iter_mut().for_each(ask_for_everything);
    holders.iter().for_each(|holder| assert!(has_reply(holder, RecvFlags::empty())));
    let mut waits = fixture.client(Style::Simple);
    ask_for_everything(&mut waits);
    while_serving(&fixture, || {
        let mut other = fixture.client(Style::Simple);
        other.write(5 << 20, &[7; 100_000]).unwrap();
        assert_eq!(other.read(5 << 20, 100_000).unwrap(), [7; 100_000], "its own memory is enough");
        assert!(!has_reply(&waits, RecvFlags::DONTWAIT));
    });
    drop(holders.pop());
    assert_eq!(waits.chunk().payload.len() as u64, 8 + SIZE);
}

#[test]
fn clients_that_take_no_replies_are_cut_off_when_others_wait() {
    let limits = Limits { budget_bytes: 0, stall: Duration::from_millis(50), ..Limits::default() };
    let fixture = Fixture::chain_with(Setup { limits: Some(limits), ..Setup::default() });
    let mut holders: Vec<_> = (0..5).map(|_| fixture.client(Style::Simple)).collect();
    holders.iter_mut().for_each(ask_for_everything);
    holders.iter().for_each(|holder| assert!(has_reply(holder, RecvFlags::empty())));
    let mut waits = fixture.client(Style::Simple);
    ask_for_everything(&mut waits);
    assert_eq!(waits.chunk().payload.len() as u64, 8 + SIZE);
}

#[test]
fn a_storm_of_small_refusals_is_answered_in_full() {
    let fixture = Fixture::chain();
    let mut client = fixture.client(Style::Structured);
    let mut reader = client.socket.try_clone().unwrap();
    let count = 100_000;
    let received = std::thread::spawn(move || {
        let (mut total, mut scratch) = (0, vec![0; 1 << 20]);
        // Header 20, error and length 6, and the message.
        let message = "this command is not supported".len();
        while total < count * (26 + message) {
            total += reader.read(&mut scratch).unwrap();
        }
        total - count * (26 + message)
    });
    for _ in 0..count {
        client.send(Command::Unknown(77), F::empty(), 0, 0);
    }
    assert_eq!(received.join().unwrap(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    /// Whatever bytes come in either phase, the server is there for the next client.
    #[test]
    fn any_bytes_are_survived(
        bytes in proptest::collection::vec(any::<u8>(), 1..600),
        frames in proptest::collection::vec((0u16..12, 0u16..64, any::<u64>(), 0u64..70_000), 0..20),
        style in prop_oneof![Just(Style::Simple), Just(Style::Structured), Just(Style::Extended)],
    ) {
        static FIXTURE: std::sync::LazyLock<Fixture> =
            std::sync::LazyLock::new(|| Fixture::chain_with(Setup { read_only: true, ..Setup::default() }));
        let mut client = Client::connect_raw(&FIXTURE.socket());
        let _ = client.socket.write_all(&bytes);
        let mut client = Client::connect(&FIXTURE.socket());
        let _ = client.socket.write_all(&[b"IHAVEOPT", &bytes[..]].concat());
        let mut client = FIXTURE.client(style);
        let mut sent = Vec::new();
        for (command, flags, offset, length) in frames {
            let (command, flags) = (Command::from_wire(command), F::from_bits_retain(flags));
            let offset = if offset % 3 == 0 { offset } else { offset % SIZE };
            Request { flags, command, cookie: 1, offset, length }.encode(style.is_extended(), &mut sent);
        }
        sent.extend(bytes);
        let _ = client.socket.write_all(&sent);
        drop(client);
        prop_assert_eq!(FIXTURE.client(style).read(0, 1).unwrap(), [0x11]);
    }
}
