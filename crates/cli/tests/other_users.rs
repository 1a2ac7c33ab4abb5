//! The server as one user, QEMU as another: the group of a socket lets QEMU in, and nothing else of the server's does.
//!
//! Only root can be several users: as anybody else these tests have nothing to try.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use crate::support::{Images, assert_clean, stderr, tool_ok, wait_until};
use rustix::process::{Pid, Signal, geteuid, kill_process};

/// Numbers of users and of a group that no host has.
const SERVER: u32 = 61_001;
const QEMU: u32 = 61_002;
const STRANGER: u32 = 61_003;
const GUESTS: u32 = 61_010;

/// Connects to the socket that it is given.
const CONNECT: &str = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])";

/// Writes its second sector, says K at the first serial port, and stops.
#[rustfmt::skip]
const BOOT_SECTOR: [u8; 28] = [
    0x31, 0xc0,             // xor ax, ax
    0x8e, 0xc0,             // mov es, ax
    0xbb, 0x00, 0x7c,       // mov bx, 0x7c00: this sector
    0xb8, 0x01, 0x03,       // mov ax, 0x0301: write one sector
    0xb9, 0x02, 0x00,       // mov cx, 0x0002: to cylinder 0, sector 2
    0xb6, 0x00,             // mov dh, 0: head 0; the drive is in dl
    0xcd, 0x13,             // int 0x13
    0x72, 0x06,             // jc hlt
    0xba, 0xf8, 0x03,       // mov dx, 0x3f8
    0xb0, b'K',             // mov al, 'K'
    0xee,                   // out dx, al
    0xf4,                   // hlt
    0xeb, 0xfd,             // jmp hlt
];

/// A program to be run as a user with no groups but its own and these.
fn as_user(user: u32, groups: &[u32], program: impl AsRef<Path>) -> Command {
    let groups: Vec<String> = groups.iter().map(u32::to_string).collect();
    let mut command = Command::new("setpriv");
    command.args([
        &format!("--reuid={user}"),
        &format!("--regid={user}"),
        "--no-new-privs",
        "--bounding-set=-all",
    ]);
    command.arg(if groups.is_empty() {
        "--clear-groups".into()
    } else {
        format!("--groups={}", groups.join(","))
    });
    // What root has in directories of its own is not for others to run.
    command.arg("--").arg(program.as_ref()).current_dir("/").env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    command
}

/// A server as a user of its own, with a disk behind both kinds of exports, in directories as the packaging makes them.
struct Server {
    child: Child,
    program: PathBuf,
    images: Images,
}

impl Server {
    fn start() -> Self {
        let images = Images::new();
        fs::set_permissions(images.path("."), Permissions::from_mode(0o755)).unwrap();
        // Where the build has it, other users need not get to.
        let program = images.path("vmstrata");
        fs::copy(env!("CARGO_BIN_EXE_vmstrata"), &program).unwrap();
        for (name, group, mode) in [("vms", SERVER, 0o755), ("run", SERVER, 0o700), ("guests", GUESTS, 0o750)]
        {
            fs::create_dir(images.path(name)).unwrap();
            chown(images.path(name), Some(SERVER), Some(group)).unwrap();
            fs::set_permissions(images.path(name), Permissions::from_mode(mode)).unwrap();
        }
        let disk = images.create("vms/web.qcow2", &["1M"]);
        let mut sector = [0; 512];
        sector[..BOOT_SECTOR.len()].copy_from_slice(&BOOT_SECTOR);
        sector[510..].copy_from_slice(&[0x55, 0xaa]);
        let boot = images.path("boot");
        fs::write(&boot, sector).unwrap();
        images.write_layer("vms/web.qcow2", &[&format!("write -s {} 0 512", boot.display())]);
        chown(&disk, Some(SERVER), Some(SERVER)).unwrap();
        fs::set_permissions(&disk, Permissions::from_mode(0o600)).unwrap();
        let child = as_user(SERVER, &[GUESTS], &program)
            .args(["serve", "--disk", &format!("path={},name=web", disk.display())])
            .args(["--vhost-user", &format!("web={},share,group={GUESTS}", images.name("guests/web.sock"))])
            .args(["--nbd", &format!("unix:{},rw,share", images.name("guests/nbd.sock"))])
            .args(["--nbd-group", &GUESTS.to_string(), "--runtime-dir", &images.name("run")])
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let server = Self { child, program, images };
        for socket in ["guests/web.sock", "guests/nbd.sock", "run/control.sock"] {
            wait_until(socket, || server.images.path(socket).exists());
        }
        server
    }

