//! Hosts of a tiered disk, and a guest whose writes tell how many there were.

#![allow(dead_code, reason = "each test binary uses its own part of this")]
#![allow(unreachable_pub, missing_docs, reason = "shared by test binaries only")]

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmstrata_disk::{Disk, OpenOptions, ResourceOptions, Resources};
use vmstrata_repo::{DirectoryRepository, Repository};
use vmstrata_tier::{
    CACHE_BYTES_MIN, Cache, CachedFiles, Elsewhere, Error, Head, OnMissing, Place, TierOptions, TierStatus,
    Tiered, is_object_name, newest, repository_of,
};

use crate::common::flat::assert_same;
use crate::common::stock::{assert_clean, content, path_str, qemu_img};

pub const SIZE: u64 = 64 << 20;
const BLOCK: u64 = 4096;

/// The block of the write with this number; a state between two writes follows from how many there were.
pub fn place(number: u64) -> u64 {
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (SIZE / BLOCK) * BLOCK
}

pub fn block(number: u64) -> Vec<u8> {
    number.to_le_bytes().repeat(BLOCK as usize / 8)
}

/// How many writes made this content; panics where no number of them did.
pub fn writes_of(content: &[u8]) -> u64 {
    let first_word = |block: &[u8]| u64::from_le_bytes(block[..8].try_into().unwrap());
    let count = content.chunks(BLOCK as usize).map(first_word).max().unwrap();
    let mut expected = vec![0; content.len()];
    for number in 1..=count {
        let at = place(number) as usize;
        expected[at..at + BLOCK as usize].copy_from_slice(&block(number));
    }
    assert_same(content, &expected, 0, "after a whole number of writes");
    count
}

/// An ordinary image of a stock tool.
pub fn image(dir: &Path) -> PathBuf {
    image_at(&dir.join("web.qcow2"))
}

pub fn image_at(path: &Path) -> PathBuf {
    qemu_img(&["create", "-q", "-f", "qcow2", path_str(path), &SIZE.to_string()]);
    path.to_owned()
}

/// Opens the disk on the host that keeps its copies in `tier`. It is cut when it is asked to be.
pub fn host(path: &Path, tier: &Path) -> Result<(Arc<Disk>, Tiered), Error> {
    host_with(path, tier, Duration::from_secs(600))
}

pub fn host_with(path: &Path, tier: &Path, window: Duration) -> Result<(Arc<Disk>, Tiered), Error> {
    host_as(path, tier, TierOptions { window, ..TierOptions::default() })
}

pub fn host_as(path: &Path, tier: &Path, options: TierOptions) -> Result<(Arc<Disk>, Tiered), Error> {
    let place = Place::of(path, tier)?;
    let resources = Resources::new(ResourceOptions::default());
    let (mut disks, tiered) = Tiered::open(&place, options, &[OpenOptions::default()], &resources)?;
    Ok((disks.remove(0), tiered))
}

/// Cuts and publishes.
pub fn sync(tiered: &Tiered) -> Result<TierStatus, Error> {
    tiered.sync(soon())
}

pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Takes the disk over; returns where the host's copy of before was put.
pub fn take_over(path: &Path, tier: &Path) -> Result<Option<PathBuf>, Error> {
    let resources = Resources::new(ResourceOptions::default());
    let place = Place::of(path, tier)?;
    vmstrata_tier::take_over(&place, &OpenOptions::default(), &resources).map(|(_, aside)| aside)
}

/// A directory beside images that hosts know as a repository only, for [`far`].
pub fn make_far(dir: &Path) -> PathBuf {
    let far = dir.join("far");
    DirBuilder::new().mode(0o700).create(&far).unwrap();
    far
}

/// The directory of a disk's repository: one that was made by [`make_far`], if there is one.
pub fn repository_dir(path: &Path) -> PathBuf {
    let far = path.with_file_name("far");
    if far.exists() { far } else { repository_of(path) }
}

/// The repository in a directory as one that is none, read through the cache in `tier`; and what opens files that way.
pub fn far(repository: &Path, tier: &Path) -> (Elsewhere, Arc<CachedFiles>) {
    std::fs::create_dir_all(tier).unwrap();
    let repository = Arc::new(DirectoryRepository::open(repository, is_object_name).unwrap());
    let cache = Cache::open(&tier.join("cache"), CACHE_BYTES_MIN).unwrap();
    let files = Arc::<CachedFiles>::default();
    (Elsewhere::new(repository, &cache, files.clone(), OnMissing::Wait), files)
}

pub fn newest_of(path: &Path) -> Head {
    let repository = DirectoryRepository::open(&repository_dir(path), is_object_name).unwrap();
    newest(&repository as &dyn Repository).unwrap().expect("a head")
}

/// What stock tools read of the disk at a path in the state that a head names, all of whose layers they find clean.
pub fn published(head: &Head, path: &Path) -> Vec<u8> {
    let repository = repository_dir(path);
    let layer = |object: &vmstrata_tier::Object| repository.join(object.id.layer_name().as_str());
    let state = head.epoch.disk(path.file_name().unwrap().to_str().unwrap()).expect("a disk of the epoch");
    for object in &state.objects {
        let path = layer(object);
        assert_clean(&path);
        let bytes = std::fs::read(&path).unwrap();
        assert!(bytes.len() as u64 == object.bytes && blake3::hash(&bytes) == object.blake3, "{path:?}");
    }
    content(&layer(state.objects.last().unwrap()), "qcow2")
}
