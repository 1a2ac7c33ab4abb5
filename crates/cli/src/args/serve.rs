//! The command line of `vmstrata serve`.

use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::Args;
use clap::builder::{NonEmptyStringValueParser, OsStringValueParser, PossibleValuesParser, TypedValueParser};
use vmstrata_api as api;
use vmstrata_export::SocketAccess;
use vmstrata_server::config::Settings;
use vmstrata_server::spec::{
    DiskSpec, FuseSpec, NbdSpec, VhostUserSpec, parse_host_rate, parse_metrics, parse_mode, parse_tier_cache,
};
use vmstrata_server::{ControlPlace, LogFormat, TlsFiles};
use vmstrata_types::path_to_text;

use super::BackingArgs;
use crate::disk_spec::{parse_disk_to_serve, parse_fuse, parse_nbd, parse_vhost_user};
use crate::units::parse_size;

/// `vmstrata serve`
#[derive(Debug, Args)]
#[command(after_help = SERVE_HELP)]
pub struct ServeArgs {
    /// Read settings from this TOML file; flags that are given win over it
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// A disk: path=FILE[,name=NAME][,read-only][,force][,cache=host|direct][,detect-zeroes=off|on|unmap][,subclusters=on|off][,format=qcow2|raw]
    /// [,at=SNAPSHOT[,clone=FILE]][,agent=SOCKET][,keep=RULE,,RULE...][,backing=none|PATH[:PATH...]]
    /// [,tier=DIR[,repository=ADDRESS][,group=NAME][,window=SECONDS][,epochs=TIME][,on-missing=wait|error[:SECONDS]][,on-outage=continue|stall]
    /// [,outage-bytes=SIZE][,durability=host|repository][,standby]][,replica=DIR[,repository=ADDRESS][,on-missing=...]][,role=swap|local,size=SIZE][,LIMITS] (repeatable);
    /// keep=daily=7,,weekly=4 has the server delete other snapshots; backing= names all that its backing files may be, or lie
    /// in, instead of its own directory; detect-zeroes=unmap gives the space of clusters that are written with zeros back; subclusters=off
    /// has overlays of snapshots made without subclusters; tier=DIR keeps what guests write in DIR on this host and publishes it
    /// beside FILE, on a NAS for example, before a write is 30 or SECONDS old, see `tier`; repository=hdfs://namenode:8020/vms/web
    /// or s3://vms/web publishes it there instead; disks with the same group= are
    /// cut at one instant and published together; epochs=2h keeps published
    /// states for so long, instead of 10m, for FILE@-90m for example; on-missing=error has reads that need the NAS fail when it has
    /// not answered for 30 or SECONDS, and not wait; on-outage=stall has flushes wait when the window cannot be kept,
    /// outage-bytes= bounds what is kept in DIR meanwhile, and durability=repository has each flush wait until it is published; standby has all requests wait while another host
    /// publishes the disk, until this one takes it over, see `vm migrate`; replica=DIR keeps what is read of layers in repositories on this host, for a clone of
    /// a tiered disk's snapshot, see `replica`, with repository= where that is in HDFS or S3; role=swap or role=local makes FILE,
    /// a raw one of SIZE that stays on this host and goes with the disk; LIMITS are
    /// iops-total=1000, bps-read=64M and their like, as for `disk limit`
    #[arg(
        long = "disk",
        value_name = "SPEC",
        required_unless_present_any = ["config", "control"],
        value_parser = OsStringValueParser::new().try_map(parse_disk_to_serve)
    )]
    pub disks: Vec<api::DiskSpec>,
    /// Serve the only --disk as it was at this snapshot, read-only: its key at=SNAPSHOT
    #[arg(long, value_name = "SNAPSHOT")]
    pub at: Option<String>,
    /// With --at: serve, for writing, a clone of that snapshot, which is made unless it is there: the disk's key clone=FILE
    #[arg(long, value_name = "FILE", requires = "at")]
    pub clone: Option<PathBuf>,
    /// A socket for one guest: NAME=SOCKET[,queues=N][,threads=N][,poll-us=N][,serial=S][,share][,any-memory]
    /// [,owner=USER][,group=GROUP][,mode=MODE] (repeatable); its owner, and with a group its members, may connect and so
    /// read and write the disk; only root can give it another owner
    #[arg(long, value_name = "SPEC", value_parser = parse_vhost_user)]
    pub vhost_user: Vec<VhostUserSpec>,
    /// An address for NBD clients of all disks, who read: unix:/path or tcp:host:port[,rw][,share][,insecure]
    /// [,allow=CLIENT[:ro|:rw[:DISK...]],,CLIENT...] (repeatable); rw lets them write; allow= lets in only clients whose
    /// certificates have the name CN=NAME, DNS=NAME or URI=NAME
    #[arg(long, value_name = "SPEC", value_parser = parse_nbd)]
    pub nbd: Vec<NbdSpec>,
    /// A directory on which all disks and their snapshots are mounted as files: DIR[,rw][,share][,allow-other] (repeatable): disk web
    /// is the file web/disk in it, its snapshot monday web/snapshots/monday; rw lets programs write disks as they are now;
    /// allow-other lets other users read
    #[arg(long, value_name = "SPEC", value_parser = parse_fuse)]
    pub fuse: Vec<FuseSpec>,
    /// The owner of the unix sockets of --nbd, by name or number, who may connect; only root can give them another
    #[arg(long, value_name = "USER", value_parser = NonEmptyStringValueParser::new())]
    pub nbd_owner: Option<String>,
    /// The group of the unix sockets among them, by name or number: its members may connect, too. The server's user must be
    /// one of them
    #[arg(long, value_name = "GROUP", value_parser = NonEmptyStringValueParser::new())]
    pub nbd_group: Option<String>,
    /// Permissions of the unix sockets among them, in octal: who may connect, and so read (with rw, write) all disks
    /// [default: 600, with --nbd-group 660]
    #[arg(long, value_name = "MODE", value_parser = parse_mode)]
    pub nbd_mode: Option<u32>,
    /// Require TLS of NBD clients: the server's certificate chain (PEM)
    #[arg(long, value_name = "FILE", requires_all = ["nbd_tls_key", "nbd"])]
    pub nbd_tls_cert: Option<PathBuf>,
    /// The certificate's private key (PEM)
    #[arg(long, value_name = "FILE", requires = "nbd_tls_cert")]
    pub nbd_tls_key: Option<PathBuf>,
    /// Let in only NBD clients with a certificate signed by these (PEM)
    #[arg(long, value_name = "FILE", requires = "nbd_tls_cert")]
    pub nbd_tls_client_ca: Option<PathBuf>,
    /// Go on without disks and exports that cannot be opened, and try them again until they can: `vmstrata status` says why
    #[arg(long)]
    pub keep_going: bool,
    /// Where backing files may be.
    #[command(flatten)]
    pub backing: BackingArgs,
    /// Resources all disks share.
    #[command(flatten)]
    pub resources: ResourceArgs,
    /// Listen here for `vmstrata status`, `disk`, `export` and others; fail if another server does
    /// [default: control.sock in the runtime directory]
    #[arg(long, value_name = "PATH", conflicts_with = "no_control")]
    pub control: Option<PathBuf>,
    /// Take over from the server that has the control socket: ask it to drain, close and end, then open the same disks
    #[arg(long, conflicts_with = "no_control")]
    pub replace: bool,
    /// Begin without the disks and exports that were added to the server before on this control socket
    #[arg(long, conflicts_with = "no_control")]
    pub forget_added: bool,
    /// Open disks without the writes that a killed server had not flushed, where its journal is missing or does not fit the
    /// disk: they are lost, as after a power failure. For those that are opened at the start
    #[arg(long)]
    pub discard_unflushed: bool,
    /// Listen for no commands
    #[arg(long)]
    pub no_control: bool,
    /// Serve metrics for Prometheus at http://ADDRESS:PORT/metrics; a port alone is on the loopback address, and one that other
    /// hosts can reach says insecure
    #[arg(long, value_name = "[ADDRESS:]PORT[,insecure]", value_parser = parse_metrics)]
    pub metrics: Option<SocketAddr>,
    /// Print the ready report as one JSON line
    #[arg(long)]
    pub json: bool,
    /// Write READY=1 and a newline to file descriptor N (a pipe or file) when serving
    #[arg(long, value_name = "N")]
    pub ready_fd: Option<u32>,
    /// How log lines on stderr look [default: text]
    #[arg(long, value_name = "FORMAT", value_parser = log_format_parser())]
    pub log_format: Option<LogFormat>,
}

