//! The handshake, option by option, with a client that says exactly what it is told.

use std::io::Write;
use std::time::{Duration, Instant};

use crate::nbd_common::client::{ACK, context_query, info_query, string};
use crate::nbd_common::{Client, Fixture, SIZE, Setup, Style};
use vmstrata_export::nbd::{Error, Export, ExportFault, Limits};

const ERR_UNSUP: u32 = 0x8000_0001;
const ERR_POLICY: u32 = 0x8000_0002;
const ERR_INVALID: u32 = 0x8000_0003;
const ERR_UNKNOWN: u32 = 0x8000_0006;
const ERR_TOO_BIG: u32 = 0x8000_0009;
const ERR_EXT_HEADER_REQD: u32 = 0x8000_000a;

fn last(replies: &[(u32, Vec<u8>)]) -> u32 {
    replies.last().unwrap().0
}

#[test]
fn a_second_writer_is_refused_by_name_and_readers_are_not() {
    let fixture = Fixture::chain();
    fixture.server().exports().add(Export::new("reads", fixture.disk.clone()).with_read_only()).unwrap();
    let guest = fixture.disk.attach_writer("the guest at /run/web.sock", false).unwrap();
    let mut client = Client::connect(&fixture.socket());
    let replies = client.option(7, &info_query("disk", &[]));
    let said = String::from_utf8_lossy(&replies[0].1).into_owned();
    assert!(replies[0].0 == ERR_POLICY && said.contains("the guest at /run/web.sock"), "{replies:?}");
    assert_eq!(last(&client.option(6, &info_query("disk", &[]))), ACK, "INFO attaches nothing");
    let mut old = Client::connect(&fixture.socket());
    old.send_option(1, b"disk");
    assert!(old.is_hung_up(), "EXPORT_NAME cannot be told");
    client.go("reads");
    drop(guest);
    // Connections through one export are one writer.
    let mut both = [fixture.client(Style::Structured), fixture.client(Style::Structured)];
    both.iter_mut().for_each(|client| client.write(0, &[1; 512]).unwrap());
    let refused = fixture.disk.attach_writer("a guest", true).unwrap_err();
    assert!(refused.by.contains(&format!("unix:{}", fixture.socket().display())), "{refused}");
}

#[test]
fn unknown_and_malformed_options_are_refused_and_the_next_is_understood() {
    let fixture = Fixture::chain();
    let mut client = Client::connect(&fixture.socket());
    assert_eq!(last(&client.option(77, b"whatever")), ERR_UNSUP);
    assert_eq!(last(&client.option(4, &[])), ERR_UNSUP, "PEEK_EXPORT was withdrawn");
    assert_eq!(last(&client.option(3, b"x")), ERR_INVALID, "LIST takes no data");
    assert_eq!(last(&client.option(8, b"x")), ERR_INVALID);
    assert_eq!(last(&client.option(7, b"")), ERR_INVALID, "GO without a name");
    assert_eq!(last(&client.option(7, &[0xff; 9])), ERR_INVALID, "a name longer than the option");
    assert_eq!(last(&client.option(7, &info_query("nobody", &[]))), ERR_UNKNOWN);
    assert_eq!(last(&client.option(5, &[])), ERR_POLICY, "no TLS here");
    assert_eq!(last(&client.option(9, &vec![0; 100_000])), ERR_TOO_BIG);
    client.go("disk");
    assert_eq!(client.size, SIZE);
    assert_eq!(client.read(0, 4).unwrap(), [0x11; 4]);
}

#[test]
fn list_names_all_exports_and_info_describes_one() {
    let fixture = Fixture::chain();
    fixture.server().exports().add(Export::new("again", fixture.disk.clone()).with_read_only()).unwrap();
    let mut client = Client::connect(&fixture.socket());
    let listed = client.option(3, &[]);
    assert_eq!(listed[0], (2, string("again")));
    assert_eq!(listed[1], (2, [string("disk"), b"a chain of layers".to_vec()].concat()));
    assert_eq!(listed[2], (ACK, vec![]));
    let info = client.option(6, &info_query("disk", &[1, 2, 3, 99]));
    let item = |kind: u8| {
        info.iter().find(|(reply, data)| *reply == 3 && data[1] == kind).map(|(_, data)| &data[2..])
    };
    assert_eq!(item(0).unwrap()[..8], SIZE.to_be_bytes());
    assert_eq!(item(1), Some(&b"disk"[..]));
    assert_eq!(item(2), Some(&b"a chain of layers"[..]));
    assert_eq!(item(3).unwrap(), [1u32, 4096, 32 << 20].map(u32::to_be_bytes).concat());
    let read_only = client.option(6, &info_query("again", &[]));
    assert_eq!(read_only[0].1[11] & 2, 2, "the read-only flag");
    assert_eq!(read_only.len(), 2, "nothing that was not asked for");
}

#[test]
fn an_empty_name_means_the_only_export() {
    let fixture = Fixture::chain();
    let mut client = Client::connect(&fixture.socket());
    let info = client.option(6, &info_query("", &[1]));
    assert_eq!(info[1].1[2..], *b"disk", "the only one");
    fixture.server().exports().add(Export::new("other", fixture.disk.clone())).unwrap();
    assert_eq!(last(&client.option(6, &info_query("", &[]))), ERR_UNKNOWN, "one of two");
    fixture.server().exports().remove("other").unwrap();
    assert_eq!(client.option(6, &info_query("", &[1]))[1].1[2..], *b"disk");
}

