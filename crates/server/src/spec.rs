//! What a server is asked to serve, checked before any file is touched.
//!
//! ```text
//!   --disk, --vhost-user ─┐
//!   configuration file   ─┼─► api::DiskSpec, api::VhostUserSpec ──► DiskSpec, VhostUserSpec ──► Host
//!   POST /v1/disks, exports ┘             as written                       checked
//! ```
//!
//! Names tie disks and exports together: a disk has one, a vhost-user socket serves the disk of that name, and NBD
//! clients ask for it as export name.

mod disk;
mod fuse;
mod limits;
mod nbd;
mod together;

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::num::{NonZeroU16, NonZeroU64};
use std::path::PathBuf;

use vmstrata_api as api;
use vmstrata_disk::LimitError;
use vmstrata_disk::snapshot::KeepError;
use vmstrata_export::SocketAccess;
use vmstrata_tier::{CACHE_BYTES_MIN, Wire};
use vmstrata_types::path_from_text;

pub use self::disk::{CloneOf, DiskSpec, LocalSpec, ReplicaSpec, StateError, TierSpec, shown_format};
pub(crate) use self::disk::{
    format_of, shown_detect_zeroes, shown_durability, shown_on_outage, shown_subclusters,
};
pub use self::fuse::FuseSpec;
pub(crate) use self::limits::{limits_of, shown_limits};
pub use self::nbd::{NbdError, NbdSpec};
pub(crate) use self::together::check_guests;
pub use self::together::check_together;
use crate::size::{SizeError, parse_size};

/// The longest disk name, well under NBD's limit of 4096 for export names.
const NAME_BYTES_MAX: usize = 255;

/// The longest serial number virtio-blk can carry (VIRTIO_BLK_ID_BYTES).
const SERIAL_BYTES_MAX: usize = 20;

/// The longest path a unix socket address can carry on Linux, without its final zero.
pub(crate) const SOCKET_PATH_BYTES_MAX: usize = 107;