/// What all disks of one server share.
#[derive(Debug, Args)]
pub struct ResourceArgs {
    /// Memory for the metadata of all disks together [default: 64M]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub metadata_cache: Option<u64>,
    /// Files of layers kept open at once; from the process's limit if omitted
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(16..))]
    pub max_open_files: Option<u32>,
    /// Threads that one disk may have for what cannot be done without waiting, of twice as many for all; the number of CPUs, at
    /// least 2, if omitted
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub workers: Option<u32>,
    /// Space in each directory of tiered disks (their key tier=DIR) for layers that are on a NAS, at least 256M [default: a quarter of
    /// what is free there]
    #[arg(long, value_name = "SIZE", value_parser = parse_tier_cache)]
    pub tier_cache: Option<u64>,
    /// Bytes that all tiered disks (their key tier=DIR) together ship in a second, at least 64K; `tier rate` changes it [default: no
    /// limit]
    #[arg(long, value_name = "SIZE", value_parser = parse_host_rate)]
    pub tier_rate: Option<NonZeroU64>,
    /// Bytes that all moves of disks together write in a second, at least 64K; `job move-rate` changes it [default: no limit]
    #[arg(long, value_name = "SIZE", value_parser = parse_host_rate)]
    pub move_rate: Option<NonZeroU64>,
    /// Make the flushes of all disks durable by one write and one sync of this file, which is made, or is a device: for guests that
    /// flush often. Images are private to this server until it has ended
    #[arg(long, value_name = "PATH")]
    pub flush_log: Option<PathBuf>,
    /// Size of that file when it is made [default: 256M]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub flush_log_size: Option<u64>,
    /// Where volatile journals go: memory-backed, kept over a restart of the server
    /// [default: /run/vmstrata, or $XDG_RUNTIME_DIR/vmstrata unless root]
    #[arg(long, value_name = "DIR")]
    pub runtime_dir: Option<PathBuf>,
}

