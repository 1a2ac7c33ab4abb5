//! What `serve` is asked for: `--disk`, `--vhost-user` and `--nbd`, read and checked before any file is touched.
//!
//! Names tie the three together: a disk has one, a vhost-user socket serves the disk of that name, and NBD
//! clients ask for it as export name.

use std::num::NonZeroU16;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use vmstrata_disk::Format;
use vmstrata_export::nbd::Address;
use vmstrata_store::CacheMode;

use crate::key_values::KeyValues;

/// The longest disk name, well under NBD's limit of 4096 for export names.
const NAME_BYTES_MAX: usize = 255;

/// The longest serial number virtio-blk can carry (VIRTIO_BLK_ID_BYTES).
const SERIAL_BYTES_MAX: usize = 20;

/// The longest path a unix socket address can carry on Linux, without its final zero.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// Reads `--format` and its like: the formats a layer can have, by the names qemu-img knows.
pub fn format_parser() -> impl TypedValueParser<Value = Format> {
    PossibleValuesParser::new(["qcow2", "raw"]).try_map(|name| parse_format(&name))
}

fn parse_format(text: &str) -> Result<Format> {
    match text {
        "qcow2" => Ok(Format::Qcow2),
        "raw" => Ok(Format::Raw),
        other => bail!("format is qcow2 or raw, not '{other}'"),
    }
}

/// One `--disk`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskSpec {
    /// The active layer's file.
    pub path: PathBuf,
    /// What sockets and clients call it; the file's stem unless given.
    pub name: String,
    /// Whether writes are refused.
    pub read_only: bool,
    /// How the active layer's data passes the host's page cache.
    pub cache: CacheMode,
    /// `None` looks at the file.
    pub format: Option<Format>,
}

impl DiskSpec {
    const KEYS: [&str; 5] = ["path", "name", "read-only", "cache", "format"];

    /// Reads `path=FILE[,name=NAME][,read-only][,cache=host|direct][,format=qcow2|raw]`.
    ///
    /// # Errors
    /// Names the key that is missing, unknown, repeated or malformed.
    pub fn parse(text: &str) -> Result<Self> {
        let mut list = KeyValues::parse(text)?;
        let path = list.take("path")?.context("'path' is missing, as in path=web.qcow2,name=web")?;
        let name = match list.take("name")? {
            Some(name) => name,
            None => stem(&path)?,
        };
        check_name(&name)?;
        let read_only = list.take_flag("read-only")?;
        let cache = list.take("cache")?.map_or(Ok(CacheMode::Host), |value| parse_cache(&value))?;
        let format = list.take("format")?.map(|value| parse_format(&value)).transpose()?;
        list.finish(&Self::KEYS)?;
        Ok(Self { path: path.into(), name, read_only, cache, format })
    }
}

/// One `--vhost-user`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VhostUserSpec {
    /// The name of the disk it serves.
    pub disk: String,
    /// The socket to listen on.
    pub socket: PathBuf,
    /// How many virtqueues are offered; `None` leaves it to the door.
    pub queues: Option<NonZeroU16>,
    /// How many threads serve them; `None` leaves it to the door.
    pub threads: Option<NonZeroU16>,
    /// How long a queue thread polls before it sleeps; `None` leaves it to the door.
    pub poll_us: Option<u32>,
    /// What the guest reads as the disk's serial number.
    pub serial: Option<String>,
    /// Whether other sockets may serve the same writable disk: the user sees to it that one guest runs at a time.
    pub share: bool,
}

impl VhostUserSpec {
    const KEYS: [&str; 5] = ["queues", "threads", "poll-us", "serial", "share"];

    /// Reads `NAME=SOCKET[,queues=N][,threads=N][,poll-us=N][,serial=S][,share]`.
    ///
    /// # Errors
    /// Names the part that is missing, unknown, repeated or malformed.
    pub fn parse(text: &str) -> Result<Self> {
        let mut list = KeyValues::parse(text)?;
        let (disk, socket) = list.take_first().context("starts with NAME=SOCKET, as in web=/run/web.sock")?;
        check_name(&disk)?;
        check_socket(&socket)?;
        let queues = list.take_number("queues")?;
        let threads = list.take_number("threads")?;
        let poll_us = list.take_number("poll-us")?;
        let serial = list.take("serial")?;
        if let Some(serial) = &serial {
            ensure!(
                serial.len() <= SERIAL_BYTES_MAX,
                "'serial' has {} bytes, virtio-blk carries {SERIAL_BYTES_MAX}",
                serial.len()
            );
        }
        let share = list.take_flag("share")?;
        list.finish(&Self::KEYS)?;
        Ok(Self { disk, socket: socket.into(), queues, threads, poll_us, serial, share })
    }
}

