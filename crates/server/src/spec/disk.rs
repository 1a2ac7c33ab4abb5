//! A disk to open, and which of its states.

use std::io;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf, absolute};
use std::sync::Arc;
use std::time::Duration;

use vmstrata_api as api;
use vmstrata_disk::snapshot::{Keep, is_snapshot_name};
use vmstrata_disk::{DetectZeroes, Format, Limits, directory_of};
use vmstrata_nbd::Uri;
use vmstrata_store::CacheMode;
use vmstrata_tier::{
    DurableAt, OnMissing, OnOutage, RepositoryAddress, TierOptions, Wire, age_of, is_group_name, stand_in,
};
use vmstrata_types::{path_from_text, path_to_text};

use super::{SpecError, check_name, check_path, limits_of, shown_limits, stem};

/// A disk to open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskSpec {
    /// The active layer's file, or `DISK@SNAPSHOT`.
    pub path: PathBuf,
    /// What sockets and clients call it; the file's stem unless given.
    pub name: String,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether it is written although images stand on it.
    pub force: bool,
    /// How the active layer's data passes the host's page cache.
    pub cache: CacheMode,
    /// What becomes of writes of zeros.
    pub detect_zeroes: DetectZeroes,
    /// Whether overlays made for it have subclusters.
    pub subclusters: bool,
    /// `None` looks at the file.
    pub format: Option<Format>,
    /// What `path` is to be a clone of, and is made as unless it is there.
    pub clone_of: Option<CloneOf>,
    /// Where the agent in its guest listens.
    pub agent: Option<PathBuf>,
    /// Which of its snapshots to keep; `None` keeps all.
    pub keep: Option<Keep>,
    /// All that its backing files may be, or lie in; `None` leaves it to the server.
    pub backing: Option<Vec<PathBuf>>,
    /// How much its guests may do in a second.
    pub limits: Limits,
    /// Where what they write is kept, if it is published.
    pub tier: Option<TierSpec>,
    /// Where what it reads of layers in repositories is kept, if it is not published itself.
    pub replica: Option<ReplicaSpec>,
    /// Whether its file comes and goes with it.
    pub local: Option<LocalSpec>,
}

/// How layers in repositories are read that a disk stands on which is not published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaSpec {
    /// The directory on this host that has what was read.
    pub dir: PathBuf,
    /// The repository that has the layers, unless that is their directory.
    pub repository: Option<RepositoryAddress>,
    /// What becomes of reads while the repository does not answer.
    pub on_missing: OnMissing,
}

impl ReplicaSpec {
    fn of(asked: &api::DiskSpec) -> Result<Option<Self>, SpecError> {
        let Some(dir) = &asked.replica else { return Ok(None) };
        let refused = [
            ("tier", asked.tier.is_some()),
            ("format=raw", asked.format == Some(api::Format::Raw)),
            ("path=nbd", Uri::is_meant(&path_from_text(&asked.path))),
        ];
        if let Some((key, _)) = refused.into_iter().find(|(_, is_asked)| *is_asked) {
            return Err(SpecError::NoReplica { key });
        }
        let on_missing = asked.on_missing.as_deref().map_or(Ok(OnMissing::Wait), parse_on_missing)?;
        Ok(Some(Self { dir: path_from_text(dir), repository: repository_of(asked)?, on_missing }))
    }
}

/// The repository that is named by its address.
fn repository_of(asked: &api::DiskSpec) -> Result<Option<RepositoryAddress>, SpecError> {
    let address = |text: &String| {
        let parsed = RepositoryAddress::parse(text);
        parsed.map_err(|error| SpecError::Repository { text: text.clone(), why: error.source.to_string() })
    };
    asked.repository.as_ref().map(address).transpose()
}

/// A disk of this host alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalSpec {
    /// What its guest has it for.
    pub role: api::DiskRole,
    /// Bytes that its file is made with.
    pub bytes: NonZeroU64,
}

/// What a local disk's size is a multiple of.
const LOCAL_UNIT: u64 = 4096;

