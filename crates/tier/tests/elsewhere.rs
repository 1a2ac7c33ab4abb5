//! Tiered disks whose repository is no directory of the host: chains reach its layers through the cache alone.

#[path = "../../disk/tests/common/mod.rs"]
mod common;
mod tier_support;

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::flat::{read, write};
use common::scratch;
use tier_support::{SIZE, block, image, newest_of, place, published, soon, sync, writes_of};
use vmstrata_disk::{Disk, OpenOptions, ResourceOptions, Resources};
use vmstrata_repo::DirectoryRepository;
use vmstrata_tier::{
    CACHE_BYTES_MIN, Cache, CachedFiles, Elsewhere, OnMissing, Place, Remote, TierOptions, Tiered,
    is_object_name, repository_of, take_over,
};

/// A host that knows the directory beside the image only as a repository.
fn host(image: &Path, dir: &Path, takes_over: bool) -> (Arc<Disk>, Tiered) {
    let repository = Arc::new(DirectoryRepository::open(&repository_of(image), is_object_name).unwrap());
    let cache = Cache::open(&dir.join("cache"), CACHE_BYTES_MIN).unwrap();
    let (remote, files) =
        (Remote::new(&cache, repository, OnMissing::Wait), Arc::new(CachedFiles::default()));
    let resources = Resources::with_opener(ResourceOptions::default(), Arc::clone(&files) as _);
    let place = Place::elsewhere(image, dir, Elsewhere { remote, files }).unwrap();
    let open = OpenOptions::default();
    if takes_over {
        take_over(&place, &open, &resources).unwrap();
    }
    Tiered::open(&place, TierOptions::default(), &open, &resources).unwrap()
}

fn end((disk, tiered): (Arc<Disk>, Tiered)) {
    assert!(tiered.stop(soon()));
    disk.close().unwrap();
}

/// Publishes more epochs than stay unmerged on the host, each of one write.
fn publish((disk, tiered): &(Arc<Disk>, Tiered), numbers: impl Iterator<Item = u64>) {
    for number in numbers {
        write(disk, place(number), &block(number)).unwrap();
        sync(tiered).unwrap();
    }
}

fn writes_on((disk, _): &(Arc<Disk>, Tiered)) -> u64 {
    writes_of(&read(disk, 0, SIZE as usize).unwrap())
}

fn image_with_repository(dir: &Path) -> PathBuf {
    let image = image(dir);
    DirBuilder::new().mode(0o700).create(repository_of(&image)).unwrap();
    image
}

#[test]
fn a_disk_is_published_opened_again_and_taken_over() {
    let dirs = [scratch(), scratch(), scratch()];
    let [nas, one, other] = dirs.each_ref().map(|dir| dir.path());
    let image = image_with_repository(nas);
    let first = host(&image, one, false);
    publish(&first, 1..=12);
    end(first);
    let first = host(&image, one, false);
    assert_eq!(writes_on(&first), 12);
    publish(&first, 13..=20);
    let head = newest_of(&image);
    assert_eq!((head.epoch.objects.len(), writes_of(&published(&head, &image))), (21, 20));

    let second = host(&image, other, true);
    assert_eq!(writes_on(&second), 20);
    publish(&second, 21..=22);
    let told = sync_after_write(&first).unwrap_err().to_string();
    assert!(told.contains("publishes here since"), "{told}");
    assert_eq!(writes_of(&published(&newest_of(&image), &image)), 22);
    end(second);
    // A disk that was fenced cannot be closed clean.
    assert!(first.1.stop(soon()));
}

fn sync_after_write((disk, tiered): &(Arc<Disk>, Tiered)) -> Result<(), vmstrata_tier::Error> {
    write(disk, 0, &[1; 512]).unwrap();
    sync(tiered).map(drop)
}
