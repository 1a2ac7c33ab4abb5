//! Kernel modules with what they need, in the order in which they can be loaded.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::packages::Kernel;

/// The bytes of the modules `wanted`, each after those it needs; what is built in is left out.
///
/// # Errors
/// When a module cannot be read.
pub fn with_needed(kernel: &Kernel, wanted: &[&str]) -> Result<Vec<Vec<u8>>> {
    let mut files = HashMap::new();
    find(&kernel.modules, &mut files)?;
    let mut loaded = Vec::new();
    let mut modules = Vec::new();
    for name in wanted {
        add(name, &files, &mut loaded, &mut modules)?;
    }
    Ok(modules)
}

fn add(
    name: &str,
    files: &HashMap<String, PathBuf>,
    loaded: &mut Vec<String>,
    modules: &mut Vec<Vec<u8>>,
) -> Result<()> {
    let Some(path) = files.get(name).filter(|_| !loaded.iter().any(|known| known == name)) else {
        return Ok(());
    };
    loaded.push(name.to_owned());
    let bytes = read(path)?;
    for needed in needs(&bytes) {
        add(&needed, files, loaded, modules)?;
    }
    modules.push(bytes);
    Ok(())
}

/// What a module says that it needs: `depends=a,b` in its section `.modinfo`.
fn needs(module: &[u8]) -> Vec<String> {
    let mut words = module.split(|&byte| byte == 0);
    let depends = words.find_map(|word| str::from_utf8(word.strip_prefix(b"depends=")?).ok());
    depends.unwrap_or("").split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

fn find(dir: &Path, files: &mut HashMap<String, PathBuf>) -> Result<()> {
    for entry in fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            find(&entry.path(), files)?;
        } else if let Some((name, _)) = entry.file_name().to_string_lossy().split_once(".ko") {
            files.insert(name.replace('-', "_"), entry.path());
        }
    }
    Ok(())
}

fn read(path: &Path) -> Result<Vec<u8>> {
    if path.extension().is_none_or(|extension| extension != "xz") {
        return Ok(fs::read(path)?);
    }
    let output = Command::new("xz").arg("-dc").arg(path).output().context("xz (package xz-utils)")?;
    ensure!(output.status.success(), "cannot decompress {}", path.display());
    Ok(output.stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_comes_after_what_it_needs() {
        let dir = tempfile::tempdir().unwrap();
        let module = |name: &str, depends: &str| {
            let bytes = format!("\x7fELF\0license=GPL\0depends={depends}\0name={name}\0");
            fs::create_dir_all(dir.path().join("kernel/fs")).unwrap();
            fs::write(dir.path().join("kernel/fs").join(format!("{name}.ko")), bytes).unwrap();
        };
        module("xfs", "libcrc32c,built_in");
        module("libcrc32c", "");
        module("virtio-blk", "libcrc32c,xfs");
        let kernel = Kernel { image: PathBuf::new(), modules: dir.path().to_owned() };
        let loaded = with_needed(&kernel, &["xfs", "virtio_blk", "ext4"]).unwrap();
        let text: Vec<String> =
            loaded.iter().map(|bytes| String::from_utf8_lossy(bytes).into_owned()).collect();
        let names: Vec<&str> = text.iter().map(|text| text.split("name=").nth(1).unwrap()).collect();
        assert_eq!(names, ["libcrc32c\0", "xfs\0", "virtio-blk\0"]);
    }
}
