//! What stock tools said of an image, remembered for images of the same bytes: starting a tool takes longer than a crash, and most crashes
//! leave bytes that another left.

use std::collections::HashMap;
use std::fs;
use std::hash::{BuildHasher as _, RandomState};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use parking_lot::Mutex;

/// Longer chains of files are judged each time.
const BYTES_MAX: u64 = 32 << 20;
const LAYERS_MAX: usize = 32;
/// What is remembered at most.
const KEPT_MAX: usize = 128 << 20;

/// A hash of all bytes of a chain.
type State = u64;

/// How a tool ended, and what it said.
pub type Said = (i32, Vec<u8>);

/// What was said, by what was asked and the bytes it was asked of.
#[derive(Debug, Default)]
pub struct Judged {
    said: Mutex<HashMap<(Vec<String>, State), Said>>,
}

impl Judged {
    /// What `ask` returns, which is called once for files with these bytes, and again after it failed.
    pub fn of(&self, path: &Path, what: &[&str], ask: impl FnOnce() -> Said) -> Said {
        let Some(state) = state_of(path) else { return ask() };
        let key = (what.iter().map(|word| (*word).to_owned()).collect(), state);
        if let Some(said) = self.said.lock().get(&key) {
            return said.clone();
        }
        let answer = ask();
        // Whole, or with leaked clusters.
        if matches!(answer.0, 0 | 3) {
            let mut said = self.said.lock();
            if said.values().map(|(_, bytes)| bytes.len()).sum::<usize>() + answer.1.len() > KEPT_MAX {
                said.clear();
            }
            said.insert(key, answer.clone());
        }
        answer
    }
}

/// The bytes of an image and of all below it; none where they are many, or not in files.
fn state_of(path: &Path) -> Option<State> {
    static HASHER: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    let (mut next, mut files, mut len) = (Some(path.to_owned()), Vec::new(), 0);
    while let Some(file) = next {
        len += fs::metadata(&file).ok()?.len();
        if len > BYTES_MAX || files.len() == LAYERS_MAX {
            return None;
        }
        let bytes = fs::read(&file).ok()?;
        next = backing_of(&file, &bytes)?;
        files.push(bytes);
    }
    Some(HASHER.hash_one(&files))
}

/// Where the backing file of a qcow2 image is; `None` where its name is not that of a file.
#[allow(clippy::option_option, reason = "most images have none")]
fn backing_of(path: &Path, bytes: &[u8]) -> Option<Option<PathBuf>> {
    if !bytes.starts_with(b"QFI\xfb") {
        return Some(None);
    }
    let (at, len) = (bytes.get(8..16)?, bytes.get(16..20)?);
    let (at, len) = (u64::from_be_bytes(at.try_into().ok()?), u32::from_be_bytes(len.try_into().ok()?));
    if at == 0 {
        return Some(None);
    }
    let name = bytes.get(usize::try_from(at).ok()?..)?.get(..len as usize)?;
    let name = std::str::from_utf8(name).ok().filter(|name| !name.contains(':'))?;
    Some(Some(path.parent()?.join(name)))
}
