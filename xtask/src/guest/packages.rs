//! Debian packages the guest is made of: fetched by apt, unpacked by dpkg, never installed on the host.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// An unpacked kernel package.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// The bootable image.
    pub image: PathBuf,
    /// `lib/modules/VERSION`.
    pub modules: PathBuf,
}

/// Programs of the guest; the libraries they need come with them.
const PROGRAMS: [&str; 9] =
    ["base-files", "bash", "coreutils", "e2fsprogs", "findutils", "grep", "mount", "qemu-guest-agent", "sed"];

/// What is added for the works: mostly files that are read.
const WORKSHOP: [&str; 10] = [
    "busybox-static",
    "cpp-12",
    "gcc-12",
    "git",
    "libllvm14",
    "libpython3.11-stdlib",
    "python3.11-minimal",
    "sqlite3",
    "vim-runtime",
    "zlib1g",
];

/// Databases that flush often.
const DATABASES: [&str; 6] =
    ["busybox-static", "postgresql-15", "postgresql-client-15", "sqlite3", "tzdata", "zlib1g"];

/// A benchmark of RocksDB, `db_bench`, and a library whose package is not named like one.
const ROCKSDB: [&str; 2] = ["rocksdb-tools", "zlib1g"];

/// What a system has besides, in which Debian's service manager is init.
const SYSTEM_PROGRAMS: [&str; 3] = ["libnbd-bin", "systemd", "zlib1g"];

/// Holds off other processes that would build the same guest; freed on drop.
///
/// # Errors
/// When the directory cannot be made or locked.
pub fn lock(dir: &Path) -> Result<File> {
    fs::create_dir_all(dir)?;
    let file = File::create(dir.join("lock"))?;
    file.lock()?;
    Ok(file)
}

/// Debian's current cloud kernel.
///
/// # Errors
/// When it cannot be fetched.
pub fn kernel(dir: &Path) -> Result<Kernel> {
    let tree = dir.join("kernel");
    once(&tree, |partial| {
        let apt = Apt::default();
        let package = dependency(&apt, "linux-image-cloud-amd64", "linux-image-")?;
        unpack(&apt, &[package], partial)
    })?;
    unpacked_kernel(&tree)
}

/// The package that `package` depends on whose name begins with `prefix`.
///
/// # Errors
/// When there is none.
pub(super) fn dependency(apt: &Apt, package: &str, prefix: &str) -> Result<String> {
    let depends = apt.run("apt-cache", &["depends", package])?;
    let mut names = depends.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
    let name = names.find(|name| name.starts_with(prefix));
    Ok(name.with_context(|| format!("{package} depends on no {prefix}*"))?.to_owned())
}

/// Where things are in a directory that kernel packages were unpacked in.
///
/// # Errors
/// When something is not there.
pub(super) fn unpacked_kernel(tree: &Path) -> Result<Kernel> {
    let modules = ["usr/lib/modules", "lib/modules"].map(|modules| tree.join(modules));
    let modules = modules.iter().find(|path| path.is_dir()).context("the kernel package has no modules")?;
    let modules = only_child(modules, "")?;
    // Later kernels have their image among the modules.
    let image = only_child(&tree.join("boot"), "vmlinuz-").or_else(|_| only_child(&modules, "vmlinuz"))?;
    Ok(Kernel { image, modules })
}

/// apt, with options of its own.
#[derive(Debug, Default)]
pub(super) struct Apt {
    /// `name=value` each.
    pub(super) options: Vec<String>,
}

impl Apt {
    /// What `program` (apt-get, apt-cache) prints.
    ///
    /// # Errors
    /// When it fails.
    pub(super) fn run(&self, program: &str, args: &[&str]) -> Result<String> {
        self.run_in(Path::new("."), program, args)
    }

    fn run_in(&self, dir: &Path, program: &str, args: &[&str]) -> Result<String> {
        let mut command = Command::new(program);
        self.options.iter().for_each(|option| _ = command.args(["-o", option]));
        let output = command.args(args).current_dir(dir).output().with_context(|| program.to_owned())?;
        let failure = || String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "{program} {args:?} (apt-get update may help): {}", failure());
        Ok(String::from_utf8(output.stdout)?)
    }
}

/// The bytes of a module named by its path below `kernel/drivers`; `None` when it is built in.
///
/// # Errors
/// When it cannot be read or decompressed.
pub fn module(kernel: &Kernel, name: &str) -> Result<Option<Vec<u8>>> {
    let path = kernel.modules.join("kernel/drivers").join(name);
    if path.is_file() {
        return Ok(Some(fs::read(&path)?));
    }
    let compressed = path.with_extension("ko.xz");
    if !compressed.is_file() {
        return Ok(None);
    }
    let output = Command::new("xz").arg("-dc").arg(&compressed).output().context("xz (package xz-utils)")?;
    ensure!(output.status.success(), "cannot decompress {}", compressed.display());
    Ok(Some(output.stdout))
}

/// A statically linked busybox.
///
/// # Errors
/// When it cannot be fetched.
pub fn busybox(dir: &Path) -> Result<PathBuf> {
    let tree = dir.join("busybox");
    once(&tree, |partial| unpack(&Apt::default(), &["busybox-static".to_owned()], partial))?;
    let places = ["usr/bin/busybox", "bin/busybox"].map(|place| tree.join(place));
    places.into_iter().find(|path| path.is_file()).context("busybox-static holds no busybox")
}

