//! `vmstrata vm list | show | delete | prune | gc | verify | repair` on a vault with made-up guests.

use crate::support;
use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;

use crate::support::{run, run_err, run_json, run_ok, stderr};
use tempfile::TempDir;
use vmstrata_memory::vault::{Closing, DiskState, NewSnapshot, OneDevice, Policy, SnapshotId, Vault};
use vmstrata_memory::{Frame, Layout, PAGE_BYTES, PageClass};

const DAY_NS: u64 = 86_400_000_000_000;

struct Repositories(TempDir);

impl Repositories {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        for name in ["a", "b"] {
            std::fs::create_dir(dir.path().join(name)).expect("makes");
        }
        Self(dir)
    }

    fn paths(&self) -> Vec<PathBuf> {
        ["a", "b"].map(|name| self.0.path().join(name)).to_vec()
    }

    /// The command with the options that name the vault.
    fn args(&self, command: &[&str]) -> Vec<String> {
        let mut args = vec!["vm".to_owned()];
        args.extend(command.iter().map(|arg| (*arg).to_owned()));
        for path in self.paths() {
            args.extend(["--vault".to_owned(), path.display().to_string()]);
        }
        args
    }

    /// 16 pages: 8 critical, 4 clean, 3 free, 1 of zeros.
    fn save(&self, name: &str, day: u64) -> SnapshotId {
        self.save_with(name, day, |at| [at as u8; PAGE_BYTES], 16)
    }

    /// The first 9 of every 16 pages are critical, 4 clean, 3 free.
    fn save_with(
        &self,
        name: &str,
        day: u64,
        page: impl Fn(u64) -> [u8; PAGE_BYTES],
        pages: u64,
    ) -> SnapshotId {
        let vault = Vault::open_directories(&self.paths()).expect("opens");
        let layout = Layout::split_at_4g(pages << 12, pages << 12).expect("a layout");
        let policy = Policy { critical_copies: 2, one_device: OneDevice::Allow, ..Policy::default() };
        let new = NewSnapshot { guest: "web".to_owned(), name: name.to_owned(), layout, policy };
        let mut writer = vault.begin(new).expect("begins");
        for at in 0..pages {
            let class = match at % 16 {
                0..9 => PageClass::Critical,
                9..13 => PageClass::Clean,
                _ => PageClass::Free,
            };
            writer.page(Frame::new(at), class, &page(at)).expect("takes");
        }
        let disks = vec![DiskState::new("web.qcow2", name)];
        let labels = vec![("job".to_owned(), "nightly".to_owned())];
        let closing = Closing { taken_ns: day * DAY_NS, labels, disks, ..Closing::default() };
        writer.finish(closing).expect("saves").id
    }
}

#[test]
fn snapshots_are_listed_and_shown() {
    let repositories = Repositories::new();
    assert_eq!(run_ok(repositories.args(&["list"])), "no snapshots\n");
    let ids = [repositories.save("mon", 20_000), repositories.save("tue", 20_001)];
    let listed = run_json(repositories.args(&["list", "web", "--json"]));
    let names: Vec<_> =
        listed["snapshots"].as_array().unwrap().iter().map(|row| row["name"].clone()).collect();
    assert_eq!(names, ["tue", "mon"]);
    assert_eq!(listed["snapshots"][0]["parent"], ids[0].to_string());
    let steps: Vec<_> =
        [0, 1].map(|row| (&listed["snapshots"][row]["step"], &listed["snapshots"][row]["full"])).into();
    assert_eq!(steps, [(&1.into(), &false.into()), (&0.into(), &true.into())]);
    assert_eq!(run_ok(repositories.args(&["list", "db"])), "no snapshots\n");
    let table = run_ok(repositories.args(&["list"]));
    assert!(
        table.contains("  full  ")
            && table.contains("web@tue")
            && table.contains("2024-10-04T00:00:00Z")
            && table.contains("64 KiB"),
        "{table}"
    );

    let shown = run_json(repositories.args(&["show", "web@mon", "--json"]));
    assert_eq!((&shown["name"], &shown["memory-size"]), (&"mon".into(), &65536.into()));
    assert_eq!(shown["disks"][0]["disk"], "web.qcow2");
    assert_eq!(shown["labels"]["job"], "nightly");
    assert_eq!((&shown["pages"]["free"], &shown["pages"]["stored"]), (&3.into(), &12.into()));
    let saved = &shown["savings"];
    let causes = ["free", "refill", "clean", "zero", "same", "in-older-snapshots", "zstd", "cost"];
    let sum: i64 = causes.iter().map(|cause| saved[cause].as_i64().unwrap()).sum();
    assert_eq!(sum, saved["full-copies"].as_i64().unwrap());
    let text = run_ok(repositories.args(&["show", "web"]));
    assert!(
        text.contains("1 since a full one")
            && text.contains("web@tue")
            && text.contains("9 critical, 4 clean, 3 free"),
        "{text}"
    );
    assert!(run_err(1, repositories.args(&["show", "web@wed"])).contains("no snapshot web@wed"));
}

