//! Exports: where guests and clients come in.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::is_default;

/// An export to open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum ExportSpec {
    /// A vhost-user-blk socket: one disk, for one guest.
    VhostUser(VhostUserSpec),
    /// An NBD address: all disks, by name.
    Nbd(NbdSpec),
    /// A directory: all disks and their snapshots, as files.
    Fuse(FuseSpec),
}

impl ExportSpec {
    /// Whether it leads to a disk.
    pub fn serves(&self, disk: &str) -> bool {
        match self {
            Self::VhostUser(spec) => spec.disk == disk,
            Self::Nbd(_) | Self::Fuse(_) => true,
        }
    }

    /// Where its clients connect.
    pub fn place(&self) -> &str {
        match self {
            Self::VhostUser(spec) => &spec.socket,
            Self::Nbd(spec) => &spec.address,
            Self::Fuse(spec) => &spec.directory,
        }
    }
}

/// A vhost-user-blk socket: what `--vhost-user` says on the command line.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VhostUserSpec {
    /// The name of the disk it serves.
    #[schema(min_length = 1, max_length = 255, pattern = r"^[^=\x00-\x1f\x7f-\x9f]+$")]
    pub disk: String,
    /// The socket to listen on.
    #[schema(min_length = 1, max_length = 107, pattern = r"^[^\x00]+$")]
    pub socket: String,
    /// How many virtqueues are offered; as many as are likely to be asked for if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 256)]
    pub queues: Option<u16>,
    /// How many threads serve them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 256)]
    pub threads: Option<u16>,
    /// How many microseconds a thread looks for work before it sleeps.
    #[serde(alias = "poll-us", default, skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 10000)]
    pub poll_us: Option<u32>,
    /// What the guest reads as the disk's serial number, at most 20 bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 20)]
    pub serial: Option<String>,
    /// Other sockets may serve the same writable disk: the user sees to it that one guest runs at a time.
    #[serde(default, skip_serializing_if = "is_default")]
    pub share: bool,
    /// The guest's memory may be in any file; else in a memfd, or on tmpfs or hugetlbfs. `vm restore --lazy` needs this.
    #[serde(alias = "any-memory", default, skip_serializing_if = "is_default")]
    pub any_memory: bool,
    /// The owner of the socket, by name or number, who may connect. Only a server that runs as root can give it to another user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "libvirt-qemu")]
    pub owner: Option<String>,
    /// The group of the socket, by name or number, whose members may connect too. The server's user must be one of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "vmstrata-guests", min_length = 1)]
    pub group: Option<String>,
    /// Permissions of the socket, in octal. Default: 660 with a group, 600 without. A client that connects can read and write
    /// the disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "660", pattern = "^0*[0246]{1,3}$")]
    pub mode: Option<String>,
}

/// An address for NBD clients of all disks: what `--nbd` says on the command line.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NbdSpec {
    /// `unix:/path` or `tcp:host:port`; port 0 takes any free one.
    #[schema(example = "unix:/run/nbd.sock", pattern = r"^(unix|tcp):[^\x00]+$")]
    pub address: String,
    /// Clients may write. A disk has one writer: a client is refused while a guest, or a client of another export, is attached
    /// for writing.
    #[serde(default, skip_serializing_if = "is_default")]
    pub rw: bool,
    /// Clients may write beside writers that come in by other exports that say so, too: the user sees to it that one writes at a time.
    #[serde(default, skip_serializing_if = "is_default")]
    pub share: bool,
    /// Let everybody in who reaches the address: without it, one that other hosts can reach needs TLS with client certificates.
    #[serde(default, skip_serializing_if = "is_default")]
    pub insecure: bool,
    /// Let in only these clients, who show certificates; all whom TLS lets in if omitted.
    #[serde(default, skip_serializing_if = "is_default")]
    pub allow: Vec<ClientRights>,
}

