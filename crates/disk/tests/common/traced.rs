//! What a process does to the files and names below a directory, as `strace` tells it, and what a power failure may leave
//! of both.
//!
//! The rule for files is that of [`Crash`]. For names: a directory keeps the changes of its names in the order in which they
//! were made, as file systems with a journal do; those before a flush of the directory that had ended are there, and of the others
//! as many as may be, from the first on. A flush of a file brings none of its names along.

mod reader;

use std::collections::{BTreeMap, HashMap};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use vmstrata_store::{Crash, Moment, Operation, Record, StoreId, Survivors};

use reader::Reader;

const CALLS: &str = "trace=open,openat,close,dup,fcntl,write,pwrite64,pwritev,pwritev2,ftruncate,fallocate,fsync,fdatasync,\
rename,renameat,renameat2,link,linkat,unlink,unlinkat,symlink,symlinkat,mkdir,mkdirat,rmdir";

/// The file, in the directory, in which the process says how far it is: a number of eight bytes at a time.
pub const MARKS: &str = "marks";

#[derive(Clone, Debug, PartialEq, Eq)]
enum Node {
    File(StoreId),
    Directory,
    Link(PathBuf),
}

/// Names of one directory that change together.
#[derive(Debug)]
struct Renaming {
    directory: PathBuf,
    changes: Vec<(PathBuf, Option<Node>)>,
    issued: Moment,
    completed: Moment,
}

#[derive(Debug)]
struct Flush {
    directory: PathBuf,
    issued: Moment,
    completed: Moment,
}

/// See the module documentation.
#[derive(Debug)]
pub struct Traced {
    root: PathBuf,
    before: BTreeMap<PathBuf, Node>,
    /// What each file held at the beginning, and its time of change then.
    contents: Vec<(Vec<u8>, Option<std::time::SystemTime>)>,
    inodes: HashMap<(u64, u64), StoreId>,
    log: Vec<Record>,
    renamings: Vec<Renaming>,
    flushes: Vec<Flush>,
    /// Files that were brought to stable storage with their times of change, and when.
    syncs: Vec<(StoreId, Moment)>,
    /// What the process said, and when.
    pub marks: Vec<(u64, Moment)>,
    pub end: Moment,
}

impl Traced {
    /// Runs `command`, which must succeed.
    pub fn run(root: &Path, command: &Command) -> Self {
        let mut reader = Reader::before(root);
        let log = tempfile::NamedTempFile::new().expect("a file for the calls");
        let mut strace = Command::new("strace");
        strace
            .args(["-f", "-qq", "-xx", "-s", "16777216", "-e", "signal=none", "-e", CALLS, "-o"])
            .arg(log.path());
        strace.arg(command.get_program()).args(command.get_args());
        strace.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let output = strace.output().unwrap_or_else(|error| panic!("strace: {error}; see scripts/test"));
        assert!(output.status.success(), "{}", super::stock::text(&output));
        reader.read(&std::fs::read_to_string(log.path()).expect("written by strace"));
        reader.traced
    }

    /// The moments at which a name is about to be changed or has just been, and those at which a file is flushed.
    pub fn turns(&self) -> Vec<Moment> {
        let names = self.renamings.iter().flat_map(|one| [one.issued.0 - 1, one.completed.0]);
        let is_flush = |record: &&Record| record.operation == Operation::Flush;
        let flushes = self.log.iter().filter(is_flush).map(|record| record.issued.0 - 1);
        let mut all: Vec<u64> = names.chain(flushes).collect();
        all.sort_unstable();
        all.dedup();
        all.into_iter().map(Moment).collect()
    }

    /// When the directory's own names were on stable storage first.
    pub fn names_flushed(&self) -> Option<Moment> {
        let flushes = self.flushes.iter().filter(|flush| flush.directory.as_os_str().is_empty());
        flushes.map(|flush| flush.completed).min()
    }

    /// When a file was flushed first.
    pub fn file_flushed(&self) -> Option<Moment> {
        let flushes = self.log.iter().filter(|record| record.operation == Operation::Flush);
        flushes.filter_map(|record| record.completed).min()
    }

    /// The last mark before a moment.
    pub fn mark_at(&self, at: Moment) -> u64 {
        self.marks.iter().rev().find(|(_, said)| *said <= at).map_or(0, |(mark, _)| *mark)
    }

    /// Leaves in `dir` what the crash leaves.
    pub fn leave(&self, dir: &Path, crash: Crash) {
        let mut places: HashMap<StoreId, PathBuf> = HashMap::new();
        for (name, node) in self.names_after(crash) {
            let path = dir.join(&name);
            if path.parent().is_none_or(|parent| !parent.is_dir()) {
                continue;
            }
            match node {
                Node::Directory => std::fs::create_dir(&path).expect("made"),
                Node::Link(target) => {
                    let target =
                        target.strip_prefix(&self.root).map_or(target.clone(), |below| dir.join(below));
                    std::os::unix::fs::symlink(target, &path).expect("made");
                }
                Node::File(store) => match places.get(&store) {
                    Some(other) => std::fs::hard_link(other, &path).expect("linked"),
                    None => {
                        self.leave_file(store, &path, crash);
                        places.insert(store, path);
                    }
                },
            }
        }
        self.let_notes_know(&places, crash.at);
    }

