//! Our locks against those of the real QEMU tools, both ways round.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use vmstrata_store::{Access, FileError, FileOptions, FileStore, Gate, LockError, LockKind, Permission};

fn run(program: &str, arguments: &[&str], directory: &Path) -> (bool, String) {
    let output = Command::new(program)
        .args(arguments)
        .current_dir(directory)
        .output()
        .unwrap_or_else(|error| panic!("{program} is required by these tests: {error}"));
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&text).into_owned())
}

/// A directory with `base.qcow2` and `top.qcow2` on it.
fn images() -> TempDir {
    let directory = TempDir::new().expect("temporary directory");
    for arguments in [
        &["create", "-q", "-f", "qcow2", "base.qcow2", "16M"][..],
        &["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", "top.qcow2"][..],
    ] {
        let (created, text) = run("qemu-img", arguments, directory.path());
        assert!(created, "{text}");
    }
    directory
}

fn store(directory: &Path, name: &str, options: FileOptions) -> Result<FileStore, FileError> {
    let path = directory.join(name);
    let file = Gate::unrestricted().open(&path, options.access).expect("open");
    FileStore::new(file, &path, &options)
}

const ACTIVE_AT_ONCE: FileOptions = FileOptions { lock_patience: Duration::ZERO, ..FileOptions::ACTIVE };

const UNCHANGED: FileOptions =
    FileOptions { access: Access::ReadWrite, lock: Some(LockKind::Unchanged), ..FileOptions::FROZEN };

#[test]
fn one_at_a_time_writes_what_readers_do_not_see() {
    let directory = images();
    let open = |options| store(directory.path(), "base.qcow2", options);
    let reader = open(FileOptions::FROZEN).expect("a reader");
    let writer = open(UNCHANGED).expect("beside a reader");
    drop(open(FileOptions::FROZEN).expect("another reader"));
    let (read, text) = run("qemu-img", &["info", "base.qcow2"], directory.path());
    assert!(read, "{text}");
    let second = open(UNCHANGED).expect_err("a second one");
    assert!(matches!(second, FileError::Lock(LockError::Conflict { .. })), "{second}");
    drop(reader);
    open(ACTIVE_AT_ONCE).expect_err("a writer of the disk");
    vmstrata_store::LocalFile::give_up_writing(&writer).expect("a reader's lock now");
    drop(open(UNCHANGED).expect("the next one"));
    drop(writer);
    let active = open(ACTIVE_AT_ONCE).expect("no one is left");
    open(UNCHANGED).expect_err("beside a writer");
    drop(active);
}

#[test]
fn no_reader_of_ours_begins_while_a_file_is_copied_into() {
    let directory = images();
    let open = |options| store(directory.path(), "base.qcow2", options);
    let copies = FileOptions { lock: Some(LockKind::CopiedInto), ..UNCHANGED };
    let reader = open(FileOptions::FROZEN).expect("a reader");
    let writer = open(copies).expect("beside a reader");
    let refused = open(FileOptions::FROZEN).expect_err("it would know tables that do not last");
    assert!(matches!(refused, FileError::Lock(LockError::CopiedInto { .. })), "{refused}");
    open(UNCHANGED).expect_err("one at a time");
    let (read, text) = run("qemu-img", &["info", "base.qcow2"], directory.path());
    assert!(read, "what QEMU knows of it lasts: {text}");
    vmstrata_store::LocalFile::give_up_writing(&writer).expect("a reader's lock now");
    drop(open(FileOptions::FROZEN).expect("another reader"));
    drop((reader, writer));
    drop(open(ACTIVE_AT_ONCE).expect("nothing is left locked"));
}

/// A QEMU process that has an image open until it is dropped.
struct Holder(Child);

impl Holder {
    /// A `qemu-storage-daemon` that exports `name` for writing.
    fn daemon(directory: &Path, name: &str) -> Self {
        let child = Command::new("qemu-storage-daemon")
            .args(["--blockdev", &format!("driver=file,node-name=f,filename={name}")])
            .args(["--blockdev", "driver=qcow2,node-name=q,file=f"])
            .args(["--nbd-server", "addr.type=unix,addr.path=nbd.sock"])
            .args(["--export", "type=nbd,id=e,node-name=q,writable=on", "--pidfile", "pid"])
            .current_dir(directory)
            .spawn()
            .expect("qemu-storage-daemon is required by these tests");
        let daemon = Self(child);
        let deadline = Instant::now() + Duration::from_secs(20);
        while !directory.join("pid").exists() {
            assert!(Instant::now() < deadline, "the daemon has not come up");
            std::thread::sleep(Duration::from_millis(10));
        }
        daemon
    }