/// A directory tree with Debian's shell and core utilities, everything under `usr`.
///
/// # Errors
/// When packages cannot be fetched.
pub fn userland(dir: &Path) -> Result<PathBuf> {
    tree(&dir.join("userland"), &PROGRAMS)
}

/// The same with systemd and an NBD client.
///
/// # Errors
/// When packages cannot be fetched.
pub fn system(dir: &Path) -> Result<PathBuf> {
    let programs: Vec<&str> = PROGRAMS.iter().chain(&SYSTEM_PROGRAMS).copied().collect();
    tree(&dir.join("system"), &programs)
}

/// The same with what the works need: programs, and the files that such machines have.
///
/// # Errors
/// When packages cannot be fetched.
pub fn workshop(dir: &Path) -> Result<PathBuf> {
    let apt = Apt::default();
    let headers = dependency(&apt, "linux-headers-cloud-amd64", "linux-headers-")?;
    let headers = dependency(&apt, &headers, "linux-headers-")?;
    let programs: Vec<&str> = PROGRAMS.iter().chain(&WORKSHOP).copied().chain([headers.as_str()]).collect();
    tree(&dir.join("workshop"), &programs)
}

/// The same as [`userland`] with PostgreSQL and SQLite.
///
/// # Errors
/// When packages cannot be fetched.
pub fn databases(dir: &Path) -> Result<PathBuf> {
    let programs: Vec<&str> = PROGRAMS.iter().chain(&DATABASES).copied().collect();
    tree(&dir.join("databases"), &programs)
}

/// RocksDB's tools and the libraries they need.
///
/// # Errors
/// When packages cannot be fetched.
pub fn rocksdb(dir: &Path) -> Result<PathBuf> {
    tree(&dir.join("rocksdb"), &ROCKSDB)
}

fn tree(tree: &Path, programs: &[&str]) -> Result<PathBuf> {
    once(tree, |partial| {
        unpack(&Apt::default(), &with_libraries(programs)?, partial)?;
        for top in ["bin", "sbin", "lib", "lib64"] {
            merge_into_usr(partial, top)?;
        }
        for mount_point in ["dev", "proc", "sys", "tmp", "files", "work"] {
            fs::create_dir_all(partial.join(mount_point))?;
        }
        Ok(())
    })?;
    Ok(tree.to_owned())
}

/// Makes `tree` by `make` unless it is there; a half-made one is never taken for whole.
pub(super) fn once(tree: &Path, make: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    if tree.is_dir() {
        return Ok(());
    }
    let partial = tree.with_extension("partial");
    if partial.exists() {
        fs::remove_dir_all(&partial)?;
    }
    fs::create_dir_all(&partial)?;
    make(&partial)?;
    Ok(fs::rename(&partial, tree)?)
}

/// The programs and every library they depend on.
fn with_libraries(programs: &[&str]) -> Result<Vec<String>> {
    let mut args = vec!["depends", "--recurse"];
    args.extend(["--no-recommends", "--no-suggests", "--no-conflicts", "--no-breaks"]);
    args.extend(["--no-replaces", "--no-enhances"]);
    args.extend(programs);
    let closure = Apt::default().run("apt-cache", &args)?;
    // The closure also holds what only maintainer scripts need (perl, debconf): libraries are enough to run.
    let wanted = |name: &&str| {
        programs.contains(name)
            || (name.starts_with("lib") && !name.contains("perl") && !name.ends_with("-dev"))
    };
    let real = |line: &&str| line.starts_with(|first: char| first.is_ascii_lowercase());
    let mut packages: Vec<String> = closure.lines().filter(real).filter(wanted).map(str::to_owned).collect();
    packages.sort();
    packages.dedup();
    Ok(packages)
}

/// Fetches packages and unpacks them.
pub(super) fn unpack(apt: &Apt, packages: &[String], into: &Path) -> Result<()> {
    let debs = tempfile::tempdir_in(into.parent().context("a directory to fetch into")?)?;
    let mut args = vec!["download"];
    args.extend(packages.iter().map(String::as_str));
    apt.run_in(debs.path(), "apt-get", &args)?;
    for deb in fs::read_dir(debs.path())? {
        let deb = deb?.path();
        let unpack = Command::new("dpkg-deb").arg("-x").arg(&deb).arg(into).status().context("dpkg-deb")?;
        ensure!(unpack.success(), "dpkg-deb -x {} failed", deb.display());
    }
    Ok(())
}

/// Debian has merged `/bin` into `/usr/bin` and so on; packages from before that are moved there.
fn merge_into_usr(root: &Path, top: &str) -> Result<()> {
    let (old, new) = (root.join(top), root.join("usr").join(top));
    fs::create_dir_all(&new)?;
    if old.is_symlink() {
        return Ok(());
    }
    if old.is_dir() {
        let copy = Command::new("cp").arg("-a").arg(old.join(".")).arg(&new).status()?;
        ensure!(copy.success(), "cannot merge {} into {}", old.display(), new.display());
        fs::remove_dir_all(&old)?;
    }
    Ok(std::os::unix::fs::symlink(Path::new("usr").join(top), &old)?)
}

fn only_child(dir: &Path, prefix: &str) -> Result<PathBuf> {
    let children = fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))?;
    let paths = children.filter_map(|child| Some(child.ok()?.path()));
    let named =
        |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix));
    paths.into_iter().find(named).with_context(|| format!("nothing named {prefix}* in {}", dir.display()))
}
