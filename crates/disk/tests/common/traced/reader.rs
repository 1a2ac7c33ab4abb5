//! Reading what `strace` wrote.

use std::collections::{BTreeMap, HashMap};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use vmstrata_store::{Moment, Operation, Record, StoreId};
use vmstrata_types::HostOffset;

use super::{Flush, MARKS, Node, Renaming, Traced};

/// What a descriptor leads to.
#[derive(Clone, Debug)]
enum Open {
    File { store: StoreId, at: u64 },
    Directory(PathBuf),
    Marks,
}

/// The calls being read.
pub(super) struct Reader {
    pub(super) traced: Traced,
    names: BTreeMap<PathBuf, Node>,
    open: HashMap<u64, Open>,
}

/// A call that has ended.
struct Call<'a> {
    name: &'a str,
    args: &'a str,
    result: i64,
    issued: Moment,
    completed: Moment,
}

impl Reader {
    pub(super) fn before(root: &Path) -> Self {
        let mut traced = Traced {
            root: root.to_owned(),
            before: BTreeMap::new(),
            contents: Vec::new(),
            inodes: HashMap::new(),
            log: Vec::new(),
            renamings: Vec::new(),
            flushes: Vec::new(),
            syncs: Vec::new(),
            marks: Vec::new(),
            end: Moment(0),
        };
        let mut directories = vec![root.to_owned()];
        while let Some(directory) = directories.pop() {
            for entry in directory.read_dir().unwrap() {
                let path = entry.unwrap().path();
                let found = path.symlink_metadata().unwrap();
                let node = if found.is_dir() {
                    directories.push(path.clone());
                    Node::Directory
                } else if found.is_symlink() {
                    Node::Link(path.read_link().unwrap())
                } else {
                    let next = StoreId(traced.contents.len() as u32);
                    let store = *traced.inodes.entry((found.dev(), found.ino())).or_insert(next);
                    if store == next {
                        traced.contents.push((std::fs::read(&path).unwrap(), found.modified().ok()));
                    }
                    Node::File(store)
                };
                traced.before.insert(path.strip_prefix(root).unwrap().to_owned(), node);
            }
        }
        let names = traced.before.clone();
        Self { traced, names, open: HashMap::new() }
    }

    pub(super) fn read(&mut self, text: &str) {
        // Of each thread, the call that it is in.
        let mut begun: HashMap<&str, (String, Moment)> = HashMap::new();
        for (number, line) in text.lines().enumerate() {
            let now = Moment(number as u64 + 1);
            self.traced.end = now;
            let Some((thread, line)) = line.split_once(' ') else { continue };
            let line = line.trim_start();
            let (whole, issued) = if let Some(start) = line.strip_suffix(" <unfinished ...>") {
                self.close_at_once(start);
                begun.insert(thread, (start.to_owned(), now));
                continue;
            } else if let Some(rest) = line.strip_prefix("<... ") {
                let Some((start, issued)) = begun.remove(thread) else { continue };
                (start + rest.split_once(" resumed>").map_or("", |(_, rest)| rest), issued)
            } else {
                self.close_at_once(line);
                (line.to_owned(), now)
            };
            let Some((call, result)) = whole.rsplit_once(" = ") else { continue };
            let Some((name, args)) = call.trim_end().trim_end_matches(')').split_once('(') else { continue };
            let result =
                result.split_whitespace().next().and_then(|number| number.parse().ok()).unwrap_or(-1);
            if result >= 0 {
                self.take(&Call { name, args, result, issued, completed: now });
            }
        }
        self.traced.log.sort_by_key(|record| record.issued);
    }

    /// The number may be given to another file before the call has ended.
    fn close_at_once(&mut self, line: &str) {
        if let Some(number) = line.strip_prefix("close(") {
            self.open.remove(&first_number(number));
        }
    }

