//! Mounts of a NAS: what the kernels of its hosts do, as far as it shows.
//!
//! ```text
//!   DirectoryRepository ── system call on a path below /mnt ──► host: names, pages, what is not committed
//!                                                                │ request, again and again until there is an answer
//!                                                                ▼
//!                                           lost? late? parted? answer lost? ──► NAS
//! ```
//!
//! The product's directory repository is not changed for it. As NFS clients do, a host
//!
//! - takes names for what they led to up to a minute ago, and lists a directory as it was then, but opens a file only if it is there;
//! - keeps bytes that it read or wrote, writes them when it flushes, and again when the NAS has started anew before it committed them;
//! - asks again when it hears nothing, so what it asks for happens twice, or once more much later, and the second answer may be that
//!   the name is there, or is not;
//! - gives a file that is removed while it is open another name until it is closed.
//!
//! A file that another host has removed is stale. Processes pause before any call, for longer than anything is kept, and die in one.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use libc::c_int;

use crate::nas::{Directory, Edit, Export, Fault, FileNumber, Nas, Reply, Request};
use crate::network::{Host, Weather};
use crate::repository::PAUSE_NS_MAX;
use crate::shared::Kind;
use crate::syscall::raw;
use crate::tasks::TASKS;

/// What is below is mounted.
const MOUNTS: &str = "/mnt/";
/// The device that all of it seems to be on, and the number of its directory.
const DEVICE: u64 = 0x78;
const ROOT: u64 = 1;
/// How long a host waits for an answer, and how often a soft mount asks.
const TIMEOUT_NS: u64 = 10_000_000;
const SOFT_ASKS: u32 = 3;
/// One call in so many that are asked again finds that the NAS has forgotten the first.
const FORGOTTEN_ONE_IN: u64 = 2;
/// How long hosts believe what they know of names.
const BELIEVED_NS: [u64; 3] = [3_000_000_000, 30_000_000_000, 60_000_000_000];
/// How long an answer takes, and a partition, at most.
const DELAY_NS_MAX: u64 = 1_000_000;
const PARTITION_NS_MAX: u64 = 120_000_000_000;
/// What a call of a process that has died says.
const DEAD: c_int = libc::ECONNABORTED;

/// A process of a host. Its mount is at its own path, as it dies alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Process {
    pub host: Host,
    pub number: u32,
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{MOUNTS}{}-{}", self.host.0, self.number)
    }
}

/// The calls that a process makes, and when it ends.
#[derive(Clone, Copy, Debug)]
struct Calls {
    made: u64,
    dies_at: u64,
    pauses_one_in: u64,
}

/// What a descriptor leads to.
#[derive(Clone, Debug)]
struct Open {
    process: Process,
    /// None for the directory.
    file: Option<FileNumber>,
    /// Names that are still to be read of the directory.
    listing: Option<Vec<String>>,
    /// Where a file goes when it is closed.
    removed: Option<String>,
}

/// What a host knows.
#[derive(Debug, Default)]
struct Kernel {
    /// What names lead to, and since when that is known.
    names: BTreeMap<String, (Option<FileNumber>, u64)>,
    listing: Option<(Vec<String>, u64)>,
    pages: BTreeMap<FileNumber, Vec<u8>>,
    lengths: BTreeMap<FileNumber, usize>,
    /// Changes that the NAS does not have, and what it has without having committed it, from which boot of it.
    dirty: BTreeMap<FileNumber, Vec<Edit>>,
    uncommitted: BTreeMap<FileNumber, Vec<(Edit, u64)>>,
}

/// What happens to the way between hosts and NAS.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    pub weather: Weather,
    /// Calls fail after a while.
    pub is_soft: bool,
    /// The NAS starts anew at one call in so many.
    pub restarts_one_in: u64,
}

/// Of what a crash of the NAS leaves.
pub type Judge = Arc<dyn Fn(Directory) + Send + Sync>;

/// After one call in so many that change the NAS it might die: what it leaves, several times, is judged.
pub struct Crashes {
    pub one_in: u64,
    pub each: u64,
    pub judge: Judge,
}

