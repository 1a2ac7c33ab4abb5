//! Backups of random chains: full and incremental ones against what the states read as, by stock tools and by restoring.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::flat::{SECTOR, some_range};
use crate::common::shape::{LayerShape, make};
use crate::common::stock::{assert_clean, content, path_str, qemu_img, qemu_io};
use crate::common::{for_seeds, patiently, random, scratch};
use rand::Rng as _;
use rand::rngs::SmallRng;
use vmstrata_backup::{
    BackupOptions, BackupReport, BackupTarget, Manifest, RestoreOptions, backup, manifest_path, restore,
    verify,
};
use vmstrata_disk::snapshot::{SnapshotInfo, State};
use vmstrata_disk::{Error, ResourceOptions, Resources};
use vmstrata_qcow2::CompressionType;

fn resources() -> Arc<Resources> {
    Resources::new(ResourceOptions { max_open_files: 64, ..ResourceOptions::default() })
}

fn to(path: &Path) -> BackupTarget<'static> {
    BackupTarget::File { path: path.to_owned(), replace: false }
}

fn to_file(state: &Path, path: &Path, options: &BackupOptions) -> Result<BackupReport, Error> {
    patiently(|| backup(&State::of_file(state), to(path), options, &resources(), &mut |_, _| true))
}

fn check_verifies(path: &Path) -> Result<BackupReport, Error> {
    patiently(|| verify(path, &resources(), &mut |_, _| true))
}

fn restore_to(files: &[PathBuf], target: &Path) -> Result<BackupReport, Error> {
    patiently(|| restore(files, target, &RestoreOptions::default(), &resources(), &mut |_, _| true))
}

/// The options of a backup on top of `previous`, if there is one.
fn on_top(previous: Option<(&Path, &Path)>, compression: Option<CompressionType>) -> BackupOptions {
    let Some((state, file)) = previous else {
        return BackupOptions { compression, ..BackupOptions::default() };
    };
    BackupOptions {
        since: Some(State::of_file(state)),
        backing_name: file.file_name().map(Into::into),
        previous: Some(Manifest::read(&manifest_path(file)).expect("a manifest")),
        compression,
        ..BackupOptions::default()
    }
}

fn compression(random: &mut SmallRng) -> Option<CompressionType> {
    [None, Some(CompressionType::Zlib), Some(CompressionType::Zstd)][random.random_range(0..3)]
}

/// Backs up each state on top of the one before, and makes sure that each reads as its state does, through stock tools
/// and restored.
fn check_chain(dir: &Path, states: &[PathBuf], random: &mut SmallRng) {
    let mut files: Vec<PathBuf> = Vec::new();
    for (number, state) in states.iter().enumerate() {
        let file = dir.join(format!("backup{number}"));
        let previous = number.checked_sub(1).map(|before| (&*states[before], &*files[before]));
        let options = on_top(previous, compression(random));
        to_file(state, &file, &options).unwrap_or_else(|error| panic!("{options:?}: {error}"));
        assert_clean(&file);
        let expected = content(state, if number == 0 { probe(state) } else { "qcow2" });
        assert!(content(&file, "qcow2") == expected, "{} differs: {options:?}", file.display());
        check_verifies(&file).expect("verifies");
        files.push(file);
        let restored = dir.join(format!("restored{number}"));
        restore_to(&files, &restored).expect("restores");
        assert_clean(&restored);
        assert!(content(&restored, "qcow2") == expected, "{} differs", restored.display());
        qemu_img(&["compare", "-q", "-f", probe(state), "-F", "qcow2", path_str(state), path_str(&restored)]);
        std::fs::remove_file(restored).unwrap();
    }
}

fn probe(path: &Path) -> &'static str {
    if std::fs::read(path).unwrap().starts_with(b"QFI\xfb") { "qcow2" } else { "raw" }
}

#[test]
fn backups_of_random_chains_read_as_their_states() {
    for_seeds(6, |seed| {
        let mut random = random("random chains", seed);
        let dir = scratch();
        let depth = random.random_range(2..=5);
        let mut shapes: Vec<LayerShape> = (0..depth)
            .map(|_| {
                let bits = random.random_range(9..=17);
                let size = random.random_range(200..20_000) * SECTOR;
                let compressed = random.random_ratio(1, 3).then_some("zlib");
                let subclusters = bits >= 14 && random.random();
                LayerShape { compressed, subclusters, operations: 6, ..LayerShape::qcow2(bits, size) }
            })
            .collect();
        if random.random() {
            shapes[0] = LayerShape::raw(random.random_range(1000..700_000));
        }
        make(dir.path(), &shapes, &mut random);
        let states: Vec<PathBuf> = (0..depth).map(|layer| dir.path().join(format!("layer{layer}"))).collect();
        check_chain(dir.path(), &states, &mut random);
    });
}