#[test]
fn snapshots_are_deleted_and_pruned() {
    let repositories = Repositories::new();
    for day in 0..4 {
        repositories.save(&format!("day{day}"), 20_000 + day);
    }
    let plan = run_ok(repositories.args(&["prune", "web", "--keep", "daily=2", "--dry-run"]));
    assert_eq!(plan, "web: 2 snapshots to delete, 2 to keep\n  day1\n  day0\n");
    assert!(
        run_ok(repositories.args(&["prune", "web", "--keep", "daily=1", "-l", "job=other"]))
            .contains("0 snapshots")
    );
    let gone = run_json(repositories.args(&["prune", "web", "--keep", "daily=2", "--json"]));
    assert_eq!(gone["deleted"], serde_json::json!(["web@day1", "web@day0"]));
    assert!(run_ok(repositories.args(&["verify"])).lines().all(|line| line.ends_with(": whole")));
    let said = run_ok(repositories.args(&["delete", "web@day3", "web@day2"]));
    assert!(said.contains("web@day3: deleted\n") && said.contains("freed"), "{said}");
    assert_eq!(run_ok(repositories.args(&["list"])), "no snapshots\n");
    run_err(1, repositories.args(&["delete", "web@day3"]));
    run_err(64, repositories.args(&["delete"]));
    run_err(64, repositories.args(&["prune", "web", "--keep", "often=2"]));
    run_err(64, ["vm", "list"]);
}

/// A page that does not shrink.
fn noise(seed: u64) -> [u8; PAGE_BYTES] {
    let mut state = seed;
    std::array::from_fn(|_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    })
}

/// Two snapshots, of which the newer has every fourth page from the older, and that one deleted while the newer is read.
fn delete_while_in_use(repositories: &Repositories) {
    repositories.save_with("mon", 20_000, |at| noise(at + 1), 256);
    repositories.save_with("tue", 20_001, |at| noise(if at % 4 == 0 { at + 1 } else { at + 1000 }), 256);
    let vault = Vault::open_directories(&repositories.paths()).expect("opens");
    let _reader = vault.snapshot(&"web@tue".parse().unwrap()).unwrap();
    let said = run_ok(repositories.args(&["delete", "web@mon"]));
    assert!(said.contains("the vault is in use") && said.contains("vmstrata vm gc"), "{said}");
    let refused = run_err(1, repositories.args(&["gc"]));
    assert!(refused.contains("the vault is in use"), "{refused}");
}

/// Bytes that the vault takes, as `du` counts them.
fn du(repositories: &Repositories) -> u64 {
    let files = repositories.paths().into_iter().flat_map(|dir| std::fs::read_dir(dir).unwrap());
    files.map(|file| file.unwrap().metadata().unwrap().blocks() * 512).sum()
}

#[test]
fn gc_frees_what_it_says_and_says_before_what_it_would() {
    let repositories = Repositories::new();
    delete_while_in_use(&repositories);
    let before = du(&repositories);
    let plan = run_json(repositories.args(&["gc", "--dry-run", "--json"]));
    assert_eq!((&plan["dry-run"], &plan["removed"], du(&repositories)), (&true.into(), &0.into(), before));
    assert!(run_ok(repositories.args(&["gc", "-n"])).contains("objects to compact, about"));
    let done = run_json(repositories.args(&["gc", "--json"]));
    assert_eq!((&done["dry-run"], &done["compacted"]), (&false.into(), &plan["compacted"]));
    let freed = done["freed"].as_u64().unwrap();
    assert_eq!(freed, before - du(&repositories));
    assert!(freed.abs_diff(plan["freed"].as_u64().unwrap()) < freed / 5, "{plan} {done}");
    assert_eq!(run_ok(repositories.args(&["gc"])), "0 files removed, 0 objects compacted, 0 B freed\n");
    assert!(run_ok(repositories.args(&["verify"])).contains("web@tue: whole"));
}

