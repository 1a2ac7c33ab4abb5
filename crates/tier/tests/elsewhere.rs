//! Tiered disks whose repository is no directory of the host: chains reach its layers through the cache alone.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::flat::{read, write};
use crate::common::scratch;
use crate::common::stock::{content, path_str, qemu_img};
use crate::tier_support::{
    SIZE, block, far, image, image_at, make_far, newest_of, place, published, repository_dir, soon, sync,
    writes_of,
};
use vmstrata_disk::{
    Disk, OpenOptions, Opened, Opener, ResourceOptions, Resources, Role, SIDECAR, is_published,
};
use vmstrata_repo::{DirectoryRepository, Repository};
use vmstrata_store::{FileIdentity, Gate};
use vmstrata_tier::{
    CachedFiles, Error, Place, TierOptions, Tiered, fetch, is_object_name, open_state, take_over,
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
    let (elsewhere, files) = far(&repository_dir(image), dir);
    let counting = Arc::new(Counting { files, opened: AtomicUsize::new(0) });
    let resources = Resources::with_opener(ResourceOptions::default(), Arc::clone(&counting) as _);
    let place = Place::elsewhere(None, &[image], dir, elsewhere).unwrap();
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
    make_far(dir);
    image(dir)
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
    let names = fs::read_dir(repository_dir(&image)).unwrap().map(|entry| entry.unwrap().file_name());
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
    let (repository, head) = (repository_dir(&image), newest_of(&image));
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

/// A host of disks, which are a group if they are several.
fn group(images: &[&Path], group: Option<&str>, dir: &Path) -> Result<(Vec<Arc<Disk>>, Tiered), Error> {
    let (elsewhere, files) = far(&images[0].with_file_name("far"), dir);
    let place = Place::elsewhere(group, images, dir, elsewhere)?;
    let resources = Resources::with_opener(ResourceOptions::default(), files);
    let opens = vec![OpenOptions::default(); images.len()];
    Tiered::open(&place, TierOptions::default(), &opens, &resources)
}

fn end_all((disks, tiered): (Vec<Arc<Disk>>, Tiered)) {
    assert!(tiered.stop(soon()));
    disks.iter().for_each(|disk| disk.close().unwrap());
}

/// The same write to all disks, published.
fn step((disks, tiered): &(Vec<Arc<Disk>>, Tiered), number: u64) {
    disks.iter().for_each(|disk| write(disk, place(number), &block(number)).unwrap());
    sync(tiered).unwrap();
}

#[test]
fn disks_of_a_group_are_known_by_their_names_in_the_heads() {
    let dirs = [scratch(), scratch(), scratch()];
    let [nas, one, other] = dirs.each_ref().map(|dir| dir.path());
    let far_dir = make_far(nas);
    let [log, data, third] = ["log.qcow2", "data.qcow2", "third.qcow2"].map(|name| image_at(&nas.join(name)));
    let raw = nas.join("raw.img");
    qemu_img(&["create", "-q", "-f", "raw", path_str(&raw), "1M"]);
    let told = |images: &[&Path], name: Option<&str>| group(images, name, one).unwrap_err().to_string();
    // One that cannot be a layer keeps all from being shipped.
    assert!(told(&[&log, &raw], Some("guest")).contains("it is raw"));
    assert!(!far_dir.join("head-000000000002").exists());
    assert!(fs::read_dir(&far_dir).unwrap().count() <= 1);

    let first = group(&[&log, &data], Some("guest"), one).unwrap();
    step(&first, 1);
    let head = newest_of(&log);
    assert_eq!([&log, &data].map(|image| writes_of(&published(&head, image))), [1, 1]);
    // Who reads a state beside the server names its layers by the cache's directory.
    let repository: Arc<dyn Repository> =
        Arc::new(DirectoryRepository::open(&far_dir, is_object_name).unwrap());
    let (cache, files) = (one.join("cache"), Arc::<CachedFiles>::default());
    let resources = Resources::with_opener(ResourceOptions::default(), files.clone());
    for state in &head.epoch.disks {
        let (from, reading) = ((&repository, &*cache), (Some(&*cache), &files));
        let state = open_state(from, state, reading, &OpenOptions::default(), &resources).unwrap();
        assert_eq!(writes_of(&read(&state, 0, SIZE as usize).unwrap()), 1);
    }
    end_all(first);
    [&log, &data].into_iter().for_each(|image| fs::remove_file(image).unwrap());
    assert!(told(&[&log, &data, &third], Some("guest")).contains("third.qcow2 cannot be added"));
    assert!(told(&[&log, &third], Some("guest")).contains("third.qcow2 cannot be added"));
    assert!(told(&[&log], None).contains("has data.qcow2, log.qcow2: serve them together, as one group"));
    assert!(matches!(group(&[&log], Some("guest"), one).unwrap_err(), Error::Incomplete { .. }));
    let elsewhere = other.join("data.qcow2");
    assert!(told(&[&log, &elsewhere], Some("guest")).contains("not in the same directory"));
    // In any order, and whatever the group is called.
    let first = group(&[&data, &log], Some("web"), one).unwrap();
    first.0.iter().for_each(|disk| assert_eq!(writes_of(&read(disk, 0, SIZE as usize).unwrap()), 1));
    step(&first, 2);

    // A head that is lost says no less of which disks there are.
    let lost = far_dir.join(newest_of(&log).number.next().name().as_str());
    fs::write(&lost, "lost").unwrap();
    let (repository, files) = far(&far_dir, other);
    let place = Place::published_elsewhere(other, repository).unwrap();
    assert_eq!(place.members().iter().map(Place::name).collect::<Vec<_>>(), ["data.qcow2", "log.qcow2"]);
    let resources = Resources::with_opener(ResourceOptions::default(), files);
    take_over(&place, &OpenOptions::default(), &resources).unwrap();
    drop((place, resources));
    let second = group(&[&log, &data], Some("guest"), other).unwrap();
    second.0.iter().for_each(|disk| assert_eq!(writes_of(&read(disk, 0, SIZE as usize).unwrap()), 2));
    first.0.iter().for_each(|disk| write(disk, 0, &[1; 512]).unwrap());
    sync(&first.1).unwrap_err();
    step(&second, 3);
    assert_eq!([&log, &data].map(|image| writes_of(&published(&newest_of(&log), image))), [3, 3]);
    end_all(second);
    assert!(first.1.stop(soon()));
}
