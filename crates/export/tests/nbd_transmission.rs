//! Requests and replies in all three styles, with a client of our own: libnbd 1.14 has no extended headers.

use crate::nbd_common::client::{Chunk, assemble, context_query, extents};
use crate::nbd_common::{Client, Fixture, SIZE, Setup, Style, chain_content, run, text};
use vmstrata_export::nbd::protocol::CommandFlags as F;
use vmstrata_export::nbd::protocol::request::Command;

const STYLES: [Style; 3] = [Style::Simple, Style::Structured, Style::Extended];
const EPERM: u32 = 1;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const EOVERFLOW: u32 = 75;
const ENOTSUP: u32 = 95;
const MIB: u64 = 1 << 20;

fn kinds(chunks: &[Chunk]) -> Vec<u16> {
    chunks.iter().map(|chunk| chunk.kind).collect()
}

#[test]
fn reads_of_all_sizes_return_the_disk() {
    let fixture = Fixture::chain();
    let content = chain_content();
    for style in STYLES {
        let mut client = fixture.client(style);
        for (offset, length) in [
            (0, 1),
            (4095, 2),
            (MIB - 100, 200),
            (MIB - 4096, 70_000),
            (1, 5 * MIB),
            (0, SIZE),
            (SIZE - 1, 1),
            (7, 0),
        ] {
            let expected = &content[offset as usize..(offset + length) as usize];
            assert!(client.read(offset, length).unwrap() == expected, "{style:?} {offset}+{length}");
        }
    }
}

#[test]
fn sparse_reads_leave_zeros_out_and_df_sends_them() {
    let fixture = Fixture::chain();
    for style in [Style::Structured, Style::Extended] {
        let mut client = fixture.client(style);
        let chunks = client.call(Command::Read, F::empty(), 2 * MIB, 2 * MIB).unwrap();
        assert_eq!(assemble(&chunks, 2 * MIB, 2 * MIB), chain_content()[2 << 20..4 << 20]);
        let bytes: usize = chunks.iter().map(|chunk| chunk.payload.len()).sum();
        assert!((768 << 10..800 << 10).contains(&bytes), "{bytes} bytes sent for 768 KiB of data");
        let whole = client.call(Command::Read, F::DF, 2 * MIB, 2 * MIB).unwrap();
        assert_eq!(kinds(&whole), [1], "one chunk of data");
        assert_eq!(assemble(&whole, 2 * MIB, 2 * MIB), chain_content()[2 << 20..4 << 20]);
        let hole = client.call(Command::Read, F::empty(), 5 * MIB, MIB).unwrap();
        assert_eq!(kinds(&hole), [2], "nothing but a hole");
    }
}

#[test]
fn what_is_written_is_read_and_survives() {
    let fixture = Fixture::chain();
    let mut content = chain_content();
    for (round, style) in STYLES.into_iter().enumerate() {
        let mut client = fixture.client(style);
        let base = round * (2 << 20);
        for (index, (offset, len)) in
            [(0, 1), (511, 3), (65_000, 9000), (100_000, 1_700_000)].into_iter().enumerate()
        {
            let at = base + offset;
            let data: Vec<u8> = (0..len).map(|byte| (byte * 7 + index + round) as u8).collect();
            client.write(at as u64, &data).unwrap();
            content[at..at + len].copy_from_slice(&data);
        }
        client.flush().unwrap();
        assert!(client.read(0, SIZE).unwrap() == content, "{style:?}");
    }
    let directory = fixture.stop();
    let active = directory.path().join("active");
    run("qemu-img", &["check", "-q", text(&active)]);
    let flat = directory.path().join("flat");
    run("qemu-img", &["convert", "-O", "raw", text(&active), text(&flat)]);
    assert!(std::fs::read(flat).unwrap() == content);
}

