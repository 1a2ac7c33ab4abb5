//! Why a server does not start, does not end clean, or does not do what it is asked.

use std::io;
use std::path::PathBuf;

use vmstrata_export::{fuse, nbd, vhost_user};

use crate::agent::AgentFault;
use crate::spec::{NbdError, SpecError};

/// See the module documentation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// What was asked for makes no sense.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The engine refused or failed.
    #[error(transparent)]
    Disk(#[from] vmstrata_disk::Error),
    /// The flush log cannot be used, or brought into the images.
    #[error(transparent)]
    FlushLog(#[from] vmstrata_flushlog::LogError),
    /// The engine of tiered disks refused or failed.
    #[error(transparent)]
    Tier(#[from] vmstrata_tier::Error),
    /// A move was refused, or failed.
    #[error(transparent)]
    Move(#[from] vmstrata_migrate::Error),
    /// The directory for copies of tiered disks cannot be used.
    #[error("{}: cannot make the directory for copies of tiered disks", path.display())]
    TierDirectory {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Something that cannot be done with a tiered disk.
    #[error("disk '{name}' is tiered, which does not go with {what} yet")]
    Tiered {
        /// The disk.
        name: String,
        /// What was asked for.
        what: &'static str,
    },
    /// A disk that is published with others.
    #[error("disk '{name}' is published with those of group '{group}': serve all of them with group={group}")]
    InGroup {
        /// The disk.
        name: String,
        /// Its group.
        group: String,
    },
    /// A group that is to be made of disks that come one after the other.
    #[error(
        "group '{group}' is not published yet: start the server with all of its disks, which makes the group"
    )]
    NewGroup {
        /// The group.
        group: String,
    },
    /// Disks of a group that are to be published differently.
    #[error(
        "disks '{one}' and '{other}' are of group '{group}': say the same of both with the keys that go with 'tier'"
    )]
    GroupDiffers {
        /// The group.
        group: String,
        /// A disk of it.
        one: String,
        /// Another one.
        other: String,
    },
    /// A disk that was removed before all of it was published.
    #[error("disk '{name}' is removed, and this host's copy has what is not published: {why}")]
    NotAllPublished {
        /// The disk.
        name: String,
        /// Why.
        why: String,
    },
    /// A disk of which nothing is published yet.
    #[error(
        "disk '{name}' is being attached, and nothing of it is published yet: wait for the job (`vmstrata job list`), or have it go on (`vmstrata tier attach`)"
    )]
    BeingAttached {
        /// The disk.
        name: String,
    },
    /// A disk that another host publishes.
    #[error(
        "disk '{name}' stands by: another host publishes it, and requests wait until this one takes it over (`vmstrata vm migrate`, `vmstrata tier takeover`)"
    )]
    StandsBy {
        /// The disk.
        name: String,
    },
    /// A disk that does not wait to be taken over.
    #[error("disk '{name}' does not stand by (its key standby)")]
    NoStandby {
        /// The disk.
        name: String,
    },
    /// A disk that is not tiered.
    #[error("disk '{name}' is not tiered (its key tier=DIR)")]
    NotTiered {
        /// The disk.
        name: String,
    },
    /// A disk that reads nothing from repositories through a cache.
    #[error(
        "disk '{name}' has no layers in a repository that are read through a cache of this host (its key replica=DIR)"
    )]
    NoReplica {
        /// The disk.
        name: String,
    },
    /// Bytes of a layer in a repository that are not what was shipped.
    #[error("a replica cannot be whole: {source}")]
    Replica {
        /// What is wrong.
        source: std::io::Error,
    },
    /// A disk that stays on this host, and has no history.
    #[error("disk '{name}' is local to this host (its key role={role}): there is no {what} of it")]
    Local {
        /// The disk.
        name: String,
        /// Its role.
        role: &'static str,
        /// What was asked for.
        what: &'static str,
    },
    /// An NBD export cannot be opened.
    #[error(transparent)]
    Nbd(#[from] nbd::Error),
    /// Disks cannot be mounted as files.
    #[error(transparent)]
    Fuse(#[from] fuse::Error),
    /// A vhost-user export cannot be opened.
    #[error("vhost-user socket of '{disk}'")]
    VhostUser {
        /// The disk it is for.
        disk: String,
        /// Why.
        source: vhost_user::Error,
    },
    /// A file that is one of the server's disks, or a layer of one, already.
    #[error("{} is already served as '{name}': use that disk, or remove it first", path.display())]
    Served {
        /// The file.
        path: PathBuf,
        /// The disk.
        name: String,
    },
    /// A name that another disk has.
    #[error("{} is already served as '{name}': give this disk another name (name=...)", path.display())]
    NameTaken {
        /// The name.
        name: String,
        /// The file of the disk that has it.
        path: PathBuf,
    },
    /// No disk has this name.
    #[error("no disk is named '{name}'")]
    NoSuchDisk {
        /// The name.
        name: String,
    },
    /// No export has this number.
    #[error("no export has the number {id}")]
    NoSuchExport {
        /// The number.
        id: u64,
    },
    /// No job has this number.
    #[error("no job has the number {id}")]
    NoSuchJob {
        /// The number.
        id: u64,
    },
    /// The same work on the same disk is under way.
    #[error("a job '{kind}' is under way on disk '{disk}' already")]
    JobExists {
        /// What it does.
        kind: &'static str,
        /// The disk.
        disk: String,
    },
    /// As many requests wait for a disk as may: the others are for other disks.
    #[error(
        "{waiting} requests wait for disk '{disk}' already, the first for {doing}: its storage may not answer"
    )]
    Crowded {
        /// The disk's name.
        disk: String,
        /// How many wait.
        waiting: usize,
        /// What the first of them is about, a participle with its object.
        doing: &'static str,
    },
    /// As many jobs are under way as may be.
    #[error("{max} jobs are under way, as many as may be")]
    TooManyJobs {
        /// The most there may be.
        max: usize,
    },
    /// A defect of vmstrata's own.
    #[error(
        "the job '{kind}' failed by a defect of vmstrata, which the log names; what it did before is kept"
    )]
    JobPanicked {
        /// What it did.
        kind: &'static str,
    },
    /// A disk that is not served yet, or no longer.
    #[error("disk '{name}' is {doing}: try again when that is done")]
    Busy {
        /// Its name.
        name: String,
        /// What is happening to it.
        doing: &'static str,
    },
    /// A disk that could not be opened when the server started.
    #[error(
        "disk '{name}' is not open, and is tried again until it is or `vmstrata disk remove` gives it up: {why}"
    )]
    NotOpen {
        /// Its name.
        name: String,
        /// Why it could not be opened the last time.
        why: String,
    },
    /// A disk that was closed, whose files the server has not let go of.
    #[error(
        "disk '{name}' is closed, but this server has its files locked still, which is a defect of vmstrata: they are unlocked when the server ends"
    )]
    StillLocked {
        /// Its name.
        name: String,
    },
    /// A snapshot that is published, or that nobody took.
    #[error("disk '{disk}' has no snapshot '{snapshot}' that waits to be published")]
    NotPending {
        /// The disk.
        disk: String,
        /// The snapshot.
        snapshot: String,
    },
    /// Storage that does not answer, or a guest's memory.
    #[error(
        "{what} could not be ended in time, as requests are still under way: the files stay locked until those are answered or this server ends"
    )]
    NotEnded {
        /// An export, or disks.
        what: String,
    },
    /// A disk whose content would change under its users.
    #[error(
        "disk '{name}' is in use by {by}, under whom it would change: detach that first, or make a disk of its own of the snapshot with `vmstrata snapshot clone`"
    )]
    Attached {
        /// Its name.
        name: String,
        /// Who uses it.
        by: String,
    },
    /// A guest that would lose its disk.
    #[error(
        "a guest is attached at {}: shut it down or unplug the disk there first, or say --force (force=true)",
        socket.display()
    )]
    GuestAttached {
        /// The guest's socket.
        socket: PathBuf,
    },
    /// A program that would lose its disk.
    #[error(
        "a program has a file of disk '{name}' open: close it first (`lsof` and `losetup -l` name it), or say --force (force=true)"
    )]
    FilesOpen {
        /// The disk.
        name: String,
    },
    /// A snapshot that was to be quiesced, of a disk whose guest's agent is not known.
    #[error(
        "disk '{name}' has no guest agent that could quiesce it: name its socket (agent=SOCKET, --agent)"
    )]
    NoAgent {
        /// The disk's name.
        name: String,
    },
    /// A guest that does not stand still.
    #[error("guest agent {}", socket.display())]
    Agent {
        /// Its socket.
        socket: PathBuf,
        /// Why.
        source: AgentFault,
    },
    /// A guest that does not go on.
    #[error(
        "the snapshot is taken, but the guest may stand still: its agent {} did not thaw it, which is tried for another minute; send guest-fsfreeze-thaw to it",
        socket.display()
    )]
    StillFrozen {
        /// Its agent's socket.
        socket: PathBuf,
        /// Why.
        source: AgentFault,
    },
    /// A guest that went on before it was let go.
    #[error(
        "the snapshot is taken, but may not be quiesced, whatever its label says: agent {} had {frozen} file systems frozen, and {thawed} of {frozen} were frozen still when it was to thaw them (Windows gives up after 10 s)",
        socket.display()
    )]
    ThawedEarly {
        /// Its agent's socket.
        socket: PathBuf,
        /// File systems that it froze.
        frozen: u64,
        /// File systems that it thawed.
        thawed: u64,
    },
    /// The server takes no more changes.
    #[error("the server is ending")]
    Ending,
    /// Disks whose images are as after a crash.
    #[error("{}", failures.iter().map(NotClean::to_string).collect::<Vec<_>>().join("; "))]
    NotClean {
        /// The disks.
        failures: Vec<NotClean>,
    },
    /// What NBD clients wrote is not known to be on stable storage.
    #[error("cannot flush what NBD clients wrote")]
    NbdFlush(#[source] vmstrata_disk::Error),
    /// The directory for journals and the control socket cannot be used.
    #[error("runtime directory {path}: {fault}; choose one with --runtime-dir")]
    RuntimeDir {
        /// The directory.
        path: PathBuf,
        /// What is wrong with it.
        fault: RuntimeDirFault,
    },
    /// The descriptor for readiness cannot be written.
    #[error("--ready-fd {fd}: cannot tell that the server is ready")]
    ReadyFd {
        /// Its number.
        fd: u32,
        /// Why.
        source: io::Error,
    },
    /// The service manager cannot be told.
    #[error("NOTIFY_SOCKET {}: cannot notify", socket.display())]
    Notify {
        /// The manager's socket.
        socket: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The kernel refuses what a server needs.
    #[error("cannot {action}")]
    System {
        /// What was tried, as a verb with its object.
        action: &'static str,
        /// Why.
        source: io::Error,
    },
    /// The control socket cannot be had.
    #[error("control socket {path}: {fault}")]
    Control {
        /// The socket.
        path: PathBuf,
        /// What is wrong.
        fault: SocketFault,
    },
    /// Changes cannot be written down.
    #[error("--audit {}: cannot write to it", path.display())]
    Audit {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The address for metrics cannot be had.
    #[error("cannot serve metrics on {address}")]
    Metrics {
        /// The address.
        address: std::net::SocketAddr,
        /// Why.
        source: io::Error,
    },
}

impl Error {
    /// A relative path, and the directory is gone that it is seen from.
    pub(crate) fn no_directory(source: io::Error) -> Self {
        Self::System { action: "find the directory it was started in", source }
    }
}

impl From<NbdError> for Error {
    fn from(error: NbdError) -> Self {
        match error {
            NbdError::Address(error) => error.into(),
            NbdError::Spec(error) => error.into(),
        }
    }
}

impl AsRef<dyn std::error::Error> for Error {
    fn as_ref(&self) -> &(dyn std::error::Error + 'static) {
        self
    }
}

/// A disk that could not be closed clean.
#[derive(Debug, thiserror::Error)]
#[error("disk '{name}' could not be closed clean: {source}")]
pub struct NotClean {
    /// Its name.
    pub name: String,
    /// Why.
    pub source: vmstrata_disk::Error,
}

/// What is wrong with a runtime directory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RuntimeDirFault {
    /// It does not exist and cannot be made, or cannot be looked at.
    #[error("cannot be made: {0}")]
    Make(io::Error),
    /// Someone else could remove what lies in it.
    #[error("belongs to another user")]
    Foreign,
    /// Someone else could put a journal into it.
    #[error("others may write to it (chmod go-w)")]
    OpenToOthers,
}

/// What is wrong with a place for a control socket.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SocketFault {
    /// Another server answers there.
    #[error(
        "another server listens there{}: stop it, take over from it with --replace, or choose another socket with --control, or none with --no-control",
        pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default()
    )]
    InUse {
        /// Its process, if that is known.
        pid: Option<i32>,
    },
    /// Something else has the name.
    #[error("it exists and is not a socket: remove it or choose another path")]
    NotASocket,
    /// A path that the kernel does not take.
    #[error("the path is longer than Linux allows for sockets")]
    TooLong,
    /// The system refuses.
    #[error("cannot listen: {0}")]
    Listen(io::Error),
}