impl LocalSpec {
    fn of(asked: &api::DiskSpec) -> Result<Option<Self>, SpecError> {
        let role = asked.role;
        if role == api::DiskRole::Disk {
            return if asked.size_bytes.is_some() { Err(SpecError::SizeWithoutRole) } else { Ok(None) };
        }
        let refused = [
            ("read-only", asked.read_only),
            ("at", asked.at.is_some()),
            ("clone", asked.clone.is_some()),
            ("keep", asked.keep.is_some()),
            ("backing", asked.backing.is_some()),
            ("format=qcow2", asked.format == Some(api::Format::Qcow2)),
            ("path=nbd", Uri::is_meant(&path_from_text(&asked.path))),
            ("tier", asked.tier.is_some()),
            ("replica", asked.replica.is_some()),
        ];
        if let Some((key, _)) = refused.into_iter().find(|(_, is_asked)| *is_asked) {
            return Err(SpecError::NotLocal { key, role: role.as_str() });
        }
        let bytes =
            asked.size_bytes.filter(|bytes| bytes.is_multiple_of(LOCAL_UNIT)).and_then(NonZeroU64::new);
        let bytes = bytes.ok_or(SpecError::LocalSize { role: role.as_str() })?;
        Ok(Some(Self { role, bytes }))
    }
}

/// How a disk is published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TierSpec {
    /// The directory on this host that has its copies of disks.
    pub dir: PathBuf,
    /// The group of disks that it is published with.
    pub group: Option<String>,
    /// The repository, unless it lies beside the disk.
    pub repository: Option<RepositoryAddress>,
    /// How old a write is at most when it is published; `None` leaves it to the engine.
    pub window: Option<Duration>,
    /// For how long states can be opened that are not the newest any more; `None` leaves it to the engine.
    pub epochs: Option<Duration>,
    /// What becomes of reads while the repository does not answer.
    pub on_missing: OnMissing,
    /// What becomes of guests while the repository does not answer.
    pub on_outage: OnOutage,
    /// Bytes on this host that are not published, at most, meanwhile; `None` leaves it to the engine.
    pub outage_bytes: Option<NonZeroU64>,
    /// Where what guests have flushed is durable.
    pub durability: DurableAt,
    /// Whether the disk waits to be taken over while another host publishes it.
    pub standby: bool,
}

/// After how many seconds a read fails, unless it is said.
const MISSING_SECONDS: u64 = 30;
/// The most that can be said.
const MISSING_SECONDS_MAX: u64 = 3600;
/// The smallest budget.
const OUTAGE_BYTES_MIN: u64 = 1 << 20;

impl TierSpec {
    fn of(asked: &api::DiskSpec) -> Result<Option<Self>, SpecError> {
        let Some(dir) = &asked.tier else {
            let keys = [
                ("group", asked.group.is_some()),
                ("repository", asked.repository.is_some() && asked.replica.is_none()),
                ("window", asked.window.is_some()),
                ("epochs", asked.epochs.is_some()),
                ("on-missing", asked.on_missing.is_some() && asked.replica.is_none()),
                ("on-outage", asked.on_outage != api::OnOutage::default()),
                ("outage-bytes", asked.outage_bytes.is_some()),
                ("durability", asked.durability != api::DurableAt::default()),
                ("standby", asked.standby),
            ];
            let odd = keys.into_iter().find(|(_, is_asked)| *is_asked);
            return odd.map_or(Ok(None), |(key, _)| Err(SpecError::WithoutTier { key }));
        };
        let refused = [
            ("read-only", asked.read_only),
            ("at", asked.at.is_some()),
            ("keep", asked.keep.is_some()),
            ("format=raw", asked.format == Some(api::Format::Raw)),
        ];
        if let Some((key, _)) = refused.into_iter().find(|(_, is_asked)| *is_asked) {
            return Err(SpecError::NotTiered { key });
        }
        if let Some(group) = asked.group.as_ref().filter(|group| !is_group_name(group)) {
            return Err(SpecError::Group { group: group.clone() });
        }
        let window = asked.window.map(Duration::from_secs);
        let [shortest, longest] = TierOptions::WINDOWS;
        if let Some(window) = window.filter(|window| !(shortest..=longest).contains(window)) {
            return Err(SpecError::Window { seconds: window.as_secs() });
        }
        let epochs = asked.epochs.as_deref().map(parse_epochs).transpose()?;
        let on_missing = asked.on_missing.as_deref().map_or(Ok(OnMissing::Wait), parse_on_missing)?;
        if let Some(bytes) = asked.outage_bytes.filter(|bytes| *bytes < OUTAGE_BYTES_MIN) {
            return Err(SpecError::OutageBytes { bytes });
        }
        Ok(Some(Self {
            dir: path_from_text(dir),
            group: asked.group.clone(),
            repository: repository_of(asked)?,
            window,
            epochs,
            on_missing,
            on_outage: match asked.on_outage {
                api::OnOutage::Continue => OnOutage::Continue,
                api::OnOutage::Stall => OnOutage::Stall,
            },
            outage_bytes: asked.outage_bytes.and_then(NonZeroU64::new),
            durability: match asked.durability {
                api::DurableAt::Host => DurableAt::Host,
                api::DurableAt::Repository => DurableAt::Repository,
            },
            standby: asked.standby,
        }))
    }

