//! Chains that are broken, and files that would like to be: each is told by its kind, and none stops the survey.

use std::fs;
use std::io::Read as _;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::{Tree, chain, patch, risks, set_mtime, tool};
use vmstrata_qcow2::SnapshotInfo;
use vmstrata_qcow2::extension::magic;
use vmstrata_survey::{RiskKind, Severity, SurveyOptions, survey};

const BACKING_FILE_OFFSET: usize = 8;
const BACKING_FILE_SIZE: usize = 16;
const INCOMPATIBLE: usize = 72;

#[test]
fn missing_layers_are_told_at_the_overlay_that_names_them() {
    let tree = Tree::new();
    let top = tree.overlay("top.qcow2", "middle.qcow2");
    tree.overlay("middle.qcow2", "gone.qcow2");
    tree.create("sound.qcow2", &["16M"]);
    let report = tree.survey();
    assert_eq!(risks(&report), [(RiskKind::Missing, "middle.qcow2".to_owned())]);
    assert!(report.risks[0].message.contains("gone.qcow2"), "{}", report.risks[0].message);
    let broken = chain(&report, &top);
    assert_eq!((broken.layers, broken.severity), (2, Some(Severity::Broken)));
    assert_eq!((report.summary.chains, report.summary.chains_broken), (2, 1));
    assert_eq!(report.severity(), Some(Severity::Broken));
}

#[test]
fn a_loop_made_with_a_hex_editor_ends_the_chain() {
    let tree = Tree::new();
    let base = tree.create("base.qcow2", &["16M"]);
    let top = tree.overlay("top.qcow2", "base.qcow2");
    assert!(tree.survey().risks.is_empty());
    // The base gets a backing file of the same name length: its own overlay. The name goes behind the header.
    let at = 0x400u64;
    patch(&base, at as usize, b"top.qcow2");
    patch(&base, BACKING_FILE_OFFSET, &at.to_be_bytes());
    patch(&base, BACKING_FILE_SIZE, &9u32.to_be_bytes());
    let report = tree.survey();
    assert_eq!(report.chains.len(), 1);
    assert_eq!(chain(&report, &base).layers, 2, "the first of the loop in the alphabet stands for it");
    let kinds: Vec<_> = risks(&report);
    assert_eq!(kinds, [(RiskKind::Loop, "base.qcow2".to_owned()), (RiskKind::Loop, "top.qcow2".to_owned())]);
    // A disk on top of the loop is the chain then.
    let disk = tree.overlay("disk.qcow2", top.to_str().unwrap());
    let report = tree.survey();
    assert_eq!(report.chains.len(), 1);
    assert_eq!((chain(&report, &disk).layers, report.severity()), (3, Some(Severity::Broken)));
}

#[test]
fn headers_that_were_cut_or_damaged_are_corrupt_and_what_we_cannot_do_is_unsupported() {
    let tree = Tree::new();
    let cut = tree.create("cut.qcow2", &["16M"]);
    fs::File::options().write(true).open(&cut).unwrap().set_len(50).unwrap();
    fs::write(tree.path("empty.qcow2"), b"").unwrap();
    fs::write(tree.path("text.qcow2"), b"hello, world").unwrap();
    patch(&tree.create("bits.qcow2", &["16M"]), 20, &63u32.to_be_bytes());
    patch(&tree.create("no-name", &["16M"]), 40, &[0xff; 8]);
    patch(&tree.create("feature.qcow2", &["16M"]), INCOMPATIBLE, &(1u64 << 40).to_be_bytes());
    tree.overlay("net.qcow2", "nbd://host/export");
    tree.overlay("json.qcow2", "json:{\"driver\":\"null-co\"}");
    fs::write(tree.path("note.txt"), b"not an image, and no one says it is").unwrap();
    let report = tree.survey();
    let named = |wanted| {
        let all = risks(&report).into_iter();
        all.filter(|(kind, _)| *kind == wanted).map(|(_, name)| name).collect::<Vec<_>>()
    };
    assert_eq!(named(RiskKind::Corrupt), ["bits.qcow2", "cut.qcow2", "empty.qcow2", "no-name", "text.qcow2"]);
    assert_eq!(named(RiskKind::Unsupported), ["feature.qcow2", "json.qcow2", "net.qcow2"]);
    assert_eq!(report.risks.len(), 8);
    assert_eq!(report.scanned.images, 8);
    // A size that was not read is not in the statistics.
    assert_eq!(report.summary.virtual_size.count, 2);
}