    fn new(directory: &Path, arguments: &[&str]) -> Self {
        let mut child = Command::new("qemu-io")
            .args(arguments)
            .current_dir(directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("qemu-io is required by these tests");
        // It answers once the image is open.
        writeln!(child.stdin.as_mut().expect("stdin"), "length").expect("ask");
        let mut answer = String::new();
        BufReader::new(child.stdout.as_mut().expect("stdout")).read_line(&mut answer).expect("answer");
        assert!(answer.contains("16 MiB"), "{answer}");
        Self(child)
    }

    fn writer(directory: &Path, name: &str) -> Self {
        Self::new(directory, &[name])
    }

    fn reader(directory: &Path, name: &str) -> Self {
        Self::new(directory, &["-r", name])
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.0.kill().expect("kill");
        self.0.wait().expect("wait");
    }
}

fn conflict(result: Result<FileStore, FileError>) -> (Permission, bool, String) {
    match result {
        Err(FileError::Lock(error @ LockError::Conflict { permission, held, .. })) => {
            (permission, held, error.to_string())
        }
        other => panic!("expected a conflict, not {other:?}"),
    }
}

#[test]
fn qemu_neither_writes_nor_reads_what_we_write() {
    let directory = images();
    let held = store(directory.path(), "top.qcow2", ACTIVE_AT_ONCE).expect("lock");
    for arguments in [&["-c", "write 0 64k", "top.qcow2"][..], &["-r", "-c", "read 0 64k", "top.qcow2"][..]] {
        let (succeeded, text) = run("qemu-io", arguments, directory.path());
        assert!(!succeeded && text.contains("lock"), "{text}");
    }
    drop(held);
    let (succeeded, text) = run("qemu-io", &["-c", "write 0 64k", "top.qcow2"], directory.path());
    assert!(succeeded, "{text}");
}

#[test]
fn we_neither_write_nor_read_what_qemu_writes() {
    let directory = images();
    let held = Holder::writer(directory.path(), "top.qcow2");
    let (permission, taken, message) = conflict(store(directory.path(), "top.qcow2", ACTIVE_AT_ONCE));
    assert_eq!((permission, taken), (Permission::Write, false));
    assert!(message.contains("top.qcow2 is in use by another process"), "{message}");
    assert!(message.contains("does not share the \"write\" permission"), "{message}");
    let (permission, taken, message) = conflict(store(directory.path(), "top.qcow2", FileOptions::FROZEN));
    assert_eq!((permission, taken), (Permission::Write, true));
    assert!(message.contains("it holds the \"write\" permission"), "{message}");
    drop(held);
    store(directory.path(), "top.qcow2", ACTIVE_AT_ONCE).expect("free again");
}

#[test]
fn a_storage_daemon_that_exports_an_image_excludes_us() {
    let directory = images();
    let _daemon = Holder::daemon(directory.path(), "top.qcow2");
    conflict(store(directory.path(), "top.qcow2", ACTIVE_AT_ONCE));
    // Its backing file is open for reading: shared with readers, shut to writers.
    store(directory.path(), "base.qcow2", FileOptions::FROZEN).expect("two readers");
    conflict(store(directory.path(), "base.qcow2", ACTIVE_AT_ONCE));
}

#[test]
fn readers_share_and_shut_writers_out() {
    let directory = images();
    let ours = store(directory.path(), "base.qcow2", FileOptions::FROZEN).expect("lock");
    let second = store(directory.path(), "base.qcow2", FileOptions::FROZEN).expect("a second reader");
    let theirs = Holder::reader(directory.path(), "base.qcow2");
    // As the backing file of an image that QEMU writes.
    let above = Holder::writer(directory.path(), "top.qcow2");
    let (succeeded, text) = run("qemu-io", &["-c", "write 0 64k", "base.qcow2"], directory.path());
    assert!(!succeeded && text.contains("lock"), "{text}");
    let (succeeded, text) = run("qemu-img", &["resize", "base.qcow2", "+1M"], directory.path());
    assert!(!succeeded && text.contains("lock"), "{text}");
    conflict(store(directory.path(), "base.qcow2", ACTIVE_AT_ONCE));
    drop((ours, second, above));
    conflict(store(directory.path(), "base.qcow2", ACTIVE_AT_ONCE));
    drop(theirs);
    store(directory.path(), "base.qcow2", ACTIVE_AT_ONCE).expect("free");
}

#[test]
fn we_exclude_ourselves_and_a_refusal_leaves_nothing_locked() {
    let directory = images();
    let first = store(directory.path(), "top.qcow2", ACTIVE_AT_ONCE).expect("lock");
    conflict(store(directory.path(), "top.qcow2", ACTIVE_AT_ONCE));
    conflict(store(directory.path(), "top.qcow2", FileOptions::FROZEN));
    drop(first);
    let reader = store(directory.path(), "top.qcow2", FileOptions::FROZEN).expect("lock");
    let path = directory.path().join("top.qcow2");
    let file = Gate::unrestricted().open(&path, Access::ReadWrite).expect("open");
    let again = file.try_clone().expect("clone");
    conflict(FileStore::new(file, &path, &ACTIVE_AT_ONCE));
    // The refused description lives on in `again`: its claims must be gone.
    let (succeeded, text) = run("qemu-io", &["-r", "-c", "read 0 64k", "top.qcow2"], directory.path());
    assert!(succeeded, "{text}");
    drop((reader, again));
}

#[test]
fn patience_outlasts_a_dying_predecessor() {
    let directory = images();
    let holder = Holder::writer(directory.path(), "top.qcow2");
    let start = Instant::now();
    let killer = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        drop(holder);
    });
    let options = FileOptions { lock_patience: Duration::from_secs(20), ..FileOptions::ACTIVE };
    let locked = store(directory.path(), "top.qcow2", options).expect("lock in the end");
    assert!(start.elapsed() >= Duration::from_millis(300));
    killer.join().expect("killer");
    drop(locked);

    let _holder = Holder::writer(directory.path(), "top.qcow2");
    let start = Instant::now();
    let options = FileOptions { lock_patience: Duration::from_millis(200), ..FileOptions::ACTIVE };
    conflict(store(directory.path(), "top.qcow2", options));
    assert!(start.elapsed() >= Duration::from_millis(200));
}