    fn take(&mut self, call: &Call<'_>) {
        let args: Vec<&str> = call.args.split(", ").collect();
        let number = |place: usize| first_number(args[place]);
        match call.name {
            "open" => self.open(call, &args, 0),
            "openat" => self.open(call, &args, 1),
            "dup" | "fcntl" if call.name == "dup" || args[1].starts_with("F_DUPFD") => {
                if let Some(open) = self.open.get(&number(0)).cloned() {
                    self.open.insert(call.result as u64, open);
                }
            }
            "write" => self.write(call, number(0), None),
            "pwrite64" => self.write(call, number(0), Some(number(3))),
            "pwritev" | "pwritev2" => {
                let (_, end) = call.args.rsplit_once("], ").expect("a list of buffers");
                let at = end.split(", ").nth(1).expect("an offset");
                self.write(call, number(0), Some(first_number(at)));
            }
            "ftruncate" => self.change(call, number(0), Operation::SetLen { len: number(1) }),
            "fallocate" => {
                assert!(
                    args[1].contains("FALLOC_FL_KEEP_SIZE"),
                    "a call that no test expects: {}",
                    call.args
                );
                let hole = Operation::PunchHole { at: HostOffset::new(number(2)), len: number(3) };
                self.change(call, number(0), hole);
            }
            "fsync" | "fdatasync" => match self.open.get(&number(0)).cloned() {
                Some(Open::Directory(directory)) => {
                    let (issued, completed) = (call.issued, call.completed);
                    self.traced.flushes.push(Flush { directory, issued, completed });
                }
                Some(Open::File { store, .. }) if call.name == "fsync" => {
                    self.traced.syncs.push((store, call.completed));
                    self.change(call, number(0), Operation::Flush);
                }
                _ => self.change(call, number(0), Operation::Flush),
            },
            _ => self.rename(call, &args),
        }
    }

    /// The path at a place among the arguments, below the directory; before it is the descriptor that it is relative to.
    fn below(&self, args: &[&str], place: usize) -> Option<PathBuf> {
        let path: PathBuf = PathBuf::from(text_of(args[place])).components().collect();
        if path.is_absolute() {
            return path.strip_prefix(&self.traced.root).ok().map(Path::to_owned);
        }
        let from = args.get(place.checked_sub(1)?)?;
        let number = from.starts_with(|c: char| c.is_ascii_digit()).then(|| first_number(from))?;
        match self.open.get(&number)? {
            Open::Directory(directory) if path == Path::new(".") => Some(directory.clone()),
            Open::Directory(directory) => Some(directory.join(path)),
            _ => None,
        }
    }

    fn open(&mut self, call: &Call<'_>, args: &[&str], place: usize) {
        let (path, flags) = (args[place], args[place + 1]);
        // Opened again, by a path that is certain.
        if let Some(Open::File { store, .. }) = self.descriptor(path).cloned() {
            self.open.insert(call.result as u64, Open::File { store, at: 0 });
            return;
        }
        let Some(name) = self.below(args, place) else { return };
        let is_directory = name.as_os_str().is_empty() || self.names.get(&name) == Some(&Node::Directory);
        let open = if name == Path::new(MARKS) {
            Open::Marks
        } else if flags.contains("O_TMPFILE") {
            Open::File { store: self.new_file(), at: 0 }
        } else if is_directory {
            Open::Directory(name)
        } else if let Some(Node::File(store)) = self.names.get(&name) {
            Open::File { store: *store, at: 0 }
        } else {
            assert!(flags.contains("O_CREAT"), "{} is not known", name.display());
            let store = self.new_file();
            self.renamed(call, vec![(name, Some(Node::File(store)))]);
            Open::File { store, at: 0 }
        };
        self.open.insert(call.result as u64, open);
        if flags.contains("O_TRUNC") {
            self.change(call, call.result as u64, Operation::SetLen { len: 0 });
        }
    }

    fn new_file(&mut self) -> StoreId {
        self.traced.contents.push((Vec::new(), None));
        StoreId(self.traced.contents.len() as u32 - 1)
    }

