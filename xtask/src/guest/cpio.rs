//! Writes the archive a kernel unpacks as its first file system (cpio "newc", initramfs buffer format).

/// An archive in the making.
#[derive(Debug, Default)]
pub struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;

impl Archive {
    /// Adds a directory.
    pub fn directory(&mut self, name: &str) {
        self.entry(name, DIRECTORY | 0o755, &[]);
    }

    /// Adds a file with its permission bits.
    pub fn file(&mut self, name: &str, permissions: u32, content: &[u8]) {
        self.entry(name, REGULAR | permissions, content);
    }

    /// Ends the archive and returns it.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn entry(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.entries += 1;
        self.bytes.extend(b"070701");
        let (links, len) = (1, u32::try_from(content.len()).expect("initramfs files are small"));
        let name_len = name.len() as u32 + 1;
        // inode, mode, uid, gid, links, mtime, size, device and its node (major, minor each), name, checksum
        for field in [self.entries, mode, 0, 0, links, 0, len, 0, 0, 0, 0, name_len, 0] {
            self.bytes.extend(format!("{field:08x}").bytes());
        }
        self.bytes.extend(name.bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_aligned_and_ended() {
        let mut archive = Archive::default();
        archive.directory("bin");
        archive.file("bin/x", 0o755, b"12345");
        let bytes = archive.finish();
        assert!(bytes.len().is_multiple_of(4));
        assert_eq!(&bytes[..14], b"07070100000001");
        let second = 110 + 4 + 2; // header, "bin\0", and padding to 116
        assert_eq!(&bytes[second..second + 6], b"070701");
        assert_eq!(&bytes[second + 54..second + 62], b"00000005", "file size");
        assert_eq!(&bytes[second + 110..second + 116], b"bin/x\0");
        assert_eq!(&bytes[second + 116..second + 121], b"12345");
        assert!(bytes.windows(10).any(|window| window == b"TRAILER!!!"));
    }
}