    /// In the engine's words, for disks that share `wire`.
    pub(crate) fn options(&self, wire: &Arc<Wire>) -> TierOptions {
        let default = TierOptions::default();
        TierOptions {
            window: self.window.unwrap_or(default.window),
            epochs: self.epochs.unwrap_or(default.epochs),
            on_outage: self.on_outage,
            outage_bytes: self.outage_bytes,
            durability: self.durability,
            wire: Arc::clone(wire),
            ..default
        }
    }
}

/// For how long states are kept: seconds, minutes or hours.
fn parse_epochs(text: &str) -> Result<Duration, SpecError> {
    let [shortest, longest] = TierOptions::EPOCHS;
    let time = age_of(text).filter(|time| (shortest..=longest).contains(time));
    time.ok_or_else(|| SpecError::Epochs { text: text.to_owned() })
}

fn parse_on_missing(text: &str) -> Result<OnMissing, SpecError> {
    let seconds = match text.split_once(':') {
        None if text == "wait" => return Ok(OnMissing::Wait),
        None if text == "error" => Some(MISSING_SECONDS),
        Some(("error", seconds)) => seconds.parse().ok(),
        _ => None,
    };
    match seconds.filter(|seconds| (1..=MISSING_SECONDS_MAX).contains(seconds)) {
        Some(seconds) => Ok(OnMissing::Error(Duration::from_secs(seconds))),
        None => Err(SpecError::OnMissing { text: text.to_owned() }),
    }
}

/// The snapshot that a clone starts from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CloneOf {
    /// The disk it is a snapshot of.
    pub disk: PathBuf,
    /// Its name.
    pub snapshot: String,
}

/// Why a state of a disk cannot be served as asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// A clone of no snapshot.
    #[error("a clone is made of a snapshot: say which, at=SNAPSHOT")]
    CloneOfNothing,
    /// A name that no snapshot can have.
    #[error("{0:?} is no snapshot's name")]
    Name(String),
    /// A snapshot to be written.
    #[error("{} is a snapshot, which does not change: serve it read-only, or as a clone (at=SNAPSHOT,clone=FILE)", path.display())]
    Written {
        /// What was asked for.
        path: PathBuf,
    },
    /// A file in the place of a disk that stays on this host.
    #[error("{} is no file of {bytes} bytes: it may be another's, so name another file, or its own size", path.display())]
    NotTheLocal {
        /// The file.
        path: PathBuf,
        /// Bytes that it should have.
        bytes: u64,
    },
    /// A file in the place of a clone.
    #[error("{} exists, and is no clone of {} at {snapshot:?}: name another file", path.display(), disk.display())]
    NotTheClone {
        /// The file.
        path: PathBuf,
        /// The disk it should be a clone of.
        disk: PathBuf,
        /// The snapshot it should be a clone of.
        snapshot: String,
    },
}

impl TryFrom<api::DiskSpec> for DiskSpec {
    type Error = SpecError;