    /// Whether the last change of a file before a moment is on stable storage with its time.
    fn is_synced(&self, store: StoreId, at: Moment) -> bool {
        let changes = self.log.iter().filter(|record| record.store == store && record.issued <= at);
        let last =
            changes.filter(|record| record.operation != Operation::Flush).map(|record| record.issued).max();
        let synced = self.syncs.iter().filter(|(synced, done)| *synced == store && *done <= at);
        synced.map(|(_, done)| *done).max() > last
    }

    fn leave_file(&self, store: StoreId, path: &Path, crash: Crash) {
        let (before, changed) = &self.contents[store.0 as usize];
        std::fs::write(path, crash.image(before, &self.log, store)).expect("written");
        let is_change = |record: &Record| record.store == store && record.operation != Operation::Flush;
        let is_untouched = !self.log.iter().any(|record| is_change(record) && record.issued <= crash.at);
        if let Some(changed) = changed.filter(|_| is_untouched) {
            std::fs::File::options().write(true).open(path).unwrap().set_modified(changed).unwrap();
        }
    }

    /// Notes name files by their inodes, which those that were left cannot have.
    fn let_notes_know(&self, places: &HashMap<StoreId, PathBuf>, at: Moment) {
        let identity = |path: &Path| path.metadata().map(|found| (found.dev(), found.ino())).unwrap();
        let place =
            |old: (u64, u64)| self.inodes.get(&old).and_then(|&store| Some((store, places.get(&store)?)));
        let now = |old: (u64, u64)| place(old).map(|(_, path)| identity(path));
        for note in places.values().filter(|path| path.extension().is_some_and(|end| end == "dropped")) {
            let Ok(mut text) = serde_json::from_slice::<serde_json::Value>(&std::fs::read(note).unwrap())
            else {
                continue;
            };
            let pair =
                |value: &serde_json::Value, keys: [&str; 2]| keys.map(|key| value[key].as_u64().unwrap_or(0));
            let old = [0, 1].map(|place| text["target"][place].as_u64().unwrap_or(0));
            if let Some((dev, ino)) = now((old[0], old[1])) {
                text["target"] = serde_json::json!([dev, ino]);
            }
            for list in ["files", "waiting"] {
                for file in text.get_mut(list).and_then(|list| list.as_array_mut()).into_iter().flatten() {
                    let [dev, ino] = pair(file, ["dev", "ino"]);
                    if let Some((_, path)) = place((dev, ino)).filter(|(store, _)| self.is_synced(*store, at))
                    {
                        let changed = file["mtime_ns"].as_u64().expect("a time");
                        let changed = std::time::UNIX_EPOCH + std::time::Duration::from_nanos(changed);
                        std::fs::File::options()
                            .write(true)
                            .open(path)
                            .unwrap()
                            .set_modified(changed)
                            .unwrap();
                    }
                    if let Some((dev, ino)) = now((dev, ino)) {
                        (file["dev"], file["ino"]) = (dev.into(), ino.into());
                    }
                }
            }
            std::fs::write(note, text.to_string()).unwrap();
        }
    }

    fn names_after(&self, crash: Crash) -> BTreeMap<PathBuf, Node> {
        let mut by_directory: BTreeMap<&Path, Vec<&Renaming>> = BTreeMap::new();
        for renaming in self.renamings.iter().filter(|renaming| renaming.issued <= crash.at) {
            by_directory.entry(&renaming.directory).or_default().push(renaming);
        }
        let mut names = self.before.clone();
        for (number, (directory, renamings)) in by_directory.into_iter().enumerate() {
            let flushed = self
                .flushes
                .iter()
                .filter(|flush| flush.directory == directory && flush.completed <= crash.at);
            let flushed = flushed.map(|flush| flush.issued).max().unwrap_or_default();
            let stable = renamings.iter().filter(|renaming| renaming.completed < flushed).count();
            let in_doubt = renamings.len() - stable;
            let survived = match crash.survivors {
                Survivors::None => 0,
                Survivors::All => in_doubt,
                Survivors::Seeded(seed) => {
                    let random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(number as u32 * 8 + 17);
                    random as usize % (in_doubt + 1)
                }
            };
            for (name, node) in renamings[..stable + survived].iter().flat_map(|renaming| &renaming.changes) {
                match node {
                    Some(node) => drop(names.insert(name.clone(), node.clone())),
                    None => drop(names.remove(name)),
                }
            }
        }
        names
    }
}