/// See the module documentation.
struct World {
    nas: Nas,
    way: Way,
    crashes: Option<Crashes>,
    believed_ns: u64,
    kernels: BTreeMap<Host, Kernel>,
    processes: BTreeMap<Process, Calls>,
    descriptors: BTreeMap<c_int, Open>,
    /// Requests that arrive once more, and when.
    late: Vec<(u64, Request)>,
    /// Hosts that do not reach the NAS, until when.
    parted: BTreeMap<Host, u64>,
    /// Files that were removed while they were open.
    removed: u64,
}

static WORLD: Mutex<Option<World>> = Mutex::new(None);

/// Nobody hands over to another task meanwhile.
fn with<T>(run: impl FnOnce(&mut World) -> T) -> T {
    run(WORLD.lock().unwrap_or_else(PoisonError::into_inner).as_mut().expect("set up before it is used"))
}

/// Mounts a NAS on hosts 1 to `hosts`.
pub fn begin(nas: Nas, way: Way, hosts: u32, crashes: Crashes) {
    let believed_ns = *TASKS.random.pick(&BELIEVED_NS);
    let kernels = (1..=hosts).map(|host| (Host(host), Kernel::default())).collect();
    let world = World {
        nas,
        way,
        crashes: Some(crashes),
        believed_ns,
        kernels,
        processes: BTreeMap::new(),
        descriptors: BTreeMap::new(),
        late: Vec::new(),
        parted: BTreeMap::new(),
        removed: 0,
    };
    *WORLD.lock().unwrap_or_else(PoisonError::into_inner) = Some(world);
}

/// A process begins, which dies at the last of so many calls, and pauses before one in so many.
pub fn start(process: Process, calls: u64, pauses_one_in: u64) {
    let calls = Calls { made: 0, dies_at: calls, pauses_one_in };
    with(|world| world.processes.insert(process, calls));
}

/// Looks at the NAS.
pub fn nas<T>(look: impl FnOnce(&Nas) -> T) -> T {
    with(|world| look(&world.nas))
}

/// Nothing is lost, late or parted any more, and hosts believe what they just heard.
pub fn calm() {
    with(|world| {
        world.way.weather = Weather::CALM;
        world.way.restarts_one_in = u64::MAX;
        world.parted.clear();
    });
}

impl World {
    fn kernel(&mut self, process: Process) -> &mut Kernel {
        self.kernels.get_mut(&process.host).expect("one of the hosts")
    }

    /// Whether a host does not reach the NAS now. Now and then, from now on.
    fn is_parted(&mut self, host: Host) -> bool {
        let now_ns = TASKS.now_ns.get();
        if TASKS.random.one_in(self.way.weather.partition_one_in) {
            let hosts: Vec<Host> = self.kernels.keys().copied().collect();
            let parted = *TASKS.random.pick(&hosts);
            let until_ns = now_ns + TASKS.random.below(PARTITION_NS_MAX);
            TASKS.note(Kind::Partition, [0, parted.0.into(), until_ns, 0], 0, &[]);
            self.parted.insert(parted, until_ns);
        }
        self.parted.get(&host).is_some_and(|until_ns| *until_ns > now_ns)
    }

    /// Has the NAS do what arrives once more by now, and then this.
    fn execute(&mut self, process: Process, request: &Request) -> Result<Reply, c_int> {
        self.late.sort_by_key(|(at_ns, _)| *at_ns);
        let due = self.late.partition_point(|(at_ns, _)| *at_ns <= TASKS.now_ns.get());
        for (_, late) in self.late.drain(..due) {
            note(Kind::Received, process.host, &late, self.nas.execute(&late, true).err());
        }
        if self.nas.export == Export::Sync && TASKS.random.one_in(self.way.restarts_one_in) {
            self.nas.restart(&TASKS.random);
        }
        let reply = self.nas.execute(request, false);
        note(Kind::Received, process.host, request, reply.as_ref().err().copied());
        reply
    }
}

fn note(kind: Kind, host: Host, request: &Request, error: Option<c_int>) {
    let (result, text) = (-i64::from(error.unwrap_or(0)), format!("{request:?}"));
    TASKS.note(kind, [0, host.0.into(), 0, 0], result, &[text.as_bytes()]);
}