/// A directory on which all disks and their snapshots are mounted as files: what `--fuse` says on the command line.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FuseSpec {
    /// The directory. Disk `web` is the file `web/disk` in it, its snapshot `monday` the file `web/snapshots/monday`.
    #[schema(example = "/run/vmstrata/disks", min_length = 1, pattern = r"^[^\x00]+$")]
    pub directory: String,
    /// Programs may write the disks as they are now. A disk has one writer: a program is refused while a guest, or a client of
    /// another export, is attached for writing.
    #[serde(default, skip_serializing_if = "is_default")]
    pub rw: bool,
    /// Programs may write beside writers that come in by other exports that say so, too: the user sees to it that one writes at a time.
    #[serde(default, skip_serializing_if = "is_default")]
    pub share: bool,
    /// Other users than the server's may read. Unless root, the server needs user_allow_other in /etc/fuse.conf for this.
    #[serde(alias = "allow-other", default, skip_serializing_if = "is_default")]
    pub allow_other: bool,
}

impl FuseSpec {
    /// The file of a disk as it is now.
    pub fn file_of(&self, disk: &str) -> String {
        format!("{}/{disk}/disk", self.directory.trim_end_matches('/'))
    }
}

/// What a client may do that shows a certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ClientRights {
    /// A name in the certificate: `CN=` and its common name, `DNS=` or `URI=` and one of its alternative names.
    #[schema(example = "CN=backup", pattern = "^(CN|DNS|URI)=.")]
    pub client: String,
    /// It may write.
    #[serde(default, skip_serializing_if = "is_default")]
    pub rw: bool,
    /// The disks it may use; all if omitted.
    #[serde(default, skip_serializing_if = "is_default")]
    pub disks: Vec<String>,
}

/// An export of the server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ExportStatus {
    /// Its number, never used again while the server runs.
    pub id: u64,
    /// What was asked for, with a port of 0 replaced by the one that was taken.
    pub export: ExportSpec,
    /// Whether it was added while the server, or one before it, ran.
    #[serde(default, skip_serializing_if = "is_default")]
    pub added: bool,
    /// Why it is not open: the server goes on without it and tries again until it is, or is removed. Absent when it is open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub open_error: Option<String>,
    /// Connections now; for vhost-user 1 while a guest is attached, for files those that are open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connections: Option<u64>,
    /// For vhost-user, whether the guest that is attached has sent a message. One that was accepted alone may not know it yet.
    #[serde(default, skip_serializing_if = "is_default")]
    pub has_spoken: bool,
    /// Whether clients must use TLS.
    pub tls: bool,
    /// What went through it, where the export counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counters: Option<ExportCounters>,
}

/// All exports, in the order in which they were added.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ExportList {
    /// The exports.
    pub exports: Vec<ExportStatus>,
}

/// What went through a vhost-user export since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExportCounters {
    /// Requests taken from rings, of all kinds.
    pub requests: u64,
    /// Requests answered with an error.
    pub errors: u64,
    /// Bytes asked for by read requests.
    pub read_bytes: u64,
    /// Bytes brought by write requests.
    pub written_bytes: u64,
    /// Notifications from drivers.
    pub kicks: u64,
    /// Notifications to drivers.
    pub calls: u64,
    /// Times a thread found work by looking, without being notified.
    pub polls: u64,
    /// Times a thread went to sleep.
    pub sleeps: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kind_says_which_fields_there_are() {
        let export: ExportSpec =
            serde_json::from_str(r#"{"kind":"vhost_user","disk":"web","socket":"/run/web.sock"}"#).unwrap();
        assert!(matches!(export, ExportSpec::VhostUser(VhostUserSpec { share: false, queues: None, .. })));
        let export: ExportSpec = serde_json::from_str(r#"{"kind":"nbd","address":"tcp:localhost"}"#).unwrap();
        let readers = NbdSpec { address: "tcp:localhost".to_owned(), ..NbdSpec::default() };
        assert_eq!(export, ExportSpec::Nbd(readers));
        for wrong in [
            r#"{"kind":"nbd","address":"unix:s","disk":"web"}"#,
            r#"{"kind":"fuse","path":"/mnt"}"#,
            r#"{"kind":"9p","directory":"/mnt"}"#,
            r#"{"address":"unix:s"}"#,
        ] {
            assert!(serde_json::from_str::<ExportSpec>(wrong).is_err(), "{wrong}");
        }
    }
}
