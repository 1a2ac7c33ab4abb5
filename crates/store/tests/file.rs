//! File stores against memory stores, and against what the file system says.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;

use proptest::prelude::*;
use tempfile::NamedTempFile;
use vmstrata_store::{
    Access, AlignedBuf, CacheMode, FileOptions, FileStore, Gate, LocalFile as _, MemoryStore, Segment, Store,
    copy_to_slice,
};
use vmstrata_types::HostOffset;

const UNLOCKED: FileOptions = FileOptions { lock: None, ..FileOptions::ACTIVE };

/// A temporary file on the file system of the sources, where direct I/O is likelier to work than in /tmp.
fn temporary(content: &[u8]) -> NamedTempFile {
    let mut file = NamedTempFile::new_in(".").expect("temporary file");
    file.write_all(content).expect("write content");
    file
}

fn open(path: &Path, cache: CacheMode) -> FileStore {
    let file = Gate::unrestricted().open(path, Access::ReadWrite).expect("open");
    FileStore::new(file, path, &FileOptions { cache, ..UNLOCKED }).expect("store")
}

fn at(offset: u64) -> HostOffset {
    HostOffset::new(offset)
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i / 512 * 7 + i % 251) as u8).collect()
}

/// An operation on a small file, with offsets and lengths that often are block boundaries.
#[derive(Clone, Debug)]
enum Action {
    Read { at: u64, len: usize, pieces: usize },
    Write { at: u64, len: usize, pieces: usize, seed: u8 },
    Punch { at: u64, len: u64 },
    SetLen(u64),
    Flush,
}

fn place() -> impl Strategy<Value = u64> {
    prop_oneof![0..20_000_u64, (0..40_u64).prop_map(|n| n * 512), (0..5_u64).prop_map(|n| n * 4096)]
}

fn action() -> impl Strategy<Value = Action> {
    let len = || place().prop_map(|len| len as usize);
    prop_oneof![
        4 => (place(), len(), 1..6_usize).prop_map(|(at, len, pieces)| Action::Read { at, len, pieces }),
        4 => (place(), len(), 1..6_usize, any::<u8>())
            .prop_map(|(at, len, pieces, seed)| Action::Write { at, len, pieces, seed }),
        1 => (place(), place()).prop_map(|(at, len)| Action::Punch { at, len }),
        1 => place().prop_map(Action::SetLen),
        1 => Just(Action::Flush),
    ]
}

/// `buf` in about `pieces` segments, of which one is empty.
fn pieces(buf: &mut [u8], pieces: usize) -> Vec<Segment<'_>> {
    let piece = buf.len().div_ceil(pieces).max(1);
    let mut segments: Vec<_> = buf.chunks_mut(piece).map(Segment::from_mut).collect();
    segments.insert(segments.len() / 2, Segment::from_mut(&mut []));
    segments
}

/// Does `action`; returns what a read read. `skew` moves its memory off its alignment.
fn perform(store: &dyn Store, action: &Action, skew: usize) -> io::Result<Vec<u8>> {
    match *action {
        Action::Read { at: offset, len, pieces: count } => {
            let mut memory = AlignedBuf::zeroed(len + skew);
            let read = store.read_segments(&pieces(&mut memory[skew..], count), at(offset))?;
            return Ok(memory[skew..skew + read].to_vec());
        }
        Action::Write { at: offset, len, pieces: count, seed } => {
            let mut memory = AlignedBuf::zeroed(len + skew);
            for (i, byte) in memory.iter_mut().enumerate() {
                *byte = seed.wrapping_add((i - skew.min(i)) as u8) | 1;
            }
            store.write_segments(&pieces(&mut memory[skew..], count), at(offset))?;
        }
        Action::Punch { at: offset, len } => store.punch_hole(at(offset), len)?,
        Action::SetLen(len) => store.set_len(len)?,
        Action::Flush => store.flush()?,
    }
    Ok(Vec::new())
}

fn content(store: &dyn Store) -> Vec<u8> {
    let mut bytes = vec![0; store.len().expect("len") as usize];
    store.read_exact(&mut bytes, HostOffset::ZERO).expect("read all");
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn files_behave_like_memory(actions in prop::collection::vec((action(), 0..2_usize), 1..40)) {
        for cache in [CacheMode::Host, CacheMode::Direct] {
            let file = temporary(&[]);
            let store = open(file.path(), cache);
            let model = MemoryStore::new();
            for (action, skew) in &actions {
                let expected = perform(&model, action, 0).expect("model");
                let found = perform(&store, action, *skew).expect("file");
                prop_assert!(expected == found, "{:?} ({:?}) read something else", action, cache);
                prop_assert_eq!(store.len().expect("len"), model.len().expect("len"), "{:?} ({:?})", action, cache);
            }
            prop_assert!(content(&store) == model.to_vec(), "contents differ ({:?})", cache);
            prop_assert!(std::fs::read(file.path()).expect("read") == model.to_vec(), "file differs ({:?})", cache);
        }
    }
}