/// What is wrong with what was asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SpecError {
    /// A disk without a name.
    #[error("a disk's name is not empty")]
    NameEmpty,
    /// A name that does not fit.
    #[error("a disk's name has at most {NAME_BYTES_MAX} bytes")]
    NameTooLong,
    /// A name that could not be said on a command line or shown on a terminal.
    #[error("a disk's name has no '=' and no control characters: {name:?}; give name=...")]
    NameCharacter {
        /// The name.
        name: String,
    },
    /// A path that names no file, hence no disk.
    #[error("'{path}' is not a file; give name=...")]
    NoStem {
        /// The path.
        path: String,
    },
    /// A path that no file can have.
    #[error("'{key}' is a path: it is not empty and has no NUL")]
    Path {
        /// What the path is for.
        key: &'static str,
    },
    /// A socket without a path.
    #[error("a socket needs a path")]
    SocketEmpty,
    /// A path that the kernel does not take.
    #[error("the socket path has {len} bytes, Linux allows {SOCKET_PATH_BYTES_MAX}: {path}")]
    SocketTooLong {
        /// Its length.
        len: usize,
        /// The path.
        path: String,
    },
    /// A serial number that does not fit.
    #[error("'serial' has {len} bytes, virtio-blk carries {SERIAL_BYTES_MAX}")]
    SerialTooLong {
        /// Its length.
        len: usize,
    },
    /// Permissions that are none.
    #[error(transparent)]
    Mode(#[from] ModeError),
    /// An owner or a group without a name.
    #[error("a socket's owner and group have a name or a number")]
    AccountEmpty,
    /// A file that only its own directory could find.
    #[error("'{path}' is relative, and the server has another directory: give its absolute path")]
    Relative {
        /// The path.
        path: String,
    },
    /// A number that must not be 0.
    #[error("'{what}' is at least 1")]
    Zero {
        /// The number's name.
        what: &'static str,
    },
    /// A socket for a disk that is not there.
    #[error("vhost-user socket of '{disk}': no disk has this name (there are: {})", there.join(", "))]
    NoSuchDisk {
        /// The name.
        disk: String,
        /// The disks that are there.
        there: Vec<String>,
    },
    /// Two sockets for one writable disk.
    #[error(
        "disk '{disk}' has two vhost-user sockets: two guests writing one disk would corrupt it; make it read-only, \
         or say share on both if only one guest runs at a time, as in a migration"
    )]
    TwoGuests {
        /// The disk.
        disk: String,
    },
    /// A snapshot of nothing.
    #[error("a snapshot is of one disk at least: name it")]
    NoDisks,
    /// A disk that is to be snapshotted twice at one instant.
    #[error("disk '{name}' is named twice: name each once")]
    DiskTwice {
        /// The disk.
        name: String,
    },
    /// Two disks of one name.
    #[error("two disks are named '{name}': give one of them name=...")]
    NameTwice {
        /// The name.
        name: String,
    },
    /// One disk, asked for twice.
    #[error("disk {} is given twice", path.display())]
    PathTwice {
        /// Its file.
        path: PathBuf,
    },
    /// A disk without an export.
    #[error(
        "nothing serves disk '{disk}': add --vhost-user {disk}=/path.sock, --nbd unix:/path or --fuse /directory"
    )]
    NoExport {
        /// The disk.
        disk: String,
    },
    /// A state of a disk that cannot be served as asked.
    #[error(transparent)]
    State(#[from] StateError),
    /// Rules that are none for what to keep of a disk's snapshots.
    #[error("keep: {0}")]
    Keep(#[from] KeepError),
    /// Numbers that are no limit.
    #[error("{what}: {error}")]
    Limit {
        /// The limit.
        what: &'static str,
        /// Why.
        error: LimitError,
    },
    /// A head that is none.
    #[error("'head' is the name of a head, as head-000000000012, not '{text}'")]
    Head {
        /// What was said.
        text: String,
    },
    /// A key of tiered disks without a tier.
    #[error("'{key}' goes with 'tier'{}", if matches!(*key, "on-missing" | "repository") { " or 'replica'" } else { "" })]
    WithoutTier {
        /// The key.
        key: &'static str,
    },
    /// No address of a repository.
    #[error("'repository' cannot be '{text}': {why}")]
    Repository {
        /// What was asked for.
        text: String,
        /// What is expected.
        why: String,
    },
    /// States that are kept for too short or too long.
    #[error("'epochs' is a time from 10m to 24h, such as 90m, not '{text}'")]
    Epochs {
        /// What was asked for.
        text: String,
    },
    /// No answer to what becomes of reads without the repository.
    #[error("'on-missing' is wait, error or error:SECONDS (1 to 3600), not '{text}'")]
    OnMissing {
        /// What was asked for.
        text: String,
    },
    /// A window that is too short or too long.
    #[error("'window' is 1 to 600 seconds, not {seconds}")]
    Window {
        /// What was asked for.
        seconds: u64,
    },
    /// A budget that one write uses up.
    #[error("'outage-bytes' is at least 1M, not {bytes}")]
    OutageBytes {
        /// What was asked for.
        bytes: u64,
    },
    /// Too few bytes a second.
    #[error(transparent)]
    HostRate(#[from] HostRateError),
    /// Something that a tiered disk does not do.
    #[error("'{key}' does not go with 'tier'")]
    NotTiered {
        /// Its key.
        key: &'static str,
    },
    /// Something that does not go with a replica.
    #[error("'{key}' does not go with 'replica'")]
    NoReplica {
        /// Its key.
        key: &'static str,
    },
    /// Hours that are none.
    #[error("'hours' is two times of a day such as 22:00-06:00, not '{text}'")]
    Hours {
        /// What was asked for.
        text: String,
    },
    /// A size of a disk whose file is not made.
    #[error("'size' goes with 'role=swap' and 'role=local'")]
    SizeWithoutRole,
    /// Something that a disk of one host does not do.
    #[error("'{key}' does not go with 'role={role}'")]
    NotLocal {
        /// Its key.
        key: &'static str,
        /// The disk's role.
        role: &'static str,
    },
    /// A disk of one host without a size, or with an odd one.
    #[error("'role={role}' needs a size that is a multiple of 4096, as in size=2G")]
    LocalSize {
        /// The disk's role.
        role: &'static str,
    },
    /// A group that cannot be called so.
    #[error(
        "'{group}' is no group's name: that has 1 to 200 letters, digits, dots, dashes and underscores, and begins with no dot"
    )]
    Group {
        /// What was asked for.
        group: String,
    },
    /// A right to write for everybody, and rights for some.
    #[error("'rw' is for all clients of an export, and 'allow' names some: say rw with those that may write")]
    WritersTwice,
    /// A client that no certificate names so.
    #[error("'{client}' names no client: write CN=, DNS= or URI= and a name in its certificate")]
    ClientName {
        /// What was said.
        client: String,
    },
    /// Rights of clients that show no certificates.
    #[error(
        "'allow' of {address} names clients by their certificates: require those with --nbd-tls-client-ca"
    )]
    ClientsUnknown {
        /// The address.
        address: String,
    },
    /// Disks for everybody.
    #[error(
        "{address} can be reached from other hosts, by unknown clients: require certificates of them \
         (--nbd-tls-cert, --nbd-tls-key, --nbd-tls-client-ca), take an address of this host alone, or say insecure"
    )]
    Exposed {
        /// The address.
        address: String,
    },
    /// Two exports at one path.
    #[error("socket {} is given twice", path.display())]
    SocketTwice {
        /// The path.
        path: PathBuf,
    },
    /// Two mounts on one directory.
    #[error("directory {} is given twice for files of disks", path.display())]
    DirectoryTwice {
        /// The path.
        path: PathBuf,
    },
}