const SERVE_HELP: &str = "\
Examples:
  vmstrata serve --disk path=web.qcow2,name=web --vhost-user web=/run/web.sock
  vmstrata serve --disk path=web.qcow2 --vhost-user web=/run/web.sock,queues=4 --nbd unix:/run/nbd.sock
  vmstrata serve --disk path=/mnt/nas/web.qcow2,tier=/var/lib/vmstrata --vhost-user web=/run/web.sock
  vmstrata serve --disk path=web.qcow2 --at mon --nbd unix:/run/mon.sock
  vmstrata serve --disk path=web.qcow2 --vhost-user web=/run/web.sock --fuse /run/vmstrata/disks
  vmstrata serve --disk path=backup.qcow2,read-only --nbd tcp:0.0.0.0:10809 \\
      --nbd-tls-cert cert.pem --nbd-tls-key key.pem --nbd-tls-client-ca ca.pem

  vmstrata serve --config /etc/vmstrata.toml

The file has the flags' names as keys, without the dashes: nbd = [\"unix:/run/nbd.sock\"], metadata-cache = \"1G\";
each disk is a table [[disk]] with path, name and so on, each guest's socket a table [[vhost-user]] with disk,
socket and so on. Paths in it are seen from its directory. A flag replaces the file's value, lists as a whole.

