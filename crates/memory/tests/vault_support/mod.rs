//! Guests made up for tests of the snapshot store, and what must be read back of them.
#![allow(dead_code, unreachable_pub, missing_docs, reason = "each test file uses a part")]

pub mod fault;

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use tempfile::TempDir;
use vmstrata_memory::vault::{
    Closing, Deleted, NewSnapshot, ObjectId, OneDevice, Page, Policy, Result, Saved, Snapshot, Vault,
    VaultError, Want, Which, Writer,
};
use vmstrata_memory::{Frame, Layout, PAGE_BYTES, PageClass};
use vmstrata_repo::{DirectoryRepository, Repository};

/// A page and what it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    pub class: PageClass,
    /// Pages are filled with this number as a seed; 0 is zeros.
    pub seed: u64,
}

pub fn bytes(seed: u64) -> [u8; PAGE_BYTES] {
    let mut page = [0; PAGE_BYTES];
    if seed != 0 {
        // Half of it noise: it shrinks, and no two are the same.
        SmallRng::seed_from_u64(seed).fill(&mut page[..PAGE_BYTES / 2]);
    }
    page
}

/// A guest with a hole in its memory.
#[derive(Clone, Debug)]
pub struct Guest {
    pub layout: Layout,
    pub pages: BTreeMap<Frame, Known>,
}

impl Guest {
    /// All pages by `page`, which gets their number.
    pub fn new(count: u64, mut page: impl FnMut(u64) -> Known) -> Self {
        let layout = Layout::split_at_4g(count << 12, (count / 2).max(1) << 12).expect("a layout");
        let frames = layout.blocks().iter().flat_map(|block| {
            let first = Frame::of(block.start).get();
            first..first + block.len / PAGE_BYTES as u64
        });
        let pages = frames.enumerate().map(|(at, frame)| (Frame::new(frame), page(at as u64))).collect();
        Self { layout, pages }
    }

    pub fn random(count: u64, rng: &mut SmallRng) -> Self {
        Self::new(count, |_| Self::random_page(rng))
    }

    pub fn random_page(rng: &mut SmallRng) -> Known {
        let class = [PageClass::Critical, PageClass::Clean, PageClass::Free][rng.random_range(0..3)];
        // Few seeds, so that pages repeat.
        Known { class, seed: rng.random_range(0..40) }
    }

    /// The pages of `other`, each behind two that nobody else has.
    pub fn around(other: &Self) -> Self {
        let theirs: Vec<Known> = other.pages.values().copied().collect();
        Self::new(theirs.len() as u64 * 3, |page| match page % 3 {
            2 => theirs[page as usize / 3],
            _ => Known { class: PageClass::Critical, seed: 1000 + page },
        })
    }

    pub fn give(&self, writer: &mut Writer) -> Result<()> {
        self.pages.iter().try_for_each(|(frame, page)| writer.page(*frame, page.class, &bytes(page.seed)))
    }
}

pub fn policy(critical_copies: u8, clean_copies: u8) -> Policy {
    Policy {
        critical_copies,
        clean_copies,
        one_device: OneDevice::Allow,
        extent_pages: 4,
        threads: 2,
        buffer_bytes: 1 << 20,
        ..Policy::default()
    }
}

/// Directories, as repositories.
pub struct Repositories {
    pub dirs: Vec<TempDir>,
}

impl Repositories {
    pub fn new(count: usize) -> Self {
        Self { dirs: (0..count).map(|_| tempfile::tempdir().expect("a directory")).collect() }
    }

    pub fn paths(&self) -> Vec<PathBuf> {
        self.dirs.iter().map(|dir| dir.path().to_owned()).collect()
    }

    pub fn vault(&self) -> Arc<Vault> {
        Vault::open_directories(&self.paths()).expect("opens")
    }

    pub fn repositories(&self) -> Vec<Arc<dyn Repository>> {
        let open = |path: &PathBuf| {
            Arc::new(DirectoryRepository::open(path, ObjectId::is_name).expect("opens"))
                as Arc<dyn Repository>
        };
        self.paths().iter().map(open).collect()
    }

    /// Files of all repositories but locks, by repository, sorted.
    pub fn files(&self) -> Vec<Vec<String>> {
        let names = |path: PathBuf| {
            let entries = std::fs::read_dir(path).expect("lists");
            let mut names: Vec<String> = entries
                .map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8"))
                .collect();
            names.retain(|name| name != "lock");
            names.sort();
            names
        };
        self.paths().into_iter().map(names).collect()
    }

    /// Bytes that all files take of their devices, as `du` counts them.
    pub fn allocated(&self) -> u64 {
        let files = self.files();
        let paths = self.paths();
        let all = paths.iter().zip(&files).flat_map(|(dir, names)| names.iter().map(|name| dir.join(name)));
        all.map(|path| std::fs::metadata(path).expect("a file").blocks() * 512).sum()
    }

    /// Whether each critical object is the same bytes in all repositories that have it.
    pub fn are_alike(&self) -> bool {
        let mut first = BTreeMap::new();
        let (files, paths) = (self.files(), self.paths());
        let all = paths.iter().zip(&files).flat_map(|(dir, names)| names.iter().map(move |name| (dir, name)));
        let mut critical = all.filter(|(_, name)| name.ends_with(".critical"));
        critical.all(|(dir, name)| {
            let bytes = std::fs::read(dir.join(name)).expect("reads");
            *first.entry(name).or_insert_with(|| bytes.clone()) == bytes
        })
    }

