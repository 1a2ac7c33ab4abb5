//! Dependencies between the crates point one way, and the engine knows neither network nor runtime.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// A crate of the workspace with what it is built from (development dependencies left out).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Package {
    /// Its name.
    pub name: String,
    /// Names of its dependencies.
    pub dependencies: Vec<String>,
}

/// Which crates of the workspace each one may stand on.
const BELOW: &[(&str, &[&str])] = &[
    ("vmstrata-types", &[]),
    ("vmstrata-qcow2", &["vmstrata-types"]),
    ("vmstrata-job", &[]),
    ("vmstrata-store", &["vmstrata-types"]),
    ("vmstrata-flushlog", &["vmstrata-types", "vmstrata-store"]),
    ("vmstrata-repo", &["vmstrata-types", "vmstrata-store"]),
    ("vmstrata-check", &["vmstrata-types", "vmstrata-qcow2", "vmstrata-store"]),
    ("vmstrata-disk", &["vmstrata-types", "vmstrata-qcow2", "vmstrata-store", "vmstrata-check"]),
    (
        "vmstrata-backup",
        &["vmstrata-types", "vmstrata-qcow2", "vmstrata-store", "vmstrata-disk", "vmstrata-job"],
    ),
    (
        "vmstrata-tier",
        &["vmstrata-types", "vmstrata-qcow2", "vmstrata-store", "vmstrata-repo", "vmstrata-disk"],
    ),
    ("vmstrata-nbd", &["vmstrata-types", "vmstrata-store", "vmstrata-disk"]),
    ("vmstrata-export", &["vmstrata-types", "vmstrata-store", "vmstrata-disk", "vmstrata-nbd"]),
    (
        "vmstrata-migrate",
        &["vmstrata-types", "vmstrata-qcow2", "vmstrata-store", "vmstrata-disk", "vmstrata-nbd"],
    ),
    ("vmstrata-survey", &["vmstrata-types", "vmstrata-qcow2", "vmstrata-store", "vmstrata-disk"]),
    ("vmstrata-memory", &["vmstrata-types", "vmstrata-qcow2", "vmstrata-store", "vmstrata-repo"]),
    ("vmstrata-api", &["vmstrata-types"]),
    (
        "vmstrata-server",
        &[
            "vmstrata-types",
            "vmstrata-qcow2",
            "vmstrata-store",
            "vmstrata-flushlog",
            "vmstrata-disk",
            "vmstrata-backup",
            "vmstrata-export",
            "vmstrata-memory",
            "vmstrata-api",
            "vmstrata-job",
            "vmstrata-migrate",
            "vmstrata-nbd",
            "vmstrata-tier",
        ],
    ),
    (
        "vmstrata-cli",
        &[
            "vmstrata-types",
            "vmstrata-qcow2",
            "vmstrata-store",
            "vmstrata-check",
            "vmstrata-disk",
            "vmstrata-backup",
            "vmstrata-export",
            "vmstrata-survey",
            "vmstrata-migrate",
            "vmstrata-nbd",
            "vmstrata-tier",
            "vmstrata-repo",
            "vmstrata-memory",
            "vmstrata-api",
            "vmstrata-job",
            "vmstrata-server",
        ],
    ),
    (
        "vmstrata-fuzz-bodies",
        &[
            "vmstrata-types",
            "vmstrata-qcow2",
            "vmstrata-store",
            "vmstrata-check",
            "vmstrata-disk",
            "vmstrata-export",
            "vmstrata-repo",
            "vmstrata-memory",
        ],
    ),
    // A NAS, and the host of a tiered disk on it.
    (
        "xtask",
        &[
            "vmstrata-types",
            "vmstrata-repo",
            "vmstrata-disk",
            "vmstrata-tier",
            "vmstrata-migrate",
            "vmstrata-export",
        ],
    ),
];