#[test]
fn pruning_frees_what_du_says() {
    let repositories = Repositories::new();
    repositories.save_with("mon", 20_000, |at| noise(at + 1), 256);
    repositories.save_with("tue", 20_001, |at| noise(if at % 4 == 0 { at + 1 } else { at + 1000 }), 256);
    let before = du(&repositories);
    let gone = run_json(repositories.args(&["prune", "web", "--keep", "last=1", "--json"]));
    assert_eq!(gone["freed"].as_u64(), Some(before - du(&repositories)));
    assert!(gone["freed"].as_u64() > Some(1 << 19), "{gone}");
}

#[test]
fn deleting_takes_the_name_of_a_snapshot_not_of_a_guest() {
    let repositories = Repositories::new();
    assert!(run_err(1, repositories.args(&["delete", "web"])).contains("web: no snapshots of this guest"));
    let ids = [repositories.save("mon", 20_000), repositories.save("tue", 20_001)];
    for args in [&["delete", "web"][..], &["delete", "web@mon", "web"], &["delete", "web", "--dry-run"]] {
        let refused = run_err(1, repositories.args(args));
        assert!(
            refused.contains("it has web@tue, web@mon") && refused.contains("vmstrata vm delete web@tue"),
            "{refused}"
        );
    }
    let plan = run_ok(repositories.args(&["delete", "web@mon", "--dry-run"]));
    assert!(plan.starts_with("1 snapshot to delete\n  web@mon\nweb.qcow2@mon stays"), "{plan}");
    let by_id = ids[1].to_string();
    let plan = run_json(repositories.args(&["delete", &by_id, "--disks", "--dry-run", "--json"]));
    assert_eq!(plan["delete"], serde_json::json!(["web@tue"]));
    assert_eq!(plan["delete-disk-snapshots"], serde_json::json!(["web.qcow2@tue"]));
    assert_eq!(run_json(repositories.args(&["list", "--json"]))["snapshots"].as_array().unwrap().len(), 2);
    let said = run_ok(repositories.args(&["delete", &by_id]));
    assert!(said.starts_with("web@tue: deleted\n"), "an id is told by its name: {said}");
}

#[test]
fn a_vault_that_others_can_write_to_is_read_with_a_warning_and_not_written() {
    let repositories = Repositories::new();
    repositories.save("mon", 20_000);
    let dir = repositories.0.path().join("b");
    let set_mode = |mode| std::fs::set_permissions(&dir, Permissions::from_mode(mode)).unwrap();
    set_mode(0o777);
    let remedy = format!("chmod 700 {}", dir.display());
    let listed = run(repositories.args(&["list"]));
    assert!(listed.status.success() && stderr(&listed).contains(&remedy), "{}", stderr(&listed));
    for command in [&["delete", "web@mon"][..], &["repair"]] {
        let said = run_err(1, repositories.args(command));
        let last = said.lines().last().unwrap();
        assert!(last.contains("others can write to it") && last.contains(&remedy), "{said}");
    }
    set_mode(0o700);
    run_ok(repositories.args(&["delete", "web@mon"]));
}

/// Killed after it removed the metadata, and before the objects.
#[test]
fn a_delete_that_was_killed_is_finished_when_it_is_repeated() {
    let repositories = Repositories::new();
    let id = repositories.save("mon", 20_000);
    for repository in repositories.paths() {
        std::fs::remove_file(repository.join(format!("{id}.snapshot"))).unwrap();
    }
    let before = du(&repositories);
    assert!(
        run_err(1, repositories.args(&["delete", "web@mon", "--dry-run"])).contains("no snapshot web@mon")
    );
    let done = run_json(repositories.args(&["delete", "web@mon", "--json"]));
    assert_eq!(done["freed"].as_u64(), Some(before - du(&repositories)));
    assert!(run_err(1, repositories.args(&["delete", "web@mon"])).contains("no snapshot web@mon"));
}

#[test]
fn damage_is_told_by_exit_codes_and_repaired() {
    let repositories = Repositories::new();
    let id = repositories.save("mon", 20_000);
    let object = |repository: &str| repositories.0.path().join(repository).join(format!("{id}.critical"));
    let whole = std::fs::read(object("a")).unwrap();
    let mut damaged = whole.clone();
    damaged[90] ^= 1;
    std::fs::write(object("a"), &damaged).unwrap();
    let found = run(repositories.args(&["verify", "web@mon"]));
    assert_eq!(found.status.code(), Some(3));
    let said = String::from_utf8(found.stdout).unwrap();
    assert!(said.contains("lacks copies") && said.contains(object("a").to_str().unwrap()), "{said}");
    let repaired = run_json(repositories.args(&["repair", "--one-device", "--json"]));
    assert_eq!(repaired["made"][0], object("a").display().to_string());
    assert!(std::fs::read(object("a")).unwrap() == whole);
    for repository in ["a", "b"] {
        std::fs::write(object(repository), &damaged).unwrap();
    }
    let found = run(repositories.args(&["verify", "--json"]));
    assert_eq!(found.status.code(), Some(2));
    let found: serde_json::Value = serde_json::from_slice(&found.stdout).unwrap();
    assert_eq!((&found[0]["whole"], &found[0]["lost-critical-pages"]), (&false.into(), &8.into()));
    assert_eq!(run(repositories.args(&["repair"])).status.code(), Some(2));
}