#[test]
fn ten_incremental_backups_restore_every_point() {
    let mut random = random("ten", 0);
    let dir = scratch();
    let mut states: Vec<PathBuf> = Vec::new();
    for number in 0..11 {
        let state = dir.path().join(format!("state{number}"));
        match states.last() {
            None => qemu_img(&["create", "-q", "-f", "qcow2", path_str(&state), "24M"]),
            Some(below) => {
                let below = path_str(below);
                qemu_img(&["create", "-q", "-f", "qcow2", "-b", below, "-F", "qcow2", path_str(&state)])
            }
        };
        let commands: Vec<String> = (0..8)
            .map(|_| {
                let (at, len) = some_range(&mut random, 24 << 20, 1 << 16);
                match random.random_range(0..5) {
                    0 => format!("write -q -z {at} {len}"),
                    _ => format!("write -q -P {} {at} {len}", random.random_range(0..256)),
                }
            })
            .collect();
        qemu_io(&state, &commands);
        states.push(state);
    }
    check_chain(dir.path(), &states, &mut random);
}

/// A disk of 1 MiB with a few clusters of 4 KiB, and an incremental backup of it on a full one.
struct Pair {
    dir: tempfile::TempDir,
    states: [PathBuf; 2],
    files: [PathBuf; 2],
}

fn pair(compression: Option<CompressionType>) -> Pair {
    let dir = scratch();
    let [old, new, full, inc] = ["old", "new", "full", "inc"].map(|name| dir.path().join(name));
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k", path_str(&old), "1M"]);
    qemu_io(&old, &["write -q -P 1 0 12k".to_owned(), "write -q -P 2 512k 4k".to_owned()]);
    let below = ["-b", "old", "-F", "qcow2", "-o", "cluster_size=4k"];
    qemu_img(&[&["create", "-q", "-f", "qcow2"][..], &below, &[path_str(&new)]].concat());
    qemu_io(&new, &["write -q -P 3 4k 4k".to_owned(), "write -q -z 512k 4k".to_owned()]);
    to_file(&old, &full, &on_top(None, compression)).expect("full");
    to_file(&new, &inc, &on_top(Some((&old, &full)), compression)).expect("incremental");
    Pair { dir, states: [old, new], files: [full, inc] }
}

#[test]
fn a_pipe_gets_the_same_bytes_as_a_file() {
    let pair = pair(None);
    for (number, state) in pair.states.iter().enumerate() {
        let previous = (number == 1).then(|| (&*pair.states[0], &*pair.files[0]));
        let options = on_top(previous, None);
        let mut piped = Vec::new();
        let target = BackupTarget::Stream(&mut piped);
        let state = State::of_file(state);
        let report = backup(&state, target, &options, &resources(), &mut |_, _| true).expect("backs up");
        let file = std::fs::read(&pair.files[number]).unwrap();
        assert!(piped == file, "backup {number}");
        let beside = Manifest::read(&manifest_path(&pair.files[number])).unwrap();
        assert_eq!((report.manifest.file, report.manifest.regions), (beside.file, beside.regions));
    }
}

#[test]
fn an_incremental_backup_has_the_changed_clusters_only() {
    let pair = pair(None);
    let map = qemu_img(&["map", "--output=json", "-f", "qcow2", path_str(&pair.files[1])]);
    let map: serde_json::Value = serde_json::from_str(&map).unwrap();
    let own: Vec<(u64, u64, bool)> = map
        .as_array()
        .unwrap()
        .iter()
        .filter(|run| run["depth"] == 0 && run["present"] == true)
        .map(|run| (run["start"].as_u64().unwrap(), run["length"].as_u64().unwrap(), run["data"] == true))
        .collect();
    assert_eq!(own, [(4 << 10, 4 << 10, true), (512 << 10, 4 << 10, false)]);
}