    fn try_from(asked: api::DiskSpec) -> Result<Self, SpecError> {
        if let Some(at) = asked.at.as_ref().filter(|at| !is_snapshot_name(at)) {
            return Err(StateError::Name(at.clone()).into());
        }
        let paths = [
            ("path", Some(&asked.path)),
            ("clone", asked.clone.as_ref()),
            ("agent", asked.agent.as_ref()),
            ("tier", asked.tier.as_ref()),
            ("replica", asked.replica.as_ref()),
        ];
        let backing = asked.backing.iter().flatten().map(|path| ("backing", Some(path)));
        for (key, path) in paths.into_iter().chain(backing) {
            path.map_or(Ok(()), |path| check_path(key, path))?;
        }
        let tier = TierSpec::of(&asked)?;
        let replica = ReplicaSpec::of(&asked)?;
        let local = LocalSpec::of(&asked)?;
        let read_only = asked.read_only || asked.at.is_some() && asked.clone.is_none();
        let (path, called, clone_of) = match (asked.at, asked.clone) {
            (None, Some(_)) => return Err(StateError::CloneOfNothing.into()),
            (None, None) => (asked.path.clone(), stem(&asked.path), None),
            (Some(at), None) => {
                (format!("{}@{at}", asked.path), stem(&asked.path).map(|stem| format!("{stem}@{at}")), None)
            }
            (Some(snapshot), Some(clone)) => {
                let called = stem(&clone);
                (clone, called, Some(CloneOf { disk: path_from_text(&asked.path), snapshot }))
            }
        };
        let name = asked.name.map_or(called, Ok)?;
        check_name(&name)?;
        let cache = match asked.cache {
            api::CacheMode::Host => CacheMode::Host,
            api::CacheMode::Direct => CacheMode::Direct,
        };
        let detect_zeroes = match asked.detect_zeroes {
            api::DetectZeroes::Off => DetectZeroes::Off,
            api::DetectZeroes::On => DetectZeroes::On,
            api::DetectZeroes::Unmap => DetectZeroes::Unmap,
        };
        let format = asked.format.or(local.map(|_| api::Format::Raw)).map(format_of);
        let agent = asked.agent.as_deref().map(path_from_text);
        let keep = asked.keep.map(|keep| keep.parse()).transpose()?;
        let limits = limits_of(&asked.limits)?;
        let backing = asked.backing.map(|backing| backing.iter().map(|path| path_from_text(path)).collect());
        Ok(Self {
            path: path_from_text(&path),
            name,
            read_only,
            force: asked.force,
            cache,
            detect_zeroes,
            subclusters: asked.subclusters == api::Subclusters::On,
            format,
            clone_of,
            agent,
            keep,
            backing,
            limits,
            tier,
            replica,
            local,
        })
    }
}

impl From<&DiskSpec> for api::DiskSpec {
    fn from(spec: &DiskSpec) -> Self {
        let (path, at, clone) = match &spec.clone_of {
            Some(CloneOf { disk, snapshot }) => {
                (path_to_text(disk), Some(snapshot.clone()), Some(path_to_text(&spec.path)))
            }
            None => (path_to_text(&spec.path), None, None),
        };
        Self {
            path,
            name: Some(spec.name.clone()),
            read_only: spec.read_only,
            force: spec.force,
            cache: match spec.cache {
                CacheMode::Host => api::CacheMode::Host,
                CacheMode::Direct => api::CacheMode::Direct,
            },
            detect_zeroes: shown_detect_zeroes(spec.detect_zeroes),
            subclusters: shown_subclusters(spec.subclusters),
            format: spec.format.map(shown_format),
            at,
            clone,
            agent: spec.agent.as_deref().map(path_to_text),
            keep: spec.keep.as_ref().map(Keep::to_string),
            backing: spec
                .backing
                .as_ref()
                .map(|backing| backing.iter().map(|path| path_to_text(path)).collect()),
            limits: shown_limits(spec.limits),
            tier: spec.tier.as_ref().map(|tier| path_to_text(&tier.dir)),
            group: spec.tier.as_ref().and_then(|tier| tier.group.clone()),
            repository: spec.repository().map(RepositoryAddress::to_string),
            window: spec.tier.as_ref().and_then(|tier| tier.window).map(|window| window.as_secs()),
            epochs: spec
                .tier
                .as_ref()
                .and_then(|tier| tier.epochs)
                .map(|epochs| format!("{}s", epochs.as_secs())),
            replica: spec.replica.as_ref().map(|replica| path_to_text(&replica.dir)),
            on_missing: match spec.on_missing() {
                OnMissing::Wait => None,
                OnMissing::Error(time) => Some(format!("error:{}", time.as_secs())),
            },
            on_outage: spec.tier.as_ref().map(|tier| shown_on_outage(tier.on_outage)).unwrap_or_default(),
            outage_bytes: spec.tier.as_ref().and_then(|tier| tier.outage_bytes).map(NonZeroU64::get),
            durability: spec.tier.as_ref().map(|tier| shown_durability(tier.durability)).unwrap_or_default(),
            standby: spec.tier.as_ref().is_some_and(|tier| tier.standby),
            role: spec.role(),
            size_bytes: spec.local.map(|local| local.bytes.get()),
        }
    }
}