#[test]
fn trim_zeroes_and_cache_in_all_styles() {
    for style in STYLES {
        let fixture = Fixture::chain();
        let mut client = fixture.client(style);
        client.call(Command::WriteZeroes, F::empty(), MIB, MIB / 2).unwrap();
        client.call(Command::WriteZeroes, F::NO_HOLE | F::FUA, 100, 1000).unwrap();
        client.call(Command::WriteZeroes, F::FAST_ZERO, 2 * MIB, 65536).unwrap();
        assert_eq!(client.call(Command::WriteZeroes, F::FAST_ZERO, 10, 65536).unwrap_err(), ENOTSUP);
        let mut expected = chain_content();
        expected[1 << 20..(1 << 20) + (1 << 19)].fill(0);
        expected[100..1100].fill(0);
        expected[2 << 20..(2 << 20) + 65536].fill(0);
        client.call(Command::Cache, F::empty(), 0, SIZE).unwrap();
        assert!(client.read(0, SIZE).unwrap() == expected, "{style:?}");
        // Trimming promises nothing about the content, so only its neighbours are looked at.
        client.call(Command::Trim, F::FUA, 2 * MIB, MIB).unwrap();
        assert!(client.read(0, 2 * MIB).unwrap() == expected[..2 << 20]);
        for command in [Command::Trim, Command::Cache, Command::WriteZeroes, Command::Write] {
            let flags =
                if command == Command::Write && style.is_extended() { F::PAYLOAD_LEN } else { F::empty() };
            client.call(command, flags, 5, 0).unwrap();
        }
    }
}

#[test]
fn fua_makes_a_write_of_many_pieces_stable() {
    let fixture = Fixture::chain();
    let mut client = fixture.client(Style::Structured);
    let data = vec![0x5a; 3 << 20];
    let cookie = client.send_write(MIB / 2, &data, true);
    client.reply(cookie).unwrap();
    let cookie = client.send_write(12_345, &[1, 2, 3], true);
    client.reply(cookie).unwrap();
    // The server is still up and has not been asked to flush: what stock tools see is what FUA made stable.
    let flat = fixture.path("flat");
    run("qemu-img", &["convert", "-U", "-O", "raw", text(&fixture.path("active")), text(&flat)]);
    let flat = std::fs::read(flat).unwrap();
    assert!(flat[1 << 19..(1 << 19) + (3 << 20)] == data && flat[12_345..12_348] == [1, 2, 3]);
}

#[test]
fn requests_that_make_no_sense_are_refused_and_the_next_is_served() {
    let fixture = Fixture::chain();
    for style in STYLES {
        let mut client = fixture.client(style);
        let none = F::empty();
        let refused = [
            (Command::Read, none, SIZE, 1, EINVAL),
            (Command::Read, none, u64::MAX, 1, EINVAL),
            (Command::Read, F::from_bits_retain(1 << 9), 0, 512, EINVAL),
            (Command::Read, F::NO_HOLE, 0, 512, EINVAL),
            (Command::Trim, none, SIZE - 1, 2, EINVAL),
            (Command::Cache, none, SIZE - 1, 2, EINVAL),
            (Command::WriteZeroes, none, SIZE - 1, 2, ENOSPC),
            (Command::Flush, none, 0, 1, EINVAL),
            (Command::Unknown(8), none, 0, 4096, EINVAL),
            (Command::Unknown(999), none, 0, 0, EINVAL),
            (Command::Read, none, 0, u32::MAX.into(), EINVAL),
        ];
        for (command, flags, offset, length, errno) in refused {
            let result = client.call(command, flags, offset, length);
            assert_eq!(result.unwrap_err(), errno, "{style:?} {command:?} {offset}+{length}");
        }
        assert_eq!(client.write(SIZE - 1, &[1, 2, 3]), Err(ENOSPC), "its payload is passed over");
        assert_eq!(client.write(SIZE - 100, &vec![1; 1 << 20]), Err(ENOSPC));
        assert_eq!(client.read(0, 2).unwrap(), [0x11; 2]);
    }
    let mut structured = fixture.client(Style::Structured);
    assert_eq!(structured.call(Command::Read, F::DF, 0, 33 * MIB).unwrap_err(), EINVAL, "past the end first");
    let chunk = structured.call(Command::Unknown(8), F::empty(), 0, 0);
    assert_eq!(chunk.unwrap_err(), EINVAL);
}

