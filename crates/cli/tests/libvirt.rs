//! Guests of a real libvirtd on disks of ours: what `serve` prints, what `docs/libvirt.md` says, and sockets that QEMU may open.
//!
//! Each test has a libvirtd of its own, in session mode with all its files in a scratch directory; that of the last one is
//! privileged, in a mount namespace. Root's tests run it as `nobody`, for session mode is not for root. Guests are emulated.

use crate::support;
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use crate::support::server::Server;
use crate::support::{Images, stderr, wait_until};
use rustix::process::{Pid, Signal, getegid, geteuid, kill_process};
use serde_json::Value;

/// Whom session mode is for when root runs the tests: `nobody`, whom every host has.
const NOBODY: u32 = 65_534;

/// Again and again: writes its second sector and says K at the first serial port.
#[rustfmt::skip]
const BOOT_SECTOR: [u8; 31] = [
    0x31, 0xc0,             // xor ax, ax
    0x8e, 0xc0,             // mov es, ax
    0xfb,                   // sti
    0x52,                   // again: push dx
    0xbb, 0x00, 0x7c,       // mov bx, 0x7c00: this sector
    0xb8, 0x01, 0x03,       // mov ax, 0x0301: write one sector
    0xb9, 0x02, 0x00,       // mov cx, 0x0002: to cylinder 0, sector 2
    0xb6, 0x00,             // mov dh, 0: head 0; the drive is in dl
    0xcd, 0x13,             // int 0x13
    0x72, 0x06,             // jc after the next three
    0xba, 0xf8, 0x03,       // mov dx, 0x3f8
    0xb0, b'K',             // mov al, 'K'
    0xee,                   // out dx, al
    0x5a,                   // pop dx
    0xf4,                   // hlt, until the clock ticks
    0xeb, 0xe6,             // jmp again
];

/// A page of the documentation, for this test's directories.
const DOCS: &str = include_str!("../../../docs/libvirt.md");

/// Whether libvirt is installed; if not, says that the test is skipped.
fn is_there() -> bool {
    let missing = ["libvirtd", "virtlogd", "virsh"]
        .into_iter()
        .find(|program| Command::new(program).arg("--version").output().is_err());
    if let Some(program) = missing {
        eprintln!("skipped: {program} is not installed");
    }
    missing.is_none()
}

/// A libvirtd in session mode; it ends with its guests when dropped.
struct Libvirt {
    images: Images,
    daemons: Vec<Child>,
}

impl Libvirt {
    fn start() -> Self {
        let images = Images::new();
        fs::set_permissions(images.path("."), Permissions::from_mode(0o755)).unwrap();
        for (dir, is_theirs) in [
            ("bin", false),
            ("vms", false),
            ("guests", false),
            ("lib/images", true),
            ("lib/qemu/save", true),
            ("home", true),
            ("run", true),
        ] {
            fs::create_dir_all(images.path(dir)).unwrap();
            fs::set_permissions(images.path(dir), Permissions::from_mode(0o755)).unwrap();
            if is_theirs && geteuid().is_root() {
                chown(images.path(dir), Some(NOBODY), Some(NOBODY)).unwrap();
            }
        }
        let here = images.name("");
        let drop = "setpriv --reuid=65534 --regid=65534 --clear-groups";
        let user = if geteuid().is_root() { drop } else { "" };
        let virsh = format!(
            "exec {user} env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME={here}home XDG_RUNTIME_DIR={here}run \
             XDG_CONFIG_HOME={here}home/config XDG_CACHE_HOME={here}home/cache \
             LIBVIRT_DEFAULT_URI=qemu:///session"
        );
        let mut libvirt = Self { images, daemons: Vec::new() };
        libvirt.program("as-user", &format!("{virsh} \"$@\""));
        // The server hears of a killed guest a moment later.
        libvirt.program(
            "virsh",
            "as-user timeout 60 virsh \"$@\" || exit\n\
             [ $1 != destroy ] || while vmstrata status 2>/dev/null | grep -q 'guest attached'; do sleep 0.02; done",
        );
        // What stands for the service manager.
        libvirt.program("chown", "exit 0");
        libvirt.program(
            "systemd-run",
            &format!(
                "while [ $1 != -- ]; do shift; done\nshift\n\
                 (\"$@\" --runtime-dir {here}adopt >/dev/null 2>&1 & echo $! >{here}adopt.pid; wait; echo >{here}adopt.ended) \
                 >/dev/null 2>&1 &\nuntil [ -S {here}guests/adopt.sock ]; do sleep 0.02; done"
            ),
        );
        libvirt.program(
            "systemctl",
            &format!("kill $(cat {here}adopt.pid)\nuntil [ -e {here}adopt.ended ]; do sleep 0.02; done"),
        );
        for daemon in ["virtlogd", "libvirtd"] {
            let mut command = Command::new(libvirt.images.path("bin/as-user"));
            command.arg(daemon).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            libvirt.daemons.push(command.spawn().unwrap());
            let socket = libvirt.images.path("run/libvirt").join(match daemon {
                "virtlogd" => "virtlogd-sock",
                _ => "libvirt-sock",
            });
            wait_until(daemon, || socket.exists());
        }
        libvirt
    }

