//! What the tests of the survey share: trees of images made by stock tools, and stock tools as the oracle.

// Each test binary compiles this module for itself and uses a part of it.
#![allow(dead_code, unreachable_pub)]

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;
use vmstrata_qcow2::{CreateOptions, NewBacking, SnapshotInfo, new_image};
use vmstrata_survey::report::Chain;
use vmstrata_survey::{Report, RiskKind, SurveyOptions, survey};

/// Runs a stock tool, which must succeed, and returns stdout.
pub fn tool<S: AsRef<OsStr>>(name: &str, args: impl IntoIterator<Item = S>) -> String {
    let output = Command::new(name)
        .args(args)
        .output()
        .unwrap_or_else(|error| panic!("{name} is required by these tests: {error}"));
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// A directory of images.
pub struct Tree {
    dir: TempDir,
}

impl Tree {
    pub fn new() -> Self {
        Self { dir: tempfile::tempdir().expect("a temporary directory") }
    }

    pub fn root(&self) -> PathBuf {
        self.dir.path().canonicalize().expect("there")
    }

    /// The path of a file in it; directories on the way are made.
    pub fn path(&self, name: &str) -> PathBuf {
        let path = self.root().join(name);
        fs::create_dir_all(path.parent().expect("below the root")).expect("directories");
        path
    }

    pub fn name(&self, name: &str) -> String {
        self.path(name).to_str().expect("UTF-8").to_owned()
    }

    /// `qemu-img create -f qcow2` with these arguments after the file.
    pub fn create(&self, name: &str, args: &[&str]) -> PathBuf {
        let path = self.name(name);
        tool("qemu-img", [&["create", "-q", "-f", "qcow2", path.as_str()], args].concat());
        path.into()
    }

    /// An overlay on `backing`, which need not be there; 16 MiB.
    pub fn overlay(&self, name: &str, backing: &str) -> PathBuf {
        self.create(name, &["-u", "-b", backing, "-F", "qcow2", "16M"])
    }

    /// An image of one sector more than its metadata, written without a process for each: for trees of thousands.
    pub fn quick(&self, name: &str, backing: Option<&str>) {
        self.quick_snapshot(name, backing, None);
    }

    /// The same, with a record of the snapshot that its backing file is.
    pub fn quick_snapshot(&self, name: &str, backing: Option<&str>, snapshot: Option<SnapshotInfo>) {
        let backing = backing.map(|name| NewBacking { name: name.into(), format: Some("qcow2".to_owned()) });
        let record = snapshot.map(Into::into);
        let options = CreateOptions { backing, record, ..CreateOptions::new(16 << 20) };
        let image = new_image(&options).expect("fits");
        let mut bytes = vec![0; usize::try_from(image.file_len).expect("small")];
        for (at, part) in &image.parts {
            let at = usize::try_from(at.get()).expect("small");
            bytes[at..at + part.len()].copy_from_slice(part);
        }
        fs::write(self.path(name), bytes).expect("written");
    }

    pub fn options(&self) -> SurveyOptions {
        SurveyOptions { roots: vec![self.root()], ..SurveyOptions::default() }
    }

    pub fn survey(&self) -> Report {
        survey(&self.options()).expect("the root is there")
    }
}

/// `qemu-img info` of a chain, active layer first.
pub fn stock_chain(top: &Path) -> Vec<Value> {
    let args = ["info", "-U", "--backing-chain", "--output=json", top.to_str().expect("UTF-8")];
    serde_json::from_str(&tool("qemu-img", args)).expect("JSON")
}

/// The chain whose active layer is `path`.
pub fn chain<'a>(report: &'a Report, path: &Path) -> &'a Chain {
    let found = report.chains.iter().find(|chain| Path::new(&chain.path) == path);
    found.unwrap_or_else(|| panic!("no chain {}: {:#?}", path.display(), report.chains))
}

/// The kinds of all risks with the last part of their layer's path.
pub fn risks(report: &Report) -> Vec<(RiskKind, String)> {
    let name = |path: &str| Path::new(path).file_name().expect("a file").to_string_lossy().into_owned();
    report.risks.iter().map(|risk| (risk.kind, name(&risk.path))).collect()
}

/// Overwrites bytes of a file, which keeps its times.
pub fn patch(path: &Path, at: usize, bytes: &[u8]) {
    let mut content = fs::read(path).expect("readable");
    content[at..at + bytes.len()].copy_from_slice(bytes);
    fs::write(path, content).expect("writable");
}

/// Sets the time of a file's last change, in seconds since 1970.
pub fn set_mtime(path: &Path, seconds: u64) {
    let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
    let file = fs::File::options().write(true).open(path).expect("writable");
    file.set_modified(time).expect("the file is ours");
}