#[test]
fn direct_mode_is_direct_and_says_what_it_needs() {
    let file = temporary(&pattern(8192));
    let store = open(file.path(), CacheMode::Direct);
    assert_eq!(store.cache(), CacheMode::Direct, "these tests need a file system with direct I/O");
    let alignment = store.raw_alignment();
    assert!([512, 1024, 2048, 4096].contains(&alignment), "{alignment}");
    let fd = store.raw().expect("raw");
    let flags = rustix::fs::fcntl_getfl(fd).expect("flags");
    assert!(flags.contains(rustix::fs::OFlags::DIRECT));
    assert_ne!(fd.as_raw_fd(), -1);
    assert_eq!(open(file.path(), CacheMode::Host).raw_alignment(), 1);
}

#[test]
fn requests_longer_than_a_bounce_buffer_arrive_whole() {
    let file = temporary(&[]);
    let store = open(file.path(), CacheMode::Direct);
    let bytes = pattern((3 << 20) + 777);
    store.set_len(5 << 20).expect("grow");
    for offset in [0, 1, 511, 4096, 5000] {
        store.write_all(&bytes, at(offset)).expect("write");
        let mut back = vec![0; bytes.len()];
        store.read_exact(&mut back, at(offset)).expect("read");
        assert!(back == bytes, "at {offset}");
    }
    store.punch_hole(HostOffset::ZERO, u64::MAX).expect("punch");
    assert!(content(&store).iter().all(|&byte| byte == 0));
}

#[test]
fn partial_direct_writes_of_one_block_do_not_undo_each_other() {
    let file = temporary(&vec![0; 4096]);
    let store = open(file.path(), CacheMode::Direct);
    std::thread::scope(|scope| {
        for lane in 0..8_u64 {
            let store = &store;
            scope.spawn(move || {
                for round in 1..=50_u8 {
                    for slot in (lane..64).step_by(8) {
                        store.write_all(&[round; 8], at(slot * 8)).expect("write");
                    }
                }
            });
        }
    });
    assert_eq!(content(&store)[..512], [50; 512]);
}

#[test]
fn extents_tell_data_from_holes() {
    let file = temporary(&[]);
    let store = open(file.path(), CacheMode::Host);
    store.set_len(1 << 20).expect("grow");
    store.write_all(&[1; 65536], at(131_072)).expect("write");
    store.flush().expect("flush");
    assert_eq!(store.extent(at(0)).expect("extent"), (false, at(131_072)));
    assert_eq!(store.extent(at(131_073)).expect("extent"), (true, at(196_608)));
    assert_eq!(store.extent(at(196_608)).expect("extent"), (false, at(1 << 20)));
    assert_eq!(store.extent(at(1 << 20)).expect("extent"), (true, at(1 << 20)));
    store.punch_hole(at(131_072), 65_536).expect("punch");
    assert_eq!(store.extent(at(0)).expect("extent"), (false, at(1 << 20)));
    let blocks = std::os::unix::fs::MetadataExt::blocks(&file.as_file().metadata().expect("stat"));
    assert_eq!(blocks, 0, "the space was given back");
}

#[test]
fn identity_follows_the_file_and_its_changes() {
    let file = temporary(b"abc");
    let link = file.path().with_extension("link");
    std::fs::hard_link(file.path(), &link).expect("link");
    let (store, linked) = (open(file.path(), CacheMode::Host), open(&link, CacheMode::Host));
    std::fs::remove_file(&link).expect("unlink");
    let before = store.identity().expect("identity");
    assert_eq!(before, linked.identity().expect("identity"));
    assert_eq!(before.len, 3);
    std::thread::sleep(std::time::Duration::from_millis(20));
    linked.write_all(b"abcd", HostOffset::ZERO).expect("write");
    let after = store.identity().expect("identity");
    assert_eq!(after.file, before.file);
    assert!(after.mtime_ns > before.mtime_ns && after.len == 4);
    let other = temporary(b"abc");
    assert_ne!(open(other.path(), CacheMode::Host).identity().expect("identity").file, before.file);
}