#[test]
fn damage_to_any_byte_is_noticed() {
    use std::os::unix::fs::FileExt as _;
    for compression in [None, Some(CompressionType::Zstd)] {
        let pair = pair(compression);
        let path = &pair.files[1];
        let file = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
        let bytes = std::fs::read(path).unwrap();
        // Every byte of the header, and a good part of all others.
        for at in (0..256).chain((256..bytes.len()).step_by(11)).chain([bytes.len() - 1]) {
            file.write_all_at(&[bytes[at] ^ 0x10], at as u64).unwrap();
            let result = check_verifies(path);
            let error = result.expect_err(&format!("byte {at} was damaged"));
            assert!(error.fault::<vmstrata_backup::BackupFault>().is_some(), "byte {at}: {error}");
            file.write_all_at(&bytes[at..=at], at as u64).unwrap();
        }
        check_verifies(path).expect("whole again");
        file.set_len(bytes.len() as u64 + 1).unwrap();
        assert!(check_verifies(path).is_err(), "a byte more");
        file.set_len(bytes.len() as u64 - 1).unwrap();
        assert!(check_verifies(path).is_err(), "a byte less");
    }
}

#[test]
fn a_rebased_backup_is_verified_and_restored() {
    let pair = pair(Some(CompressionType::Zstd));
    let [full, inc] = &pair.files;
    let moved = pair.dir.path().join("monday");
    std::fs::rename(full, &moved).unwrap();
    std::fs::rename(manifest_path(full), manifest_path(&moved)).unwrap();
    qemu_img(&["rebase", "-u", "-b", "monday", "-F", "qcow2", path_str(inc)]);
    check_verifies(inc).expect("verifies");
    let target = pair.dir.path().join("restored");
    restore_to(&[moved.clone(), inc.clone()], &target).expect("restores");
    assert!(content(&target, "qcow2") == content(&pair.states[1], "qcow2"));
    qemu_img(&["rebase", "-u", "-b", "tuesday", "-F", "qcow2", path_str(inc)]);
    let error = check_verifies(inc).expect_err("no such backing file");
    assert!(error.to_string().contains("does not match its SHA-256"), "{error}");
}

#[test]
fn nothing_is_restored_from_damage() {
    let pair = pair(None);
    let target = pair.dir.path().join("restored");
    let mut bytes = std::fs::read(&pair.files[0]).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&pair.files[0], &bytes).unwrap();
    let error = restore_to(&pair.files, &target).unwrap_err();
    assert!(error.to_string().contains("damaged"), "{error}");
    assert_eq!(error.path(), Some(&*pair.files[0]));
    assert!(!target.exists());
    assert_eq!(temporaries(pair.dir.path()), Vec::<String>::new());
}

/// Names in a directory that a finished job must not have left.
fn temporaries(dir: &Path) -> Vec<String> {
    let names =
        std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.ends_with(".new")).collect()
}

#[test]
fn backups_that_do_not_follow_one_another_are_refused() {
    let pair = pair(None);
    let target = pair.dir.path().join("restored");
    let [full, inc] = &pair.files;
    let refused = |files: &[&PathBuf], part: &str| {
        let files: Vec<PathBuf> = files.iter().copied().cloned().collect();
        let error = restore_to(&files, &target).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
        assert!(!target.exists());
    };
    refused(&[inc], "incremental backup on top of full");
    refused(&[full, full], "stands alone");
    refused(&[full, inc, inc], "another backup");
    refused(&[], "no backup");
    let unlinked = pair.dir.path().join("unlinked");
    let options = BackupOptions { previous: None, ..on_top(Some((&pair.states[0], full)), None) };
    to_file(&pair.states[1], &unlinked, &options).unwrap();
    refused(&[full, &unlinked], "--previous");
    // A second full backup of the same state is another backup.
    let second = pair.dir.path().join("second");
    let info = Some(SnapshotInfo { name: "again".to_owned(), ..SnapshotInfo::default() });
    let (state, target) = (State { info, ..State::of_file(&pair.states[0]) }, to(&second));
    backup(&state, target, &BackupOptions::default(), &resources(), &mut |_, _| true).unwrap();
    refused(&[&second, inc], "another backup");
}

#[test]
fn options_that_do_not_go_together_are_refused() {
    let pair = pair(None);
    let fails = |options: &BackupOptions, state: &Path, part: &str| {
        let error = to_file(state, &pair.dir.path().join("none"), options).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    };
    let since = BackupOptions { since: Some(State::of_file(&pair.states[0])), ..BackupOptions::default() };
    fails(&since, &pair.states[1], "needs the previous backup");
    let named = BackupOptions { backing_name: Some("full".into()), ..BackupOptions::default() };
    fails(&named, &pair.states[1], "only an incremental backup");
    let other = on_top(Some((&pair.states[1], &pair.files[0])), None);
    fails(&other, &pair.states[1], "not of \"new\"");
    let mut bytes = Vec::new();
    let packed = BackupOptions { compression: Some(CompressionType::Zstd), ..BackupOptions::default() };
    let target = BackupTarget::Stream(&mut bytes);
    let state = State::of_file(&pair.states[0]);
    let error = backup(&state, target, &packed, &resources(), &mut |_, _| true).unwrap_err();
    assert!(error.to_string().contains("to a pipe"), "{error}");
}

