//! Views against the files they are of.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use proptest::prelude::*;
use rustix::fs::FallocateFlags;
use std::sync::Arc;
use tempfile::NamedTempFile;
use vmstrata_store::{
    Access, CacheMode, FileOptions, FileStore, Gate, LocalFile as _, OpenStore, Segment, View,
};
use vmstrata_types::HostOffset;

const PAGE: usize = 4096;

fn open(path: &Path, cache: CacheMode) -> FileStore {
    let file = Gate::unrestricted().open(path, Access::ReadOnly).expect("open");
    FileStore::new(file, path, &FileOptions { lock: None, cache, ..FileOptions::FROZEN }).expect("store")
}

fn temporary(content: &[u8]) -> NamedTempFile {
    let mut file = NamedTempFile::new_in(".").expect("temporary file");
    file.write_all(content).expect("write content");
    file
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i / 512 * 7 + i % 251) as u8).collect()
}

/// What a view has at `at`, in two pieces; `None` where it says that another way must be found.
fn read(view: &View, at: usize, len: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0xEE; len];
    let (left, right) = bytes.split_at_mut(len / 3);
    let whole = view.read(&[Segment::from_mut(left), Segment::from_mut(right)], HostOffset::new(at as u64));
    whole.then_some(bytes)
}

#[test]
fn only_files_in_this_host_s_page_cache_are_viewed() {
    let file = temporary(&pattern(3 * PAGE));
    assert!(open(file.path(), CacheMode::Host).view().is_some());
    let around = open(file.path(), CacheMode::Direct);
    assert_eq!(around.view().is_none(), around.cache() == CacheMode::Direct);
    assert!(open(Path::new("/proc/self/mountinfo"), CacheMode::Host).view().is_none());
    assert!(open(temporary(&[]).path(), CacheMode::Host).view().is_none(), "nothing to map");
}

#[test]
fn what_was_not_noted_is_not_read_and_what_is_forgotten_is_not_either() {
    let content = pattern(200 * PAGE);
    let file = temporary(&content);
    let store = OpenStore::new(Arc::new(open(file.path(), CacheMode::Host)));
    let view = &store.view(HostOffset::new(200 * PAGE as u64)).expect("a view");
    // The host is asked first, and the file was just written.
    assert_eq!(read(view, 5000, 9000).as_deref(), Some(&content[5000..14000]));
    view.forget();
    assert_eq!(read(view, 5000, 9000), None);
    view.note(HostOffset::new(5000), 9000);
    assert_eq!(read(view, PAGE, 3 * PAGE).as_deref(), Some(&content[PAGE..4 * PAGE]));
    assert_eq!(read(view, PAGE - 1, PAGE), None, "a page before");
    assert_eq!(read(view, 3 * PAGE, PAGE + 1), None, "a page after");
    // Past the end: not noted, and not read.
    view.note(HostOffset::new(199 * PAGE as u64), 2 * PAGE as u64);
    assert_eq!(read(view, 199 * PAGE, PAGE), None);
    assert_eq!(read(view, 200 * PAGE, 1), None);
    assert_eq!(read(view, usize::MAX - 10, 100), None);
    // A clone is of the same pages, and outlives the file's name and store.
    let twin = view.clone();
    twin.note(HostOffset::new(64 * PAGE as u64), 1);
    assert!(read(view, 64 * PAGE, PAGE).is_some());
    drop((store, file));
    assert_eq!(read(&twin, 64 * PAGE, PAGE).as_deref(), Some(&content[64 * PAGE..65 * PAGE]));
}

#[test]
fn a_file_that_is_cut_off_is_not_taken_for_zeros() {
    let content = pattern(100 * PAGE);
    let file = temporary(&content);
    let view = open(file.path(), CacheMode::Host).view().expect("a view");
    let other = temporary(&content);
    let other = open(other.path(), CacheMode::Host).view().expect("a view");
    assert!(read(&view, 50 * PAGE, PAGE).is_some());
    File::options().write(true).open(file.path()).expect("open").set_len(10 * PAGE as u64).expect("cut");
    assert_eq!(read(&view, 50 * PAGE, PAGE), None);
    assert_eq!(read(&view, 0, PAGE), None, "nothing of it is believed any more");
    assert_eq!(read(&other, 50 * PAGE, PAGE).as_deref(), Some(&content[50 * PAGE..51 * PAGE]));
}

#[test]
fn a_file_that_grows_is_viewed_as_far_as_it_reaches() {
    let content = pattern(100 * PAGE);
    let file = temporary(&content[..10 * PAGE + 512]);
    let writer = File::options().read(true).write(true).open(file.path()).expect("open");
    let store = FileStore::new(writer.try_clone().expect("clone"), file.path(), &FileOptions::ACTIVE);
    let store = OpenStore::new(Arc::new(store.expect("a store")));
    let end = |pages: usize| HostOffset::new((pages * PAGE) as u64);
    let before = store.view(end(10)).expect("a view");
    assert!(!store.view(end(11)).expect("a view").reaches(end(11)), "past the end");
    assert_eq!(read(&before, 10 * PAGE, PAGE), None);
    writer.write_all_at(&content, 0).expect("write");
    assert_eq!(read(&before, 10 * PAGE, PAGE), None, "as the file was");
    let after = store.view(end(11)).expect("a view");
    assert_eq!(read(&after, 5000, 95 * PAGE).as_deref(), Some(&content[5000..5000 + 95 * PAGE]));
    // What is punched out and written again is what the file has.
    rustix::fs::fallocate(&writer, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, PAGE as u64)
        .expect("punch");
    assert_eq!(read(&after, 0, PAGE), Some(vec![0; PAGE]));
    // More than the mapping has room for.
    writer.set_len(4 << 30).expect("extend");
    writer.write_all_at(&content[..PAGE], 3 << 30).expect("write");
    let far = store.view(HostOffset::new((3 << 30) + PAGE as u64)).expect("a view");
    assert_eq!(read(&far, 3 << 30, PAGE).as_deref(), Some(&content[..PAGE]));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn views_read_what_is_all_noted(
        notes in prop::collection::vec((0..200_usize * PAGE, 1..5 * PAGE), 0..40),
        reads in prop::collection::vec((0..200_usize * PAGE, 1..70 * PAGE), 1..60),
    ) {
        let content = pattern(200 * PAGE - 77);
        let file = temporary(&content);
        let view = open(file.path(), CacheMode::Host).view().expect("a view");
        view.forget();
        let mut noted = [false; 200];
        for (at, len) in notes {
            view.note(HostOffset::new(at as u64), len as u64);
            if at + len <= content.len() {
                noted[at / PAGE..=(at + len - 1) / PAGE].fill(true);
            }
        }
        for (at, len) in reads {
            let whole = at + len <= content.len();
            let known = whole && noted[at / PAGE..=(at + len - 1) / PAGE].iter().all(|page| *page);
            prop_assert_eq!(read(&view, at, len), known.then(|| content[at..at + len].to_vec()));
        }
    }
}