/// Checks that the parts fit together: every name is one disk's, every socket is used once, every disk has a door.
///
/// # Errors
/// Names the disk or socket that does not fit.
pub fn check_together(disks: &[DiskSpec], sockets: &[VhostUserSpec], nbd: &[Address]) -> Result<()> {
    for (at, socket) in sockets.iter().enumerate() {
        let Some(disk) = disks.iter().find(|disk| disk.name == socket.disk) else {
            let names: Vec<_> = disks.iter().map(|disk| disk.name.as_str()).collect();
            bail!("--vhost-user {}: no disk has this name (there are: {})", socket.disk, names.join(", "));
        };
        let alone =
            sockets[..at].iter().all(|earlier| earlier.disk != socket.disk || earlier.share && socket.share);
        ensure!(
            alone || disk.read_only,
            "disk '{}' has two --vhost-user sockets: two guests writing one disk would corrupt it; make it read-only, \
             or say share on both if only one guest runs at a time, as in a migration",
            disk.name
        );
    }
    for (at, disk) in disks.iter().enumerate() {
        let twice = disks[..at].iter().any(|earlier| earlier.name == disk.name);
        ensure!(!twice, "two disks are named '{}': give one of them name=...", disk.name);
        let has_door = !nbd.is_empty() || sockets.iter().any(|socket| socket.disk == disk.name);
        ensure!(
            has_door,
            "nothing serves disk '{}': add --vhost-user {0}=/path.sock or --nbd unix:/path",
            disk.name
        );
    }
    check_sockets_differ(sockets, nbd)
}

fn check_sockets_differ(sockets: &[VhostUserSpec], nbd: &[Address]) -> Result<()> {
    let mut paths: Vec<&Path> = sockets.iter().map(|socket| socket.socket.as_path()).collect();
    paths.extend(nbd.iter().filter_map(|address| match address {
        Address::Unix(path) => Some(path.as_path()),
        Address::Tcp { .. } => None,
    }));
    paths.sort_unstable();
    match paths.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => bail!("socket {} is given twice", pair[0].display()),
        None => Ok(()),
    }
}

fn parse_cache(text: &str) -> Result<CacheMode> {
    match text {
        "host" => Ok(CacheMode::Host),
        "direct" => Ok(CacheMode::Direct),
        other => bail!("cache is host or direct, not '{other}'"),
    }
}

fn stem(path: &str) -> Result<String> {
    let stem =
        Path::new(path).file_stem().with_context(|| format!("'{path}' is not a file; give name=..."))?;
    Ok(stem.to_string_lossy().into_owned())
}

fn check_name(name: &str) -> Result<()> {
    ensure!(!name.is_empty(), "a disk's name is not empty");
    ensure!(name.len() <= NAME_BYTES_MAX, "a disk's name has at most {NAME_BYTES_MAX} bytes");
    let bad = name.chars().find(|c| c.is_control() || *c == '=');
    ensure!(bad.is_none(), "a disk's name has no '=' and no control characters: {name:?}; give name=...");
    Ok(())
}