/// A copy that was broken off, as `rsync` or `cp` leaves it, has its header and its L1 table.
#[test]
fn a_file_that_was_cut_short_is_corrupt_by_its_l1_table() {
    let tree = Tree::new();
    let base = tree.create("base.qcow2", &["16M"]);
    let top = tree.overlay("top.qcow2", "base.qcow2");
    tool("qemu-io", ["-c", "write -q 0 1M", base.to_str().unwrap()]);
    assert!(tree.survey().risks.is_empty());
    let cut = |len| fs::File::options().write(true).open(&base).unwrap().set_len(len).unwrap();
    // Past the L2 table, which stock tools put before the data: only its entries tell.
    cut(fs::metadata(&base).unwrap().len() - (512 << 10));
    assert!(tree.survey().risks.is_empty());
    let deep = survey(&SurveyOptions { deep: true, ..tree.options() }).unwrap();
    assert_eq!(risks(&deep), [(RiskKind::Corrupt, "base.qcow2".to_owned())]);
    assert!(deep.risks[0].message.contains("a data cluster lies at"), "{}", deep.risks[0].message);
    assert_eq!(chain(&deep, &top).severity, Some(Severity::Broken));
    cut(0x3_0200);
    let report = tree.survey();
    assert_eq!(risks(&report), [(RiskKind::Corrupt, "base.qcow2".to_owned())]);
    assert!(report.risks[0].message.contains("an L2 table lies at"), "{}", report.risks[0].message);
    assert_eq!((chain(&report, &top).layers, chain(&report, &top).severity), (2, Some(Severity::Broken)));
}

/// Whoever says that a layer is raw says that it has no tables.
#[test]
fn the_tables_of_what_is_used_as_raw_are_nobodys() {
    let tree = Tree::new();
    let base = tree.create("base.qcow2", &["16M"]);
    tool("qemu-io", ["-c", "write -q 0 1M", base.to_str().unwrap()]);
    fs::File::options().write(true).open(&base).unwrap().set_len(0x3_0200).unwrap();
    tree.create("top.qcow2", &["-u", "-b", "base.qcow2", "-F", "raw", "3M"]);
    assert!(tree.survey().risks.is_empty());
    assert!(survey(&SurveyOptions { deep: true, ..tree.options() }).unwrap().risks.is_empty());
}

#[test]
fn a_half_deleted_snapshot_is_told_and_is_none() {
    let tree = Tree::new();
    tree.quick("base.qcow2", None);
    let record = SnapshotInfo { name: "monday".to_owned(), taken_ns: 1, ..SnapshotInfo::default() };
    tree.quick_snapshot("disk.qcow2", Some("base.qcow2"), Some(record));
    let named = |report: &vmstrata_survey::Report| report.layers[0].snapshot.clone();
    let report = tree.survey();
    assert_eq!((report.risks.len(), named(&report)), (0, Some("monday".to_owned())));
    // What a merge writes into a layer before it overwrites it: the name that it will have.
    let base = tree.path("base.qcow2");
    let mut mark = magic::DROPPED.to_be_bytes().to_vec();
    mark.extend(10u32.to_be_bytes());
    mark.extend(b"disk.qcow2\0\0\0\0\0\0");
    patch(&base, extensions_end(&base), &mark);
    let report = tree.survey();
    assert_eq!(risks(&report), [(RiskKind::HalfDeleted, "base.qcow2".to_owned())]);
    assert_eq!(named(&report), None);
    assert_eq!(chain(&report, &tree.path("disk.qcow2")).severity, Some(Severity::Suspect));
}

/// Where the list of extensions has its end, which is eight zeros.
fn extensions_end(image: &Path) -> usize {
    let bytes = fs::read(image).unwrap();
    let word = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap());
    let mut at = word(100) as usize;
    while word(at) != 0 {
        at += 8 + (word(at + 4) as usize).next_multiple_of(8);
    }
    at
}

