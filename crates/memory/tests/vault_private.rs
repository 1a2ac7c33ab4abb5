//! A vault is for its user alone: modes of what is written, vaults that others can enter, and what they may plant there.

use crate::vault_support;
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use crate::vault_support::{Guest, Known, Repositories, assert_reads, open, policy, save, save_at};
use rustix::fs::{CWD, FileType, Gid, Mode, Uid, chown, mknodat};
use vmstrata_memory::PageClass;
use vmstrata_memory::vault::{OneDevice, Saved, Vault, VaultError, Which};

/// Puts something at a path.
type Plant = fn(&Path);

/// Nobody.
const OTHER: u32 = 65534;

fn guest(number: u64) -> Guest {
    Guest::new(256, |page| Known { class: PageClass::Critical, seed: number * 1000 + page })
}

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

fn give_to(path: &Path, user: u32) {
    chown(path, Some(Uid::from_raw(user)), Some(Gid::from_raw(user))).unwrap();
}

/// A repository with the snapshot "1".
fn saved() -> (Repositories, Saved) {
    let repositories = Repositories::new(1);
    let saved = save(&repositories.vault(), &guest(1), "1", policy(1, 1));
    (repositories, saved)
}

/// What is said when a vault must not be written.
fn refusal(error: VaultError) -> String {
    match error {
        VaultError::Repository(error) => error.source.to_string(),
        other => panic!("{other}"),
    }
}

/// Why snapshots are neither added, repaired nor deleted, which is the same.
fn refused(repositories: &Repositories, saved: &Saved) -> String {
    let vault = repositories.vault();
    let before = repositories.files();
    let said = refusal(save_at(&vault, &guest(2), "2", policy(1, 1), 2).unwrap_err());
    assert_eq!(refusal(vault.repair(&[], OneDevice::Allow).unwrap_err()), said);
    assert_eq!(refusal(vault.collect().unwrap_err()), said);
    assert_eq!(refusal(vault.delete(&[saved.id]).unwrap_err()), said);
    assert_eq!(repositories.files(), before);
    said
}

fn assert_can_be_read(repositories: &Repositories) {
    assert_reads(&open(&repositories.vault(), "1").unwrap(), &guest(1), 1, false);
}

#[test]
fn files_are_for_their_user_alone() {
    let (repositories, _) = saved();
    let dir = repositories.dirs[0].path();
    let vault = repositories.vault();
    let mut writer = vault.begin(vault_support::new_snapshot(&guest(2), "2", policy(1, 1))).unwrap();
    guest(2).give(&mut writer).unwrap();
    let is_unfinished = |name: &String| name.starts_with('.');
    wait_until(|| repositories.files()[0].iter().any(is_unfinished));
    let modes: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| mode(&entry.unwrap().path())).collect();
    // Pages and metadata, the lock, and what is not finished.
    assert_eq!(modes, [0o600; 4]);
}

/// Waits until threads have come so far.
fn wait_until(mut holds: impl FnMut() -> bool) {
    let end = std::time::Instant::now() + std::time::Duration::from_secs(120);
    while !holds() {
        assert!(std::time::Instant::now() < end, "not in time");
        std::thread::yield_now();
    }
}

#[test]
fn a_vault_that_others_can_only_read_is_closed_when_it_is_written() {
    let (repositories, _) = saved();
    let dir = repositories.dirs[0].path();
    fs::create_dir(dir.join("lost+found")).unwrap();
    for (open, closed) in [(0o755, 0o700), (0o711, 0o700), (0o2750, 0o2700)] {
        set_mode(dir, open);
        assert_can_be_read(&repositories);
        assert_eq!(mode(dir), open);
        save_at(&repositories.vault(), &guest(2), &format!("m{open}"), policy(1, 1), 2).unwrap();
        assert_eq!(mode(dir), closed);
    }
    set_mode(dir, 0o755);
    let vault = repositories.vault();
    vault.delete(&[vault.find_id(&Which::Newest("web".to_owned())).unwrap()]).unwrap();
    assert_eq!(mode(dir), 0o700);
}

#[test]
fn a_vault_that_others_can_write_to_is_refused() {
    let (repositories, saved) = saved();
    let dir = repositories.dirs[0].path();
    for open in [0o720, 0o775, 0o702, 0o1777] {
        set_mode(dir, open);
        let said = refused(&repositories, &saved);
        assert!(
            said.contains("others can write") && said.ends_with(&format!("chmod 700 {}", dir.display())),
            "{said}"
        );
        assert_eq!(mode(dir), open);
        assert_can_be_read(&repositories);
    }
}

