//! Reads that fail in turn under a diff, a backup and a restore; what a diff costs; and backups made to be hostile.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::faulty::FaultyFiles;
use crate::common::scratch;
use crate::common::stock::{assert_clean, content, path_str, qemu_img, qemu_io};
use vmstrata_backup::{
    BackupOptions, BackupTarget, Diff, DiffExtent, DiffOptions, Manifest, RestoreOptions, backup,
    manifest_path, restore, verify,
};
use vmstrata_disk::snapshot::State;
use vmstrata_disk::{CreateOptions, Error, ErrorKind, Format, ResourceOptions, Resources, create};
use vmstrata_qcow2::CompressionType;
use vmstrata_store::{FaultPlan, OperationKind};

const EIO: i32 = 5;

fn run(path: &Path, commands: &[&str]) {
    qemu_io(path, &commands.iter().map(|command| (*command).to_owned()).collect::<Vec<_>>());
}

/// Two states with data, zeros and compressed clusters in both.
fn states(dir: &Path) -> [PathBuf; 2] {
    let [old, new] = ["old", "new"].map(|name| dir.join(name));
    qemu_img(&["create", "-q", "-f", "qcow2", path_str(&old), "8M"]);
    run(&old, &["write -q -c -P 9 3M 64k", "write -q -P 1 0 1M", "write -q -P 2 6M 64k"]);
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", "old", "-F", "qcow2", path_str(&new)]);
    run(
        &new,
        &["write -q -c -P 8 5M 64k", "write -q -P 3 512k 64k", "write -q -z 6M 64k", "write -q -z 7M 64k"],
    );
    [old, new]
}

