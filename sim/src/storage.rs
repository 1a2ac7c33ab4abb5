//! The storage of a simulated host: what a power failure leaves of what processes did to it.
//!
//! Bytes: the rule of [`vmstrata_store::Crash`] (each sector of 512 bytes holds what one of the writes since the last flush left).
//! Names: a directory keeps the changes of its names in their order; those before a flush of it are there, and of the others as many
//! as the seed says, from the first on. A directory that a reboot empties keeps nothing.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::path::{Path, PathBuf};

use vmstrata_store::{Crash, CrashKind, Moment, Operation, Record, StoreId, Survivors};
use vmstrata_types::HostOffset;

use crate::random::Random;
use crate::shared::{Event, Inode, Kind, Node, Shared};

/// The directory of all that is simulated.
const ROOT: usize = 1;

/// What a name leads to.
#[derive(Clone, Debug)]
struct Found {
    node: Node,
    inode: usize,
    target: OsString,
}

/// What each name of each directory leads to.
type Names = BTreeMap<(usize, OsString), Found>;

/// Names of one directory that changed together.
struct Renaming {
    directory: usize,
    changes: Vec<(OsString, Option<Found>)>,
    completed: Option<Moment>,
}

/// Where the end of an event is noted.
enum Begun {
    Record(usize),
    Renaming(usize),
}

/// See the module documentation.
pub struct Storage {
    root: PathBuf,
    shared: Shared,
    /// The directory that a reboot empties.
    volatile: usize,
    /// Events of earlier processes.
    earlier: u64,
    now: Moment,
    /// What files held at the last power failure, and what was done since.
    base: BTreeMap<usize, Vec<u8>>,
    log: Vec<Record>,
    names: Names,
    renamings: Vec<Renaming>,
    begun: BTreeMap<u64, Begun>,
}

impl Storage {
    /// Takes all that is below `root` for stable; a reboot empties the directory `volatile` in it.
    pub fn new(root: &Path, volatile: &str, shared: Shared) -> Self {
        let number = |path: &Path| shared.number(fs::metadata(path).expect("it is there").ino(), 0);
        assert_eq!(number(root), ROOT);
        let mut storage = Self {
            root: root.to_owned(),
            shared,
            volatile: number(&root.join(volatile)),
            earlier: 0,
            now: Moment(0),
            base: BTreeMap::new(),
            log: Vec::new(),
            names: Names::new(),
            renamings: Vec::new(),
            begun: BTreeMap::new(),
        };
        storage.adopt(root, ROOT);
        for number in shared.inodes() {
            shared.set_inode(number, Inode { is_unsynced: 0, ..shared.inode(number) });
        }
        storage
    }