/// Crates below `export` must not see these: asynchronous runtimes, exports, and clients of a network.
const FOREIGN_TO_ENGINE: [&str; 16] = [
    "async-std",
    "curl",
    "h2",
    "hdfs-native",
    "hyper",
    "mio",
    "nfs3_client",
    "opendal",
    "quinn",
    "reqwest",
    "rustls",
    "smol",
    "tokio",
    "tonic",
    "ureq",
    "virtio-queue",
];
/// The same by first word: `vhost`, `vhost-user-backend`, `virtio-...`.
const FOREIGN_PREFIXES: [&str; 2] = ["vhost", "tokio-"];
const ENGINE: [&str; 7] = [
    "vmstrata-types",
    "vmstrata-qcow2",
    "vmstrata-store",
    "vmstrata-flushlog",
    "vmstrata-check",
    "vmstrata-disk",
    "vmstrata-backup",
];

/// The workspace's crates as cargo sees them.
///
/// # Errors
/// When cargo does not run or answers something unexpected.
pub fn read(root: &Path) -> Result<Vec<Package>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(root)
        .output()
        .context("cargo does not run")?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let packages = metadata["packages"].as_array().context("cargo metadata names no packages")?;
    packages.iter().map(package).collect()
}

fn package(json: &serde_json::Value) -> Result<Package> {
    let name =
        |json: &serde_json::Value| json["name"].as_str().map(str::to_owned).context("a package without name");
    let dependencies = json["dependencies"].as_array().context("a package without dependencies")?;
    let shipped = dependencies.iter().filter(|dependency| dependency["kind"] != "dev");
    Ok(Package { name: name(json)?, dependencies: shipped.map(name).collect::<Result<_>>()? })
}

/// Every dependency that points the wrong way.
pub fn check(packages: &[Package]) -> Vec<String> {
    packages.iter().flat_map(check_one).collect()
}

fn check_one(package: &Package) -> Vec<String> {
    let name = package.name.as_str();
    let Some((_, below)) = BELOW.iter().find(|(known, _)| *known == name) else {
        return vec![format!("{name}: a new crate: give it its place in xtask/src/tidy/layers.rs")];
    };
    let ours = |dependency: &str| BELOW.iter().any(|(known, _)| *known == dependency);
    let upward = |dependency: &&String| ours(dependency) && !below.contains(&dependency.as_str());
    let foreign = |dependency: &&String| {
        ENGINE.contains(&name)
            && (FOREIGN_TO_ENGINE.contains(&dependency.as_str())
                || FOREIGN_PREFIXES.iter().any(|prefix| dependency.starts_with(prefix)))
    };
    let dependencies = || package.dependencies.iter();
    let upward =
        dependencies().filter(upward).map(|dependency| format!("{name} must not depend on {dependency}"));
    let foreign = dependencies()
        .filter(foreign)
        .map(|dependency| format!("{name} names {dependency}: the engine knows no network and no runtime"));
    upward.chain(foreign).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, dependencies: &[&str]) -> Package {
        Package {
            name: name.into(),
            dependencies: dependencies.iter().map(|name| name.to_string()).collect(),
        }
    }

    #[test]
    fn dependencies_downward_are_fine_and_upward_are_not() {
        assert!(check(&[package("vmstrata-disk", &["vmstrata-store", "libc"])]).is_empty());
        assert_eq!(check(&[package("vmstrata-store", &["vmstrata-disk"])]).len(), 1);
        assert_eq!(check(&[package("vmstrata-qcow2", &["vmstrata-store"])]).len(), 1);
    }

    #[test]
    fn the_engine_knows_no_network() {
        for foreign in ["tokio", "vhost", "vhost-user-backend", "rustls"] {
            assert_eq!(check(&[package("vmstrata-disk", &[foreign])]).len(), 1, "{foreign}");
            assert!(check(&[package("vmstrata-export", &[foreign])]).is_empty(), "{foreign}");
        }
    }

    #[test]
    fn an_unknown_crate_must_be_placed() {
        assert_eq!(check(&[package("vmstrata-new", &[])]).len(), 1);
    }
}