#[test]
fn a_directory_that_is_no_vault_alone_is_not_closed() {
    let (repositories, saved) = saved();
    let dir = repositories.dirs[0].path();
    set_mode(dir, 0o755);
    let plant: [(&str, Plant); 6] = [
        ("notes.txt", |at| fs::write(at, "").unwrap()),
        ("images", |at| fs::create_dir(at).unwrap()),
        ("lost+found", |at| fs::write(at, "").unwrap()),
        ("18ea40b26cc753da29d403db5f612d9e.clean", |at| symlink("/nowhere", at).unwrap()),
        (".18ea40b26cc753da29d403db5f612d9e.clean.1-1.new", |at| {
            mknodat(CWD, at, FileType::Fifo, Mode::RWXU, 0).unwrap();
        }),
        (".18ea40b26cc753da29d403db5f612d9e.clean.new", |at| fs::write(at, "").unwrap()),
    ];
    for (name, plant) in plant {
        let at = dir.join(name);
        plant(&at);
        let said = refused(&repositories, &saved);
        assert!(said.contains(&format!("it holds {name:?}, which is not the repository's")), "{said}");
        assert!(said.ends_with(&format!("chmod 700 {}", dir.display())), "{said}");
        assert_eq!(mode(dir), 0o755);
        fs::remove_file(&at).or_else(|_| fs::remove_dir(&at)).unwrap();
    }
    if rustix::process::geteuid().is_root() {
        let foreign = dir.join("18ea40b26cc753da29d403db5f612d9e.clean");
        fs::write(&foreign, "").unwrap();
        give_to(&foreign, OTHER);
        assert!(refused(&repositories, &saved).contains("which is not the repository's"));
    }
}

#[test]
fn another_users_vault_is_refused_and_read_without_a_trace() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let (repositories, saved) = saved();
    let dir = repositories.dirs[0].path();
    give_to(dir, OTHER);
    fs::remove_file(dir.join("lock")).unwrap();
    for closed in [0o700, 0o755] {
        set_mode(dir, closed);
        let said = refused(&repositories, &saved);
        let remedy = format!("chown 0 {at} && chmod 700 {at}", at = dir.display());
        assert!(said.contains("user 65534") && said.ends_with(&remedy), "{said}");
        assert_eq!(mode(dir), closed);
        assert_can_be_read(&repositories);
        assert!(!dir.join("lock").exists());
    }
}

/// Root's vault, which another user can read but neither close nor write.
#[test]
fn a_vault_that_its_reader_cannot_close_is_refused() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let (repositories, _) = saved();
    let dir = repositories.dirs[0].path();
    set_mode(dir, 0o755);
    for entry in fs::read_dir(dir).unwrap() {
        set_mode(&entry.unwrap().path(), 0o644);
    }
    // Where it can be run from by anyone.
    let place = tempfile::tempdir().unwrap();
    set_mode(place.path(), 0o755);
    let test = place.path().join("test");
    fs::copy(std::env::current_exe().unwrap(), &test).unwrap();
    let mut child = Command::new(&test);
    child
        .args(["--exact", "vault_private::child_of_another_user"])
        .env("PRIVATE_VAULT", dir)
        .current_dir("/");
    let output = child.uid(OTHER).gid(OTHER).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    assert_eq!(mode(dir), 0o755);
}

#[test]
fn child_of_another_user() {
    let Some(dir) = std::env::var_os("PRIVATE_VAULT") else { return };
    assert_eq!(rustix::process::geteuid().as_raw(), OTHER);
    let vault = Vault::open_directories(&[dir.into()]).unwrap();
    assert_reads(&open(&vault, "1").unwrap(), &guest(1), 1, false);
    let said = refusal(save_at(&vault, &guest(2), "2", policy(1, 1), 2).unwrap_err());
    assert!(said.contains("belongs to user 0, with mode 755") && said.contains("chown 65534"), "{said}");
}

/// What lies outside is neither read nor written nor deleted.
#[test]
fn links_lead_nowhere() {
    let (repositories, saved) = saved();
    let (dir, outside) = (repositories.dirs[0].path(), tempfile::tempdir().unwrap());
    let theirs = outside.path().join("theirs");
    let critical = dir.join(format!("{}.critical", saved.id));
    fs::rename(&critical, &theirs).unwrap();
    symlink(&theirs, &critical).unwrap();
    let lost = vault_support::is_lost;
    let read = open(&repositories.vault(), "1").and_then(|snapshot| {
        snapshot.read_page(*guest(1).pages.keys().next().unwrap(), &mut [0; vmstrata_memory::PAGE_BYTES])
    });
    assert!(lost(&read.unwrap_err()));
    let bytes = fs::read(&theirs).unwrap();
    repositories.vault().delete(&[saved.id]).unwrap();
    assert!(fs::symlink_metadata(&critical).is_err() && fs::read(&theirs).unwrap() == bytes);
    fs::remove_file(dir.join("lock")).unwrap();
    symlink(outside.path().join("lock"), dir.join("lock")).unwrap();
    assert!(
        refusal(save_at(&repositories.vault(), &guest(2), "2", policy(1, 1), 2).unwrap_err())
            .contains("lock is not")
    );
    assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 1);
}

/// What it needs is not known then.
#[test]
fn nothing_is_collected_while_metadata_is_a_link() {
    let (repositories, one) = saved();
    let two = save(&repositories.vault(), &guest(2), "2", policy(1, 1));
    let (dir, outside) = (repositories.dirs[0].path(), tempfile::tempdir().unwrap());
    let at = |id| dir.join(format!("{id}.snapshot"));
    let moved = outside.path().join("moved");
    fs::rename(at(one.id), &moved).unwrap();
    symlink(&moved, at(one.id)).unwrap();
    let vault: Arc<Vault> = repositories.vault();
    assert!(matches!(vault.delete(&[two.id]), Err(VaultError::NeedsUnknown(_))));
    fs::rename(&moved, at(one.id)).unwrap();
    assert_can_be_read(&repositories);
}