/// Reads how fast all tiered disks ship, or all moves write: a size, the bytes of a second.
///
/// # Errors
/// What is no size, or too little.
pub fn parse_host_rate(text: &str) -> Result<NonZeroU64, HostRateError> {
    let bytes = parse_size(text.strip_suffix("/s").unwrap_or(text))?;
    check_host_rate(bytes)
}

/// The most bytes a second that anybody can mean.
const HOST_RATE_MAX: u64 = 1_000_000_000_000_000;

/// Checks how many bytes a second that are.
///
/// # Errors
/// Too few, or too many.
pub(crate) fn check_host_rate(bytes: u64) -> Result<NonZeroU64, HostRateError> {
    let rate = NonZeroU64::new(bytes).filter(|_| (Wire::RATE_MIN..=HOST_RATE_MAX).contains(&bytes));
    rate.ok_or(HostRateError::Range { bytes })
}

/// Why that is no rate of a host.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostRateError {
    /// It is no size.
    #[error(transparent)]
    Size(#[from] SizeError),
    /// A piece of a layer would take for ever, or no wire is as fast.
    #[error("a host's rate is 65536 to 10^15 bytes a second, not {bytes}")]
    Range {
        /// What was asked for.
        bytes: u64,
    },
}

/// A vhost-user socket to open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VhostUserSpec {
    /// The name of the disk it serves.
    pub disk: String,
    /// The socket to listen on.
    pub socket: PathBuf,
    /// How many virtqueues are offered; `None` leaves it to the export.
    pub queues: Option<NonZeroU16>,
    /// How many threads serve them; `None` leaves it to the export.
    pub threads: Option<NonZeroU16>,
    /// How long a queue thread polls before it sleeps; `None` leaves it to the export.
    pub poll_us: Option<u32>,
    /// What the guest reads as the disk's serial number.
    pub serial: Option<String>,
    /// Whether other sockets may serve the same writable disk: the user sees to it that one guest runs at a time.
    pub share: bool,
    /// Whether the guest's memory may be in any file.
    pub any_memory: bool,
    /// Who may connect.
    pub access: SocketAccess,
}

impl TryFrom<api::VhostUserSpec> for VhostUserSpec {
    type Error = SpecError;

