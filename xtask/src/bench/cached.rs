//! Files put into the page cache in like pieces, and kept there.

use std::ffi::c_void;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::ptr;

use anyhow::{Context, Result};
use rustix::fs::{Advice, fadvise};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::run::CLUSTER;

/// How often a file is read until the kernel takes its pages for in use, and changes nothing more.
const READS: u32 = 3;

/// Files that lie in the page cache, and stay there until this is dropped.
///
/// Some machines take pages of files away that nobody seems to have used for a while, however much memory is free; what is
/// drawn at random from gigabytes looks like that. They leave alone what a process has mapped.
pub(super) struct Cached(#[expect(dead_code, reason = "held for what dropping it does")] Vec<Mapping>);

impl Cached {
    /// Reads `groups` of files from the disk, so that they lie in the page cache as a guest that reads here and there leaves
    /// them: cluster by cluster, and read more than once.
    ///
    /// The kernel keeps what is written at once, or read ahead, in large pieces: larger ones the longer a file is. Reads of
    /// those are half as fast again, so without this one file would be quicker than the thousand that its bytes are spread
    /// over, whoever reads them. What writing left in the cache goes first for that reason. The second read of a page moves it
    /// among those in use, which takes longer than to read it; what was read in more rounds than another would be slower for
    /// that. And some memory is slower than other, by how a virtual machine's host provides it: groups that are compared with
    /// each other are read by turns, and get the same of both.
    pub(super) fn new(groups: &[Vec<PathBuf>]) -> Result<Self> {
        groups.iter().flatten().try_for_each(|path| forget(path))?;
        let mut cluster = vec![0; CLUSTER as usize];
        for _ in 0..READS {
            let mut walks: Vec<_> = groups.iter().map(|paths| Walk { paths, file: None }).collect();
            while !walks.is_empty() {
                let mut goes_on = Vec::with_capacity(walks.len());
                for mut walk in walks {
                    if walk.read(&mut cluster)? {
                        goes_on.push(walk);
                    }
                }
                walks = goes_on;
            }
        }
        let mappings = groups.iter().flatten().map(|path| Mapping::new(path));
        Ok(Self(mappings.collect::<Result<_>>()?))
    }
}

/// Takes a file out of the page cache, except for what is mapped.
pub(super) fn forget(path: &Path) -> Result<()> {
    Ok(fadvise(open(path)?, 0, None, Advice::DontNeed)?)
}

fn open(path: &Path) -> Result<File> {
    File::open(path).with_context(|| format!("cannot open {}", path.display()))
}

/// Goes through files from start to end.
struct Walk<'a> {
    paths: &'a [PathBuf],
    file: Option<File>,
}

impl Walk<'_> {
    /// Reads on; `false` at the end of the last file.
    fn read(&mut self, buf: &mut [u8]) -> Result<bool> {
        loop {
            if let Some(file) = &mut self.file
                && file.read(buf)? > 0
            {
                return Ok(true);
            }
            let Some((next, rest)) = self.paths.split_first() else { return Ok(false) };
            let file = open(next)?;
            fadvise(&file, 0, None, Advice::Random)?;
            (self.paths, self.file) = (rest, Some(file));
        }
    }
}

/// A whole file, mapped.
struct Mapping {
    start: *mut c_void,
    len: usize,
}

impl Mapping {
    fn new(path: &Path) -> Result<Self> {
        let file = open(path)?;
        let len = usize::try_from(file.metadata()?.len())?;
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: the kernel chooses a free place; nothing is ever read through it.
        let start = unsafe { mmap(ptr::null_mut(), len, ProtFlags::READ, flags, &file, 0) }
            .with_context(|| format!("cannot map {}", path.display()))?;
        Ok(Self { start, len })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this place was mapped by `new`, and nothing refers into it.
        let _ = unsafe { munmap(self.start, self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_all_lengths_are_walked_to_their_ends() {
        let dir = tempfile::tempdir().unwrap();
        let lens = [0, 1, CLUSTER as usize, 3 * CLUSTER as usize + 5];
        let paths: Vec<_> = lens.map(|len| dir.path().join(len.to_string())).to_vec();
        for (path, len) in paths.iter().zip(lens) {
            std::fs::write(path, vec![1; len]).unwrap();
        }
        let (mut walk, mut buf) = (Walk { paths: &paths, file: None }, vec![0; CLUSTER as usize]);
        let mut reads = 0;
        while walk.read(&mut buf).unwrap() {
            reads += 1;
        }
        assert_eq!(reads, 1 + 1 + 4);
        Cached::new(&[paths[1..].to_vec(), paths[2..3].to_vec()]).unwrap();
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = Cached::new(&[vec![PathBuf::from("/no/such/file")]]).err().unwrap();
        assert!(format!("{error:#}").contains("/no/such/file"));
    }
}
