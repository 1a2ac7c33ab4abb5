//! Tiered disks whose repository is no directory of the host: chains reach its layers through the cache alone.

#[path = "../../disk/tests/common/mod.rs"]
mod common;
mod tier_support;

use std::fs::{self, DirBuilder};
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::flat::{read, write};
use common::scratch;
use common::stock::content;
use tier_support::{SIZE, block, image, newest_of, place, published, soon, sync, writes_of};
use vmstrata_disk::{
    Disk, OpenOptions, Opened, Opener, ResourceOptions, Resources, Role, SIDECAR, is_published,
};
use vmstrata_repo::DirectoryRepository;
use vmstrata_store::{FileIdentity, Gate};
use vmstrata_tier::{
    CACHE_BYTES_MIN, Cache, CachedFiles, Elsewhere, OnMissing, Place, Remote, TierOptions, Tiered, fetch,
    is_object_name, repository_of, take_over,
};

/// Counts the published layers that are opened to be read, not looked at.
#[derive(Debug)]
struct Counting {
    files: Arc<CachedFiles>,
    opened: AtomicUsize,
}

impl Opener for Counting {
    fn open(&self, path: &Path, role: Role, gate: &Gate) -> vmstrata_disk::Result<Opened> {
        let is_read = role == Role::Frozen && is_published(path);
        self.opened.fetch_add(is_read.into(), Ordering::Relaxed);
        self.files.open(path, role, gate)
    }

    fn identity(&self, path: &Path, gate: &Gate) -> vmstrata_disk::Result<FileIdentity> {
        self.files.identity(path, gate)
    }

    fn sidecar(&self, layer: &Path, gate: &Gate) -> Option<PathBuf> {
        self.files.sidecar(layer, gate)
    }

    fn may_be_absent(&self) -> bool {
        self.files.may_be_absent()
    }
}

/// A host that knows the directory beside the image only as a repository.
fn host(image: &Path, dir: &Path, takes_over: bool) -> (Arc<Disk>, Tiered) {
    host_and_count(image, dir, takes_over).0
}

/// The same, and the published layers that it opened to open the disk.
fn host_and_count(image: &Path, dir: &Path, takes_over: bool) -> ((Arc<Disk>, Tiered), usize) {
    let repository = Arc::new(DirectoryRepository::open(&repository_of(image), is_object_name).unwrap());
    let cache = Cache::open(&dir.join("cache"), CACHE_BYTES_MIN).unwrap();
    let (remote, files) =
        (Remote::new(&cache, repository, OnMissing::Wait), Arc::new(CachedFiles::default()));
    let counting = Arc::new(Counting { files: Arc::clone(&files), opened: AtomicUsize::new(0) });
    let resources = Resources::with_opener(ResourceOptions::default(), Arc::clone(&counting) as _);
    let place = Place::elsewhere(image, dir, Elsewhere { remote, files }).unwrap();
    let open = OpenOptions::default();
    if takes_over {
        take_over(&place, &open, &resources).unwrap();
    }
    let (mut disks, tiered) = Tiered::open(&place, TierOptions::default(), &[open], &resources).unwrap();
    ((disks.remove(0), tiered), counting.opened.load(Ordering::Relaxed))
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
    assert_eq!((head.epoch.disks[0].objects.len(), writes_of(&published(&head, &image))), (21, 20));

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

/// The indices in a host's copy of the disk.
fn indices(dir: &Path) -> Vec<PathBuf> {
    let copies = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let files = copies.filter(|path| path.is_dir()).flat_map(|copy| fs::read_dir(copy).unwrap());
    let files = files.map(|entry| entry.unwrap().path());
    files.filter(|path| path.to_str().unwrap().ends_with(SIDECAR)).collect()
}

#[test]
fn indices_of_published_layers_lie_on_the_host_and_are_used_after_a_restart() {
    let dirs = [scratch(), scratch(), scratch()];
    let [nas, one, other] = dirs.each_ref().map(|dir| dir.path());
    let image = image_with_repository(nas);
    let first = host(&image, one, false);
    publish(&first, 1..=20);
    end(first);
    let (second, opened) = host_and_count(&image, other, true);
    assert!(opened >= 21, "{opened} layers are opened where there is no index");
    publish(&second, 21..=22);
    end(second);
    let names = fs::read_dir(repository_of(&image)).unwrap().map(|entry| entry.unwrap().file_name());
    let mut others = names.filter(|name| !is_object_name(name.to_str().unwrap()));
    assert_eq!(others.next(), None);
    assert_eq!(indices(other).len(), 21);

    let (second, opened) = host_and_count(&image, other, false);
    assert!(opened <= 2, "{opened} layers are opened where there is an index");
    assert_eq!(writes_on(&second), 22);
    end(second);
    // One of a layer that this copy never had.
    let lost = indices(other)[0].with_file_name(format!("{}.qcow2{SIDECAR}", "0".repeat(32)));
    fs::write(&lost, "").unwrap();
    end(host(&image, other, false));
    assert_eq!(indices(other).len(), 21);
    indices(other).iter().for_each(|index| fs::remove_file(index).unwrap());
    let second = host(&image, other, false);
    assert_eq!(writes_on(&second), 22);
    end(second);
}

#[test]
fn fetched_layers_are_files_that_stock_tools_read_unless_they_were_changed() {
    let dirs = [scratch(), scratch(), scratch(), scratch()];
    let [nas, one, copy, other] = dirs.each_ref().map(|dir| dir.path());
    let image = image_with_repository(nas);
    let first = host(&image, one, false);
    publish(&first, 1..=3);
    end(first);
    let (repository, head) = (repository_of(&image), newest_of(&image));
    let state = &head.epoch.disks[0];
    let far = DirectoryRepository::open(&repository, is_object_name).unwrap();
    let newest = fetch(&far, state, copy).unwrap();
    assert_eq!(writes_of(&content(&newest, "qcow2")), 3);
    assert_eq!(fetch(&far, state, copy).unwrap(), newest, "what is there is not fetched again");
    let layer = repository.join(state.objects[2].id.layer_name().as_str());
    let file = fs::File::options().read(true).write(true).open(layer).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 70_000).unwrap();
    file.write_all_at(&[!byte[0]], 70_000).unwrap();
    let told = fetch(&far, state, other).unwrap_err();
    assert!(matches!(told, vmstrata_tier::Error::Corrupt { .. }), "{told}");
}