/// Has the NAS do something, and judges what it would leave if it died then.
fn execute(process: Process, request: &Request) -> Result<Reply, c_int> {
    let (reply, judged) = with(|world| {
        let reply = world.execute(process, request);
        let crashes =
            world.crashes.as_ref().filter(|crashes| request.changes() && TASKS.random.one_in(crashes.one_in));
        let left = |crashes: &Crashes| {
            let left: Vec<Directory> =
                (0..crashes.each).map(|_| world.nas.after_crash(&TASKS.random)).collect();
            (crashes.judge.clone(), left)
        };
        (reply, crashes.map(left))
    });
    if let Some((judge, left)) = judged {
        left.into_iter().for_each(|left| judge(left));
    }
    reply
}

/// Asks the NAS until it has answered.
fn ask(process: Process, request: &Request) -> Result<Reply, c_int> {
    let (calls, way) = with(|world| {
        let calls = world.processes.get_mut(&process).expect("it has begun");
        calls.made += 1;
        (*calls, world.way)
    });
    let (random, weather) = (&TASKS.random, way.weather);
    if random.one_in(calls.pauses_one_in) {
        TASKS.sleep(random.below(PAUSE_NS_MAX));
    }
    if calls.made > calls.dies_at || calls.made == calls.dies_at && random.one_in(2) {
        return Err(DEAD);
    }
    let (mut unheard, mut asked) = (None, 0);
    loop {
        asked += 1;
        if way.is_soft && asked > SOFT_ASKS {
            return Err(libc::ETIMEDOUT);
        }
        TASKS.sleep(random.below(DELAY_NS_MAX));
        let is_lost = || with(|world| world.is_parted(process.host)) || random.one_in(weather.lost_one_in);
        let mut heard = None;
        if request.changes() && random.one_in(weather.late_one_in) {
            let at_ns = TASKS.now_ns.get() + random.below(weather.late_ns_max);
            with(|world| world.late.push((at_ns, request.clone())));
        }
        if is_lost() {
            note(Kind::Lost, process.host, request, None);
        } else {
            let reply = match unheard.take() {
                Some(reply) if !random.one_in(FORGOTTEN_ONE_IN) => reply,
                _ => execute(process, request),
            };
            TASKS.sleep(random.below(DELAY_NS_MAX));
            if is_lost() {
                unheard = Some(reply);
            } else {
                heard = Some(reply);
            }
        }
        match heard {
            _ if calls.made == calls.dies_at => return Err(DEAD),
            Some(reply) => return reply,
            None => TASKS.sleep(TIMEOUT_NS),
        }
    }
}

/// What a host believes that a name leads to, if it believes anything.
fn believed(process: Process, name: &str) -> Option<Option<FileNumber>> {
    with(|world| {
        let believed_ns = world.believed_ns;
        let (file, since_ns) = *world.kernel(process).names.get(name)?;
        (TASKS.now_ns.get() - since_ns < believed_ns).then_some(file)
    })
}

fn remember(process: Process, name: &str, file: Option<FileNumber>) {
    let now_ns = TASKS.now_ns.get();
    with(|world| world.kernel(process).names.insert(name.to_owned(), (file, now_ns)));
}

/// The host has changed the name, if to this file, and lists the directory anew.
fn change_name(process: Process, name: &str, file: Option<Option<FileNumber>>) {
    with(|world| {
        let kernel = world.kernel(process);
        kernel.listing = None;
        kernel.names.remove(name);
    });
    if let Some(file) = file {
        remember(process, name, file);
    }
}

fn file_of(process: Process, reply: Reply) -> FileNumber {
    let Reply::File(file, len) = reply else { unreachable!("the NAS answers what it is asked") };
    with(|world| {
        let kernel = world.kernel(process);
        if kernel.lengths.insert(file, len) != Some(len) && !kernel.dirty.contains_key(&file) {
            kernel.pages.remove(&file);
        }
    });
    file
}

fn look_up(process: Process, name: &str) -> Result<FileNumber, c_int> {
    if let Some(file) = believed(process, name) {
        return file.ok_or(libc::ENOENT);
    }
    let heard = ask(process, &Request::Lookup(name.to_owned())).map(|reply| file_of(process, reply));
    if let Ok(_) | Err(libc::ENOENT) = heard {
        remember(process, name, heard.ok());
    }
    heard
}

/// Opens a file, if it is there now.
fn open_file(process: Process, name: &str) -> Result<FileNumber, c_int> {
    loop {
        let file = look_up(process, name)?;
        match ask(process, &Request::Attributes(file)) {
            Err(libc::ESTALE) => change_name(process, name, None),
            reply => return reply.map(|reply| file_of(process, reply)),
        }
    }
}

