//! Kernels of other releases of Debian, from the mirror that this machine's apt uses.
//!
//! Packages are looked up in a state directory of their own below the target directory: the machine's is not touched.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::packages::{self, Apt, Kernel};

/// The kernels that tests of guests' memory are to judge: the machine's own, and those of the suites that
/// `VMSTRATA_GUEST_SUITES` names.
///
/// # Errors
/// When packages cannot be fetched.
pub fn kernels(dir: &Path) -> Result<Vec<Kernel>> {
    let _lock = packages::lock(dir)?;
    let own = packages::kernel(dir)?;
    let asked = std::env::var("VMSTRATA_GUEST_SUITES").unwrap_or_default();
    std::iter::once(Ok(own)).chain(asked.split_whitespace().map(|suite| kernel(dir, suite))).collect()
}

/// The cloud kernel of a suite such as `bullseye` or `trixie-backports`.
///
/// # Errors
/// When the mirror does not offer it.
pub fn kernel(dir: &Path, suite: &str) -> Result<Kernel> {
    let tree = dir.join(format!("kernel-{suite}"));
    packages::once(&tree, |partial| {
        let apt = apt(&dir.join(format!("apt-{suite}")), suite)?;
        let image = packages::dependency(&apt, "linux-image-cloud-amd64", "linux-image-")?;
        let mut packages = vec![image.clone()];
        // Later kernels are in several packages.
        for part in ["linux-binary-", "linux-modules-"] {
            packages.extend(packages::dependency(&apt, &image, part).ok());
        }
        packages::unpack(&apt, &packages, partial)
    })?;
    packages::unpacked_kernel(&tree)
}

/// apt with one source: the machine's first Debian mirror, for `suite`.
fn apt(state: &Path, suite: &str) -> Result<Apt> {
    let here = Apt::default();
    let format = ["indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Origin: Debian"];
    let mirrors = here.run("apt-get", &format)?;
    let mirror = mirrors.lines().next().context("apt has no Debian mirror")?;
    for dir in ["lists/partial", "cache/archives/partial"] {
        fs::create_dir_all(state.join(dir))?;
    }
    let sources = state.join("sources.list");
    fs::write(&sources, format!("deb [signed-by={KEYRING}] {mirror} {suite} main\n"))?;
    let option = |name: &str, path: &Path| format!("{name}={}", path.display());
    let apt = Apt {
        options: vec![
            option("Dir::Etc::SourceList", &sources),
            "Dir::Etc::SourceParts=/dev/null".into(),
            option("Dir::State::Lists", &state.join("lists")),
            option("Dir::Cache", &state.join("cache")),
            "Acquire::Languages=none".into(),
        ],
    };
    apt.run("apt-get", &["update"])?;
    Ok(apt)
}

/// Of package debian-archive-keyring, which every Debian has.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