    /// A program for [`Libvirt::shell`].
    fn program(&self, name: &str, script: &str) {
        let path = self.images.path("bin").join(name);
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
    }

    /// What the documentation says, with this test's directories and users.
    fn here(&self, text: &str) -> String {
        let (group, nbd_group) = if geteuid().is_root() {
            ("owner=nobody".into(), "--nbd-owner nobody")
        } else {
            (format!("group={}", getegid().as_raw()), "")
        };
        text.replace("/srv/vms", &self.images.name("vms"))
            .replace("/run/vmstrata-guests", &self.images.name("guests"))
            .replace("/var/lib/libvirt", &self.images.name("lib"))
            .replace("--nbd-group vmstrata-guests", nbd_group)
            .replace("group=vmstrata-guests", &group)
            // Its guests hear no ACPI.
            .replace("virsh shutdown", "virsh destroy")
    }

    /// Runs a script of the documentation.
    fn shell(&self, script: &str) -> Output {
        let path = format!("{}:{}", self.images.name("bin"), std::env::var("PATH").unwrap());
        let script = format!("umask 022; set -ex\n{}", self.here(script));
        let command = ["-c", &script];
        Command::new("bash")
            .args(command)
            .current_dir(self.images.path("vms"))
            .env("PATH", path)
            .output()
            .unwrap()
    }