A server that cannot open one of its disks or exports does not start. With --keep-going it serves the others, and tries again
until it can or until `vmstrata disk remove` or `export remove` gives it up; status, metrics and the log say why it waits.

A disk has one writer: while a guest is attached, an NBD client of an export with rw is refused by name, and the other way
round, unless both exports say share. Connections through one export are one writer; readers may always come in.

An NBD address that other hosts can reach needs TLS with client certificates, or says insecure.

A comma inside a value is written twice: path=/a,,b.qcow2. When ready, the server prints how to attach each
disk to QEMU, libvirt, cloud-hypervisor and NBD clients. Under systemd use Type=notify.

An upgrade under running guests: vmstrata serve --replace with the arguments of the server that runs. Disks and exports that were
added to it are taken over, here as after any other end of a server, until the host is rebooted. Guests with
reconnect=1 and NBD clients with reconnect-delay wait for a moment and notice nothing else.

SIGTERM and SIGINT end it: requests in flight finish, everything is flushed, images are closed clean.
A second signal ends it at once, as a crash would: what was flushed is safe.
Exit codes: 0 ended clean, 1 could not start, or a disk could not be closed clean, 64 wrong usage.";

impl ServeArgs {
    /// What the flags say, in the words of a configuration file.
    ///
    /// # Errors
    /// A disk that makes no sense with `--at`.
    pub fn settings(&self) -> Result<Settings> {
        let keys = self.nbd_tls_cert.clone().zip(self.nbd_tls_key.clone());
        let nbd_tls = keys.map(|(certificate, key)| TlsFiles {
            certificate,
            key,
            client_ca: self.nbd_tls_client_ca.clone(),
        });
        let control = if self.no_control {
            Some(ControlPlace::Off)
        } else {
            self.control.clone().map(ControlPlace::At)
        };
        Ok(Settings {
            disks: self.disks()?,
            keep_going: self.keep_going,
            vhost_user: self.vhost_user.clone(),
            nbd: self.nbd.clone(),
            fuse: self.fuse.clone(),
            nbd_access: SocketAccess {
                owner: self.nbd_owner.clone(),
                group: self.nbd_group.clone(),
                mode: self.nbd_mode,
            },
            nbd_tls,
            allow_backing: self.backing.allow_backing.clone(),
            metadata_cache_bytes: self.resources.metadata_cache,
            max_open_files: self.resources.max_open_files.map(|files| files as usize),
            workers: self.resources.workers.map(|workers| workers as usize),
            tier_cache_bytes: self.resources.tier_cache,
            tier_rate: self.resources.tier_rate,
            move_rate: self.resources.move_rate,
            flush_log: self.resources.flush_log.clone(),
            flush_log_bytes: self.resources.flush_log_size,
            runtime_dir: self.resources.runtime_dir.clone(),
            control,
            metrics: self.metrics,
            audit: crate::audit::file().map(Path::to_owned),
            log_format: self.log_format,
        })
    }

    /// The disks, the only one at the snapshot that `--at` names.
    fn disks(&self) -> Result<Vec<DiskSpec>> {
        let mut disks = self.disks.clone();
        match (&self.at, &mut disks[..]) {
            (None, _) => {}
            (Some(_), []) => {
                bail!("--at is of the disk that --disk names; in a configuration file say at = of a [[disk]]")
            }
            (Some(_), [disk]) if disk.at.is_some() || disk.clone.is_some() => {
                bail!(
                    "--at and --clone are keys of the disk, which says at= or clone= itself: give one or the other"
                )
            }
            (Some(at), [disk]) => {
                (disk.at, disk.clone) = (Some(at.clone()), self.clone.as_deref().map(path_to_text))
            }
            (Some(at), disks) => bail!(
                "--at is of one disk, and there are {}: say at={at} in the --disk that is meant",
                disks.len()
            ),
        }
        disks.into_iter().map(|disk| Ok(disk.try_into()?)).collect()
    }
}