fn create(process: Process, name: &str) -> Result<FileNumber, c_int> {
    if let Some(Some(_)) = believed(process, name) {
        return Err(libc::EEXIST);
    }
    let file = file_of(process, ask(process, &Request::Create(name.to_owned()))?);
    change_name(process, name, Some(Some(file)));
    Ok(file)
}

fn link(process: Process, from: &str, to: &str) -> Result<isize, c_int> {
    let file = look_up(process, from)?;
    if let Some(Some(_)) = believed(process, to) {
        return Err(libc::EEXIST);
    }
    change_name(process, to, None);
    ask(process, &Request::Link(file, to.to_owned()))?;
    change_name(process, to, Some(Some(file)));
    Ok(0)
}

fn remove(process: Process, name: &str) -> Result<isize, c_int> {
    let file = look_up(process, name)?;
    let hidden = with(|world| {
        world.removed += 1;
        let hidden = format!(".nfs{:016x}", world.removed);
        let mut open = world.descriptors.values_mut();
        let open = open.find(|open| open.file == Some(file) && open.process.host == process.host)?;
        open.removed = Some(hidden.clone());
        Some(hidden)
    });
    ask(
        process,
        &match hidden {
            Some(hidden) => Request::Rename(name.to_owned(), hidden),
            None => Request::Remove(name.to_owned()),
        },
    )?;
    change_name(process, name, Some(None));
    Ok(0)
}

/// Sends what the NAS does not have.
fn write_dirty(process: Process, file: FileNumber) -> Result<(), c_int> {
    let next =
        || with(|world| world.kernel(process).dirty.get(&file).and_then(|edits| edits.first().cloned()));
    while let Some(edit) = next() {
        let written = ask(process, &Request::Edit(file, edit.clone()));
        with(|world| {
            let kernel = world.kernel(process);
            match written {
                Ok(Reply::Verifier(verifier)) => {
                    kernel.dirty.get_mut(&file).expect("it is dirty").remove(0);
                    kernel.uncommitted.entry(file).or_default().push((edit, verifier));
                }
                // What is lost is told once.
                _ => {
                    kernel.dirty.remove(&file);
                    kernel.uncommitted.remove(&file);
                    kernel.pages.remove(&file);
                }
            }
        });
        written?;
    }
    Ok(())
}

fn flush(process: Process, file: FileNumber) -> Result<isize, c_int> {
    loop {
        write_dirty(process, file)?;
        let Reply::Verifier(verifier) = ask(process, &Request::Commit(file))? else {
            unreachable!("the NAS answers what it is asked")
        };
        let is_done = with(|world| {
            let kernel = world.kernel(process);
            let written = kernel.uncommitted.remove(&file).unwrap_or_default();
            let is_done = written.iter().all(|(_, under)| *under == verifier);
            let again = written.into_iter().map(|(edit, _)| edit).filter(|_| !is_done);
            kernel.dirty.entry(file).or_default().splice(..0, again);
            is_done
        });
        if is_done {
            with(|world| world.kernel(process).dirty.remove(&file));
            return Ok(0);
        }
    }
}

fn edit(process: Process, file: FileNumber, edit: Edit) {
    with(|world| {
        let kernel = world.kernel(process);
        let pages = kernel.pages.entry(file).or_default();
        edit.apply(pages);
        kernel.lengths.insert(file, pages.len());
        kernel.dirty.entry(file).or_default().push(edit);
    });
}

fn write(process: Process, file: FileNumber, bytes: &[u8], at: usize) -> Result<isize, c_int> {
    edit(process, file, Edit::Write { at, bytes: bytes.to_vec() });
    if TASKS.random.one_in(2) {
        write_dirty(process, file)?;
    }
    Ok(bytes.len() as isize)
}

fn set_len(process: Process, file: FileNumber, len: usize) -> Result<isize, c_int> {
    edit(process, file, Edit::SetLen(len));
    flush(process, file)
}

fn read(process: Process, file: FileNumber, into: &mut [u8], at: usize) -> Result<isize, c_int> {
    let kept = with(|world| world.kernel(process).pages.get(&file).cloned());
    let pages = match kept {
        Some(pages) => pages,
        None => {
            let Reply::Bytes(pages) = ask(process, &Request::Read(file))? else {
                unreachable!("the NAS answers what it is asked")
            };
            with(|world| world.kernel(process).pages.insert(file, pages.clone()));
            pages
        }
    };
    let from = pages.get(at..).unwrap_or_default();
    let len = from.len().min(into.len());
    into[..len].copy_from_slice(&from[..len]);
    Ok(len as isize)
}