/// As the API says it.
pub(crate) fn shown_on_outage(on_outage: OnOutage) -> api::OnOutage {
    match on_outage {
        OnOutage::Continue => api::OnOutage::Continue,
        OnOutage::Stall => api::OnOutage::Stall,
    }
}

/// As the API says it.
pub(crate) fn shown_durability(durability: DurableAt) -> api::DurableAt {
    match durability {
        DurableAt::Host => api::DurableAt::Host,
        DurableAt::Repository => api::DurableAt::Repository,
    }
}

/// As the API says it.
pub(crate) fn shown_subclusters(subclusters: bool) -> api::Subclusters {
    if subclusters { api::Subclusters::On } else { api::Subclusters::Off }
}

/// In the engine's words.
pub(crate) fn format_of(format: api::Format) -> Format {
    match format {
        api::Format::Qcow2 => Format::Qcow2,
        api::Format::Raw => Format::Raw,
    }
}

/// As the API says it.
pub fn shown_format(format: Format) -> api::Format {
    match format {
        Format::Qcow2 => api::Format::Qcow2,
        Format::Raw => api::Format::Raw,
    }
}

/// As the API says it.
pub(crate) fn shown_detect_zeroes(detect_zeroes: DetectZeroes) -> api::DetectZeroes {
    match detect_zeroes {
        DetectZeroes::Off => api::DetectZeroes::Off,
        DetectZeroes::On => api::DetectZeroes::On,
        DetectZeroes::Unmap => api::DetectZeroes::Unmap,
    }
}

impl DiskSpec {
    /// What its guest has it for.
    pub(crate) fn role(&self) -> api::DiskRole {
        self.local.map(|local| local.role).unwrap_or_default()
    }

    /// The address of the repository that has its layers, or its base.
    fn repository(&self) -> Option<&RepositoryAddress> {
        let of_tier = self.tier.as_ref().and_then(|tier| tier.repository.as_ref());
        of_tier.or(self.replica.as_ref().and_then(|replica| replica.repository.as_ref()))
    }

    /// The directory that the disk's backing name gives for its base, where the repository is no directory.
    pub(crate) fn stand_in(&self) -> Option<PathBuf> {
        let repository = self.replica.as_ref()?.repository.as_ref()?;
        Some(stand_in(&directory_of(&self.path), &repository.place()))
    }

    /// What becomes of its reads while a repository does not answer.
    fn on_missing(&self) -> OnMissing {
        let of_tier = self.tier.as_ref().map(|tier| tier.on_missing);
        of_tier.or(self.replica.as_ref().map(|replica| replica.on_missing)).unwrap_or(OnMissing::Wait)
    }

    /// The group of disks that it is published with.
    pub(crate) fn group(&self) -> Option<&str> {
        self.tier.as_ref()?.group.as_deref()
    }

    /// Whether both are of one group, or are meant to be: groups with repositories at different addresses may have the same name.
    pub(crate) fn is_grouped_with(&self, other: &Self) -> bool {
        let place = |spec: &Self| Some(spec.tier.as_ref()?.repository.as_ref()?.place());
        let may_be_one = match (place(self), place(other)) {
            (Some(own), Some(other)) => own == other,
            // Opening them says that they differ.
            _ => true,
        };
        self.group().is_some() && self.group() == other.group() && may_be_one
    }

