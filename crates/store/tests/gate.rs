//! What the gate lets through, with real links, FIFOs and directories.

use std::ffi::OsStr;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use tempfile::TempDir;
use vmstrata_store::{Access, Gate, GateError};

/// `allowed/disk` ("disk"), `allowed/sub/deep` ("deep"), `secret/key` ("key").
fn tree() -> TempDir {
    let root = TempDir::new().expect("temporary directory");
    for directory in ["allowed/sub", "allowed-too", "secret"] {
        std::fs::create_dir_all(root.path().join(directory)).expect("directory");
    }
    for (file, content) in [
        ("allowed/disk", "disk"),
        ("allowed/sub/deep", "deep"),
        ("secret/key", "key"),
        ("allowed-too/disk", "too"),
    ] {
        std::fs::write(root.path().join(file), content).expect("file");
    }
    root
}

fn gate(root: &TempDir) -> Gate {
    Gate::new([root.path().join("allowed")]).expect("gate")
}

fn read(gate: &Gate, path: &Path) -> Result<String, GateError> {
    let mut content = String::new();
    gate.open(path, Access::ReadOnly)?.read_to_string(&mut content).expect("read");
    Ok(content)
}

#[test]
fn files_inside_open_by_every_road() {
    let root = tree();
    let gate = gate(&root);
    symlink(root.path().join("allowed/sub"), root.path().join("secret/way-in")).expect("link");
    for (path, content) in [
        ("allowed/disk", "disk"),
        ("allowed/sub/deep", "deep"),
        ("secret/../allowed/disk", "disk"),
        ("secret/way-in/deep", "deep"),
    ] {
        assert_eq!(read(&gate, &root.path().join(path)).expect(path), content);
    }
    let file = gate.open(&root.path().join("allowed/disk"), Access::ReadWrite).expect("writable");
    file.set_len(1).expect("really writable");
}

#[test]
fn files_outside_stay_shut() {
    let root = tree();
    let gate = gate(&root);
    let key = root.path().join("secret/key");
    symlink(&key, root.path().join("allowed/file-link")).expect("link");
    symlink("../secret", root.path().join("allowed/directory-link")).expect("link");
    for path in [
        "secret/key",
        "allowed/../secret/key",
        "allowed/file-link",
        "allowed/directory-link/key",
        "allowed-too/disk",
        "/etc/passwd",
        "/proc/self/environ",
    ] {
        let error = read(&gate, &root.path().join(path)).expect_err(path);
        assert!(matches!(error, GateError::Outside { .. }), "{path}: {error}");
    }
    let message = read(&gate, &root.path().join("allowed/file-link")).unwrap_err().to_string();
    for part in [
        "allowed/file-link is outside",
        &format!("it really is {}", key.display()),
        &format!("add --allow-backing {}", key.parent().expect("parent").display()),
        &format!("({})", root.path().join("allowed").canonicalize().expect("canonical").display()),
    ] {
        assert!(message.contains(part), "{part:?} in {message:?}");
    }
}

#[test]
fn what_is_not_a_file_is_refused_at_once() {
    let root = tree();
    let fifo = root.path().join("allowed/fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).expect("fifo");
    let _socket = std::os::unix::net::UnixListener::bind(root.path().join("allowed/socket")).expect("socket");
    for gate in [gate(&root), Gate::unrestricted()] {
        for (path, kind) in [
            ("allowed/fifo", "FIFO"),
            ("allowed/socket", "socket"),
            ("allowed/sub", "directory"),
            ("/dev/zero", "character device"),
        ] {
            let error = gate.open(&root.path().join(path), Access::ReadOnly).expect_err(path);
            assert!(error.to_string().contains(kind), "{path}: {error}");
        }
    }
}

#[test]
fn what_is_missing_or_malformed_is_an_error() {
    let root = tree();
    let gate = gate(&root);
    symlink("loop", root.path().join("allowed/loop")).expect("link");
    let long = root.path().join("x".repeat(5000));
    for path in [root.path().join("allowed/nothing"), root.path().join("allowed/loop"), long] {
        assert!(matches!(gate.open(&path, Access::ReadOnly), Err(GateError::Open { .. })), "{path:?}");
    }
    let nul = Path::new(OsStr::from_bytes(b"/tmp/a\0b"));
    assert!(matches!(gate.open(nul, Access::ReadOnly), Err(GateError::Open { .. })));
    assert!(matches!(Gate::new([root.path().join("nothing")]), Err(GateError::Directory { .. })));
}

#[test]
fn no_directory_allows_nothing_and_unrestricted_everything() {
    let root = tree();
    let disk = root.path().join("allowed/disk");
    let none = Gate::new(Vec::<&Path>::new()).expect("gate");
    assert!(matches!(none.open(&disk, Access::ReadOnly), Err(GateError::Outside { .. })));
    assert_eq!(read(&Gate::unrestricted(), &disk).expect("open"), "disk");
}

/// A link that is switched between an allowed and a forbidden file while the gate opens it.
#[test]
fn a_link_that_changes_meanwhile_never_leads_outside() {
    let root = tree();
    let gate = gate(&root);
    let link = root.path().join("allowed/switch");
    symlink(root.path().join("allowed/disk"), &link).expect("link");
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let next = root.path().join("next");
            for target in ["secret/key", "allowed/disk"].into_iter().cycle() {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                symlink(root.path().join(target), &next).expect("link");
                std::fs::rename(&next, &link).expect("switch");
            }
        });
        let (mut opened, mut refused) = (0, 0);
        while opened < 500 || refused < 500 {
            match read(&gate, &link) {
                Ok(content) => {
                    assert_eq!(content, "disk");
                    opened += 1;
                }
                Err(error) => {
                    assert!(matches!(error, GateError::Outside { .. }), "{error}");
                    refused += 1;
                }
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_look_tells_the_state_of_what_would_be_opened() {
    let root = tree();
    let gate = gate(&root);
    let path = root.path().join("allowed/disk");
    let looked = gate.look(&path).expect("inside").expect("a regular file");
    let file = gate.open(&path, Access::ReadOnly).expect("inside");
    let store =
        vmstrata_store::FileStore::new(file, &path, &vmstrata_store::FileOptions::FROZEN).expect("opens");
    assert_eq!(looked, store.identity().expect("known"));
    assert!(matches!(gate.look(&root.path().join("secret/key")), Err(GateError::Outside { .. })));
    assert!(matches!(gate.look(&root.path().join("allowed")), Err(GateError::NotAFile { .. })));
}