/// Has the host read the file from the NAS next.
fn forget_pages(process: Process, file: FileNumber) {
    with(|world| {
        let keeps = world.nas.fault == Some(Fault::KeptPages);
        let kernel = world.kernel(process);
        if !keeps && kernel.dirty.get(&file).is_none_or(Vec::is_empty) {
            kernel.pages.remove(&file);
        }
    });
}

/// The names in the directory, as of now or as the host knew them.
fn list(process: Process) -> Result<Vec<String>, c_int> {
    let now_ns = TASKS.now_ns.get();
    let known = with(|world| {
        let believed_ns = world.believed_ns;
        let listing = world.kernel(process).listing.clone();
        listing.filter(|(_, since_ns)| now_ns - since_ns < believed_ns)
    });
    if let Some((names, _)) = known {
        return Ok(names);
    }
    let mut names = Vec::new();
    for half in [false, true] {
        let Reply::Names(some) = ask(process, &Request::List { half })? else {
            unreachable!("the NAS answers what it is asked")
        };
        names.extend(some);
    }
    with(|world| world.kernel(process).listing = Some((names.clone(), now_ns)));
    Ok(names)
}

/// Carries a call out, if it is about something that is mounted; the result is as the kernel's.
pub fn call(number: i64, args: [usize; 6]) -> Option<isize> {
    if WORLD.lock().unwrap_or_else(PoisonError::into_inner).is_none() {
        return None;
    }
    let done = if number == libc::SYS_openat { open(args) } else { call_on(number, args) };
    done.map(|done| done.unwrap_or_else(|error| -(error as isize)))
}

/// The descriptor of something mounted.
fn open_of(descriptor: usize) -> Option<Open> {
    with(|world| world.descriptors.get(&(descriptor as c_int)).cloned())
}

/// A new descriptor, with nothing behind it that the kernel knows.
fn descriptor(process: Process, file: Option<FileNumber>) -> isize {
    // SAFETY: a name.
    let descriptor = unsafe { raw(libc::SYS_memfd_create, [c"mount".as_ptr() as usize, 0, 0, 0, 0, 0]) };
    let open = Open { process, file, listing: None, removed: None };
    with(|world| world.descriptors.insert(descriptor as c_int, open));
    descriptor
}

fn name_at(address: usize) -> String {
    // SAFETY: the caller's path; it is used while the call lasts.
    let path = unsafe { CStr::from_ptr(address as *const _) };
    path.to_str().expect("names of the product are text").to_owned()
}

fn open([directory, path, flags, ..]: [usize; 6]) -> Option<Result<isize, c_int>> {
    let name = name_at(path);
    if let Some(mounted) = name.strip_prefix(MOUNTS) {
        let (host, number) = mounted.split_once('-').expect("the path of a process");
        let process = Process {
            host: Host(host.parse().expect("a number")),
            number: number.parse().expect("a number"),
        };
        return Some(Ok(descriptor(process, None)));
    }
    let process = open_of(directory)?.process;
    let file = match &*name {
        "." => Ok(None),
        name if flags as c_int & libc::O_CREAT != 0 => create(process, name).map(Some),
        name => open_file(process, name).map(Some),
    };
    Some(file.map(|file| descriptor(process, file)))
}