#[test]
fn show_names_the_snapshots_that_use_its_objects() {
    let repositories = Repositories::new();
    let id = repositories.save("mon", 20_000);
    assert!(run_ok(repositories.args(&["show", "web@mon"])).contains("2, used by no other snapshot"));
    repositories.save("tue", 20_001);
    repositories.save("wed", 20_002);
    let shown = run_json(repositories.args(&["show", "web@tue", "--json"]));
    assert_eq!(shown["shared-with"], serde_json::json!(["web@mon", "web@wed"]));
    let critical = &shown["objects"].as_array().unwrap()[0];
    assert_eq!(critical["object"], format!("{id}.critical"));
    // Eight of the guest, and one of its tables.
    assert_eq!((&critical["copies"], &critical["critical-pages"]), (&2.into(), &9.into()));
    assert_eq!(critical["used-by"], serde_json::json!(["web@wed", "web@mon"]));
    let text = run_ok(repositories.args(&["show", "web@tue"]));
    assert!(text.contains("2, used by 2 other snapshots"), "{text}");
    assert!(text.contains("9 critical pages; used by web@wed, web@mon"), "{text}");
}

#[test]
fn verify_and_repair_name_every_snapshot_of_a_damaged_object() {
    let repositories = Repositories::new();
    let id = repositories.save("mon", 20_000);
    repositories.save("tue", 20_001);
    repositories.save("wed", 20_002);
    let path = repositories.0.path().join("a").join(format!("{id}.critical"));
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[90] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    let found = run(repositories.args(&["verify", "web@tue", "--json"]));
    let found: serde_json::Value = serde_json::from_slice(&found.stdout).unwrap();
    assert_eq!(found[0]["also-concerned"], serde_json::json!(["web@wed", "web@mon"]));
    let said = String::from_utf8(run(repositories.args(&["verify", "web@tue"])).stdout).unwrap();
    assert!(said.contains("also concerned: web@wed, web@mon"), "{said}");
    let repaired = run_json(repositories.args(&["repair", "web@tue", "--one-device", "--json"]));
    assert_eq!(repaired["mended"], serde_json::json!(["web@wed", "web@tue", "web@mon"]));
    assert_eq!(repaired["snapshots"][0]["also-concerned"], serde_json::json!([]));
}

#[test]
fn a_namenode_that_is_not_there_is_an_error() {
    let refused = run_err(1, ["vm", "list", "--vault", "hdfs://127.0.0.1:1/vault"]);
    assert!(refused.contains("hdfs://127.0.0.1:1/vault") && refused.contains("refused"), "{refused}");
    let wrong = run_err(1, ["vm", "list", "--vault", "hdfs://127.0.0.1:1/vault?blocks=1"]);
    assert!(wrong.contains("expected hdfs://NAMENODE"), "{wrong}");
    run_err(64, ["vm", "list", "--vault", ""]);
}

#[test]
fn a_vault_that_is_not_there_is_told_with_what_makes_it() {
    let repositories = Repositories::new();
    let gone = repositories.0.path().join("gone").display().to_string();
    let said = run_err(1, ["vm", "list", "--vault", &gone]);
    let expected = format!(
        "no repository of the vault can be opened: {gone}: no such directory; `mkdir -m 700 {gone}` makes it"
    );
    assert!(said.contains(&expected), "{said}");
}

#[test]
fn a_missing_directory_is_a_warning_and_deletes_nothing() {
    let repositories = Repositories::new();
    repositories.save("mon", 20_000);
    std::fs::rename(repositories.0.path().join("a"), repositories.0.path().join("gone")).unwrap();
    let listed = run(repositories.args(&["list"]));
    assert!(listed.status.success() && support::stderr(&listed).contains("warning"), "{listed:?}");
    let refused = run_err(1, repositories.args(&["delete", "web@mon"]));
    assert!(refused.contains("nothing is deleted"), "{refused}");
    std::fs::rename(repositories.0.path().join("gone"), repositories.0.path().join("a")).unwrap();
    assert!(run_ok(repositories.args(&["verify"])).contains("web@mon: whole"));
}