    fn write(&mut self, call: &Call<'_>, descriptor: u64, place: Option<u64>) {
        let Some(open) = self.open.get_mut(&descriptor) else { return };
        let mut bytes: Vec<u8> = call.args.split('"').skip(1).step_by(2).flat_map(bytes_of).collect();
        bytes.truncate(call.result as usize);
        let at = match open {
            Open::Marks => {
                let mark = u64::from_le_bytes(bytes[..].try_into().expect("a number"));
                self.traced.marks.push((mark, call.completed));
                return;
            }
            Open::File { at, .. } => place.unwrap_or_else(|| std::mem::replace(at, *at + bytes.len() as u64)),
            Open::Directory(_) => unreachable!("directories are not written"),
        };
        self.change(call, descriptor, Operation::Write { at: HostOffset::new(at), bytes });
    }

    fn change(&mut self, call: &Call<'_>, descriptor: u64, operation: Operation) {
        if let Some(Open::File { store, .. }) = self.open.get(&descriptor) {
            let (issued, completed) = (call.issued, Some(call.completed));
            self.traced.log.push(Record { store: *store, operation, issued, completed });
        }
    }

    fn rename(&mut self, call: &Call<'_>, args: &[&str]) {
        let paths: Vec<usize> = (0..args.len()).filter(|&place| args[place].starts_with('"')).collect();
        let Some(name) = paths.last().and_then(|&place| self.below(args, place)) else { return };
        let changes = match call.name {
            "unlink" | "unlinkat" | "rmdir" => vec![(name, None)],
            "mkdir" | "mkdirat" => vec![(name, Some(Node::Directory))],
            "symlink" | "symlinkat" => vec![(name, Some(Node::Link(text_of(args[paths[0]]).into())))],
            "link" | "linkat" => vec![(name, Some(self.linked(args, paths[0])))],
            "rename" | "renameat" | "renameat2" => {
                let old = self.below(args, paths[0]).expect("renamed within the directory");
                assert_eq!(old.parent(), name.parent(), "no test expects more");
                let node = self.names.get(&old).cloned().expect("a name that is there");
                vec![(old, None), (name, Some(node))]
            }
            _ => return,
        };
        self.renamed(call, changes);
    }

    /// What is open as the descriptor that a path names.
    fn descriptor(&self, path: &str) -> Option<&Open> {
        let number = text_of(path).strip_prefix("/proc/self/fd/").map(first_number)?;
        self.open.get(&number)
    }

    /// What a first argument of `link` leads to.
    fn linked(&self, args: &[&str], place: usize) -> Node {
        if let Some(Open::File { store, .. }) = self.descriptor(args[place]) {
            return Node::File(*store);
        }
        self.below(args, place).and_then(|old| self.names.get(&old).cloned()).expect("a name that is there")
    }

    fn renamed(&mut self, call: &Call<'_>, changes: Vec<(PathBuf, Option<Node>)>) {
        for (name, node) in &changes {
            match node {
                Some(node) => drop(self.names.insert(name.clone(), node.clone())),
                None => drop(self.names.remove(name)),
            }
        }
        let directory = changes[0].0.parent().expect("below the directory").to_owned();
        let (issued, completed) = (call.issued, call.completed);
        self.traced.renamings.push(Renaming { directory, changes, issued, completed });
    }
}

fn first_number(text: &str) -> u64 {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text[..end].parse().unwrap_or_else(|_| panic!("not a number: {text}"))
}

/// The bytes of `\x2f\x74`.
fn bytes_of(text: &str) -> Vec<u8> {
    text.split("\\x").skip(1).map(|byte| u8::from_str_radix(byte, 16).expect("in hexadecimal")).collect()
}

/// The text of `"\x2f\x74"`.
fn text_of(arg: &str) -> String {
    String::from_utf8(bytes_of(arg.trim_matches('"'))).expect("UTF-8")
}