    /// Whether a user can connect to a socket; if not, it is the permissions that forbid it.
    fn lets_in(&self, user: u32, groups: &[u32], socket: &str) -> bool {
        let mut connect = as_user(user, groups, "python3");
        let tried = connect.args(["-c", CONNECT, &self.images.name(socket)]).output().unwrap();
        let said = stderr(&tried);
        assert!(
            tried.status.success() || said.contains("PermissionError"),
            "{user} {groups:?} {socket}: {said}"
        );
        tried.status.success()
    }

    /// Ends the server, which leaves its image clean.
    fn stop(mut self) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        assert!(self.child.wait().unwrap().success());
        assert_clean(&self.images.path("vms/web.qcow2"));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_member_of_the_sockets_group_gets_to_the_exports_and_to_nothing_else() {
    if !geteuid().is_root() {
        return;
    }
    let server = Server::start();
    let exports = ["guests/web.sock", "guests/nbd.sock"];
    for (user, groups, is_member) in
        [(QEMU, &[GUESTS][..], true), (STRANGER, &[], false), (STRANGER, &[STRANGER + 1], false)]
    {
        for export in exports {
            assert_eq!(server.lets_in(user, groups, export), is_member, "{user} {groups:?}: {export}");
        }
        assert!(!server.lets_in(user, groups, "run/control.sock"), "{user} {groups:?}");
        let image = server.images.path("vms/web.qcow2");
        let read = as_user(user, groups, "cat").arg(image).output().unwrap();
        assert!(!read.status.success() && stderr(&read).contains("Permission denied"), "{}", stderr(&read));
        // Nor can it put a socket of its own in an export's place.
        let removed =
            as_user(user, groups, "rm").arg("-f").arg(server.images.path(exports[0])).status().unwrap();
        assert!(!removed.success());
    }
    // The permissions of the socket count, and not only those of its directory.
    fs::set_permissions(server.images.path("guests"), Permissions::from_mode(0o755)).unwrap();
    assert!(!server.lets_in(STRANGER, &[], exports[0]) && !server.lets_in(STRANGER, &[], exports[1]));
    assert!(server.lets_in(SERVER, &[], "run/control.sock"));
    server.stop();
}

#[test]
fn a_group_that_the_server_is_no_member_of_is_refused() {
    if !geteuid().is_root() {
        return;
    }
    let server = Server::start();
    for (group, part) in
        [(STRANGER.to_string(), "is not a member of"), ("nosuchgroup".into(), "there is no group")]
    {
        let socket = server.images.name("guests/2.sock");
        let refused = as_user(SERVER, &[GUESTS], &server.program)
            .args(["export", "add", "--control", &server.images.name("run/control.sock")])
            .args(["--vhost-user", &format!("web={socket},share,group={group}")])
            .output()
            .unwrap();
        assert_eq!(refused.status.code(), Some(1));
        assert!(stderr(&refused).contains(part), "{}", stderr(&refused));
        assert!(!Path::new(&socket).exists());
    }
    server.stop();
}

#[test]
fn a_guest_of_another_user_boots_from_its_disk_and_writes_to_it() {
    if !geteuid().is_root() {
        return;
    }
    let server = Server::start();
    let console = server.images.path("console");
    let qemu = as_user(QEMU, &[GUESTS], "qemu-system-x86_64")
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-accel", "tcg", "-serial", "stdio"])
        .args(["-object", "memory-backend-memfd,id=mem,size=64M,share=on"])
        .args(["-machine", "q35,memory-backend=mem", "-m", "64M"])
        .args(["-chardev", &format!("socket,id=web,path={}", server.images.name("guests/web.sock"))])
        .args(["-device", "vhost-user-blk-pci,chardev=web,bootindex=0"])
        .stdin(Stdio::null())
        .stdout(fs::File::create(&console).unwrap())
        .spawn()
        .unwrap();
    let mut qemu = Ended(qemu);
    wait_until("the guest", || {
        assert!(qemu.0.try_wait().unwrap().is_none(), "QEMU ended");
        fs::read(&console).unwrap().ends_with(b"K")
    });
    drop(qemu);
    let uri = format!("nbd+unix:///web?socket={}", server.images.name("guests/nbd.sock"));
    let sectors = tool_ok("qemu-io", ["-r", "-f", "raw", "-c", "read -v 512 16", &uri]);
    assert!(sectors.contains("31 c0 8e c0"), "{sectors}");
    server.stop();
}

/// What a tenant plants beside the disk `web.qcow2` in the directory `$1`: pipes, and then a link to the directory `$2` in place of that
/// of the clones of a snapshot. In a sticky directory it cannot remove what is the server's.
const PIPES: &str = r#"
cd "$1"
for name in web.s2.qcow2.vmsx .web.qcow2.dropped .web.qcow2.dropped.new; do
    rm -f $name; mkfifo $name || :
done 2>/dev/null
"#;
const LINK: &str = r#"cd "$1" && rm -rf .web.s2.qcow2.clones && ln -s "$2" .web.s2.qcow2.clones"#;

#[test]
fn what_a_tenant_plants_beside_a_disk_leads_the_server_to_nothing_else() {
    if !geteuid().is_root() {
        return;
    }
    let images = Images::new();
    fs::set_permissions(images.path("."), Permissions::from_mode(0o755)).unwrap();
    let program = images.path("vmstrata");
    fs::copy(env!("CARGO_BIN_EXE_vmstrata"), &program).unwrap();
    // As in planted.rs of the crate disk, with links as in a directory of services.
    let (victim, real) = (images.path("wants"), images.path("real.service"));
    fs::write(&real, "unit").unwrap();
    fs::create_dir(&victim).unwrap();
    let links = ["firewall.service", "sshd.service"];
    for link in links {
        symlink(&real, victim.join(link)).unwrap();
    }
    for path in [&victim, &real] {
        chown(path, Some(SERVER), Some(SERVER)).unwrap();
    }
    for (at, (owner, mode, is_served)) in [STRANGER, 0]
        .into_iter()
        .flat_map(|owner| [0o777, 0o1777].map(|mode| (owner, mode)))
        .flat_map(|(owner, mode)| [true, false].map(|is_served| (owner, mode, is_served)))
        .enumerate()
    {
        let case = format!("owner {owner}, {mode:o}, served: {is_served}");
        let (dir, run) = (images.path(&at.to_string()), images.path(&format!("run{at}")));
        for (path, owner, mode) in [(&dir, owner, mode), (&run, SERVER, 0o700)] {
            fs::create_dir(path).unwrap();
            chown(path, Some(owner), Some(owner)).unwrap();
            fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        }
        let (disk, control) = (dir.join("web.qcow2"), run.join("control.sock"));
        let disk = disk.to_str().unwrap();
        let server = |args: &[&str]| -> Output {
            let mut command = as_user(SERVER, &[], "timeout");
            if control.exists() {
                command.env("VMSTRATA_CONTROL", &control);
            }
            command.arg("30").arg(&program).args(args).output().unwrap()
        };
        for args in [
            &["create", disk, "1M"][..],
            &["snapshot", "create", disk, "--name", "s1"],
            &["snapshot", "create", disk, "--name", "s2"],
            &["snapshot", "create", disk, "--name", "s3"],
        ] {
            let done = server(args);
            assert!(done.status.success(), "{case}: {}", stderr(&done));
        }
        let served = is_served.then(|| {
            let mut command = as_user(SERVER, &[], &program);
            command.args(["serve", "--disk", &format!("path={disk}"), "--nbd"]);
            command.arg(format!("unix:{}", run.join("nbd.sock").display()));
            let child = command.arg("--runtime-dir").arg(&run).stdout(Stdio::null()).spawn().unwrap();
            wait_until("the server", || control.exists());
            Ended(child)
        });
        for (plant, args) in [
            (PIPES, &["snapshot", "delete", disk, "s1"][..]),
            (LINK, &["snapshot", "delete", disk, "s2"]),
            (LINK, &["snapshot", "prune", disk, "--keep", "last=1"]),
        ] {
            let mut tenant = as_user(STRANGER, &[], "sh");
            assert!(tenant.args(["-c", plant, "sh"]).arg(&dir).arg(&victim).status().unwrap().success());
            let done = server(args);
            // Refused or carried out, as it may, but not waited for.
            let why = stderr(&done);
            assert!(matches!(done.status.code(), Some(0 | 1)), "{case}: {args:?}: {:?}: {why}", done.status);
        }
        drop(served);
        let mut left: Vec<_> =
            fs::read_dir(&victim).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, links, "{case}");
        assert_eq!(fs::read(&real).unwrap(), b"unit", "{case}");
        assert_eq!(fs::metadata(&victim).unwrap().uid(), SERVER, "{case}");
        assert!(dir.join(".web.s2.qcow2.clones").is_symlink(), "{case}: it is not the server's to remove");
    }
}