#[test]
fn a_raw_base_and_a_raw_disk_need_no_header() {
    let tree = Tree::new();
    fs::write(tree.path("base-without-ending"), vec![7; 3 << 20]).unwrap();
    tree.create("top.qcow2", &["-u", "-b", "base-without-ending", "-F", "raw", "3M"]);
    fs::write(tree.path("disk.img"), vec![7; 1 << 20]).unwrap();
    let report = tree.survey();
    assert_eq!((report.chains.len(), report.layers.len()), (2, 3), "{:#?}", report.layers);
    assert!(report.risks.is_empty(), "{:#?}", report.risks);
    // The same base, called qcow2.
    tree.overlay("wrong.qcow2", "base-without-ending");
    assert_eq!(risks(&tree.survey()), [(RiskKind::Corrupt, "wrong.qcow2".to_owned())]);
}

#[test]
fn fifos_sockets_and_links_that_turn_in_circles_hold_nothing_up() {
    let tree = Tree::new();
    tool("mkfifo", [tree.path("fifo.qcow2"), tree.path("base.fifo")]);
    let _socket = UnixListener::bind(tree.path("socket.qcow2")).unwrap();
    symlink("b", tree.path("a")).unwrap();
    symlink("a", tree.path("b")).unwrap();
    symlink("..", tree.path("dir/up")).unwrap();
    symlink("/", tree.path("dir/all")).unwrap();
    tree.overlay("on-fifo.qcow2", "base.fifo");
    tree.overlay("on-circle.qcow2", "a");
    tree.overlay("on-dir.qcow2", "dir");
    let started = Instant::now();
    let report = tree.survey();
    assert!(started.elapsed() < Duration::from_secs(10));
    let unreadable = |name: &str| (RiskKind::Unreadable, name.to_owned());
    assert_eq!(
        risks(&report),
        [unreadable("on-circle.qcow2"), unreadable("on-dir.qcow2"), unreadable("on-fifo.qcow2")]
    );
    assert_eq!((report.scanned.special.count, report.scanned.links.count), (3, 4));
    assert_eq!(report.scanned.images, 3);
}

#[test]
fn backing_files_outside_are_not_opened_unless_allowed() {
    let (tree, golden) = (Tree::new(), Tree::new());
    golden.create("base.qcow2", &["16M"]);
    let top = tree.overlay("top.qcow2", &golden.name("base.qcow2"));
    symlink(golden.path("base.qcow2"), tree.path("inside.qcow2")).unwrap();
    tree.overlay("sly.qcow2", "inside.qcow2");
    let passwd = tree.create("passwd.qcow2", &["-u", "-b", "/etc/passwd", "-F", "raw", "16M"]);
    let report = tree.survey();
    let outside = |name: &str| (RiskKind::Outside, name.to_owned());
    assert_eq!(risks(&report), [outside("passwd.qcow2"), outside("sly.qcow2"), outside("top.qcow2")]);
    assert!(report.layers.iter().all(|layer| layer.path.starts_with(tree.root().to_str().unwrap())));
    assert!(report.risks[2].message.contains("--allow-backing"), "{}", report.risks[2].message);

    fs::remove_file(passwd).unwrap();
    let report = survey(&SurveyOptions { allow_backing: vec![golden.root()], ..tree.options() }).unwrap();
    assert!(report.risks.is_empty(), "{:#?}", report.risks);
    assert_eq!((chain(&report, &top).layers, chain(&report, &top).shared), (2, 1));
}

#[test]
fn a_raw_disk_whose_guest_wrote_a_header_leads_nowhere() {
    let tree = Tree::new();
    // What the guest wrote names another tenant's disk, and a file of the host.
    tree.create("tenant.raw", &["-u", "-b", "other.qcow2", "-F", "qcow2", "16M"]);
    tree.create("other.qcow2", &["16M"]);
    let top = tree.create("top.qcow2", &["-u", "-b", "tenant.raw", "-F", "raw", "16M"]);
    let report = tree.survey();
    assert_eq!(report.chains.len(), 2);
    assert_eq!(chain(&report, &top).layers, 2);
    assert_eq!(chain(&report, &tree.path("other.qcow2")).shared, 0);
}