pub(crate) fn entries(dir: &Path) -> Vec<String> {
    let names =
        std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

/// Fails each read in turn until `job` has none left to fail; a job with a failed read must fail.
pub(crate) fn fail_each_read(mut job: impl FnMut(&Arc<Resources>) -> Result<(), Error>) -> u64 {
    for nth in 0.. {
        let plan = FaultPlan::new();
        let files = FaultyFiles::new(&plan);
        plan.fail_nth(Some(OperationKind::Read), nth, EIO);
        let result = job(&files.resources());
        let befell = plan.count(Some(OperationKind::Read)) > nth;
        match result {
            Ok(()) if !befell => return nth,
            Ok(()) => panic!("read {nth} failed and the job did not"),
            Err(error) => {
                assert!(befell && matches!(error.kind(), ErrorKind::Io { .. }), "read {nth}: {error}")
            }
        }
    }
    unreachable!("jobs end")
}

#[test]
fn a_failed_read_fails_a_diff() {
    let dir = scratch();
    let [old, new] = states(dir.path());
    let diff = |resources: &Arc<Resources>| {
        let diff = Diff::open(&old, &new, &DiffOptions::default(), resources)?;
        diff.extents().collect::<Result<Vec<DiffExtent>, Error>>()?;
        diff.changed_bytes()?.collect::<Result<Vec<DiffExtent>, Error>>().map(drop)
    };
    assert!(fail_each_read(diff) > 10, "a diff reads");
}

#[test]
fn a_failed_read_fails_a_backup_and_leaves_nothing() {
    let dir = scratch();
    let [old, new] = states(dir.path());
    let before = entries(dir.path());
    for compression in [None, Some(CompressionType::Zlib)] {
        let file = dir.path().join("backup");
        let options = BackupOptions {
            since: Some(State::of_file(&old)),
            backing_name: Some("full".into()),
            compression,
            threads: 2,
            ..BackupOptions::default()
        };
        let job = |resources: &Arc<Resources>| {
            let target = BackupTarget::File { path: file.clone(), replace: false };
            let done = backup(&State::of_file(&new), target, &options, resources, &mut |_, _| true);
            assert!(done.is_ok() || entries(dir.path()) == before, "{:?}", entries(dir.path()));
            done.map(drop)
        };
        assert!(fail_each_read(job) > 10, "a backup reads");
        std::fs::remove_file(manifest_path(&file)).unwrap();
        std::fs::remove_file(file).unwrap();
    }
}

#[test]
fn a_failed_read_fails_a_restore_and_leaves_nothing() {
    let dir = scratch();
    let [_, new] = states(dir.path());
    let file = dir.path().join("backup");
    let options = BackupOptions { compression: Some(CompressionType::Zstd), ..BackupOptions::default() };
    let target = BackupTarget::File { path: file.clone(), replace: false };
    let resources = Resources::new(ResourceOptions::default());
    backup(&State::of_file(&new), target, &options, &resources, &mut |_, _| true).expect("backs up");
    drop(resources);
    let before = entries(dir.path());
    let restored = dir.path().join("restored");
    let job = |resources: &Arc<Resources>| {
        let files = [file.clone()];
        let done = restore(&files, &restored, &RestoreOptions::default(), resources, &mut |_, _| true);
        assert!(done.is_ok() || entries(dir.path()) == before, "{:?}", entries(dir.path()));
        done.map(drop)
    };
    assert!(fail_each_read(job) > 10, "a restore reads");
    assert_clean(&restored);
    assert!(content(&restored, "qcow2") == content(&new, "qcow2"));
}

/// Reads of a diff of the two newest of `layers` empty layers on a base of 50 GiB that has all its tables, where the
/// newest has `changed` clusters, each in a table of its own.
fn reads_of_a_diff(layers: usize, changed: u64) -> u64 {
    let dir = scratch();
    let path = |number: usize| dir.path().join(format!("layer{number}"));
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", "preallocation=metadata", path_str(&path(0)), "50G"]);
    for number in 1..=layers {
        let backing = Some((format!("layer{}", number - 1).into(), Format::Qcow2));
        create(&path(number), &CreateOptions { backing, ..CreateOptions::default() }).unwrap();
    }
    let commands: Vec<String> = (0..changed).map(|number| format!("write -q {} 64k", number << 29)).collect();
    qemu_io(&path(layers), &commands);
    let plan = FaultPlan::new();
    let files = FaultyFiles::new(&plan);
    let resources = files.resources();
    let diff = Diff::open(&path(layers - 1), &path(layers), &DiffOptions::default(), &resources).unwrap();
    let found = diff.extents().collect::<Result<Vec<DiffExtent>, Error>>().unwrap();
    assert_eq!(found.len() as u64, changed);
    plan.count(Some(OperationKind::Read))
}

#[test]
fn a_diff_costs_what_changed_and_not_the_disk_or_the_chain() {
    let none = reads_of_a_diff(2, 0);
    assert!(none <= 8, "{none} reads for nothing: two headers and an L1 table");
    let hundred = reads_of_a_diff(2, 100);
    assert!(
        hundred <= 100 + 13 + none,
        "{hundred} reads: 100 tables, and the L1 table once a region of 4 GiB"
    );
    assert_eq!(reads_of_a_diff(60, 100), hundred, "the layers below do not count");
}

/// A backup whose L1 entries all lead to one table, with a manifest that says so: a small file that would be large.
#[test]
fn tables_that_are_shared_do_not_take_memory() {
    let dir = scratch();
    let (state, file) = (dir.path().join("state"), dir.path().join("backup"));
    let clusters_of_4k = CreateOptions {
        size: Some(16 << 30),
        cluster_bits: vmstrata_types::ClusterBits::new(12).unwrap(),
        ..CreateOptions::default()
    };
    create(&state, &clusters_of_4k).unwrap();
    run(&state, &["write -q 0 4k"]);
    let resources = Resources::new(ResourceOptions::default());
    let target = BackupTarget::File { path: file.clone(), replace: false };
    backup(&State::of_file(&state), target, &BackupOptions::default(), &resources, &mut |_, _| true).unwrap();
    drop(resources);
    let mut bytes = std::fs::read(&file).unwrap();
    let l1 = u64::from_be_bytes(bytes[40..48].try_into().unwrap()) as usize;
    let entries = u32::from_be_bytes(bytes[36..40].try_into().unwrap()) as usize;
    assert_eq!(entries, 8 << 10);
    for entry in 1..entries {
        bytes.copy_within(l1..l1 + 8, l1 + entry * 8);
    }
    std::fs::write(&file, &bytes).unwrap();
    sign_again(&file);
    let started = std::time::Instant::now();
    let resources = Resources::new(ResourceOptions::default());
    let error = verify(&file, &resources, &mut |_, _| true).unwrap_err();
    assert!(error.to_string().contains("more tables than fit"), "{error}");
    assert!(started.elapsed().as_secs() < 20, "{:?}", started.elapsed());
}

/// A backup of a small state, to be turned against whoever reads it.
fn small_backup(dir: &Path) -> PathBuf {
    let [_, state] = states(dir);
    let file = dir.join("backup");
    let resources = Resources::new(ResourceOptions::default());
    let target = BackupTarget::File { path: file.clone(), replace: false };
    backup(&State::of_file(&state), target, &BackupOptions::default(), &resources, &mut |_, _| true).unwrap();
    file
}

/// Damages the file and signs it again: verifying and restoring must fail, and leave nothing.
fn assert_refused(file: &Path, change: impl Fn(&mut Vec<u8>)) {
    let saved = (std::fs::read(file).unwrap(), std::fs::read(manifest_path(file)).unwrap());
    let mut bytes = saved.0.clone();
    change(&mut bytes);
    std::fs::write(file, &bytes).unwrap();
    sign_again(file);
    let target = file.with_extension("restored");
    let resources = Resources::new(ResourceOptions::default());
    assert!(verify(file, &resources, &mut |_, _| true).is_err());
    let files = [file.to_owned()];
    assert!(restore(&files, &target, &RestoreOptions::default(), &resources, &mut |_, _| true).is_err());
    assert!(!target.exists());
    std::fs::write(file, saved.0).unwrap();
    std::fs::write(manifest_path(file), saved.1).unwrap();
}

/// What a file stores is compared by region, so a damage that the sum of the file does not tell is told by those.
#[test]
fn a_file_that_was_changed_and_signed_again_is_refused() {
    let dir = scratch();
    let file = small_backup(dir.path());
    let word = |bytes: &[u8], at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
    let l2 = |bytes: &[u8]| (word(bytes, word(bytes, 40) as usize) & 0x00ff_ffff_ffff_fe00) as usize;
    let enter = |bytes: &mut Vec<u8>, index: usize, entry: u64| {
        let at = l2(bytes) + index * 8;
        bytes[at..at + 8].copy_from_slice(&entry.to_be_bytes());
    };
    assert_refused(&file, |bytes| *bytes.last_mut().unwrap() ^= 1);
    assert_refused(&file, |bytes| enter(bytes, 0, 0));
    assert_refused(&file, |bytes| enter(bytes, 0, 1));
    assert_refused(&file, |bytes| enter(bytes, 100, 1));
    assert_refused(&file, |bytes| enter(bytes, 0, 1 << 63 | 1 << 40));
    assert_refused(&file, |bytes| enter(bytes, 0, 0x3f00_0000_0000_01fe));
    assert_refused(&file, |bytes| enter(bytes, 0, 1 << 62 | 0x3fff << 46 | 0x2_0001));
    // Another size of disk or of clusters.
    assert_refused(&file, |bytes| bytes[30] ^= 0x10);
    assert_refused(&file, |bytes| bytes[23] = 12);
}

#[test]
fn manifests_with_regions_off_the_disk_are_refused() {
    let dir = scratch();
    let file = small_backup(dir.path());
    let path = manifest_path(&file);
    let text = std::fs::read_to_string(&path).unwrap();
    for start in [u64::MAX - (u64::MAX % (4 << 20)), 4 << 40, 4096, 8 << 20] {
        let changed = text.replace("\"start\": 4194304", &format!("\"start\": {start}"));
        assert_ne!(changed, text);
        std::fs::write(&path, changed).unwrap();
        sign(&file);
        let error = Manifest::read(&path).unwrap_err().to_string();
        assert!(error.contains("damaged"), "{start:#x}: {error}");
    }
}

/// Makes the manifest match a file that was changed, as only an attacker would.
fn sign_again(file: &Path) {
    sign(file);
    Manifest::read(&manifest_path(file)).expect("signed well");
}

fn sign(file: &Path) {
    use sha2::{Digest as _, Sha256};
    let path = manifest_path(file);
    let mut manifest: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let hex =
        |bytes: &[u8]| Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    manifest["file"]["sha256"] = hex(&std::fs::read(file).unwrap()).into();
    manifest["sha256"] = "0".repeat(64).into();
    // The checksum is over the fields in their order, which a map does not keep.
    let fields = [
        "vmstrata_backup",
        "state",
        "made_at",
        "disk_bytes",
        "cluster_bytes",
        "file",
        "region_bytes",
        "regions",
        "sha256",
    ];
    let ordered = |value: &serde_json::Value, names: &[&str]| {
        let items: Vec<String> = names.iter().map(|name| format!("\"{name}\":{}", value[*name])).collect();
        format!("{{{}}}", items.join(","))
    };
    let blank: Vec<String> = fields
        .iter()
        .map(|name| match *name {
            "file" => format!("\"file\":{}", ordered(&manifest["file"], &["bytes", "sha256"])),
            "regions" => {
                let regions = manifest["regions"].as_array().unwrap();
                let regions: Vec<String> =
                    regions.iter().map(|region| ordered(region, &["start", "sha256"])).collect();
                format!("\"regions\":[{}]", regions.join(","))
            }
            name => format!("\"{name}\":{}", manifest[name]),
        })
        .collect();
    let own = hex(format!("{{{}}}", blank.join(",")).as_bytes());
    manifest["sha256"] = own.into();
    std::fs::write(&path, serde_json::to_vec(&manifest).unwrap()).unwrap();
}