#[test]
fn what_is_there_is_replaced_only_when_asked_and_only_when_unused() {
    let pair = pair(None);
    let before = std::fs::read(&pair.files[0]).unwrap();
    let error = to_file(&pair.states[1], &pair.files[0], &BackupOptions::default()).unwrap_err();
    assert!(error.to_string().contains("exists"), "{error}");
    let replace = |state: &Path, path: &Path| {
        let target = BackupTarget::File { path: path.to_owned(), replace: true };
        backup(&State::of_file(state), target, &BackupOptions::default(), &resources(), &mut |_, _| true)
    };
    // The state itself is in use, by this very backup.
    assert!(replace(&pair.states[1], &pair.states[0]).is_err());
    assert!(std::fs::read(&pair.files[0]).unwrap() == before);
    // The incremental one stands on it.
    let error = patiently(|| replace(&pair.states[1], &pair.files[0])).unwrap_err();
    assert!(error.to_string().contains("stands on it"), "{error}");
    assert!(std::fs::read(&pair.files[0]).unwrap() == before);
    std::fs::remove_file(&pair.files[1]).unwrap();
    patiently(|| replace(&pair.states[1], &pair.files[0])).unwrap();
    check_verifies(&pair.files[0]).unwrap();
    assert!(content(&pair.files[0], "qcow2") == content(&pair.states[1], "qcow2"));
}

#[test]
fn a_job_that_is_stopped_leaves_nothing() {
    let pair = pair(None);
    let path = pair.dir.path().join("stopped");
    let target = to(&path);
    let state = State::of_file(&pair.states[1]);
    let stopped = backup(&state, target, &BackupOptions::default(), &resources(), &mut |_, _| false);
    assert!(stopped.unwrap_err().to_string().contains("stopped"));
    assert!(!path.exists() && !manifest_path(&path).exists());
    assert_eq!(temporaries(pair.dir.path()), Vec::<String>::new());
}

#[test]
fn zeros_that_were_written_take_no_room_when_compressed() {
    let dir = scratch();
    let (state, file) = (dir.path().join("state"), dir.path().join("backup"));
    qemu_img(&["create", "-q", "-f", "qcow2", path_str(&state), "8M"]);
    qemu_io(&state, &["write -q -P 0 0 8M".to_owned()]);
    let report = to_file(&state, &file, &on_top(None, Some(CompressionType::Zlib))).unwrap();
    assert_eq!((report.stored_bytes, report.manifest.regions.len()), (0, 0));
    assert!(content(&file, "qcow2") == vec![0; 8 << 20]);
    check_verifies(&file).unwrap();
}

#[test]
fn an_empty_disk_can_be_backed_up() {
    let dir = scratch();
    let (state, file) = (dir.path().join("state"), dir.path().join("backup"));
    qemu_img(&["create", "-q", "-f", "qcow2", path_str(&state), "0"]);
    to_file(&state, &file, &BackupOptions::default()).unwrap();
    assert_clean(&file);
    restore_to(std::slice::from_ref(&file), &dir.path().join("restored")).unwrap();
}

/// Whoever may read neither the disk nor the directory of backups reads no backup elsewhere.
#[test]
fn backups_and_restored_disks_are_their_makers_alone() {
    use std::os::unix::fs::PermissionsExt as _;
    let Pair { dir, states, .. } = pair(None);
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
    let (file, restored) = (dir.path().join("private.qcow2"), dir.path().join("restored.qcow2"));
    to_file(&states[0], &file, &BackupOptions::default()).unwrap();
    restore_to(std::slice::from_ref(&file), &restored).unwrap();
    assert_eq!([mode(&file), mode(&manifest_path(&file)), mode(&restored)], [0o600; 3]);
    // What is replaced says for whom it is.
    std::fs::set_permissions(&restored, std::fs::Permissions::from_mode(0o640)).unwrap();
    let options = RestoreOptions { replace: true, ..RestoreOptions::default() };
    let files = std::slice::from_ref(&file);
    patiently(|| restore(files, &restored, &options, &resources(), &mut |_, _| true)).unwrap();
    assert_eq!(mode(&restored), 0o640);
}