#[test]
fn long_reads_come_in_pieces_and_df_has_a_limit() {
    let fixture = Fixture::empty(100 << 20);
    let mut client = fixture.client(Style::Structured);
    client.write(40 << 20, &vec![0xab; 20 << 20]).unwrap();
    assert_eq!(client.call(Command::Read, F::DF, 0, (32 << 20) + 1).unwrap_err(), EOVERFLOW);
    let chunks = client.call(Command::Read, F::empty(), 0, 100 << 20).unwrap();
    assert!(chunks.iter().all(|chunk| chunk.payload.len() <= (512 << 10) + 8));
    let data = assemble(&chunks, 0, 100 << 20);
    assert!(data[40 << 20..60 << 20].iter().all(|byte| *byte == 0xab));
    assert_eq!(data.iter().filter(|byte| **byte != 0).count(), 20 << 20);
    let mut simple = fixture.client(Style::Simple);
    assert!(simple.read(40 << 20, 20 << 20).unwrap().iter().all(|byte| *byte == 0xab));
    assert_eq!(simple.read(0, (32 << 20) + 1).unwrap_err(), EINVAL);
}

#[test]
fn read_only_exports_refuse_every_write() {
    let fixture = Fixture::chain_with(Setup { read_only: true, ..Setup::default() });
    for style in STYLES {
        let mut client = fixture.client(style);
        assert_eq!(
            client.flags & (1 << 1 | 1 << 5 | 1 << 6 | 1 << 11),
            1 << 1,
            "READ_ONLY, no trim, no zeroes"
        );
        assert_eq!(client.write(0, &[1; 70_000]), Err(EPERM));
        assert_eq!(client.call(Command::Trim, F::empty(), 0, 512).unwrap_err(), EPERM);
        assert_eq!(client.call(Command::WriteZeroes, F::empty(), 0, 512).unwrap_err(), EPERM);
        client.flush().unwrap();
        assert_eq!(client.read(0, 3).unwrap(), [0x11; 3]);
    }
}

const ALLOCATION: [(u64, u64); 4] = [(5 << 19, 0), (256 << 10, 3), (256 << 10, 0), (5 << 20, 3)];
const LAYERS: [(u64, u64); 4] = [(1 << 20, 0), (1 << 20, 1), (1 << 20, 2), (5 << 20, 0xffff_ffff)];

#[test]
fn block_status_tells_allocation_and_layers() {
    let fixture = Fixture::chain();
    for style in [Style::Structured, Style::Extended] {
        let mut client = fixture.client(style);
        let chunks = client.call(Command::BlockStatus, F::empty(), 0, SIZE).unwrap();
        assert_eq!(chunks.len(), 2);
        assert_eq!(extents(&chunks[0]), (1, ALLOCATION.to_vec()), "{style:?}");
        assert_eq!(extents(&chunks[1]), (2, LAYERS.to_vec()), "explicit zeros are of their layer");
        let one = client.call(Command::BlockStatus, F::REQ_ONE, MIB + 512, MIB / 2).unwrap();
        assert_eq!(extents(&one[0]), (1, vec![(MIB / 2, 0)]), "no further than asked");
        assert_eq!(extents(&one[1]), (2, vec![(MIB / 2, 1)]));
        let one = client.call(Command::BlockStatus, F::REQ_ONE, 0, SIZE).unwrap();
        assert_eq!(extents(&one[0]), (1, vec![ALLOCATION[0]]), "layers do not cut allocation");
        assert_eq!(client.call(Command::BlockStatus, F::empty(), 0, SIZE + 1).unwrap_err(), EINVAL);
    }
    let mut simple = fixture.client(Style::Simple);
    assert_eq!(simple.call(Command::BlockStatus, F::empty(), 0, SIZE).unwrap_err(), EINVAL);
}

#[test]
fn block_status_answers_for_selected_contexts_only() {
    let fixture = Fixture::chain();
    let mut client = Client::connect(&fixture.socket());
    client.set_style(Style::Structured);
    client.option(10, &context_query("disk", &["vmstrata:layer"]));
    client.go("disk");
    let chunks = client.call(Command::BlockStatus, F::empty(), 0, 4096).unwrap();
    assert_eq!(chunks.len(), 1);
    assert_eq!(extents(&chunks[0]), (2, vec![(4096, 0)]));
}