fn call_on(number: i64, args: [usize; 6]) -> Option<Result<isize, c_int>> {
    let [first, second, third, fourth, ..] = args;
    let Open { process, file, .. } = open_of(first)?;
    // SAFETY: the caller's buffer.
    let bytes = || unsafe { std::slice::from_raw_parts_mut(second as *mut u8, third) };
    let of_file = || file.expect("the product does that to files");
    Some(match number {
        libc::SYS_close => {
            close(first as c_int);
            // SAFETY: the caller's descriptor.
            Ok(unsafe { raw(number, args) })
        }
        libc::SYS_fcntl => return None,
        libc::SYS_fstat => Ok(tell(process, file, second)),
        libc::SYS_newfstatat => {
            look_up(process, &name_at(second)).map(|file| tell(process, Some(file), third))
        }
        libc::SYS_statx => Ok(tell_long(process, file, args[4])),
        libc::SYS_getdents64 => entries(first, bytes()),
        libc::SYS_pread64 => read(process, of_file(), bytes(), fourth),
        libc::SYS_pwrite64 => write(process, of_file(), bytes(), fourth),
        libc::SYS_ftruncate => set_len(process, of_file(), second),
        libc::SYS_fdatasync | libc::SYS_fsync => match file {
            Some(file) => flush(process, file),
            // Names go to an NFS server as they change.
            None if with(|world| world.nas.export != Export::Flushed) => Ok(0),
            None => ask(process, &Request::FlushNames).map(|_| 0),
        },
        libc::SYS_fadvise64 => {
            forget_pages(process, of_file());
            Ok(0)
        }
        libc::SYS_linkat => link(process, &name_at(second), &name_at(fourth)),
        libc::SYS_unlinkat => remove(process, &name_at(second)),
        // Their first argument is no descriptor.
        libc::SYS_futex
        | libc::SYS_getpid
        | libc::SYS_getrandom
        | libc::SYS_sched_yield
        | libc::SYS_nanosleep
        | libc::SYS_clock_nanosleep => return None,
        _ => TASKS.fail(&format!("system call {number} on a mount is not simulated")),
    })
}

fn close(descriptor: c_int) {
    let open = with(|world| world.descriptors.remove(&descriptor)).expect("looked up before");
    if let Some(hidden) = open.removed {
        let _ = ask(open.process, &Request::Remove(hidden));
    }
}

/// Fills a buffer with names of the directory.
fn entries(descriptor: usize, into: &mut [u8]) -> Result<isize, c_int> {
    let open = open_of(descriptor).expect("looked up before");
    let mut names = match open.listing {
        Some(names) => names,
        None => list(open.process)?,
    };
    let mut used = 0;
    while let Some(name) = names.last() {
        let len = (19 + name.len() + 1).next_multiple_of(8);
        let Some(entry) = into.get_mut(used..used + len) else { break };
        // `struct linux_dirent64`: inode, place of the next, length, kind, name.
        entry.fill(0);
        entry[..8].copy_from_slice(&1u64.to_ne_bytes());
        entry[16..18].copy_from_slice(&(len as u16).to_ne_bytes());
        entry[18] = libc::DT_REG;
        entry[19..19 + name.len()].copy_from_slice(name.as_bytes());
        used += len;
        names.pop();
    }
    with(|world| world.descriptors.get_mut(&(descriptor as c_int)).expect("open").listing = Some(names));
    Ok(used as isize)
}

/// Number, mode and length of a file, or of the directory.
fn about(process: Process, file: Option<FileNumber>) -> (u64, u32, usize) {
    match file {
        None => (ROOT, libc::S_IFDIR | 0o700, 0),
        Some(file) => {
            let len = with(|world| world.kernel(process).lengths.get(&file).copied());
            (file.0, libc::S_IFREG | 0o600, len.unwrap_or(0))
        }
    }
}

fn tell(process: Process, file: Option<FileNumber>, address: usize) -> isize {
    let (number, mode, len) = about(process, file);
    // SAFETY: plain data, for which zeros are valid.
    let mut told: libc::stat = unsafe { std::mem::zeroed() };
    (told.st_dev, told.st_ino, told.st_mode, told.st_nlink) = (DEVICE, number, mode, 1);
    // SAFETY: no pointers.
    (told.st_uid, told.st_size) = (unsafe { libc::geteuid() }, len as i64);
    // SAFETY: room for the result.
    unsafe { (address as *mut libc::stat).write(told) };
    0
}

fn tell_long(process: Process, file: Option<FileNumber>, address: usize) -> isize {
    let (number, mode, len) = about(process, file);
    // SAFETY: plain data, for which zeros are valid.
    let mut told: libc::statx = unsafe { std::mem::zeroed() };
    (told.stx_mask, told.stx_nlink) = (libc::STATX_BASIC_STATS, 1);
    (told.stx_ino, told.stx_mode, told.stx_size) = (number, mode as u16, len as u64);
    (told.stx_dev_major, told.stx_dev_minor) = (libc::major(DEVICE), libc::minor(DEVICE));
    // SAFETY: room for the result.
    unsafe { (address as *mut libc::statx).write(told) };
    0
}