    fn adopt(&mut self, path: &Path, directory: usize) {
        let entries = fs::read_dir(path).expect("a directory");
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("its names").path()).collect();
        paths.sort();
        for path in paths {
            let metadata = fs::metadata(&path).expect("it is there");
            let inode = self.shared.number(metadata.ino(), 0);
            let node = if metadata.is_dir() { Node::Directory } else { Node::File };
            let name = path.file_name().expect("a name").to_owned();
            self.names.insert((directory, name), Found { node, inode, target: OsString::new() });
            if metadata.is_dir() {
                self.adopt(&path, inode);
            } else {
                self.base.insert(inode, fs::read(&path).expect("a file"));
            }
        }
    }

    /// Takes note of an event of the process that has died last.
    pub fn see(&mut self, number: u64, event: &Event, data: &[u8]) {
        let number = self.earlier + number;
        self.now = Moment(number);
        let [inode, first, second, _] = event.args;
        let at = HostOffset::new(first);
        let operation = match event.kind {
            Kind::Write => Operation::Write { at, bytes: data.to_vec() },
            Kind::PunchHole => Operation::PunchHole { at, len: second },
            Kind::SetLen => Operation::SetLen { len: first },
            Kind::Flush => Operation::Flush,
            Kind::Name => {
                self.rename(inode as usize, first, second as usize, data);
                self.begun.insert(number, Begun::Renaming(self.renamings.len() - 1));
                return;
            }
            Kind::Ended => {
                match self.begun.remove(&(self.earlier + inode)) {
                    Some(Begun::Record(place)) => self.log[place].completed = Some(self.now),
                    Some(Begun::Renaming(place)) => self.renamings[place].completed = Some(self.now),
                    None => unreachable!("an event ends once"),
                }
                return;
            }
            Kind::Call | Kind::Guest | Kind::Died | Kind::Failed | Kind::Told => return,
            Kind::Sent | Kind::Lost | Kind::Received | Kind::Partition | Kind::Crashed => return,
        };
        let (store, issued) = (StoreId(inode as u32), self.now);
        self.log.push(Record { store, operation, issued, completed: None });
        self.begun.insert(number, Begun::Record(self.log.len() - 1));
    }

    fn rename(&mut self, directory: usize, node: u64, inode: usize, data: &[u8]) {
        let parts: Vec<OsString> =
            data.split(|&byte| byte == 0).map(|part| OsString::from_vec(part.to_vec())).collect();
        let [name, target, gone] = &parts[..] else { unreachable!("three texts") };
        let nodes = [Node::File, Node::Directory, Node::Link];
        let node = nodes.into_iter().find(|&known| known as u64 == node);
        let found = node.map(|node| Found { node, inode, target: target.clone() });
        let mut changes = vec![(name.clone(), found)];
        if !gone.is_empty() {
            changes.push((gone.clone(), None));
        }
        self.renamings.push(Renaming { directory, changes, completed: None });
    }

    /// The process is gone, the host is not: what was done is done, and lasts after the next flush.
    pub fn lose_process(&mut self) {
        let now = Some(self.now);
        self.forget_flushes_under_way();
        self.log.iter_mut().for_each(|record| record.completed = record.completed.or(now));
        self.renamings.iter_mut().for_each(|renaming| renaming.completed = renaming.completed.or(now));
        self.begun.clear();
        self.earlier = self.now.0;
    }

    /// The host loses its power: leaves below the root what the seed says, and takes that for stable.
    pub fn lose_power(&mut self, random: &Random, now_ns: u64) {
        self.forget_flushes_under_way();
        let crash = Crash { kind: CrashKind::Power, at: self.now, survivors: survivors(random) };
        self.names = self.names_after(random);
        self.names.retain(|(directory, _), _| *directory != self.volatile);
        let files: Vec<usize> =
            self.names.values().filter(|found| found.node == Node::File).map(|found| found.inode).collect();
        let empty = Vec::new();
        let image = |inode: usize| {
            let base = self.base.get(&inode).unwrap_or(&empty);
            (inode, crash.image(base, &self.log, StoreId(inode as u32)))
        };
        self.base = files.into_iter().map(image).collect();
        self.log.clear();
        self.renamings.clear();
        self.begun.clear();
        self.earlier = self.now.0;
        self.write(now_ns);
    }

    /// A flush that has not ended promises nothing, and takes nothing from others, as one that failed would.
    fn forget_flushes_under_way(&mut self) {
        self.log.retain(|record| record.operation != Operation::Flush || record.completed.is_some());
    }

    /// How many changes of a directory's names, from the first on, no power failure takes back.
    fn stable(&self, directory: usize, renamings: &[&Renaming]) -> usize {
        let flushes = self.log.iter().filter(|record| {
            record.store == StoreId(directory as u32) && record.operation == Operation::Flush
        });
        let flushed = flushes.filter(|flush| flush.completed.is_some()).map(|flush| flush.issued).max();
        let is_stable = |one: &&Renaming| one.completed.is_some_and(|done| Some(done) < flushed);
        renamings.iter().rposition(is_stable).map_or(0, |last| last + 1)
    }

    fn names_after(&self, random: &Random) -> Names {
        let mut by_directory: BTreeMap<usize, Vec<&Renaming>> = BTreeMap::new();
        for renaming in &self.renamings {
            by_directory.entry(renaming.directory).or_default().push(renaming);
        }
        let mut names = self.names.clone();
        for (directory, renamings) in by_directory {
            let stable = self.stable(directory, &renamings);
            let in_doubt = (renamings.len() - stable) as u64;
            let survived = match random.below(4) {
                0 => 0,
                1 => in_doubt,
                _ => random.below(in_doubt + 1),
            };
            for (name, found) in renamings[..stable + survived as usize].iter().flat_map(|one| &one.changes) {
                let name = (directory, name.clone());
                match found {
                    Some(found) => drop(names.insert(name, found.clone())),
                    None => drop(names.remove(&name)),
                }
            }
        }
        names
    }

    /// Whether a power failure now might leave nothing of that name in any of these directories below the root.
    pub fn may_lose(&self, name: &str, directories: &[&str]) -> bool {
        directories.iter().all(|directory| {
            let found = self.names.get(&(ROOT, OsString::from(*directory)));
            found.is_none_or(|found| self.may_be_absent(found.inode, name))
        })
    }

    fn may_be_absent(&self, directory: usize, name: &str) -> bool {
        let renamings: Vec<&Renaming> =
            self.renamings.iter().filter(|renaming| renaming.directory == directory).collect();
        let stable = self.stable(directory, &renamings);
        let mut is_there = self.names.contains_key(&(directory, OsString::from(name)));
        for (number, renaming) in renamings.iter().enumerate() {
            if number >= stable && !is_there {
                return true;
            }
            let changes = renaming.changes.iter().filter(|(changed, _)| changed.to_str() == Some(name));
            changes.for_each(|(_, found)| is_there = found.is_some());
        }
        !is_there
    }

    /// Makes the real files anew, under their numbers.
    fn write(&self, now_ns: u64) {
        for entry in fs::read_dir(&self.root).expect("the root") {
            let path = entry.expect("its names").path();
            fs::remove_dir_all(&path).expect("removed");
        }
        self.write_directory(&self.root, ROOT, &mut BTreeMap::new(), now_ns);
    }

    fn write_directory(
        &self,
        path: &Path,
        directory: usize,
        written: &mut BTreeMap<usize, PathBuf>,
        now_ns: u64,
    ) {
        self.is_now(directory, path, now_ns);
        for ((_, name), Found { node, inode, target }) in
            self.names.iter().filter(|((within, _), _)| *within == directory)
        {
            let path = path.join(name);
            match node {
                Node::Nothing => unreachable!("no name leads to nothing"),
                Node::Directory => {
                    fs::create_dir(&path).expect("made");
                    self.write_directory(&path, *inode, written, now_ns);
                }
                Node::Link => symlink(target, &path).expect("made"),
                Node::File => match written.get(inode) {
                    Some(other) => fs::hard_link(other, &path).expect("linked"),
                    None => {
                        fs::write(&path, &self.base[inode]).expect("written");
                        self.is_now(*inode, &path, now_ns);
                        written.insert(*inode, path);
                    }
                },
            }
        }
    }

    /// A real file has the number from now on. Times of change that were not flushed are lost.
    fn is_now(&self, number: usize, path: &Path, now_ns: u64) {
        let real = fs::metadata(path).expect("made").ino();
        let inode = self.shared.inode(number);
        let times = if inode.is_unsynced == 0 { (inode.mtime_ns, inode.ctime_ns) } else { (now_ns, now_ns) };
        self.shared.set_inode(number, Inode { real, mtime_ns: times.0, ctime_ns: times.1, is_unsynced: 0 });
    }
}

fn survivors(random: &Random) -> Survivors {
    match random.below(4) {
        0 => Survivors::None,
        1 => Survivors::All,
        _ => Survivors::Seeded(random.next()),
    }
}