#[test]
fn an_extended_client_can_filter_contexts() {
    let fixture = Fixture::chain();
    let mut client = fixture.client(Style::Extended);
    assert_ne!(client.flags & 1 << 12, 0, "BLOCK_STATUS_PAYLOAD");
    let mut ask = |payload: &[u8]| {
        let len = payload.len() as u64;
        let cookie = client.send_with(Command::BlockStatus, F::PAYLOAD_LEN, 0, len, payload);
        client.reply(cookie)
    };
    let payload = |len: u64, ids: &[u32]| -> Vec<u8> {
        len.to_be_bytes().into_iter().chain(ids.iter().flat_map(|id| id.to_be_bytes())).collect()
    };
    let chunks = ask(&payload(SIZE, &[2])).unwrap();
    assert_eq!(chunks.len(), 1);
    assert_eq!(extents(&chunks[0]), (2, LAYERS.to_vec()));
    assert_eq!(ask(&payload(SIZE, &[2, 1])).unwrap().len(), 2);
    for bad in
        [payload(SIZE, &[3]), payload(SIZE, &[1, 1]), payload(SIZE + 1, &[1]), vec![0; 5], vec![0; 1 << 20]]
    {
        assert_eq!(ask(&bad).unwrap_err(), EINVAL);
    }
    assert_eq!(ask(&payload(4096, &[1])).unwrap().len(), 1);
    let cookie = client.send_with(Command::Trim, F::PAYLOAD_LEN, 0, 4, b"what");
    assert_eq!(client.reply(cookie).unwrap_err(), EINVAL, "a payload where none belongs is passed over");
    assert_eq!(client.read(0, 1).unwrap(), [0x11]);
}

/// As the client of QEMU 10 does it.
#[test]
fn an_extended_write_need_not_say_that_it_has_a_payload() {
    let fixture = Fixture::chain();
    let mut client = fixture.client(Style::Extended);
    let data = [0x5a; 4096];
    let cookie = client.send_with(Command::Write, F::FUA, 8192, 4096, &data);
    client.reply(cookie).unwrap();
    assert_eq!(client.read(8192, 4096).unwrap(), data);
}

#[test]
fn extended_requests_pass_4_gib() {
    let fixture = Fixture::empty(9 << 30);
    let mut client = fixture.client(Style::Extended);
    client.write(8 << 30, &[9; 512]).unwrap();
    let chunks = client.call(Command::BlockStatus, F::empty(), 0, 9 << 30).unwrap();
    let (_, found) = extents(&chunks[0]);
    assert_eq!(found, [(8 << 30, 3), (65536, 0), ((1 << 30) - 65536, 3)]);
    client.call(Command::WriteZeroes, F::empty(), 0, 9 << 30).unwrap();
    client.call(Command::Trim, F::empty(), 0, 9 << 30).unwrap();
    assert_eq!(client.read(8 << 30, 512).unwrap(), [0; 512]);
    assert_eq!(
        client.call(Command::Read, F::empty(), 0, 5 << 30).unwrap_err(),
        EINVAL,
        "longer than any read"
    );
}

#[test]
fn many_requests_at_once_are_all_answered() {
    let fixture = Fixture::chain();
    for style in STYLES {
        let mut client = fixture.client(style);
        let content = chain_content();
        let mut sent = std::collections::HashMap::new();
        for index in 0..500u64 {
            let (offset, length) = (index * 14_321 % (SIZE - 8192), 1 + index * 37 % 8192);
            sent.insert(client.send(Command::Read, F::empty(), offset, length), (offset, length));
        }
        while !sent.is_empty() {
            let chunk = client.chunk();
            assert!(chunk.is_done, "short reads come in one chunk");
            let (offset, length) = sent.remove(&chunk.cookie).expect("each reply once");
            let data = assemble(&[chunk], offset, length);
            assert!(data == content[offset as usize..(offset + length) as usize]);
        }
    }
}

#[test]
fn disconnecting_finishes_what_is_under_way() {
    let fixture = Fixture::chain();
    let mut client = fixture.client(Style::Simple);
    let cookie = client.send_write(3 * MIB, &vec![0x77; 4 << 20], false);
    client.send(Command::Disconnect, F::empty(), 0, 0);
    client.reply(cookie).unwrap();
    assert!(client.is_hung_up());
    let mut client = fixture.client(Style::Simple);
    assert!(client.read(3 * MIB, 4 * MIB).unwrap().iter().all(|byte| *byte == 0x77));
}
