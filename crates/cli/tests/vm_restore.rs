//! `vmstrata vm restore` where it does not come to a guest: snapshots that are lost, and commands that are ended.

use crate::support;
use std::path::PathBuf;
use std::process::{Child, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::support::server::Server;
use crate::support::vault::Repositories;
use crate::support::{Images, run, run_err, run_json, run_ok, stderr, vmstrata, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use vmstrata_disk::snapshot::recorded_in;
use vmstrata_memory::vault::DiskState;

#[test]
fn what_is_lost_names_the_newest_older_snapshot_that_is_whole() {
    let repositories = Repositories::new();
    let ids = [("mon", 1), ("tue", 2), ("wed", 3)].map(|(name, number)| repositories.save(name, number));
    let said = |snapshot: &str, flags: &[&str]| run_err(1, repositories.args(snapshot, flags, "exit 3"));
    // One copy is enough; what fails is what stands in for QEMU.
    repositories.lose(ids[2], "critical", &["a"]);
    let unharmed = said("web@wed", &[]);
    assert!(unharmed.contains("QEMU did not start: exit status: 3"), "{unharmed}");
    repositories.lose(ids[2], "critical", &["b"]);
    repositories.lose(ids[1], "snapshot", &["a", "b"]);
    let lost = said("web@wed", &[]);
    assert!(lost.contains("web@wed: its metadata is lost") && lost.contains("whole is web@mon"), "{lost}");
    let unknown = said("web@tue", &[]);
    assert!(unknown.contains(&ids[1].to_string()) && unknown.contains("whole is web@mon"), "{unknown}");
    let by_id = said(&ids[1].to_string(), &["--lazy"]);
    assert!(by_id.contains("its metadata is lost") && by_id.contains("whole is web@mon"), "{by_id}");
    assert!(said(&ids[0].to_string(), &[]).contains("did not start"));
    repositories.lose(ids[0], "critical", &["a", "b"]);
    assert!(said("web@wed", &[]).contains("no older snapshot of the guest is whole"));
    // The newest may be one of which nothing is known: an older one is not taken for it.
    repositories.lose(ids[2], "snapshot", &["a", "b"]);
    let newest = said("web", &[]);
    assert!(newest.contains("no snapshot of web that can be read"), "{newest}");
    repositories.assert_nothing_left();
}

/// A guest that runs meets a lost page when it touches it, and its QEMU is ended: it must not be started.
#[test]
fn a_lazy_restore_refuses_lost_pages_before_qemu_is_started() {
    let repositories = Repositories::new();
    let ids = [("mon", 1), ("tue", 2)].map(|(name, number)| repositories.save(name, number));
    let started = repositories.path("started");
    let script = format!("touch {}", started.display());
    let refused = |flags: &[&str], what: &str| {
        let start = std::time::Instant::now();
        let said = run_err(1, repositories.args("web@tue", flags, &script));
        assert!(
            said.contains(&format!("web@tue: {what} is lost")) && said.contains("whole is web@mon"),
            "{said}"
        );
        assert!(!started.exists(), "{flags:?}: QEMU was started");
        (said.lines().last().map(str::to_owned), start.elapsed())
    };
    let object = |repository: &str| repositories.path(repository).join(format!("{}.critical", ids[1]));
    // The first extent, which has the guest's pages, and what says where it is.
    for repository in ["a", "b"] {
        let mut bytes = std::fs::read(object(repository)).expect("reads");
        let end = bytes.len() - 1;
        (bytes[90], bytes[end]) = (!bytes[90], !bytes[end]);
        std::fs::write(object(repository), bytes).expect("writes");
    }
    assert_eq!(refused(&["--lazy"], "frame 0x0").0, refused(&[], "frame 0x0").0, "both ways say the same");
    for repository in ["a", "b"] {
        std::fs::remove_file(object(repository)).expect("removes");
    }
    let (said, took) = refused(&["--lazy"], "its metadata");
    assert_eq!(said, refused(&[], "its metadata").0);
    assert!(took < Duration::from_secs(10), "a guest's patience is 30 s: {took:?}");
    repositories.assert_nothing_left();
}

/// A restore that was started with a script as QEMU, which runs by now.
struct Restoring {
    restore: Child,
    qemu: PathBuf,
}

impl Restoring {
    fn start(repositories: &Repositories, flags: &[&str], qemu: &[&str]) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let started = repositories.path(&format!("started-{number}"));
        let script = format!("echo $$ > {0}.new; mv {0}.new {0}; exec sleep 600", started.display());
        let mut command = vmstrata();
        command.args(repositories.args("web@mon", flags, &script)).args(qemu).stderr(Stdio::null());
        let mut restore = command.spawn().expect("starts");
        wait_until("QEMU", || started.exists() || restore.try_wait().expect("waits").is_some());
        let pid = std::fs::read_to_string(&started).expect("QEMU was started");
        std::fs::remove_file(started).expect("removes");
        Self { restore, qemu: PathBuf::from(format!("/proc/{}", pid.trim())) }
    }

    /// Whether QEMU runs: one that has ended may wait for its parent.
    fn runs(&self) -> bool {
        self.qemu.join("exe").exists()
    }

    fn end(&mut self, signal: Signal) -> ExitStatus {
        kill_process(Pid::from_child(&self.restore), signal).expect("it runs");
        self.restore.wait().expect("waits")
    }
}

/// Ended while QEMU is started: QEMU ends too, and neither files nor mounts are left.
#[test]
fn a_restore_that_is_ended_leaves_nothing() {
    let repositories = Repositories::new();
    repositories.save("mon", 1);
    for flags in [&[][..], &["--lazy"]] {
        let mut restoring = Restoring::start(&repositories, flags, &[]);
        assert_eq!(restoring.end(Signal::TERM).code(), Some(1), "{flags:?}");
        assert!(!restoring.runs());
        repositories.assert_nothing_left();
    }
}

/// The same with kill -9, by which nothing can be done in the process itself.
#[test]
fn a_restore_that_is_killed_before_the_guest_runs_leaves_nothing() {
    let it = WithDisk::new();
    it.images.write_layer("web.qcow2", &["write -P 7 1M 64k"]);
    let (drive, clone) = (it.drive(), it.images.path("web.mon.clone.qcow2"));
    for flags in [&["--clone-disks"][..], &["--clone-disks", "--lazy"]] {
        let control = it.images.name("no-server");
        let flags = [flags, &["--control", &control]].concat();
        let mut restoring = Restoring::start(&it.repositories, &flags, &["sh", "-drive", &drive]);
        assert!(clone.exists() && restoring.runs());
        restoring.end(Signal::KILL);
        wait_until("the clone", || !clone.exists());
        // It goes last.
        assert!(!restoring.runs());
        it.repositories.assert_nothing_left();
    }
}

#[test]
fn restores_at_once_make_clones_of_different_names() {
    let it = WithDisk::new();
    it.images.write_layer("web.qcow2", &["write -P 7 1M 64k"]);
    let (drive, control) = (it.drive(), it.images.name("no-server"));
    let flags = ["--clone-disks", "--control", &control];
    let start = || Restoring::start(&it.repositories, &flags, &["sh", "-drive", &drive]);
    let mut both = std::thread::scope(|scope| {
        let threads = [scope.spawn(start), scope.spawn(start)];
        threads.map(|thread| thread.join().expect("starts"))
    });
    for clone in ["web.mon.clone.qcow2", "web.mon.clone-2.qcow2"] {
        assert!(it.images.path(clone).exists(), "{clone}");
    }
    both.iter_mut().for_each(|restoring| _ = restoring.end(Signal::TERM));
}

/// A server goes on with a clone that it was asked for.
#[test]
fn a_killed_restore_leaves_no_clone_with_a_server() {
    let it = WithDisk::new();
    let vhost = it.images.name("web.sock");
    let disk = format!("path={}", it.disk);
    let server = Server::start(&["--disk", &disk, "--vhost-user", &format!("web={vhost}")]);
    let control = server.control().display().to_string();
    let served = || {
        let listed: serde_json::Value = run_json(["status", "--control", &control, "--json"]);
        listed["disks"].as_array().expect("disks").len()
    };
    let chardev = format!("socket,id=c,path={vhost}");
    let flags = ["--control", &control, "--clone-disks"];
    let mut restoring = Restoring::start(&it.repositories, &flags, &["sh", "-chardev", &chardev]);
    assert_eq!(served(), 2);
    restoring.end(Signal::KILL);
    wait_until("the clone", || served() == 1 && !it.images.path("web.mon.clone.qcow2").exists());
}

/// What a server allows for its disks need not be said again.
#[test]
fn a_served_disk_may_stand_where_its_server_allows_it() {
    let it = WithDisk::new();
    std::fs::create_dir(it.images.path("golden")).expect("a directory");
    let base = it.images.name("golden/base.qcow2");
    it.images.create("golden/base.qcow2", &["16M"]);
    std::fs::remove_file(&it.disk).expect("removes");
    it.images.create("web.qcow2", &["-b", &base, "-F", "qcow2"]);
    let nbd = it.images.name("nbd.sock");
    let disk = format!("path={}", it.disk);
    let address = format!("unix:{nbd}");
    let golden = it.images.name("golden");
    let server = Server::start(&["--disk", &disk, "--nbd", &address, "--allow-backing", &golden]);
    server.ask_ok(["snapshot", "create", &it.disk, "--name", "tue"]);
    let taken_ns = recorded_in(it.disk.as_ref()).expect("a snapshot").taken_ns;
    let state = DiskState::new(&it.disk, "tue");
    it.repositories.save_with("tue", 2, taken_ns, vec![state]);
    let control = server.control().display().to_string();
    let url = format!("nbd+unix:///web?socket={nbd}");
    for flags in [&[][..], &["--clone-disks"]] {
        let mut args = it.repositories.args(
            "web@tue",
            &[&["--control", control.as_str()][..], flags].concat(),
            "exit 3",
        );
        args.push(url.clone());
        let said = run_err(1, args);
        assert!(said.contains("did not start: exit status: 3"), "{said}");
    }
}

/// A snapshot of memory with a disk that stands on its own of the same instant.
struct WithDisk {
    repositories: Repositories,
    images: Images,
    disk: String,
}

impl WithDisk {
    fn new() -> Self {
        let (repositories, images) = (Repositories::new(), Images::new());
        let disk = images.create("web.qcow2", &["16M"]);
        let disk = disk.to_str().expect("UTF-8").to_owned();
        run_ok(["snapshot", "create", &disk, "--name", "mon"]);
        let taken_ns = recorded_in(disk.as_ref()).expect("a snapshot").taken_ns;
        repositories.save_with("mon", 1, taken_ns, vec![DiskState::new(&disk, "mon")]);
        Self { repositories, images, disk }
    }

    /// Restores with a script as QEMU that notes its options, these among them, and fails; what is said, and those options.
    fn restore(&self, flags: &[&str], options: &[&str]) -> (String, Option<String>) {
        let noted = self.images.path("noted");
        let _ = std::fs::remove_file(&noted);
        let mut args =
            self.repositories.args("web@mon", flags, &format!("echo \"$@\" > {}; exit 3", noted.display()));
        args.extend(["sh"].iter().chain(options).map(|word| (*word).to_owned()));
        if !flags.contains(&"--control") {
            args.splice(2..2, ["--control".to_owned(), self.images.name("no-server")]);
        }
        let output = run(args);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        (stderr(&output), std::fs::read_to_string(noted).ok())
    }

    fn drive(&self) -> String {
        format!("if=virtio,file={}", self.disk)
    }

    /// Carries out the command that a refusal names.
    fn do_as_told(said: &str) {
        let line =
            said.lines().find_map(|line| line.trim_start().strip_prefix("vmstrata ")).expect("a command");
        run_ok(line.split("   ").next().expect("words").split(' '));
    }
}

#[test]
fn a_guest_is_not_started_on_a_disk_in_another_state() {
    let it = WithDisk::new();
    let drive = it.drive();
    let drive = ["-drive", drive.as_str()];
    let refused = |why: &str| {
        let (said, started) = it.restore(&[], &drive);
        assert!(said.contains(why) && started.is_none(), "{why}: {said}");
        said
    };
    let starts = |flags: &[&str]| {
        let (said, started) = it.restore(flags, &drive);
        assert!(started.is_some(), "{said}");
        said
    };
    starts(&[]);
    let json = format!(r#"{{"driver":"qcow2","file":{{"driver":"file","filename":"{}"}}}}"#, it.disk);
    assert!(it.restore(&[], &["-blockdev", &json]).1.is_some());
    let (said, started) = it.restore(&[], &["-drive", "file=other.qcow2"]);
    assert!(said.contains("is not a disk of QEMU's command line") && started.is_none(), "{said}");

    it.images.write_layer("web.qcow2", &["write -P 7 1M 64k"]);
    let said = refused("1 cluster written since");
    assert!(starts(&["--force"]).contains("warning: "), "forced");
    WithDisk::do_as_told(&said);
    starts(&[]);

    run_ok(["snapshot", "create", &it.disk, "--name", "tue"]);
    WithDisk::do_as_told(&refused("1 snapshot taken since: tue"));
    starts(&[]);
    std::fs::remove_file(&it.disk).expect("removes");
    it.images.create("web.qcow2", &["16M"]);
    refused("does not stand on the snapshot mon");
    run_ok(["snapshot", "create", &it.disk, "--name", "mon2"]);
    refused("does not stand on the snapshot mon");
}

#[test]
fn a_clone_takes_the_place_of_a_disk_in_another_state() {
    let it = WithDisk::new();
    it.images.write_layer("web.qcow2", &["write -P 7 1M 64k"]);
    let before = it.images.files();
    let (said, started) = it.restore(&["--clone-disks"], &["-drive", &it.drive()]);
    let clone = it.images.name("web.mon.clone.qcow2");
    assert!(
        started.as_deref().unwrap_or_default().contains(&format!("if=virtio,file={clone} ")),
        "{said}{started:?}"
    );
    assert!(said.contains(&format!("{clone}: clone of {} at mon", it.disk)), "{said}");
    // It did not run on it.
    let after = it.images.files();
    let disks = |files: &[String]| files.iter().filter(|file| file.ends_with("qcow2")).count();
    assert_eq!(disks(&before), disks(&after), "{after:?}");
    // A clone by hand, and where the disk is now.
    run_ok(["snapshot", "clone", &it.disk, "mon", "-o", &clone]);
    let (said, started) = it.restore(&["--disk", &clone], &["-drive", &format!("file={clone}")]);
    assert!(started.is_some(), "{said}");
}

#[test]
fn a_served_disk_is_found_behind_its_socket_and_cloned_by_its_server() {
    let it = WithDisk::new();
    let (vhost, nbd) = (it.images.name("web.sock"), it.images.name("nbd.sock"));
    let server = Server::start(&[
        "--disk",
        &format!("path={}", it.disk),
        "--vhost-user",
        &format!("web={vhost}"),
        "--nbd",
        &format!("unix:{nbd},rw"),
    ]);
    let control = server.control().display().to_string();
    let url = format!("nbd+unix:///web?socket={nbd}");
    let ways = [
        format!("socket,id=c,path={vhost}"),
        format!("driver=nbd,node-name=d,export=web,server.type=unix,server.path={nbd}"),
        format!("if=virtio,file={url}"),
    ];
    let served = || {
        let listed: serde_json::Value = run_json(["status", "--control", &control, "--json"]);
        listed["disks"].as_array().expect("disks").len()
    };
    let restore = |flags: &[&str], way: &str| {
        it.restore(&[&["--control", control.as_str()][..], flags].concat(), &["-x", way])
    };
    for way in &ways {
        let (said, started) = restore(&[], way);
        assert!(started.is_some_and(|options| options.contains(way)), "{way}: {said}");
    }
    assert!(restore(&[], "path=/other.sock").0.contains("no socket there leads to it"));
    // In the server's memory, and not in the file yet.
    support::tool_ok("qemu-io", ["-f", "raw", "-t", "unsafe", "-c", "write -P 7 1M 64k", url.as_str()]);
    for (way, now) in ways.iter().zip([
        format!("path={}", it.images.name("web.mon.clone.sock")),
        format!("export=web.mon.clone,server.type=unix,server.path={nbd}"),
        format!("nbd+unix:///web.mon.clone?socket={nbd}"),
    ]) {
        let (said, started) = restore(&[], way);
        assert!(said.contains("written since") || said.contains("since the server opened it"), "{said}");
        assert!(started.is_none(), "{said}");
        let (said, started) = restore(&["--clone-disks"], way);
        assert!(
            started.as_deref().is_some_and(|options| options.contains(&now)),
            "{way}: {said} {started:?}"
        );
        // The guest did not run: nothing is left of the clone.
        assert_eq!(served(), 1, "{way}");
        assert!(!it.images.path("web.mon.clone.qcow2").exists());
    }
}