#[test]
fn names_that_cannot_be_exported_are_refused() {
    let fixture = Fixture::chain();
    let reason = |name: &str| match fixture.server().exports().add(Export::new(name, fixture.disk.clone())) {
        Err(Error::Export { reason, .. }) => reason,
        other => panic!("{other:?}"),
    };
    assert_eq!(reason("disk"), ExportFault::Taken);
    assert_eq!(reason("a\0b"), ExportFault::NotAString);
    assert_eq!(reason(&"x".repeat(4097)), ExportFault::NotAString);
}

#[test]
fn export_name_answers_with_or_without_padding() {
    let fixture = Fixture::chain();
    for (flags, padding) in [(3u32, 0), (1, 124), (0, 124)] {
        let mut client = Client::connect_raw(&fixture.socket());
        client.take(18);
        client.socket.write_all(&flags.to_be_bytes()).unwrap();
        client.send_option(1, b"disk");
        assert_eq!(client.take(8), SIZE.to_be_bytes());
        let [_, low] = client.take(2)[..] else { panic!() };
        assert_eq!(low & 0x81, 1, "HAS_FLAGS, and no SEND_DF without structured replies");
        assert_eq!(client.take(padding), vec![0; padding]);
        assert_eq!(client.read(1 << 20, 3).unwrap(), [0x22; 3]);
    }
    let mut client = Client::connect(&fixture.socket());
    client.send_option(1, b"nobody");
    assert!(client.is_hung_up(), "there is no way to say no");
}

#[test]
fn extended_headers_win_over_structured_replies() {
    let fixture = Fixture::chain();
    let mut client = Client::connect(&fixture.socket());
    client.set_style(Style::Structured);
    client.set_style(Style::Extended);
    assert_eq!(last(&client.option(8, &[])), ERR_EXT_HEADER_REQD);
    client.go("disk");
    assert_eq!(client.flags & 1 << 12, 0, "no contexts, so no block status payload");
    assert_eq!(client.read(2 << 20, 5).unwrap(), [0x33; 5]);
    let mut client = Client::connect(&fixture.socket());
    client.set_style(Style::Extended);
    client.send_option(1, b"disk");
    assert!(client.is_hung_up(), "EXPORT_NAME has no place after extended headers");
}

#[test]
fn contexts_are_listed_by_wildcard_and_selected_by_name() {
    let fixture = Fixture::chain();
    let mut client = Client::connect(&fixture.socket());
    assert_eq!(
        last(&client.option(10, &context_query("disk", &[]))),
        ERR_INVALID,
        "needs structured replies"
    );
    client.set_style(Style::Structured);
    let names = |replies: Vec<(u32, Vec<u8>)>| -> Vec<String> {
        assert_eq!(last(&replies), ACK);
        let contexts = replies.iter().filter(|(kind, _)| *kind == 4);
        contexts.map(|(_, data)| String::from_utf8(data[4..].to_vec()).unwrap()).collect()
    };
    let query = |queries: &[&str]| context_query("disk", queries);
    assert_eq!(names(client.option(9, &query(&[]))), ["base:allocation", "vmstrata:layer"]);
    assert_eq!(names(client.option(9, &query(&["vmstrata:"]))), ["vmstrata:layer"]);
    assert_eq!(names(client.option(9, &query(&["qemu:", "base:nothing"]))), [""; 0]);
    assert_eq!(names(client.option(10, &query(&["base:"]))), [""; 0], "wildcards select nothing");
    let both = ["vmstrata:layer", "qemu:dirty-bitmap:b", "base:allocation", "vmstrata:layer"];
    assert_eq!(names(client.option(10, &query(&both))), ["base:allocation", "vmstrata:layer"]);
    assert_eq!(last(&client.option(10, &context_query("nobody", &both))), ERR_UNKNOWN);
    assert_eq!(last(&client.option(9, &query(&["x"])[..9])), ERR_INVALID, "cut off");
}

#[test]
fn a_client_that_dawdles_is_hung_up_on() {
    let limits = Limits { handshake: Duration::from_millis(300), ..Limits::default() };
    let fixture = Fixture::chain_with(Setup { limits: Some(limits), ..Setup::default() });
    let started = Instant::now();
    let mut silent = Client::connect_raw(&fixture.socket());
    let mut half = Client::connect(&fixture.socket());
    half.socket.write_all(b"IHAVEOPT\0\0").unwrap();
    assert!(silent.is_hung_up() && half.is_hung_up());
    assert!(started.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_flood_of_options_and_unknown_flags_end_the_session() {
    let fixture = Fixture::chain();
    let mut client = Client::connect(&fixture.socket());
    let refused = (0..Limits::default().options).map(|_| last(&client.option(99, &[]))).collect::<Vec<_>>();
    assert!(refused.iter().all(|kind| *kind == ERR_UNSUP));
    assert!(client.is_hung_up());
    let mut client = Client::connect_raw(&fixture.socket());
    client.socket.write_all(&0x8000_0003u32.to_be_bytes()).unwrap();
    assert!(client.is_hung_up());
    let mut client = Client::connect(&fixture.socket());
    client.socket.write_all(b"GET / HTTP/1.1\r\n").unwrap();
    assert!(client.is_hung_up());
    let mut client = Client::connect(&fixture.socket());
    client
        .socket
        .write_all(&[&b"IHAVEOPT"[..], &99u32.to_be_bytes(), &u32::MAX.to_be_bytes()].concat())
        .unwrap();
    assert!(client.is_hung_up(), "four gigabytes of option data");
}

#[test]
fn abort_is_acknowledged() {
    let fixture = Fixture::chain();
    let mut client = Client::connect(&fixture.socket());
    assert_eq!(client.option(2, b"ignored"), [(ACK, vec![])]);
    assert!(client.is_hung_up());
}