fn check_socket(path: &str) -> Result<()> {
    ensure!(!path.is_empty(), "a socket needs a path");
    ensure!(
        path.len() <= SOCKET_PATH_BYTES_MAX,
        "the socket path has {} bytes, Linux allows {SOCKET_PATH_BYTES_MAX}: {path}",
        path.len()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error_of<T: std::fmt::Debug>(result: Result<T>) -> String {
        format!("{:#}", result.unwrap_err())
    }

    #[test]
    fn a_disk_is_named_after_its_file() {
        let disk = DiskSpec::parse("path=/vms/web.v2.qcow2").unwrap();
        assert_eq!(
            disk,
            DiskSpec {
                path: "/vms/web.v2.qcow2".into(),
                name: "web.v2".into(),
                read_only: false,
                cache: CacheMode::Host,
                format: None
            }
        );
    }

    #[test]
    fn every_key_of_a_disk_is_read() {
        let disk = DiskSpec::parse("path=a,,b.img,name=a b,read-only,cache=direct,format=raw").unwrap();
        assert_eq!(disk.path, Path::new("a,b.img"));
        assert_eq!(disk.name, "a b");
        assert!(disk.read_only);
        assert_eq!(disk.cache, CacheMode::Direct);
        assert_eq!(disk.format, Some(Format::Raw));
        assert!(!DiskSpec::parse("path=a,read-only=off").unwrap().read_only);
        assert_eq!(DiskSpec::parse("path=a,cache=host,format=qcow2").unwrap().format, Some(Format::Qcow2));
    }

    #[test]
    fn a_bad_disk_says_what_is_wrong() {
        for (text, part) in [
            ("web.qcow2", "'path' is missing"),
            ("name=web", "'path' is missing"),
            ("path=a,readonly", "unknown key 'readonly'"),
            ("path=a,cache=none", "cache is host or direct"),
            ("path=a,format=vmdk", "format is qcow2 or raw"),
            ("path=/", "is not a file"),
            ("path=a,name=b=c", "no '='"),
            ("path=a,name=b\n", "no control characters"),
        ] {
            let error = error_of(DiskSpec::parse(text));
            assert!(error.contains(part), "{text}: {error}");
        }
        assert!(
            error_of(DiskSpec::parse(&format!("path=a,name={}", "n".repeat(256)))).contains("at most 255")
        );
        DiskSpec::parse(&format!("path=a,name={}", "n".repeat(255))).unwrap();
    }

    #[test]
    fn every_key_of_a_vhost_user_socket_is_read() {
        let socket =
            VhostUserSpec::parse("web=/run/a=b.sock,queues=4,threads=2,poll-us=50,serial=WEB-1,share")
                .unwrap();
        assert_eq!(socket.disk, "web");
        assert_eq!(socket.socket, Path::new("/run/a=b.sock"));
        assert_eq!(socket.queues, NonZeroU16::new(4));
        assert_eq!(socket.threads, NonZeroU16::new(2));
        assert_eq!(socket.poll_us, Some(50));
        assert_eq!(socket.serial.as_deref(), Some("WEB-1"));
        assert!(socket.share);
        let plain = VhostUserSpec::parse("web=s").unwrap();
        assert!(plain.queues.is_none() && !plain.share);
    }

    #[test]
    fn a_bad_vhost_user_socket_says_what_is_wrong() {
        for (text, part) in [
            ("web", "NAME=SOCKET"),
            ("web=", "needs a path"),
            ("web=s,queues=0", "'queues' is a number"),
            ("web=s,queues=65536", "'queues' is a number"),
            ("web=s,poll-us=x", "'poll-us' is a number"),
            ("web=s,serial=123456789012345678901", "carries 20"),
            ("web=s,read-only", "unknown key 'read-only'"),
        ] {
            let error = error_of(VhostUserSpec::parse(text));
            assert!(error.contains(part), "{text}: {error}");
        }
        let long = "s".repeat(SOCKET_PATH_BYTES_MAX);
        VhostUserSpec::parse(&format!("web={long}")).unwrap();
        assert!(error_of(VhostUserSpec::parse(&format!("web={long}s"))).contains("108 bytes"));
    }

    #[test]
    fn names_and_sockets_must_fit_together() {
        let disk = |text: &str| DiskSpec::parse(text).unwrap();
        let socket = |text: &str| VhostUserSpec::parse(text).unwrap();
        let nbd = |text: &str| text.parse::<Address>().unwrap();
        let web = disk("path=web.qcow2");
        let shared = disk("path=web.qcow2,read-only");
        check_together(std::slice::from_ref(&web), &[socket("web=a")], &[nbd("unix:b")]).unwrap();
        check_together(std::slice::from_ref(&shared), &[socket("web=a"), socket("web=b")], &[]).unwrap();
        check_together(std::slice::from_ref(&web), &[socket("web=a,share"), socket("web=b,share")], &[])
            .unwrap();
        for (disks, sockets, doors, part) in [
            (vec![web.clone(), web.clone()], vec![], vec![nbd("unix:b")], "two disks are named 'web'"),
            (vec![web.clone()], vec![], vec![], "nothing serves disk 'web'"),
            (
                vec![web.clone()],
                vec![socket("db=a")],
                vec![nbd("unix:b")],
                "no disk has this name (there are: web)",
            ),
            (vec![web.clone()], vec![socket("web=a"), socket("web=b")], vec![], "two guests"),
            (vec![web.clone()], vec![socket("web=a,share"), socket("web=b")], vec![], "two guests"),
            (vec![web.clone()], vec![socket("web=a")], vec![nbd("unix:a")], "socket a is given twice"),
        ] {
            let error = error_of(check_together(&disks, &sockets, &doors));
            assert!(error.contains(part), "{error}");
        }
    }
}
