//! Which format a file's first and last bytes are those of.
//!
//! vmstrata reads qcow2 and raw. It knows the other formats of QEMU by their magic numbers, so that no image of one is taken for
//! a raw disk.
//!
//! Source: the `probe` functions of QEMU's block drivers. Beyond them, the footers of fixed VHDs and of DMGs, which QEMU takes
//! for raw disks unless told otherwise.

use std::fmt;

use crate::bytes::be32;
use crate::header::is_qcow2;

/// Bytes that tell: so many at the start of a file, and so many at its end.
pub const PROBE_LEN: usize = 512;

/// A format of disk images that has a magic number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageFormat {
    /// Versions 2 and 3, and any later one.
    Qcow2,
    /// Version 1.
    Qcow,
    /// QEMU Enhanced Disk.
    Qed,
    /// VMware.
    Vmdk,
    /// VirtualBox.
    Vdi,
    /// Hyper-V.
    Vhdx,
    /// Virtual PC, also known as VHD.
    Vpc,
    /// Parallels.
    Parallels,
    /// Linux Unified Key Setup, version 1: as QEMU, which reads no other, so a guest may still use version 2 on all of a disk.
    Luks,
    /// Apple.
    Dmg,
    /// Bochs.
    Bochs,
}

impl ImageFormat {
    /// The format of a file that starts with these bytes.
    pub fn of_start(start: &[u8]) -> Option<Self> {
        let at =
            |offset: usize, magic: &[u8]| start.get(offset..).is_some_and(|rest| rest.starts_with(magic));
        let begins = |magic: &[u8]| at(0, magic);
        Some(match () {
            () if is_qcow2(start) && start.len() >= 8 && be32(start, 4) == 1 => Self::Qcow,
            () if is_qcow2(start) => Self::Qcow2,
            () if begins(b"QED\0") => Self::Qed,
            () if begins(b"KDMV") || begins(b"COWD") || begins(b"# Disk DescriptorFile") => Self::Vmdk,
            () if at(0x40, &0xbeda_107f_u32.to_le_bytes()) => Self::Vdi,
            () if begins(b"vhdxfile") => Self::Vhdx,
            () if begins(b"conectix") => Self::Vpc,
            () if begins(b"WithoutFreeSpace") || begins(b"WithouFreSpacExt") => Self::Parallels,
            () if begins(b"LUKS\xba\xbe\x00\x01") => Self::Luks,
            () if begins(b"Bochs Virtual HD Image\0") => Self::Bochs,
            () => return None,
        })
    }

    /// The format of a file that ends with these [`PROBE_LEN`] bytes, and whose start says nothing.
    pub fn of_end(end: &[u8]) -> Option<Self> {
        if end.starts_with(b"conectix") {
            Some(Self::Vpc)
        } else if end.starts_with(b"koly") {
            Some(Self::Dmg)
        } else {
            None
        }
    }
}

impl fmt::Display for ImageFormat {
    /// As `qemu-img` calls it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Qcow2 => "qcow2",
            Self::Qcow => "qcow",
            Self::Qed => "qed",
            Self::Vmdk => "vmdk",
            Self::Vdi => "vdi",
            Self::Vhdx => "vhdx",
            Self::Vpc => "vpc",
            Self::Parallels => "parallels",
            Self::Luks => "luks",
            Self::Dmg => "dmg",
            Self::Bochs => "bochs",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_known_by_their_magic_and_other_bytes_are_not() {
        let mut vdi = [0; 512];
        vdi[0x40..0x44].copy_from_slice(b"\x7f\x10\xda\xbe");
        for (start, format) in [
            (&b"QFI\xfb\0\0\0\x01"[..], Some("qcow")),
            (b"QFI\xfb\0\0\0\x03", Some("qcow2")),
            (b"QFI\xfb", Some("qcow2")),
            (&vdi, Some("vdi")),
            (&vdi[..0x42], None),
            (b"LUKS\xba\xbe\0\x01", Some("luks")),
            (b"LUKS\xba\xbe\0\x02", None),
            (b"KDM", None),
            (b"", None),
            (&[0; 512], None),
        ] {
            let found = ImageFormat::of_start(start).map(|format| format.to_string());
            assert_eq!(found.as_deref(), format, "{start:02x?}");
        }
        assert_eq!(ImageFormat::of_end(b"conectix"), Some(ImageFormat::Vpc));
        assert_eq!(ImageFormat::of_end(b"koly"), Some(ImageFormat::Dmg));
        assert_eq!(ImageFormat::of_end(&[0; 512]), None);
    }
}