/// The command of a unit of ours, for an instance, with what its environment says.
fn command_of(unit: &str, instance: &str, environment: &[(&str, &str)]) -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/systemd").join(unit);
    let text = fs::read_to_string(path).unwrap();
    let command = text.lines().find_map(|line| line.strip_prefix("ExecStart=")).unwrap();
    let words = command.split(' ').map(|word| {
        let variable = word.strip_prefix("${").and_then(|word| word.strip_suffix('}'));
        let value = variable.map(|name| environment.iter().find(|(other, _)| *other == name).unwrap().1);
        value.unwrap_or(word).replace("%i", instance)
    });
    words.collect()
}

#[test]
fn the_unit_for_snapshots_of_memory_takes_a_guest_of_another_user() {
    if !geteuid().is_root() {
        return;
    }
    let server = Server::start();
    let shm = tempfile::tempdir_in("/dev/shm").unwrap();
    // As the packaging makes them.
    let monitors = server.images.path("monitors");
    fs::create_dir(&monitors).unwrap();
    for dir in [&monitors, &shm.path().to_owned()] {
        chown(dir, Some(0), Some(GUESTS)).unwrap();
        fs::set_permissions(dir, Permissions::from_mode(0o3770)).unwrap();
    }
    let vault = server.images.path("vault");
    fs::create_dir(&vault).unwrap();
    chown(&vault, Some(SERVER), Some(SERVER)).unwrap();
    fs::set_permissions(&vault, Permissions::from_mode(0o700)).unwrap();
    let (monitor, memory) = (monitors.join("web.qmp"), shm.path().join("web.memory"));
    let mut qemu = as_user(QEMU, &[GUESTS], "sh");
    qemu.args(["-c", "umask 0007; exec \"$@\"", "sh", "qemu-system-x86_64"])
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-accel", "tcg", "-m", "64M"])
        .args([
            "-object",
            &format!("memory-backend-file,id=mem,size=64M,share=on,mem-path={}", memory.display()),
        ])
        .args(["-machine", "q35,memory-backend=mem"])
        .args(["-chardev", &format!("socket,id=web,path={}", server.images.name("guests/web.sock"))])
        .args(["-device", "vhost-user-blk-pci,chardev=web"])
        .args(["-qmp", &format!("unix:{},server=on,wait=off", monitor.display())]);
    let _qemu = Ended(qemu.stdin(Stdio::null()).spawn().unwrap());
    wait_until("the monitor", || monitor.exists());
    let environment =
        [("VMSTRATA_QMP", monitor.to_str().unwrap()), ("VMSTRATA_EVERY", "1s"), ("VMSTRATA_KEEP", "last=2")];
    let command = command_of("vmstrata-vm-snapshot@.service", "web", &environment);
    let log = server.images.path("log");
    let file = fs::File::create(&log).unwrap();
    let mut unit = as_user(SERVER, &[GUESTS], "sh");
    unit.args(["-c", "umask 0077; exec \"$@\"", "sh", server.program.to_str().unwrap()]).args(&command[1..]);
    unit.arg("--copies=1").env("VMSTRATA_VAULT", &vault);
    unit.env("VMSTRATA_CONTROL", server.images.path("run/control.sock"));
    let mut unit = unit.stdout(file.try_clone().unwrap()).stderr(file).spawn().unwrap();
    let said = || fs::read_to_string(&log).unwrap();
    wait_until("two snapshots", || {
        assert!(unit.try_wait().unwrap().is_none() && !said().contains("no snapshot"), "{}", said());
        said().matches("and 1 disk taken").count() > 1
    });
    kill_process(Pid::from_child(&unit), Signal::TERM).unwrap();
    assert!(unit.wait().unwrap().success(), "{}", said());
    server.stop();
}

/// A process that ends with the test.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