    /// The same with absolute paths: those who read them in the status may be in another directory.
    ///
    /// # Errors
    /// This process's own directory is gone, and a path is relative.
    pub(crate) fn absolute(mut self) -> io::Result<Self> {
        if !Uri::is_meant(&self.path) {
            self.path = absolute(self.path)?;
        }
        if let Some(clone_of) = &mut self.clone_of {
            clone_of.disk = absolute(&clone_of.disk)?;
        }
        self.agent = self.agent.map(absolute).transpose()?;
        if let Some(tier) = &mut self.tier {
            tier.dir = absolute(&tier.dir)?;
        }
        if let Some(replica) = &mut self.replica {
            replica.dir = absolute(&replica.dir)?;
        }
        let backing = self.backing.map(|backing| backing.into_iter().map(absolute).collect());
        self.backing = backing.transpose()?;
        Ok(self)
    }

    /// The same by the disk's new path, if it has moved.
    #[must_use]
    pub(crate) fn where_it_is(mut self) -> Self {
        if self.tier.is_none()
            && let Some(moved) = vmstrata_migrate::moved_to(&self.path)
        {
            tracing::warn!(disk = self.name, from = %self.path.display(), to = %moved.path.display(), "has moved: serve it by its new path");
            self.path = moved.path;
            if moved.is_raw {
                self.format = Some(Format::Raw);
            }
        }
        self
    }