    fn shell_ok(&self, script: &str) -> String {
        let output = self.shell(script);
        assert!(output.status.success(), "{}", stderr(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Starts a server whose sockets libvirt's QEMU may open, and makes it the one that `vmstrata` asks.
    fn serve(&self, runtime: tempfile::TempDir, args: &str) -> Server {
        let args = self.here(args);
        let control = runtime.path().join("control.sock");
        let program = env!("CARGO_BIN_EXE_vmstrata");
        self.program("vmstrata", &format!("VMSTRATA_CONTROL={} exec {program} \"$@\"", control.display()));
        Server::start_in(runtime, &args.split_whitespace().collect::<Vec<_>>())
    }

    /// Defines a guest, as the schema of libvirt has it.
    fn define(&self, name: &str, memory: &str, disks: &str) {
        let xml = domain(name, memory, disks, &self.console(name));
        fs::write(self.images.path("vms").join(format!("{name}.xml")), xml).unwrap();
        self.shell_ok(&format!("virsh define --validate {name}.xml"));
    }

    fn console(&self, name: &str) -> PathBuf {
        self.images.path("home").join(name)
    }

    /// How often the guest has written to its disk since it was started.
    fn written(&self, name: &str) -> u64 {
        fs::metadata(self.console(name)).map_or(0, |found| found.len())
    }

    /// Waits until the guest has written to its disk once more.
    fn await_write(&self, name: &str) {
        let mut before = self.written(name);
        wait_until("a write of the guest", || {
            let now = self.written(name);
            let more = now > before;
            // It was started again.
            before = before.min(now);
            more
        });
    }
}

impl Drop for Libvirt {
    fn drop(&mut self) {
        let bin = self.images.path("bin");
        let guests = "for guest in $(as-user virsh list --name); do as-user virsh destroy $guest; done";
        let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
        let _ = Command::new("timeout").args(["60", "sh", "-c", guests]).env("PATH", path).output();
        for daemon in self.daemons.iter_mut().rev() {
            let _ = kill_process(Pid::from_child(daemon), Signal::TERM);
            let _ = daemon.wait();
        }
        let adopt = fs::read_to_string(self.images.path("adopt.pid")).ok();
        let pid = adopt.filter(|_| !self.images.path("adopt.ended").exists());
        if let Some(pid) = pid.and_then(|text| Pid::from_raw(text.trim().parse().ok()?)) {
            let _ = kill_process(pid, Signal::TERM);
        }
    }
}

/// A disk that boots [`BOOT_SECTOR`].
fn boot_disk(images: &Images, name: &str) -> PathBuf {
    let disk = images.create(name, &["64M"]);
    let mut sector = [0; 512];
    sector[..BOOT_SECTOR.len()].copy_from_slice(&BOOT_SECTOR);
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    let boot = images.path("boot");
    fs::write(&boot, sector).unwrap();
    images.write_layer(name, &[&format!("write -s {} 0 512", boot.display())]);
    disk
}

fn domain(name: &str, memory: &str, disks: &str, console: &Path) -> String {
    format!(
        "<domain type='qemu'>
  <name>{name}</name>
  <memory unit='MiB'>64</memory>
  {memory}
  <os><type arch='x86_64' machine='q35'>hvm</type></os>
  <devices>
    {disks}
    <controller type='usb' model='none'/>
    <serial type='file'><source path='{}'/></serial>
    <memballoon model='none'/>
  </devices>
</domain>",
        console.display()
    )
}

/// The XML that a ready server prints for a disk: what is for the domain, and what is for its devices.
fn printed<'a>(server: &'a Server, disk: usize, export: &str) -> (&'a str, &'a str) {
    let xml = server.ready["disks"][disk][export][0]["libvirt"].as_str().unwrap();
    xml.split_once("<!-- inside <devices>: -->").unwrap_or(("", xml))
}

fn scratch() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

#[test]
fn a_guest_starts_from_the_printed_xml_and_outlives_its_server() {
    if !is_there() {
        return;
    }
    let libvirt = Libvirt::start();
    boot_disk(&libvirt.images, "vms/web.qcow2");
    boot_disk(&libvirt.images, "vms/data.qcow2");
    let sockets = "--vhost-user web=/run/vmstrata-guests/web.sock,group=vmstrata-guests \
                   --vhost-user data=/run/vmstrata-guests/data.sock,group=vmstrata-guests \
                   --nbd unix:/run/vmstrata-guests/nbd.sock,rw --nbd-group vmstrata-guests";
    let args = format!("--disk path=/srv/vms/web.qcow2 --disk path=/srv/vms/data.qcow2 {sockets}");
    let server = libvirt.serve(scratch(), &args);
    let ((memory, web), (_, data)) = (printed(&server, 0, "vhost_user"), printed(&server, 1, "vhost_user"));
    libvirt.define("web", memory, &format!("{web}{data}"));
    let listed = libvirt.shell_ok("virsh domblklist web");
    assert!(listed.contains(" vda ") && listed.contains(" vdb "), "{listed}");
    libvirt.shell_ok("virsh start web");
    libvirt.await_write("web");
    let server = libvirt.serve(server.crash(), &args);
    libvirt.await_write("web");
    libvirt.shell_ok("virsh destroy web; virsh undefine web");

    // Over NBD it has to be told to go on.
    let (web, data) = (printed(&server, 0, "nbd").1, printed(&server, 1, "nbd").1);
    libvirt.define("web", "", &format!("{web}{data}"));
    libvirt.shell_ok("virsh start web");
    libvirt.await_write("web");
    let runtime = server.crash();
    wait_until("the guest to stop", || libvirt.shell_ok("virsh domstate web --reason").contains("I/O error"));
    let _server = libvirt.serve(runtime, &args);
    let before = libvirt.written("web");
    wait_until("the guest to go on", || {
        // At the first time QEMU only begins to connect.
        libvirt.shell("virsh resume web");
        libvirt.written("web") > before
    });
}

/// Rows of the table: what libvirt does not do, what it says, and what does it.
fn rows() -> Vec<[&'static str; 3]> {
    let rows = DOCS.lines().filter(|line| line.starts_with("| `virsh "));
    rows.map(|row| {
        let cells: Vec<&str> = row.trim_matches('|').split(" | ").map(str::trim).collect();
        <[&str; 3]>::try_from(cells).unwrap_or_else(|cells| panic!("{cells:?}"))
    })
    .collect()
}

/// The guest `web`, which runs on its disk and has written to it, and the server of that.
fn start_web(libvirt: &Libvirt) -> Server {
    let server = libvirt.serve(
        scratch(),
        "--disk path=/srv/vms/web.qcow2 --vhost-user web=/run/vmstrata-guests/web.sock,group=vmstrata-guests",
    );
    let (memory, disk) = printed(&server, 0, "vhost_user");
    libvirt.define("web", memory, disk);
    libvirt.shell_ok("virsh start web");
    libvirt.await_write("web");
    server
}

#[test]
fn what_virsh_cannot_do_is_as_documented_and_ours_does_it() {
    if !is_there() {
        return;
    }
    let libvirt = Libvirt::start();
    boot_disk(&libvirt.images, "vms/web.qcow2");
    let _server = start_web(&libvirt);
    let is_the_documented = libvirt.shell_ok("virsh --version").starts_with("9.0.");
    let rows = rows();
    assert!(rows.len() > 10, "{rows:?}");
    for [command, message, ours] in rows {
        let refused = libvirt.shell(command.trim_matches('`'));
        assert!(!refused.status.success(), "{command}");
        if is_the_documented {
            assert!(stderr(&refused).contains(message), "{command}: {}", stderr(&refused));
        }
        // Those that are more than a hint.
        for ours in ours.split('`').filter(|text| text.starts_with("vmstrata ") && text.contains("web")) {
            libvirt.shell_ok(ours);
        }
    }
    libvirt.await_write("web");
}

/// The scripts below a heading.
fn scripts(heading: &str) -> Vec<&'static str> {
    let (_, section) = DOCS.split_once(&format!("\n## {heading}\n")).unwrap();
    let section = section.split("\n## ").next().unwrap();
    section.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect()
}

#[test]
fn memory_and_disks_go_back_to_one_instant_as_documented() {
    if !is_there() {
        return;
    }
    let libvirt = Libvirt::start();
    let path = boot_disk(&libvirt.images, "vms/web.qcow2");
    let server = start_web(&libvirt);
    let [take, go_back] = scripts("Memory and disks at one instant").try_into().unwrap();
    // Nothing goes on between the two.
    let paused = take.replace("vmstrata snapshot", "virsh domstate web --reason\nvmstrata snapshot");
    let said = libvirt.shell_ok(&paused);
    assert!(said.contains("paused (creating snapshot)"), "{said}");
    libvirt.await_write("web");
    libvirt.shell_ok(go_back);
    libvirt.await_write("web");
    let listed: Value =
        serde_json::from_str(&server.ask_ok(["snapshot", "list", "--json", path.to_str().unwrap()])).unwrap();
    assert_eq!(listed["snapshots"][0]["name"], "s1", "{listed}");
}

#[test]
fn a_running_guest_is_adopted_and_given_back_as_documented() {
    if !is_there() {
        return;
    }
    let libvirt = Libvirt::start();
    let theirs = boot_disk(&libvirt.images, "lib/images/old.qcow2");
    let for_qemu = |path: &Path| {
        if geteuid().is_root() {
            chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
        }
    };
    for_qemu(&theirs);
    libvirt.images.create("vms/other.qcow2", &["1M"]);
    let server = libvirt
        .serve(scratch(), "--disk path=/srv/vms/other.qcow2 --nbd unix:/run/vmstrata-guests/nbd.sock,rw");
    let memory = "<memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>";
    let disk = format!(
        "<disk type='file' device='disk'><driver name='qemu' type='qcow2'/><source file='{}'/>\
         <target dev='vda' bus='virtio'/></disk>",
        theirs.display()
    );
    libvirt.define("old", memory, &disk);
    libvirt.shell_ok("virsh start old");
    libvirt.await_write("old");
    let [adopt, next_start] = scripts("Adopt a guest that runs on a qcow2 file").try_into().unwrap();
    libvirt.shell_ok(adopt);
    libvirt.await_write("old");
    // It writes to ours, and no more to its own.
    fs::write(&theirs, "").unwrap();
    libvirt.await_write("old");
    let [give_back, give_back_running] = scripts("Give it back").try_into().unwrap();
    libvirt.shell_ok(give_back_running);
    libvirt.await_write("old");
    let adopt_again = adopt.lines().last().unwrap();
    libvirt.shell_ok(adopt_again);
    libvirt.await_write("old");
    libvirt.shell_ok(next_start);
    libvirt.await_write("old");
    let status = server.ask_ok(["status"]);
    assert!(status.contains("guest attached"), "{status}");
    // A privileged libvirtd does this itself.
    for_qemu(&libvirt.images.path("vms/old.qcow2"));
    libvirt.shell_ok(give_back);
    libvirt.await_write("old");
    libvirt.shell_ok("virsh destroy old");
    support::assert_clean(&libvirt.images.path("vms/old.qcow2"));
}

/// Of no host, and so without members there.
const GUESTS: u32 = 61_010;

/// A privileged libvirtd with Debian's user and files of its own, that starts the guest of a file; `$1` is a scratch directory.
const STOCK: &str = r#"
mount --make-rprivate /
for dir in /run /var/lib /var/cache /var/log /etc/libvirt; do mount -t tmpfs none $dir; done
printf 'security_driver = "none"\ncgroup_controllers = []\nremember_owner = 0\n' >/etc/libvirt/qemu.conf
for file in passwd group; do
    cp /etc/$file $1
    mount --bind $1/$file /etc/$file
done
# libvirt-daemon-system makes the user.
id libvirt-qemu || {
    echo libvirt-qemu:x:64055:64055::/:/usr/sbin/nologin >>/etc/passwd
    echo libvirt-qemu:x:64055: >>/etc/group
}
virtlogd &
libvirtd 2>/dev/null &
until [ -S /run/libvirt/virtlogd-sock ] && [ -S /run/libvirt/libvirt-sock ]; do sleep 0.05; done
export LIBVIRT_DEFAULT_URI=qemu:///system
virsh define --validate $1/web.xml
# As usermod does, while libvirtd runs.
echo "guests:x:61010:libvirt-qemu" >>/etc/group
virsh start web
until [ -s $1/console ]; do sleep 0.05; done
virsh list
"#;

#[test]
fn a_guest_of_a_stock_libvirt_starts_once_its_user_is_in_the_sockets_group() {
    if !is_there() {
        return;
    }
    let can = |program: &str, args: &[&str]| {
        Command::new(program).args(args).output().is_ok_and(|output| output.status.success())
    };
    let alone = ["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"];
    if !geteuid().is_root() || !can("unshare", &[&alone[..], &["true"]].concat()) {
        eprintln!("skipped: this needs root and namespaces");
        return;
    }
    let images = Images::new();
    fs::set_permissions(images.path("."), Permissions::from_mode(0o755)).unwrap();
    let disk = boot_disk(&images, "web.qcow2");
    let socket = images.name("web.sock");
    let disk = format!("path={}", disk.display());
    let server = Server::start(&["--disk", &disk, "--vhost-user", &format!("web={socket},group={GUESTS}")]);
    if can("id", &["libvirt-qemu"]) {
        // On this host it is no member.
        let warning = format!("which may not connect to {socket} (root:{GUESTS}, 0660)");
        assert!(server.log().contains(&warning), "{}", server.log());
        assert!(server.log().contains(&format!("usermod -aG {GUESTS} libvirt-qemu")), "{}", server.log());
    }
    let (memory, disk) = printed(&server, 0, "vhost_user");
    fs::write(images.path("web.xml"), domain("web", memory, disk, &images.path("console"))).unwrap();
    let script = ["100", "unshare"].into_iter().chain(alone);
    let run = support::tool("timeout", script.chain(["bash", "-exc", STOCK, "bash", &images.name("")]));
    assert!(run.status.success(), "{}", stderr(&run));
    let found = fs::metadata(&socket).unwrap();
    assert_eq!(
        (found.uid(), found.gid(), found.mode() & 0o777),
        (0, GUESTS, 0o660),
        "libvirt leaves it alone"
    );
}