    fn try_from(asked: api::VhostUserSpec) -> Result<Self, SpecError> {
        check_name(&asked.disk)?;
        check_socket(&asked.socket)?;
        if let Some(len) = asked.serial.as_ref().map(String::len).filter(|len| *len > SERIAL_BYTES_MAX) {
            return Err(SpecError::SerialTooLong { len });
        }
        let at_least_1 = |number: Option<u16>, what| match number.map(NonZeroU16::new) {
            Some(None) => Err(SpecError::Zero { what }),
            number => Ok(number.flatten()),
        };
        Ok(Self {
            queues: at_least_1(asked.queues, "queues")?,
            threads: at_least_1(asked.threads, "threads")?,
            disk: asked.disk,
            socket: asked.socket.into(),
            poll_us: asked.poll_us,
            serial: asked.serial,
            share: asked.share,
            any_memory: asked.any_memory,
            access: SocketAccess {
                owner: asked.owner.map(parse_account).transpose()?,
                group: asked.group.map(parse_account).transpose()?,
                mode: asked.mode.as_deref().map(parse_mode).transpose()?,
            },
        })
    }
}

impl From<&VhostUserSpec> for api::VhostUserSpec {
    fn from(spec: &VhostUserSpec) -> Self {
        Self {
            disk: spec.disk.clone(),
            socket: spec.socket.display().to_string(),
            queues: spec.queues.map(u16::from),
            threads: spec.threads.map(u16::from),
            poll_us: spec.poll_us,
            serial: spec.serial.clone(),
            share: spec.share,
            any_memory: spec.any_memory,
            owner: spec.access.owner.clone(),
            group: spec.access.group.clone(),
            mode: spec.access.mode.map(|mode| format!("{mode:o}")),
        }
    }
}

/// An export to open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExportSpec {
    /// One disk, for one guest.
    VhostUser(VhostUserSpec),
    /// All disks, for NBD clients.
    Nbd(NbdSpec),
    /// All disks and their snapshots, as files.
    Fuse(FuseSpec),
}

impl TryFrom<api::ExportSpec> for ExportSpec {
    type Error = NbdError;

    fn try_from(asked: api::ExportSpec) -> Result<Self, NbdError> {
        Ok(match asked {
            api::ExportSpec::VhostUser(asked) => Self::VhostUser(asked.try_into()?),
            api::ExportSpec::Nbd(asked) => Self::Nbd(asked.try_into()?),
            api::ExportSpec::Fuse(asked) => Self::Fuse(asked.try_into()?),
        })
    }
}

impl From<&ExportSpec> for api::ExportSpec {
    fn from(spec: &ExportSpec) -> Self {
        match spec {
            ExportSpec::VhostUser(spec) => Self::VhostUser(spec.into()),
            ExportSpec::Nbd(spec) => Self::Nbd(spec.into()),
            ExportSpec::Fuse(spec) => Self::Fuse(spec.into()),
        }
    }
}

impl ExportSpec {
    /// The only disk that it serves.
    pub(crate) fn only_disk(&self) -> Option<&str> {
        match self {
            Self::VhostUser(spec) => Some(&spec.disk),
            Self::Nbd(_) | Self::Fuse(_) => None,
        }
    }

    /// Where its clients connect.
    pub(crate) fn place(&self) -> String {
        match self {
            Self::VhostUser(spec) => spec.socket.display().to_string(),
            Self::Nbd(spec) => spec.address.to_string(),
            Self::Fuse(spec) => spec.directory.display().to_string(),
        }
    }

    /// The same with an absolute path: the next server may be started in another directory.
    ///
    /// # Errors
    /// This process's own directory is gone, and the path is relative.
    pub(crate) fn absolute(self) -> io::Result<Self> {
        Ok(match self {
            Self::VhostUser(spec) => {
                Self::VhostUser(VhostUserSpec { socket: std::path::absolute(&spec.socket)?, ..spec })
            }
            Self::Nbd(spec) => Self::Nbd(spec.absolute()?),
            Self::Fuse(spec) => Self::Fuse(spec.absolute()?),
        })
    }
}

/// A text that is no place for metrics.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MetricsError {
    /// No port.
    #[error(
        "metrics are served on a port, or an address and a port, as in 9100, [::1]:9100 or 192.0.2.1:9100,insecure"
    )]
    Place,
    /// Numbers for everybody.
    #[error(
        "metrics on {0} can be read from other hosts, without TLS: take a port of this host alone, or say {0},insecure"
    )]
    Exposed(SocketAddr),
}