fn log_format_parser() -> impl TypedValueParser<Value = LogFormat> {
    PossibleValuesParser::new(["text", "json"])
        .map(|format| if format == "json" { LogFormat::Json } else { LogFormat::Text })
}

/// `vmstrata thaw-guard`, which a server runs
#[derive(Debug, Args)]
pub struct ThawGuardArgs {
    /// The socket of the guest's agent
    pub agent: PathBuf,
    /// The note that the guest may be frozen
    pub note: PathBuf,
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::{Command, CommandFactory};

    use super::*;
    use crate::args::Cli;

    /// Flags that are no keys of the configuration file.
    const FLAGS_ONLY: [(&str, &str); 9] = [
        ("config", "names the file"),
        ("at", "a key of [[disk]]"),
        ("clone", "a key of [[disk]]"),
        ("replace", "of one start"),
        ("forget-added", "of one start"),
        ("discard-unflushed", "of one start"),
        ("json", "of one start"),
        ("ready-fd", "a descriptor of one start"),
        ("help", "serves nothing"),
    ];

    /// The names that an error about an unknown one lists.
    fn listed(error: &str) -> BTreeSet<String> {
        error.split('`').skip(3).step_by(2).map(str::to_owned).collect()
    }

    fn command(path: &[&str]) -> Command {
        let mut cli = Cli::command();
        cli.build();
        path.iter().fold(cli, |command, name| command.find_subcommand(name).unwrap().clone())
    }

    #[test]
    fn each_flag_of_serve_is_a_key_of_its_configuration_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, "unknown = 1\n").unwrap();
        let mut keys = listed(&Settings::read(file.path()).unwrap_err().to_string());
        assert!(keys.contains("disk"), "{keys:?}");
        for (flag, reason) in FLAGS_ONLY {
            assert!(keys.insert(flag.to_owned()), "{flag} is a key, although {reason}");
        }
        let serve = command(&["serve"]);
        let flags: BTreeSet<_> =
            serve.get_arguments().filter_map(|flag| flag.get_long()).map(str::to_owned).collect();
        assert_eq!(flags, keys);
    }

    #[test]
    fn help_names_each_key_of_disks_and_exports() {
        let disk = serde_json::from_str::<api::DiskSpec>(r#"{"unknown": 1}"#).unwrap_err();
        let vhost_user = serde_json::from_str::<api::VhostUserSpec>(r#"{"unknown": 1}"#).unwrap_err();
        let nbd = serde_json::from_str::<api::NbdSpec>(r#"{"unknown": 1}"#).unwrap_err();
        let fuse = serde_json::from_str::<api::FuseSpec>(r#"{"unknown": 1}"#).unwrap_err();
        for (path, flag, error) in [
            (&["serve"][..], "disks", &disk),
            (&["serve"], "vhost_user", &vhost_user),
            (&["serve"], "nbd", &nbd),
            (&["serve"], "fuse", &fuse),
            (&["disk", "add"], "spec", &disk),
            (&["export", "add"], "vhost_user", &vhost_user),
            (&["export", "add"], "nbd", &nbd),
            (&["export", "add"], "fuse", &fuse),
        ] {
            let command = command(path);
            let help = command.get_arguments().find(|arg| arg.get_id() == flag).unwrap().get_help().unwrap();
            // What is more than a value stands in capitals: LIMITS.
            let help = help.to_string().to_lowercase();
            let keys = listed(&error.to_string());
            assert!(keys.len() > 3, "{error}");
            // These open the list, without a key: NAME=SOCKET and the address.
            let opening = ["disk", "socket", "address", "directory"];
            for key in keys.iter().filter(|key| !key.contains('_') && !opening.contains(&key.as_str())) {
                assert!(help.contains(key.as_str()), "{path:?} {flag}: {key} is not in: {help}");
            }
        }
    }
}