#[test]
fn read_only_files_refuse_writes_and_offsets_have_an_end() {
    let file = temporary(&pattern(100));
    let read_only = Gate::unrestricted().open(file.path(), Access::ReadOnly).expect("open");
    let options = FileOptions { lock: None, ..FileOptions::FROZEN };
    let store = FileStore::new(read_only, file.path(), &options).expect("store");
    assert_eq!(store.write_all(b"x", at(0)).unwrap_err().raw_os_error(), Some(libc::EBADF));
    assert_eq!(store.path(), file.path());
    assert_eq!(content(&store), pattern(100));
    let store = open(file.path(), CacheMode::Direct);
    for offset in [u64::MAX, i64::MAX as u64] {
        let errno = store.write_all(b"xy", at(offset)).unwrap_err().raw_os_error();
        assert!(matches!(errno, Some(libc::EFBIG | libc::EINVAL)), "{errno:?}");
    }
}

/// What callers of `punch_hole` go by is `Unsupported`; what file systems without holes answer is `EOPNOTSUPP`.
#[test]
fn a_file_system_without_holes_is_unsupported() {
    let error = io::Error::from_raw_os_error(libc::EOPNOTSUPP);
    assert_eq!(error.kind(), io::ErrorKind::Unsupported);
}

/// A loop device over a file, detached on drop; `None` without the right or the means to make one.
struct LoopDevice {
    device: PathBuf,
    _file: NamedTempFile,
}

impl LoopDevice {
    fn new(content: &[u8], sector: u32) -> Option<Self> {
        let file = temporary(content);
        let output = Command::new("losetup")
            .args(["--find", "--show", "--sector-size", &sector.to_string()])
            .arg(file.path())
            .output()
            .ok()?;
        let device = String::from_utf8(output.stdout).ok()?.trim().to_owned();
        (output.status.success() && !device.is_empty()).then(|| Self { device: device.into(), _file: file })
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let detached = Command::new("losetup").arg("--detach").arg(&self.device).status();
        assert!(std::thread::panicking() || detached.is_ok_and(|status| status.success()));
    }
}

#[test]
fn block_devices_are_stores_of_fixed_length() {
    for sector in [512, 4096] {
        let Some(device) = LoopDevice::new(&pattern(1 << 20), sector) else {
            eprintln!("not tested: block devices need root and loop devices");
            return;
        };
        for cache in [CacheMode::Host, CacheMode::Direct] {
            let store = open(&device.device, cache);
            store.write_all(&pattern(1 << 20), HostOffset::ZERO).expect("write");
            assert_eq!((store.len().expect("len"), store.cache()), (1 << 20, cache));
            store.set_len(1 << 20).expect("the same length");
            assert_eq!(store.set_len(1).unwrap_err().kind(), io::ErrorKind::Unsupported);
            assert_eq!(store.extent(at(5)).expect("extent"), (true, at(1 << 20)));
            let id = store.identity().expect("identity");
            assert_eq!((id.file.ino, id.len), (0, 1 << 20));

            let mut expected = pattern(1 << 20);
            for (from, to) in [(100, 300), (5000, 70_001), (131_072, 262_144), ((1 << 20) - 77, 1 << 20)] {
                store.punch_hole(at(from), to - from).expect("punch");
                expected[from as usize..to as usize].fill(0);
            }
            store.write_all(b"odd", at(4095)).expect("write");
            expected[4095..4098].copy_from_slice(b"odd");
            store.flush().expect("flush");
            assert!(content(&store) == expected, "sectors of {sector}, {cache:?}");
            let mut tail = [0; 64];
            assert_eq!(
                store.read_segments(&[Segment::from_mut(&mut tail)], at((1 << 20) - 10)).expect("read"),
                10
            );
            assert!(store.write_all(b"past the end", at((1 << 20) - 5)).is_err());
        }
    }
}

#[test]
fn what_the_host_has_in_memory_is_read_without_waiting() {
    let file = temporary(&pattern(10_000));
    let mut found = vec![0; 5000];
    let cached = open(file.path(), CacheMode::Host);
    // Someone else's memory pressure may take it away again.
    let is_there = |found: &mut [u8]| {
        (0..100).any(|_| {
            cached.read_exact(found, at(3)).expect("read");
            found.fill(0);
            cached.read_now(found, at(3))
        })
    };
    assert!(is_there(&mut found), "never in memory");
    assert_eq!(found, pattern(10_000)[3..5003]);
    assert!(!cached.read_now(&mut found, at(9000)), "past the end");
    assert!(!open(file.path(), CacheMode::Direct).read_now(&mut found, at(0)));
}

#[test]
fn writes_see_the_bytes_of_their_segments_in_order() {
    let file = temporary(&[]);
    let store = open(file.path(), CacheMode::Host);
    let mut memory = pattern(2500);
    let segments: Vec<_> = memory.chunks_mut(1).map(Segment::from_mut).collect();
    store.write_segments(&segments, at(3)).expect("write");
    let mut expected = vec![0; 2500];
    copy_to_slice(&segments, &mut expected);
    assert_eq!(std::fs::read(file.path()).expect("read")[3..], expected);
    drop(File::open(file.path()).expect("still there"));
}