#[test]
fn the_bytes_locked_are_those_that_qemu_locks() {
    let directory = images();
    let look = || {
        let inode = std::os::unix::fs::MetadataExt::ino(
            &std::fs::metadata(directory.path().join("top.qcow2")).expect("stat"),
        );
        let table = std::fs::read_to_string("/proc/locks").expect("locks");
        let mut bytes: Vec<u32> = table
            .lines()
            .filter(|line| line.contains(&format!(":{inode} ")))
            .flat_map(|line| {
                let mut fields = line.split_whitespace().rev().map(|field| field.parse().expect("a byte"));
                let (last, first): (u32, u32) = (fields.next().expect("end"), fields.next().expect("start"));
                first..=last
            })
            .collect();
        bytes.sort_unstable();
        bytes
    };
    // The kernel shows the table in pieces, and other processes change it meanwhile: lines come twice, or not at all.
    let locked =
        || std::iter::repeat_with(|| (look(), look())).find(|(one, other)| one == other).expect("endless").0;
    type Hold = fn(&Path, &str) -> Holder;
    for (kind, hold) in [(LockKind::Active, Holder::writer as Hold), (LockKind::Frozen, Holder::reader)] {
        let theirs = hold(directory.path(), "top.qcow2");
        let expected = locked();
        drop(theirs);
        let options = FileOptions { lock: Some(kind), ..ACTIVE_AT_ONCE };
        let _ours = store(directory.path(), "top.qcow2", options).expect("lock");
        assert_eq!(locked(), expected, "{kind:?}");
        assert!(!expected.is_empty());
    }
}