    /// The same where relative paths are seen from `directory`.
    #[must_use]
    pub(crate) fn seen_from(mut self, directory: &Path) -> Self {
        self.path = directory.join(self.path);
        if let Some(clone_of) = &mut self.clone_of {
            clone_of.disk = directory.join(&clone_of.disk);
        }
        self.agent = self.agent.map(|agent| directory.join(agent));
        if let Some(tier) = &mut self.tier {
            tier.dir = directory.join(&tier.dir);
        }
        if let Some(replica) = &mut self.replica {
            replica.dir = directory.join(&replica.dir);
        }
        for path in self.backing.iter_mut().flatten() {
            *path = directory.join(&*path);
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(at: Option<&str>, clone: Option<&str>) -> Result<DiskSpec, SpecError> {
        let text = |text: &str| Some(text.to_owned());
        let (at, clone) = (at.and_then(text), clone.and_then(text));
        api::DiskSpec { path: "/vms/web.qcow2".to_owned(), at, clone, ..Default::default() }.try_into()
    }

    #[test]
    fn a_snapshot_is_served_read_only_under_a_name_of_its_own() {
        let spec = spec(Some("mon"), None).unwrap();
        assert_eq!((spec.path, spec.read_only), (PathBuf::from("/vms/web.qcow2@mon"), true));
        assert_eq!((spec.name.as_str(), spec.clone_of), ("web@mon", None));
    }

    #[test]
    fn a_clone_is_a_disk_of_its_own() {
        let spec = spec(Some("mon"), Some("ci/42.qcow2")).unwrap().seen_from(Path::new("/etc"));
        assert_eq!((spec.path, spec.read_only), (PathBuf::from("/etc/ci/42.qcow2"), false));
        let clone_of = CloneOf { disk: "/vms/web.qcow2".into(), snapshot: "mon".to_owned() };
        assert_eq!((spec.name.as_str(), spec.clone_of), ("42", Some(clone_of)));
    }

    #[test]
    fn what_was_asked_for_can_be_asked_for_again() {
        let text = |text: &str| Some(text.to_owned());
        let rules = api::DiskSpec {
            path: "/vms/web.qcow2".to_owned(),
            cache: api::CacheMode::Direct,
            detect_zeroes: api::DetectZeroes::Unmap,
            subclusters: api::Subclusters::Off,
            format: Some(api::Format::Raw),
            agent: text("/run/agent.sock"),
            keep: text("daily=7,weekly=4"),
            backing: Some(vec!["/golden".to_owned()]),
            limits: api::DiskLimits {
                iops_read: Some(api::Limit { rate: 10, max: None, max_length: None }),
                bps_total: Some(api::Limit { rate: 1 << 20, max: Some(1 << 21), max_length: Some(10) }),
                ..api::DiskLimits::default()
            },
            ..api::DiskSpec::default()
        };
        for asked in [
            rules.clone(),
            api::DiskSpec { at: text("mon"), read_only: true, ..rules.clone() },
            api::DiskSpec { path: "file:///vms/w%FF.qcow2".to_owned(), at: text("mon"), ..rules.clone() },
            api::DiskSpec { at: text("mon"), clone: text("/ci/42.qcow2"), name: text("ci"), ..rules },
            tiered("/var/lib/vmstrata", Some(5)),
            api::DiskSpec {
                repository: text("hdfs://namenode:8020/vms/web?block=1M"),
                group: text("guest"),
                ..tiered("/var/lib/vmstrata", None)
            },
            api::DiskSpec { epochs: text("2h"), ..tiered("/var/lib/vmstrata", None) },
            api::DiskSpec { backing: Some(vec!["/nas".to_owned()]), ..tiered("/var/lib/vmstrata", None) },
            api::DiskSpec { on_missing: text("error:7"), ..tiered("/var/lib/vmstrata", None) },
            api::DiskSpec { on_missing: text("error:7"), ..with_replica() },
            api::DiskSpec { repository: text("s3://vms/golden"), ..with_replica() },
            api::DiskSpec {
                on_outage: api::OnOutage::Stall,
                outage_bytes: Some(1 << 30),
                durability: api::DurableAt::Repository,
                ..tiered("/var/lib/vmstrata", None)
            },
        ] {
            let spec = DiskSpec::try_from(asked).unwrap();
            assert_eq!(DiskSpec::try_from(api::DiskSpec::from(&spec)).unwrap(), spec);
        }
    }

    fn with_replica() -> api::DiskSpec {
        let (path, replica) = ("/nas/desk7.qcow2".to_owned(), Some("/var/lib/vmstrata".to_owned()));
        api::DiskSpec { path, replica, ..api::DiskSpec::default() }
    }

    #[test]
    fn a_replica_is_of_an_image_that_is_not_published() {
        let spec = DiskSpec::try_from(with_replica()).unwrap().seen_from(Path::new("/etc"));
        assert_eq!(spec.replica.unwrap().on_missing, OnMissing::Wait);
        let refused = |asked| DiskSpec::try_from(asked).unwrap_err();
        let tier = Some("/tier".to_owned());
        assert_eq!(refused(api::DiskSpec { tier, ..with_replica() }), SpecError::NoReplica { key: "tier" });
        let format = Some(api::Format::Raw);
        assert_eq!(
            refused(api::DiskSpec { format, ..with_replica() }),
            SpecError::NoReplica { key: "format=raw" }
        );
        let path = "nbd://host/web".to_owned();
        assert_eq!(
            refused(api::DiskSpec { path, ..with_replica() }),
            SpecError::NoReplica { key: "path=nbd" }
        );
        let replica = Some(String::new());
        assert_eq!(refused(api::DiskSpec { replica, ..with_replica() }), SpecError::Path { key: "replica" });
        let swap = api::DiskSpec { role: api::DiskRole::Swap, size_bytes: Some(4096), ..with_replica() };
        assert_eq!(refused(swap), SpecError::NotLocal { key: "replica", role: "swap" });
    }

    fn tiered(dir: &str, window: Option<u64>) -> api::DiskSpec {
        let path = "/nas/web.qcow2".to_owned();
        api::DiskSpec { path, tier: Some(dir.to_owned()), window, ..api::DiskSpec::default() }
    }

    #[test]
    fn a_tiered_disk_has_a_directory_and_a_window_within_bounds() {
        let spec = DiskSpec::try_from(tiered("tier", None)).unwrap().seen_from(Path::new("/etc"));
        assert_eq!(spec.tier.unwrap().dir, Path::new("/etc/tier"));
        for (seconds, is_taken) in [(0, false), (1, true), (600, true), (601, false)] {
            let spec = DiskSpec::try_from(tiered("/tier", Some(seconds)));
            let expected = if is_taken { Ok(()) } else { Err(SpecError::Window { seconds }) };
            assert_eq!(spec.map(drop), expected);
        }
        let refused = |asked| DiskSpec::try_from(asked).unwrap_err();
        let plain = tiered("/tier", Some(5));
        let key = |key| SpecError::WithoutTier { key };
        let on_missing = |text: &str| api::DiskSpec { on_missing: Some(text.to_owned()), ..plain.clone() };
        assert_eq!(
            refused(api::DiskSpec { tier: None, window: None, ..on_missing("wait") }),
            key("on-missing")
        );
        for (text, on_missing_is) in [
            ("wait", Some(OnMissing::Wait)),
            ("error", Some(OnMissing::Error(Duration::from_secs(30)))),
            ("error:3600", Some(OnMissing::Error(Duration::from_secs(3600)))),
            ("error:3601", None),
            ("error:0", None),
            ("wait:30", None),
            ("30", None),
        ] {
            let taken = DiskSpec::try_from(on_missing(text)).map(|spec| spec.tier.unwrap().on_missing);
            assert_eq!(taken, on_missing_is.ok_or(SpecError::OnMissing { text: text.to_owned() }));
        }
        for (text, epochs) in [
            ("10m", Some(600)),
            ("600s", Some(600)),
            ("599s", None),
            ("24h", Some(86_400)),
            ("25h", None),
            ("1d", None),
            ("20", None),
            ("", None),
        ] {
            let asked = api::DiskSpec { epochs: Some(text.to_owned()), ..plain.clone() };
            let kept = |spec: DiskSpec| spec.tier.unwrap().options(&Arc::default()).epochs.as_secs();
            let taken = DiskSpec::try_from(asked).map(kept);
            assert_eq!(taken, epochs.ok_or(SpecError::Epochs { text: text.to_owned() }));
        }
        let without = |asked| match refused(api::DiskSpec { tier: None, window: None, ..asked }) {
            SpecError::WithoutTier { key } => key,
            other => panic!("{other}"),
        };
        let stalls = api::DiskSpec { on_outage: api::OnOutage::Stall, ..plain.clone() };
        let budget = |bytes| api::DiskSpec { outage_bytes: Some(bytes), ..plain.clone() };
        let far = api::DiskSpec { durability: api::DurableAt::Repository, ..plain.clone() };
        let kept = api::DiskSpec { epochs: Some("1h".to_owned()), ..plain.clone() };
        let elsewhere = |text: &str| api::DiskSpec { repository: Some(text.to_owned()), ..plain.clone() };
        let keys = [kept, stalls, budget(1 << 20), far, elsewhere("hdfs://namenode/vms")].map(without);
        assert_eq!(keys, ["epochs", "on-outage", "outage-bytes", "durability", "repository"]);
        for text in ["/mnt/nas/vms", "s3:///web", "hdfs://namenode", "hdfs://namenode/vms#web"] {
            let told = refused(elsewhere(text)).to_string();
            assert!(told.starts_with(&format!("'repository' cannot be '{text}': ")), "{told}");
        }
        let bytes = (1 << 20) - 1;
        assert_eq!(refused(budget(bytes)), SpecError::OutageBytes { bytes });
        let window = api::DiskSpec { tier: None, ..plain.clone() };
        assert_eq!(refused(window), SpecError::WithoutTier { key: "window" });
        let (read_only, keep) = (true, Some("daily=7".to_owned()));
        let key = |key| SpecError::NotTiered { key };
        assert_eq!(refused(api::DiskSpec { read_only, ..plain.clone() }), key("read-only"));
        assert_eq!(refused(api::DiskSpec { keep, ..plain.clone() }), key("keep"));
        assert_eq!(refused(api::DiskSpec { format: Some(api::Format::Raw), ..plain }), key("format=raw"));
        assert_eq!(refused(tiered("", None)), SpecError::Path { key: "tier" });
    }

    #[test]
    fn what_names_no_snapshot_is_refused() {
        assert_eq!(spec(None, Some("x")), Err(StateError::CloneOfNothing.into()));
        assert_eq!(spec(Some("../x"), None), Err(StateError::Name("../x".to_owned()).into()));
    }
}
