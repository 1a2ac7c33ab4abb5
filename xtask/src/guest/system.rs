//! A root disk with Debian's systemd as init, and vmstrata installed with the units of `packaging/`.
//!
//! ```text
//!   packages ──► tree ──┬── vmstrata, its units and configuration, an image to serve ──► ext4
//!                       └── units-test.service: uses them, and reports on the console
//! ```

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::{image, make_executable, must, packages, target};
use crate::bench::server::vmstrata;
use crate::chain::pattern::{self, Writer};

/// Bytes of the root disk.
const ROOT_SIZE: u64 = 768 << 20;
/// Bytes of the disk that is served in the guest.
const SERVED_SIZE: usize = 8 << 20;
const UNITS: &str = "usr/lib/systemd/system";
const TEST: &str = include_str!("system-test.sh");
const TEST_SERVICE: &str = "\
[Unit]
Description=Uses vmstrata as its units run it
After=sockets.target

[Service]
Type=oneshot
ExecStart=/usr/lib/units-test
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS0
";
const TEST_TARGET: &str = "\
[Unit]
Description=vmstrata under systemd
Requires=basic.target units-test.service
After=basic.target
";
const CONFIG: &str = r#"
nbd = [{ address = "unix:/run/vmstrata-guests/nbd.sock", rw = true }]
nbd-group = "vmstrata-guests"

[[disk]]
path = "/srv/vms/web.qcow2"
name = "web"
"#;

/// Makes the root disk in `dir`; returns the raw image.
///
/// # Errors
/// When packages cannot be fetched, or a tool is missing.
pub fn make(dir: &Path) -> Result<PathBuf> {
    let cache = target()?.join("guest");
    let lock = packages::lock(&cache)?;
    let system = packages::system(&cache)?;
    drop(lock);
    let tree = dir.join("system");
    must(Command::new("cp").arg("-a").arg(&system).arg(&tree))?;
    install(&tree)?;
    let raw = dir.join("system.raw");
    image::make_ext4(&tree, &raw, ROOT_SIZE)?;
    fs::remove_dir_all(tree)?;
    Ok(raw)
}

/// What the packages' own scripts, an administrator, and the test put into a system.
fn install(tree: &Path) -> Result<()> {
    let put = |path: &str, text: &str| -> Result<PathBuf> {
        let path = tree.join(path);
        fs::create_dir_all(path.parent().context("a directory")?)?;
        fs::write(&path, text)?;
        Ok(path)
    };
    put("etc/passwd", "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n")?;
    put("etc/group", "root:x:0:\ntty:x:5:\nnogroup:x:65534:\n")?;
    put("etc/machine-id", "")?;
    for mount_point in ["run", "var/tmp", "root", "home"] {
        fs::create_dir_all(tree.join(mount_point))?;
    }
    let init = tree.join("usr/sbin/init");
    if init.symlink_metadata().is_ok() {
        fs::remove_file(&init)?;
    }
    symlink("/usr/lib/systemd/systemd", init)?;
    put(&format!("{UNITS}/units-test.service"), TEST_SERVICE)?;
    put(&format!("{UNITS}/units-test.target"), TEST_TARGET)?;
    make_executable(&put("usr/lib/units-test", TEST)?)?;

    // vmstrata itself, as packaging/ has it; its socket is enabled.
    let packaging = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging");
    for unit in ["vmstrata.service", "vmstrata-control.socket", "vmstrata-prune@.service"] {
        fs::copy(packaging.join("systemd").join(unit), tree.join(UNITS).join(unit))?;
    }
    for kind in ["sysusers.d", "tmpfiles.d"] {
        let into = tree.join("usr/lib").join(kind);
        fs::create_dir_all(&into)?;
        fs::copy(packaging.join(kind).join("vmstrata.conf"), into.join("vmstrata.conf"))?;
    }
    let root = format!("--root={}", tree.display());
    must(Command::new("systemd-sysusers").arg(root).arg(packaging.join("sysusers.d/vmstrata.conf")))?;
    let enabled = tree.join("etc/systemd/system/sockets.target.wants");
    fs::create_dir_all(&enabled)?;
    let socket = "vmstrata-control.socket";
    symlink(Path::new("/").join(UNITS).join(socket), enabled.join(socket))?;
    must(Command::new("strip").arg("-o").arg(tree.join("usr/bin/vmstrata")).arg(vmstrata()))?;
    put("etc/vmstrata/vmstrata.toml", CONFIG)?;
    write_disk(&tree.join("srv"))
}

/// The image, beside it what it holds, and what the test writes to it.
fn write_disk(srv: &Path) -> Result<()> {
    fs::create_dir_all(srv.join("vms"))?;
    for (number, name) in ["before.raw", "after.raw"].into_iter().enumerate() {
        let mut bytes = vec![0; SERVED_SIZE];
        pattern::fill(&mut bytes, 0, Writer::client(number as u16), 0);
        fs::write(srv.join(name), bytes)?;
    }
    let mut convert = Command::new("qemu-img");
    convert.args(["convert", "-f", "raw", "-O", "qcow2"]);
    must(convert.arg(srv.join("before.raw")).arg(srv.join("vms/web.qcow2"))).map(drop)
}