#[test]
fn bits_that_call_for_care_are_told() {
    let tree = Tree::new();
    patch(&tree.create("corrupt.qcow2", &["16M"]), INCOMPATIBLE, &2u64.to_be_bytes());
    patch(
        &tree.create("dirty.qcow2", &["-o", "lazy_refcounts=on", "16M"]),
        INCOMPATIBLE,
        &1u64.to_be_bytes(),
    );
    // A vmstrata that was killed.
    patch(&tree.create("killed.qcow2", &["16M"]), 88, &(1u64 << 63 | 5 << 32).to_be_bytes());
    let report = tree.survey();
    assert_eq!(
        risks(&report),
        [
            (RiskKind::MarkedCorrupt, "corrupt.qcow2".to_owned()),
            (RiskKind::Unclean, "dirty.qcow2".to_owned()),
            (RiskKind::Unclean, "killed.qcow2".to_owned())
        ]
    );
    assert_eq!(report.severity(), Some(Severity::Suspect));
}

#[test]
fn a_layer_written_after_its_overlay_was_made_is_told_with_how_much_later() {
    let tree = Tree::new();
    let base = tree.create("base.qcow2", &["16M"]);
    tree.overlay("a.qcow2", "base.qcow2");
    tree.overlay("b.qcow2", "base.qcow2");
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    set_mtime(&base, now + 30);
    assert!(tree.survey().risks.is_empty(), "what was under way when the snapshot was taken");
    set_mtime(&base, now + 7205);
    let report = tree.survey();
    assert_eq!(risks(&report), [(RiskKind::Changed, "base.qcow2".to_owned())]);
    let message = &report.risks[0].message;
    assert!(message.contains("may have changed 2.0 h") && message.contains("and 1 more"), "{message}");
    assert_eq!(report.summary.chains_suspect, 2);
}

#[test]
fn a_disk_in_use_is_read_and_a_base_being_written_is_told() {
    let tree = Tree::new();
    let base = tree.create("base.qcow2", &["16M"]);
    let mut writer = Command::new("qemu-io")
        .arg(&base)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("qemu-io is required by these tests");
    let mut prompt = [0; 9];
    writer.stdout.as_mut().unwrap().read_exact(&mut prompt).unwrap();
    let alone = tree.survey();
    tree.overlay("top.qcow2", "base.qcow2");
    let report = tree.survey();
    // No lock was taken: stock can still have the image as it likes.
    drop(writer.stdin.take());
    assert!(writer.wait().unwrap().success());
    assert!(alone.risks.is_empty() && alone.chains[0].in_use, "{:#?}", alone.chains);
    assert_eq!(risks(&report), [(RiskKind::Written, "base.qcow2".to_owned())]);
    assert!(tree.survey().risks.is_empty());
}

#[test]
fn the_kernels_own_files_are_left_alone() {
    let options = SurveyOptions { roots: vec!["/proc".into(), "/sys".into()], ..SurveyOptions::default() };
    let report = survey(&options).unwrap();
    assert_eq!((report.scanned.files, report.scanned.special.count), (0, 2));
}

#[test]
fn a_directory_that_is_not_there_is_an_error_and_one_deep_below_is_left_out() {
    let tree = Tree::new();
    let gone = SurveyOptions { roots: vec![tree.path("gone")], ..SurveyOptions::default() };
    assert!(survey(&gone).unwrap_err().to_string().contains("gone"));
    let deep = (0..70).map(|_| "d").collect::<Vec<_>>().join("/");
    tree.create(&format!("{deep}/disk.qcow2"), &["16M"]);
    let report = tree.survey();
    assert_eq!((report.scanned.images, report.scanned.too_deep.count), (0, 1));
    assert!(!report.is_complete());
}

#[test]
fn every_header_byte_may_be_anything() {
    let tree = Tree::new();
    let top = tree.overlay("top.qcow2", "base.qcow2");
    tree.create("base.qcow2", &["16M"]);
    let good = fs::read(&top).unwrap();
    for at in (0..112).chain(0x200..0x220) {
        for value in [0, 0x7f, 0xff] {
            let mut bytes = good.clone();
            bytes[at] = value;
            fs::write(&top, bytes).unwrap();
            let report = tree.survey();
            assert!((1..=2).contains(&report.chains.len()), "byte {at} = {value}");
        }
    }
}
