//! The new overlay: shaped like the layer it will stand on, complete and on stable storage under a temporary name.

use std::ffi::OsString;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStringExt as _;
use std::path::Path;

use vmstrata_qcow2::{
    Compatible, CompressionType, CreateOptions, Header, Incompatible, NewBacking, NewImage, RefcountOrder,
    SnapshotInfo, new_image,
};
use vmstrata_store::{FileIdentity, Gate};
use vmstrata_types::ClusterBits;

use crate::access;
use crate::active::session::FEATURES_SINCE;
use crate::atomic_file::Temporary;
use crate::chain::{OpenOptions, Top, open_layer, open_top};
use crate::create::fill;
use crate::error::{ErrorKind, Result};
use crate::layer::Format;
use crate::opener::{LocalFiles, Role};

/// Clusters of overlays with subclusters: a subcluster is a page of the guest, the smallest write worth keeping apart.
const CLUSTER_BITS: ClusterBits = ClusterBits::new(17).expect("128 KiB");

/// What a new overlay takes over from the layer it stands on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Below {
    pub(super) identity: FileIdentity,
    pub(crate) format: Format,
    /// Whether its last writer has not closed it.
    pub(crate) is_open: bool,
    size: u64,
    version: u32,
    cluster_bits: ClusterBits,
    subclusters: bool,
    refcount_order: RefcountOrder,
    compression_type: CompressionType,
    lazy_refcounts: bool,
}

impl Below {
    /// Reads the header of the layer at `path`, without a lock.
    ///
    /// # Errors
    /// A file that cannot be read or breaks the format, or that is marked corrupt.
    pub(crate) fn read(path: &Path, format: Format) -> Result<Self> {
        let file = open_layer(path, Role::Inspected, Some(format), &Gate::unrestricted(), &LocalFiles)?;
        file.check_state()?;
        Self::of(&file).map_err(|error| error.in_file(path))
    }

    /// The same of a disk's file, of which `said` is known ([`OpenOptions::format`]).
    ///
    /// # Errors
    /// As [`Self::read`], and as [`open_top`].
    pub(crate) fn read_disk(path: &Path, said: Option<Format>) -> Result<Self> {
        let options = OpenOptions { format: said, ..OpenOptions::default() };
        let file = open_top(path, Role::Inspected, &options, &LocalFiles)?;
        file.check_state()?;
        Self::of(&file).map_err(|error| error.in_file(path))
    }

    fn of(file: &Top) -> Result<Self> {
        let header: Option<&Header> = file.head.as_ref().map(|head| &head.header);
        let like = CreateOptions::new(file.size);
        let has = |bit| header.is_some_and(|header| header.incompatible.contains(bit));
        if has(Incompatible::CORRUPT) && !file.is_behind_log() {
            return Err(ErrorKind::MarkedCorrupt.into());
        }
        Ok(Self {
            identity: file.opened.identity,
            format: if header.is_some() { Format::Qcow2 } else { Format::Raw },
            is_open: file.is_in_session() || has(Incompatible::DIRTY),
            size: file.size,
            version: header.map_or(like.version, |header| header.version),
            cluster_bits: header.map_or(like.cluster_bits, |header| header.cluster_bits),
            subclusters: header.is_some_and(Header::has_subclusters),
            refcount_order: header.map_or(like.refcount_order, |header| header.refcount_order),
            compression_type: header.map_or(like.compression_type, |header| header.compression_type),
            lazy_refcounts: header
                .is_some_and(|header| header.compatible.contains(Compatible::LAZY_REFCOUNTS)),
        })
    }

    /// An empty image on this layer, which it will know as `name`; with subclusters if it may have them
    /// ([`OpenOptions::subclusters`]).
    ///
    /// # Errors
    /// A record or a name for which the header has no room, or that cannot be stored.
    pub(crate) fn overlay(&self, name: OsString, info: &SnapshotInfo, subclusters: bool) -> Result<NewImage> {
        let subclusters = subclusters && self.version >= FEATURES_SINCE;
        let is_alike = self.subclusters || !subclusters;
        let backing = NewBacking { name: name.into_vec(), format: Some(self.format.to_string()) };
        Ok(new_image(&CreateOptions {
            version: self.version,
            cluster_bits: if is_alike { self.cluster_bits } else { CLUSTER_BITS },
            subclusters,
            refcount_order: self.refcount_order,
            backing: Some(backing),
            lazy_refcounts: self.lazy_refcounts,
            compression_type: self.compression_type,
            feature_names: true,
            index_room: true,
            record: Some(info.clone().into()),
            ..CreateOptions::new(self.size)
        })?)
    }
}

/// Makes the image under a temporary name for that purpose beside `active`, to be used by the users of the file there.
///
/// # Errors
/// Whatever the host reports.
pub(super) fn make(active: &Path, purpose: &str, image: &NewImage) -> Result<Temporary> {
    let temporary = Temporary::named(active, purpose)?;
    access::copy(active, temporary.file.as_fd())?;
    fill(&temporary.file, image)?;
    Ok(temporary)
}