/// Reads a port, or an address with a port: metrics are for this host alone unless `,insecure` says otherwise.
///
/// # Errors
/// When it is neither; an address that other hosts can reach.
pub fn parse_metrics(text: &str) -> Result<SocketAddr, MetricsError> {
    let (place, is_insecure) = match text.strip_suffix(",insecure") {
        Some(place) => (place, true),
        None => (text, false),
    };
    let address: SocketAddr = match place.parse::<u16>() {
        Ok(port) => (Ipv4Addr::LOCALHOST, port).into(),
        Err(_) => place.parse().map_err(|_| MetricsError::Place)?,
    };
    if address.ip().is_loopback() || is_insecure { Ok(address) } else { Err(MetricsError::Exposed(address)) }
}

/// A text that is no size of a cache of layers.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TierCacheError {
    /// It is no size.
    #[error(transparent)]
    Size(#[from] SizeError),
    /// One that large requests do not go through.
    #[error("a tier-cache has at least 256M")]
    Small,
}

/// Reads the size of a cache of layers.
///
/// # Errors
/// When it is none, or less than [`CACHE_BYTES_MIN`].
pub fn parse_tier_cache(text: &str) -> Result<u64, TierCacheError> {
    let bytes = parse_size(text)?;
    if bytes >= CACHE_BYTES_MIN { Ok(bytes) } else { Err(TierCacheError::Small) }
}

/// A text that is no permissions.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("permissions of a socket are octal digits up to 666, as in 600 or 660")]
pub struct ModeError;

/// Reads permissions of a socket: who may connect.
///
/// # Errors
/// When there are none.
pub fn parse_mode(text: &str) -> Result<u32, ModeError> {
    let mode = u32::from_str_radix(text, 8).map_err(|_| ModeError)?;
    if mode & !0o666 == 0 { Ok(mode) } else { Err(ModeError) }
}

/// Takes the name or number of a socket's owner or group; whether there is one shows when the socket is made.
///
/// # Errors
/// When it is empty.
pub fn parse_account(text: String) -> Result<String, SpecError> {
    if text.is_empty() { Err(SpecError::AccountEmpty) } else { Ok(text) }
}

fn stem(path: &str) -> Result<String, SpecError> {
    let file = path_from_text(path);
    let stem = file.file_stem().ok_or_else(|| SpecError::NoStem { path: path.to_owned() })?;
    Ok(stem.to_string_lossy().into_owned())
}

fn check_name(name: &str) -> Result<(), SpecError> {
    if name.is_empty() {
        Err(SpecError::NameEmpty)
    } else if name.len() > NAME_BYTES_MAX {
        Err(SpecError::NameTooLong)
    } else if name.chars().any(|c| c.is_control() || c == '=') {
        Err(SpecError::NameCharacter { name: name.to_owned() })
    } else {
        Ok(())
    }
}

/// Refuses a path that no file can have.
pub(crate) fn check_path(key: &'static str, path: &str) -> Result<(), SpecError> {
    if path.is_empty() || path.contains('\0') { Err(SpecError::Path { key }) } else { Ok(()) }
}

/// The path of a file that exists: a relative one would be seen from the server's directory.
pub(crate) fn absolute(key: &'static str, path: &str) -> Result<PathBuf, SpecError> {
    check_path(key, path)?;
    let file = Some(path_from_text(path)).filter(|file| file.is_absolute());
    file.ok_or_else(|| SpecError::Relative { path: path.to_owned() })
}

