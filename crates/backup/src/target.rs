//! Where bytes of a backup go, in order, with the checksum of all of them.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom, Write};
use std::os::unix::fs::FileExt as _;

use sha2::{Digest as _, Sha256};
use vmstrata_disk::{IoContext as _, Result};
use vmstrata_store::is_zero;

use crate::manifest::{Digest, FileSum};

/// Zeros of a file are left as holes in pieces of this size.
const HOLE: usize = 64 << 10;

/// A file or a pipe that is written from front to back.
pub(crate) struct Output<'a> {
    to: To<'a>,
    hash: Sha256,
    at: u64,
}

enum To<'a> {
    File(&'a File),
    Stream(&'a mut dyn Write),
}

impl<'a> Output<'a> {
    pub(crate) fn file(file: &'a File) -> Self {
        Self { to: To::File(file), hash: Sha256::new(), at: 0 }
    }

    pub(crate) fn stream(stream: &'a mut dyn Write) -> Self {
        Self { to: To::Stream(stream), hash: Sha256::new(), at: 0 }
    }

    /// # Errors
    /// Whatever the host reports.
    pub(crate) fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.hash.update(bytes);
        let written = match &mut self.to {
            To::File(file) => put_sparse(file, bytes, self.at),
            To::Stream(stream) => stream.write_all(bytes),
        };
        self.at += bytes.len() as u64;
        written.while_trying("write the backup")
    }

    /// Ends the file; its length and checksum.
    ///
    /// # Errors
    /// Whatever the host reports.
    pub(crate) fn finish(self) -> Result<FileSum> {
        let ended = match self.to {
            To::File(file) => file.set_len(self.at),
            To::Stream(stream) => stream.flush(),
        };
        ended.while_trying("write the backup")?;
        Ok(FileSum { bytes: self.at, sha256: Digest::of(self.hash) })
    }
}

fn put_sparse(file: &File, bytes: &[u8], at: u64) -> io::Result<()> {
    if !bytes.chunks(HOLE).any(is_zero) {
        return file.write_all_at(bytes, at);
    }
    for (number, piece) in bytes.chunks(HOLE).enumerate() {
        if !is_zero(piece) {
            file.write_all_at(piece, at + (number * HOLE) as u64)?;
        }
    }
    Ok(())
}

/// Length and checksum of a file that begins with `start`, whatever it has there; `watch` gets the bytes read so far and may
/// end it.
///
/// # Errors
/// Whatever the host reports, or what `watch` answers.
pub(crate) fn sum_of(
    mut file: &File,
    start: &[u8],
    mut watch: impl FnMut(u64) -> Result<()>,
) -> Result<FileSum> {
    let mut hash = Sha256::new();
    hash.update(start);
    let mut buf = vec![0; 1 << 20];
    let mut bytes = start.len() as u64;
    file.seek(SeekFrom::Start(bytes)).while_trying("read the backup")?;
    loop {
        match file.read(&mut buf) {
            Ok(0) => return Ok(FileSum { bytes, sha256: Digest::of(hash) }),
            Ok(read) => {
                hash.update(&buf[..read]);
                bytes += read as u64;
                watch(bytes)?;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error).while_trying("read the backup"),
        }
    }
}
