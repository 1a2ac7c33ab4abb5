//! Snapshots that version 3 of the format wrote, kept for ever: whatever is changed, they are still read, and mean the same.
//!
//! They were made by `VMSTRATA_WRITE_GOLDEN=DIR cargo test --test vault_golden`, which only a new format version needs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::vault_support::{Guest, Known, policy};
use vmstrata_memory::hide::Clear;
use vmstrata_memory::vault::{
    Closing, DiskPiece, DiskState, Health, NewSnapshot, Page, Policy, Refill, Snapshot, Vault,
};
use vmstrata_memory::{Frame, Layout, PAGE_BYTES, PageClass, Physical};

const CLEAR: Clear = Clear { at: Physical::new(0x1040), mask: 8 };
const PIECE: DiskPiece = DiskPiece { disk: 0, offset: 1 << 30, len: 4096 };

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vault_golden/v3")
}

/// Bytes that no library's idea of randomness changes.
fn bytes(seed: u64) -> [u8; PAGE_BYTES] {
    std::array::from_fn(|at| if seed == 0 { 0 } else { (at as u64 / 64 * seed) as u8 })
}

/// Pages of all kinds; in the second snapshot two are others.
fn guest(second: bool) -> Guest {
    Guest::new(12, |page| match page {
        0..5 => Known { class: PageClass::Critical, seed: if second && page == 1 { 90 } else { page } },
        5..9 => Known { class: PageClass::Clean, seed: if second && page == 6 { 91 } else { page } },
        9 => Known { class: PageClass::Clean, seed: 3 },
        _ => Known { class: PageClass::Free, seed: 0 },
    })
}

fn write(to: &Path) {
    std::fs::create_dir_all(to).expect("makes");
    let vault = Vault::open_directories(&[to.to_owned()]).expect("opens");
    for (name, second) in [("mon", false), ("tue", true)] {
        let guest = guest(second);
        let policy = Policy { threads: 1, ..policy(1, 1) };
        let (layout, name) = (guest.layout.clone(), name.to_owned());
        let new = NewSnapshot { guest: "web".to_owned(), name: name.clone(), layout, policy };
        let mut writer = vault.begin(new).expect("begins");
        for (number, (frame, page)) in guest.pages.iter().enumerate() {
            match number {
                8 => writer.refill(*frame, Refill::new(&bytes(page.seed), vec![PIECE])).expect("takes"),
                _ => writer.page(*frame, page.class, &bytes(page.seed)).expect("takes"),
            }
        }
        let closing = Closing {
            taken_ns: 1_700_000_000_000_000_000 + u64::from(second),
            labels: vec![("job".to_owned(), "nightly".to_owned())],
            disks: vec![DiskState::new("web.qcow2", name)],
            hiding: [(Frame::new(5), [CLEAR])].into_iter().collect(),
            blobs: BTreeMap::from([("state".to_owned(), b"devices".to_vec())]),
        };
        writer.finish(closing).expect("saves");
    }
    std::fs::remove_file(to.join("lock")).expect("a lock");
}

fn assert_is(snapshot: &Snapshot, second: bool) {
    let guest = guest(second);
    for (number, (frame, page)) in guest.pages.iter().enumerate() {
        let mut read = [1; PAGE_BYTES];
        let got = snapshot.read_page(*frame, &mut read).expect("reads");
        let expected = match (number, page.class, page.seed) {
            (8, ..) => Page::Lost,
            (_, PageClass::Free, _) => Page::Free,
            (_, _, 0) => Page::Zero,
            _ => Page::Data,
        };
        assert_eq!(got, expected, "page {number}");
        assert!(got != Page::Data || read == bytes(page.seed), "page {number}");
        assert_eq!(snapshot.classes().get(*frame), page.class);
    }
    let info = snapshot.info();
    assert_eq!(info.layout, Layout::split_at_4g(12 << 12, 6 << 12).expect("a layout"));
    assert_eq!(info.labels, [("job".to_owned(), "nightly".to_owned())]);
    assert_eq!(info.disks, [DiskState::new("web.qcow2", &info.name)]);
    assert_eq!(info.taken_ns, 1_700_000_000_000_000_000 + u64::from(second));
    assert_eq!(
        snapshot.hiding().expect("decodes").of(Frame::new(5)).map(|hide| hide.clears),
        Some(&[CLEAR][..])
    );
    let refilled = Frame::new((1 << 20) + 2);
    let [(frame, refill)] = snapshot.refill().expect("decodes") else { panic!("one page") };
    assert_eq!(*frame, refilled);
    assert!(refill.pieces[..] == [PIECE] && refill.is(&bytes(8)));
    assert_eq!(snapshot.blob("state"), Some(&b"devices"[..]));
}

#[test]
fn snapshots_of_version_3_are_read() {
    if let Some(to) = std::env::var_os("VMSTRATA_WRITE_GOLDEN") {
        write(Path::new(&to));
    }
    let dir = tempfile::tempdir().expect("a directory");
    for entry in std::fs::read_dir(golden()).expect("lists") {
        let entry = entry.expect("an entry");
        std::fs::copy(entry.path(), dir.path().join(entry.file_name())).expect("copies");
    }
    let vault = Vault::open_directories(&[dir.path().to_owned()]).expect("opens");
    assert!(vault.verify(&[], |_, _| ()).expect("verifies").iter().all(Health::is_complete));
    for (name, second) in [("web@mon", false), ("web@tue", true)] {
        let snapshot = vault.snapshot(&name.parse().expect("a name")).expect("opens");
        assert_is(&snapshot, second);
        assert_eq!(snapshot.info().parent.is_some(), second);
        let stats = snapshot.info().stats;
        assert_eq!((stats.pages, stats.free, stats.clean, stats.refilled), (12, 2, 5, 1));
        assert_eq!((stats.older_critical, stats.stored_critical), if second { (3, 1) } else { (0, 4) });
    }
}

/// The bytes, without the code that reads them.
#[test]
fn the_objects_of_version_3_have_their_marks() {
    let mut suffixes = Vec::new();
    for entry in std::fs::read_dir(golden()).expect("lists") {
        let path = entry.expect("an entry").path();
        let bytes = std::fs::read(&path).expect("reads");
        let (stem, suffix) = (path.file_stem().expect("a name"), path.extension().expect("a suffix"));
        let id: String = bytes[16..32].iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(stem.to_str(), Some(id.as_str()));
        let is_metadata = suffix == "snapshot";
        assert_eq!(bytes[8..12], if is_metadata { 3u32 } else { 1u32 }.to_le_bytes());
        assert_eq!(&bytes[..8], if is_metadata { b"VMSMEMRY" } else { b"VMSPAGES" });
        if !is_metadata {
            let tail = &bytes[bytes.len() - 40..];
            assert_eq!(&tail[..8], b"VMSPGEND");
            assert_eq!(bytes[32], u8::from(suffix == "clean"));
        }
        suffixes.push(suffix.to_str().expect("UTF-8").to_owned());
    }
    suffixes.sort();
    assert_eq!(suffixes, ["clean", "clean", "critical", "critical", "snapshot", "snapshot"]);
}