fn check_socket(path: &str) -> Result<(), SpecError> {
    match path.len() {
        0 => Err(SpecError::SocketEmpty),
        len if len > SOCKET_PATH_BYTES_MAX => Err(SpecError::SocketTooLong { len, path: path.to_owned() }),
        _ => check_path("socket", path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(path: &str, name: Option<&str>) -> Result<DiskSpec, SpecError> {
        api::DiskSpec { path: path.to_owned(), name: name.map(str::to_owned), ..Default::default() }
            .try_into()
    }

    #[test]
    fn permissions_of_a_socket_are_octal() {
        assert_eq!(["600", "0660", "0"].map(parse_mode), [Ok(0o600), Ok(0o660), Ok(0)]);
        for text in ["", "68", "777", "1600", "rw", "-1", "0o600"] {
            assert_eq!(parse_mode(text), Err(ModeError), "{text}");
        }
    }

    #[test]
    fn a_rate_of_a_host_is_a_size_of_some_bytes() {
        for (text, bytes) in [
            ("64K", Ok(64 << 10)),
            ("40M/s", Ok(40 << 20)),
            ("65535", Err(65535)),
            ("0", Err(0)),
            ("2P", Err(2 << 50)),
        ] {
            let expected = bytes.map_err(|bytes| HostRateError::Range { bytes });
            assert_eq!(parse_host_rate(text).map(NonZeroU64::get), expected, "{text}");
        }
        assert!(matches!(parse_host_rate("fast"), Err(HostRateError::Size(_))));
    }

    #[test]
    fn metrics_are_for_this_host_unless_they_are_called_insecure() {
        let read = |text| parse_metrics(text).map(|address| address.to_string());
        for (text, address) in
            [("9100", "127.0.0.1:9100"), ("[::1]:1", "[::1]:1"), ("0.0.0.0:1,insecure", "0.0.0.0:1")]
        {
            assert_eq!(read(text).as_deref(), Ok(address));
        }
        assert!(matches!(read("[::]:9100"), Err(MetricsError::Exposed(_))));
        for text in ["", "x", "9100,insecur", "localhost:1"] {
            assert_eq!(read(text), Err(MetricsError::Place), "{text}");
        }
    }

    #[test]
    fn a_disk_is_named_after_its_file() {
        let disk = disk("/vms/web.v2.qcow2", None).unwrap();
        assert_eq!((disk.name.as_str(), disk.path), ("web.v2", PathBuf::from("/vms/web.v2.qcow2")));
    }

    #[test]
    fn names_are_checked_at_their_edges() {
        assert!(disk("a", Some(&"n".repeat(NAME_BYTES_MAX))).is_ok());
        assert_eq!(disk("a", Some(&"n".repeat(NAME_BYTES_MAX + 1))), Err(SpecError::NameTooLong));
        assert_eq!(disk("a", Some("")), Err(SpecError::NameEmpty));
        assert!(matches!(disk("a", Some("b=c")), Err(SpecError::NameCharacter { .. })));
        assert!(matches!(disk("a", Some("b\n")), Err(SpecError::NameCharacter { .. })));
        assert!(matches!(disk("/", None), Err(SpecError::NoStem { .. })));
    }

    #[test]
    fn sockets_are_checked_at_their_edges_and_shown_as_they_were_asked_for() {
        let asked = |socket: String| api::VhostUserSpec { disk: "web".into(), socket, ..Default::default() };
        let longest = asked("s".repeat(SOCKET_PATH_BYTES_MAX));
        assert_eq!(api::VhostUserSpec::from(&VhostUserSpec::try_from(longest.clone()).unwrap()), longest);
        let socket = |asked| VhostUserSpec::try_from(asked).unwrap_err();
        assert!(matches!(socket(asked("s".repeat(108))), SpecError::SocketTooLong { len: 108, .. }));
        assert_eq!(socket(asked(String::new())), SpecError::SocketEmpty);
        let zero = api::VhostUserSpec { queues: Some(0), ..asked("s".into()) };
        assert_eq!(socket(zero), SpecError::Zero { what: "queues" });
        let shown = api::VhostUserSpec {
            owner: Some("qemu".into()),
            group: Some("guests".into()),
            mode: Some("660".into()),
            ..longest
        };
        assert_eq!(api::VhostUserSpec::from(&VhostUserSpec::try_from(shown.clone()).unwrap()), shown);
        let mode = api::VhostUserSpec { mode: Some("777".into()), ..asked("s".into()) };
        assert_eq!(socket(mode), SpecError::Mode(ModeError));
        let group = api::VhostUserSpec { group: Some(String::new()), ..asked("s".into()) };
        assert_eq!(socket(group), SpecError::AccountEmpty);
        let serial = api::VhostUserSpec { serial: Some("s".repeat(21)), ..asked("s".into()) };
        assert_eq!(socket(serial), SpecError::SerialTooLong { len: 21 });
    }
}