    /// Removes all from a repository of which there are other copies.
    pub fn lose_copies(&self, repository: usize) {
        for name in self.files()[repository].iter().filter(|name| !name.ends_with(".clean")) {
            std::fs::remove_file(self.dirs[repository].path().join(name)).expect("removes");
        }
    }

    pub fn is_empty(&self) -> bool {
        self.files().iter().all(Vec::is_empty)
    }
}

pub fn new_snapshot(guest: &Guest, name: &str, policy: Policy) -> NewSnapshot {
    NewSnapshot { guest: "web".to_owned(), name: name.to_owned(), layout: guest.layout.clone(), policy }
}

pub fn save_at(
    vault: &Arc<Vault>,
    guest: &Guest,
    name: &str,
    policy: Policy,
    taken_ns: u64,
) -> Result<Saved> {
    let mut writer = vault.begin(new_snapshot(guest, name, policy))?;
    guest.give(&mut writer)?;
    let blobs = BTreeMap::from([("state".to_owned(), name.as_bytes().to_vec())]);
    writer.finish(Closing { taken_ns, blobs, ..Closing::default() })
}

/// Saves a snapshot whose time is that of its name, if that is a number.
pub fn save(vault: &Arc<Vault>, guest: &Guest, name: &str, policy: Policy) -> Saved {
    save_at(vault, guest, name, policy, name.parse().unwrap_or(1)).expect("saves")
}

/// Makes the snapshot "1" of `guest`, whose pages lie in objects of "0" among pages that nobody needs any more.
pub fn leave_dead_pages(repositories: &Repositories, guest: &Guest, policy: &Policy) {
    let vault = repositories.vault();
    let first = save(&vault, &Guest::around(guest), "0", policy.clone());
    save(&vault, guest, "1", policy.clone());
    let _reader = open(&vault, "1").expect("opens");
    assert_eq!(vault.delete(&[first.id]).expect("deletes"), Deleted::Later);
}

pub fn open(vault: &Vault, name: &str) -> Result<Snapshot> {
    vault.snapshot(&Which::Named { guest: "web".to_owned(), name: name.to_owned() })
}

/// What must be read of a page of which all copies are there.
pub fn expected(page: Known, clean_copies: u8) -> Vec<Page> {
    match (page.class, page.seed) {
        (PageClass::Free, _) => vec![Page::Free],
        (_, 0) => vec![Page::Zero],
        (PageClass::Critical, _) => vec![Page::Data],
        (PageClass::Clean, _) if clean_copies > 0 => vec![Page::Data],
        // A critical page may have had the same bytes.
        (PageClass::Clean, _) => vec![Page::Lost, Page::Data],
    }
}

/// Reads everything in both ways and compares it; clean pages may be lost if `may_lose`.
pub fn assert_reads(snapshot: &Snapshot, guest: &Guest, clean_copies: u8, may_lose: bool) {
    let mut lost = Vec::new();
    let classes = snapshot.classes();
    for (frame, page) in &guest.pages {
        let mut read = [0xee; PAGE_BYTES];
        let got = snapshot.read_page(*frame, &mut read).expect("reads");
        let is_lost = may_lose && page.class == PageClass::Clean && got == Page::Lost;
        assert!(is_lost || expected(*page, clean_copies).contains(&got), "{frame}: {page:?}: {got:?}");
        let right = if got == Page::Data { bytes(page.seed) } else { [0; PAGE_BYTES] };
        assert!(read == right, "{frame}: {page:?}");
        assert_eq!(classes.get(*frame), page.class);
        if got == Page::Lost {
            lost.push(*frame);
        }
    }
    assert_streams(snapshot, guest, &lost);
}

fn assert_streams(snapshot: &Snapshot, guest: &Guest, lost: &[Frame]) {
    let streamed = Mutex::new(BTreeMap::new());
    let sink = |first: Frame, pages: &[[u8; PAGE_BYTES]]| {
        for (frame, page) in (first.get()..).map(Frame::new).zip(pages) {
            assert_eq!(streamed.lock().insert(frame, *page), None, "{frame} twice");
        }
        Ok(())
    };
    assert_eq!(snapshot.stream(Want::All, sink).expect("streams"), lost);
    let streamed = streamed.into_inner();
    for (frame, page) in &guest.pages {
        let given = streamed.get(frame).copied();
        let has_bytes = page.class != PageClass::Free && page.seed != 0 && !lost.contains(frame);
        assert!(given == has_bytes.then(|| bytes(page.seed)), "{frame}: {page:?}");
    }
}

/// Flips the lowest bit of a byte of a file.
pub fn flip(path: &std::path::Path, at: usize) {
    let mut bytes = std::fs::read(path).expect("reads");
    bytes[at] ^= 1;
    std::fs::write(path, bytes).expect("writes");
}

pub fn is_lost(error: &VaultError) -> bool {
    matches!(error, VaultError::PageLost { .. } | VaultError::MetadataLost { .. })
}
