//! Stopping a server: what is under way is finished, what was written is stable, and nobody holds it up.

use std::time::{Duration, Instant};

use crate::nbd_common::{Client, Fixture, SIZE, Setup, Style, run, text};
use vmstrata_export::nbd::protocol::CommandFlags as F;
use vmstrata_export::nbd::protocol::request::Command;
use vmstrata_export::nbd::{Export, Limits};

#[test]
fn stopping_answers_what_is_under_way_and_flushes() {
    let fixture = Fixture::chain();
    let mut idle = fixture.client(Style::Structured);
    let mut handshaking = Client::connect(&fixture.socket());
    let mut busy = fixture.client(Style::Simple);
    busy.write(1 << 20, &[0x99; 100_000]).unwrap();
    let started = Instant::now();
    let directory = fixture.stop();
    assert!(started.elapsed() < Duration::from_secs(4), "idle clients do not hold it up");
    assert!(idle.is_hung_up() && handshaking.is_hung_up() && busy.is_hung_up());
    let active = directory.path().join("active");
    run("qemu-img", &["check", "-q", text(&active)]);
    run("qemu-io", &["-f", "qcow2", "-c", "read -P 0x99 1M 100000", text(&active)]);
    assert!(!directory.path().join("nbd.sock").exists(), "the socket's file is gone");
}

#[test]
fn a_withdrawn_export_lets_its_clients_go_and_leaves_the_others_alone() {
    let fixture = Fixture::chain();
    let (exports, disk) = (fixture.server().exports(), fixture.server().exports().list()[0].disk().clone());
    exports.add(Export::new("twin", disk)).unwrap();
    let mut busy = fixture.client(Style::Structured);
    busy.write(1 << 20, &[0x77; 100_000]).unwrap();
    let mut twin = Client::open(&fixture.socket(), "twin", Style::Structured);
    let started = Instant::now();
    assert_eq!(fixture.server().withdraw("disk"), 0);
    assert!(started.elapsed() < Duration::from_secs(4), "idle clients do not hold it up");
    assert!(busy.is_hung_up());
    assert_eq!(fixture.server().connections(), 1);
    assert_eq!(twin.read(1 << 20, 100_000).unwrap(), [0x77; 100_000]);
    assert!(fixture.server().exports().list().iter().all(|export| export.name() != "disk"));
    fixture.stop();
    assert!(twin.is_hung_up());
}

#[test]
fn every_acknowledged_write_is_there_after_a_stop_in_full_flow() {
    let fixture = Fixture::empty(SIZE);
    let mut client = fixture.client(Style::Simple);
    let (tell, told) = std::sync::mpsc::channel();
    let writer = std::thread::spawn(move || {
        let mut acknowledged = 0u64;
        // Each cluster gets its number; the server stops somewhere in between.
        for cluster in 0..SIZE / 65536 {
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                client.write(cluster * 65536, &[cluster as u8 + 1; 4096]).unwrap();
            }));
            if outcome.is_err() {
                break;
            }
            acknowledged = cluster + 1;
            let _ = tell.send(());
        }
        acknowledged
    });
    (0..20).for_each(|_| told.recv().expect("the client writes"));
    let directory = fixture.stop();
    let acknowledged = writer.join().unwrap();
    assert!(acknowledged > 0);
    let (image, flat) = (directory.path().join("empty.qcow2"), directory.path().join("flat"));
    run("qemu-img", &["check", "-q", text(&image)]);
    run("qemu-img", &["convert", "-O", "raw", text(&image), text(&flat)]);
    let flat = std::fs::read(flat).unwrap();
    for cluster in 0..acknowledged as usize {
        assert!(flat[cluster << 16..(cluster << 16) + 4096].iter().all(|byte| *byte == cluster as u8 + 1));
    }
}

#[test]
fn a_client_that_does_not_read_is_cut_off() {
    let limits = Limits { shutdown: Duration::from_millis(300), ..Limits::default() };
    let fixture = Fixture::chain_with(Setup { limits: Some(limits), ..Setup::default() });
    let mut deaf = fixture.client(Style::Simple);
    for _ in 0..10 {
        deaf.send(Command::Read, F::empty(), 0, SIZE);
    }
    std::thread::sleep(Duration::from_millis(100));
    let started = Instant::now();
    fixture.stop();
    let elapsed = started.elapsed();
    assert!(elapsed >= Duration::from_millis(300) && elapsed < Duration::from_secs(10), "{elapsed:?}");
}

#[test]
fn dropping_a_server_stops_it() {
    let mut fixture = Fixture::chain();
    let mut client = fixture.client(Style::Structured);
    fixture.server = None;
    assert!(client.is_hung_up());
    assert!(std::os::unix::net::UnixStream::connect(fixture.socket()).is_err());
}
