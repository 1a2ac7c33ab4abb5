//! What can be told of a file without opening it.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use vmstrata_disk::Format;
use vmstrata_store::FileId;

use crate::image::{Fault, Image};

/// What the name of a file promises.
pub(super) fn expected(path: &Path) -> Option<Format> {
    let extension = path.extension()?.to_str()?;
    let is = |name: &str| extension.eq_ignore_ascii_case(name);
    if is("qcow2") || is("qcow") {
        Some(Format::Qcow2)
    } else if is("raw") || is("img") {
        Some(Format::Raw)
    } else {
        None
    }
}

/// Whether the name is one that taking a snapshot uses until its overlay has its own: `.NAME.N-N.snapshot`. What has
/// such a name is no disk yet, or was left by a process that was killed.
pub(super) fn is_in_the_making(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let Some(rest) = name.strip_prefix('.').and_then(|rest| rest.strip_suffix(".snapshot")) else {
        return false;
    };
    let Some((process, number)) = rest.rsplit_once('.').and_then(|(_, numbers)| numbers.split_once('-'))
    else {
        return false;
    };
    [process, number].iter().all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Which file it is, as [`vmstrata_store::FileStore::identity`] says it.
pub(super) fn file_id(metadata: &Metadata) -> FileId {
    if metadata.file_type().is_block_device() {
        FileId { dev: metadata.rdev(), ino: 0 }
    } else {
        FileId { dev: metadata.dev(), ino: metadata.ino() }
    }
}

/// An image that could not be opened.
pub(super) fn unopened(id: FileId, path: &Path, metadata: &Metadata, fault: Fault) -> Image {
    Image {
        id,
        path: path.to_owned(),
        virtual_size: 0,
        allocated: metadata.blocks() * 512,
        mtime_ns: metadata.mtime().saturating_mul(1_000_000_000).saturating_add(metadata.mtime_nsec()),
        born_ns: None,
        writer: false,
        qcow2: None,
        fault: Some(fault),
    }
}

/// File systems whose files are the kernel's own: reading some of them waits, or does something.
const KERNEL_FILE_SYSTEMS: [u64; 14] = [
    0x9fa0,      // proc
    0x6265_6572, // sysfs
    0x0027_e0eb, // cgroup
    0x6367_7270, // cgroup2
    0x6462_6720, // debugfs
    0x7472_6163, // tracefs
    0x7363_6673, // securityfs
    0xcafe_4a11, // bpf
    0x6265_6570, // configfs
    0x6165_676c, // pstore
    0xde5e_81e4, // efivarfs
    0x0000_1cd1, // devpts
    0x1980_0202, // mqueue
    0x4249_4e4d, // binfmt_misc
];

/// Whether the directory belongs to such a file system.
///
/// # Errors
/// Whatever the kernel reports.
pub(super) fn is_of_the_kernel(directory: &Path) -> io::Result<bool> {
    let kind = rustix::fs::statfs(directory)?.f_type;
    #[expect(clippy::cast_sign_loss, reason = "a magic number, signed on some architectures only")]
    let kind = kind as u64 & 0xffff_ffff;
    Ok(KERNEL_FILE_SYSTEMS.contains(&kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_promise_a_format_or_nothing() {
        assert_eq!(expected(Path::new("a/b.QCOW2")), Some(Format::Qcow2));
        assert_eq!(expected(Path::new("b.img")), Some(Format::Raw));
        assert_eq!(expected(Path::new("b.log")), None);
        assert_eq!(expected(Path::new("qcow2")), None);
    }

    #[test]
    fn a_snapshot_in_the_making_is_known_by_its_name() {
        assert!(is_in_the_making(Path::new("/a/.web.qcow2.123-0.snapshot")));
        for other in [
            "web.qcow2.123-0.snapshot",
            ".web.qcow2.12a-0.snapshot",
            ".web.qcow2..snapshot",
            ".snapshot",
            "web.qcow2",
        ] {
            assert!(!is_in_the_making(Path::new(other)), "{other}");
        }
    }

    #[test]
    fn proc_is_the_kernels_and_a_temporary_directory_is_not() {
        assert!(is_of_the_kernel(Path::new("/proc")).unwrap());
        assert!(!is_of_the_kernel(tempfile::tempdir().unwrap().path()).unwrap());
    }
}
