//! A tiered disk becomes an ordinary image again, whatever ends the process in the middle of that.

use crate::tier_support;
use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use crate::common::flat::write;
use crate::common::scratch;
use crate::common::stock::{assert_clean, content, path_str, qemu_img, qemu_io};
use crate::tier_support::{block, host, image, newest_of, place, soon, sync, take_over, writes_of};
use vmstrata_disk::{OpenOptions, ResourceOptions, Resources};
use vmstrata_tier::{Branch, Detach, Error, Pin, Place, Purpose, repository_of};

/// A disk that is not served any more, of which writes up to this number are published, in two epochs.
fn published(nas: &Path, tier: &Path, writes: u64) -> Place {
    let path = image(nas);
    let (disk, tiered) = host(&path, tier).unwrap();
    for numbers in [1..=writes / 2, writes / 2 + 1..=writes] {
        numbers.for_each(|number| write(&disk, place(number), &block(number)).unwrap());
        sync(&tiered).unwrap();
    }
    assert!(tiered.stop(soon()));
    disk.close().unwrap();
    Place::of(&path, tier).unwrap()
}

fn begin(place: &Place, flatten: bool) -> Result<Detach, Error> {
    let resources = Resources::new(ResourceOptions::default());
    Detach::begin(place, flatten, &OpenOptions::default(), &resources)
}

/// The path leads to an ordinary image with the guest's writes, and nothing of the tier is left.
fn assert_detached(place: &Place, flatten: bool, writes: u64) {
    assert_clean(&place.path);
    assert_eq!(writes_of(&content(&place.path, "qcow2")), writes);
    let left = |dir: &Path| -> Vec<String> {
        let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
        names.sort();
        names
    };
    let beside: &[&str] = if flatten { &["web.qcow2"] } else { &["web.qcow2", "web.qcow2.layers"] };
    assert_eq!(left(place.path.parent().unwrap()), beside);
    assert!(left(place.local.parent().unwrap()).is_empty());
    qemu_io(&place.path, &["write -P 7 0 64k".to_owned()]);
}

#[test]
fn a_detached_disk_is_an_ordinary_image_with_all_of_its_content() {
    for flatten in [false, true] {
        let (nas, tier) = (scratch(), scratch());
        let place = published(nas.path(), tier.path(), 100);
        begin(&place, flatten).unwrap().run().unwrap();
        assert_detached(&place, flatten, 100);
        assert!(matches!(begin(&place, flatten).unwrap_err(), Error::NoCopy { .. }));
        // Another host has no repository to take it over from.
        assert!(matches!(take_over(&place.path, &tier.path().join("other")), Err(Error::NoHead { .. })));
        if flatten {
            let (_disk, tiered) = host(&place.path, tier.path()).unwrap();
            sync(&tiered).unwrap();
        }
    }
}

#[test]
fn one_that_ends_anywhere_leaves_a_tiered_disk_or_an_ordinary_image_and_another_goes_on() {
    for (flatten, again_flatten) in [(false, false), (false, true), (true, true), (true, false)] {
        let mut is_over = false;
        for steps in 0.. {
            let (nas, tier) = (scratch(), scratch());
            let place = published(nas.path(), tier.path(), 20);
            let mut detach = begin(&place, flatten).unwrap();
            for _ in 0..steps {
                is_over |= !detach.step().unwrap();
            }
            drop(detach);
            if is_over {
                break;
            }
            assert_clean(&place.path);
            assert_eq!(writes_of(&content(&place.path, "qcow2")), 20, "after {steps} steps");
            let writes = match host(&place.path, tier.path()) {
                Ok((disk, tiered)) => {
                    // It is tiered still.
                    write(&disk, tier_support::place(21), &block(21)).unwrap();
                    sync(&tiered).unwrap();
                    assert!(tiered.stop(soon()));
                    disk.close().unwrap();
                    21
                }
                Err(Error::Detached { .. } | Error::NotAttachable { .. } | Error::NoHead { .. }) => 20,
                Err(other) => panic!("after {steps} steps: {other}"),
            };
            match begin(&place, again_flatten) {
                Ok(detach) => detach.run().unwrap(),
                Err(Error::NoCopy { .. }) => {}
                Err(other) => panic!("after {steps} steps: {other}"),
            }
            let is_flat = !nas.path().join("web.qcow2.layers").exists();
            assert!([flatten, again_flatten].contains(&is_flat), "after {steps} steps");
            assert_detached(&place, is_flat, writes);
        }
        assert!(is_over);
    }
}

#[test]
fn what_is_not_all_published_by_this_host_is_refused() {
    let (nas, tier, other) = (scratch(), scratch(), scratch());
    let place = published(nas.path(), tier.path(), 20);
    let (disk, tiered) = host(&place.path, tier.path()).unwrap();
    assert!(matches!(begin(&place, false).unwrap_err(), Error::Held { .. }));
    write(&disk, tier_support::place(21), &block(21)).unwrap();
    assert!(tiered.stop(soon()));
    disk.close().unwrap();
    drop(disk);
    assert!(matches!(begin(&place, false).unwrap_err(), Error::NotAllPublished { .. }));
    assert!(matches!(
        begin(&Place::of(&place.path, other.path()).unwrap(), false).unwrap_err(),
        Error::NoCopy { .. }
    ));
    take_over(&place.path, other.path()).unwrap();
    assert!(matches!(begin(&place, false).unwrap_err(), Error::Fenced { .. }));
    assert_eq!(writes_of(&content(&place.path, "qcow2")), 20);
}

#[test]
fn states_that_others_stand_on_are_not_deleted() {
    let (nas, tier) = (scratch(), scratch());
    let place = published(nas.path(), tier.path(), 20);
    let repository = place.open_repository().unwrap().expect("it is published");
    let pin = Pin::make(&*repository, None, &Purpose::reader("a clone")).unwrap();
    let told = begin(&place, false).unwrap_err().to_string();
    assert!(told.contains("a clone at ") && told.contains("vmstrata tier pins"), "{told}");
    pin.release(&*repository).unwrap();
    begin(&place, false).unwrap().run().unwrap();
    assert_detached(&place, false, 20);
}

#[test]
fn a_host_that_takes_the_disk_over_meanwhile_keeps_its_repository() {
    let (nas, tier, other) = (scratch(), scratch(), scratch());
    let place = published(nas.path(), tier.path(), 20);
    let mut detach = begin(&place, false).unwrap();
    // The path leads to the layers, and the repository is still there.
    (0..2).for_each(|_| assert!(detach.step().unwrap()));
    take_over(&place.path, other.path()).unwrap();
    let taken = newest_of(&place.path);
    assert!(matches!(detach.run().unwrap_err(), Error::Fenced { .. }));
    assert_eq!(newest_of(&place.path), taken);
}

#[test]
fn files_that_are_not_the_repositorys_stay() {
    let (nas, tier) = (scratch(), scratch());
    let place = published(nas.path(), tier.path(), 20);
    fs::write(repository_of(&place.path).join("notes"), "not ours").unwrap();
    begin(&place, false).unwrap().run().unwrap();
    let kept = nas.path().join("web.qcow2.tier.detached");
    assert_eq!(fs::read_dir(&kept).unwrap().count(), 1);
    fs::remove_dir_all(kept).unwrap();
    assert_detached(&place, false, 20);
}

#[test]
fn branches_say_what_was_not_published_and_are_deleted_one_by_one() {
    let (nas, tier, other) = (scratch(), scratch(), scratch());
    let place = published(nas.path(), tier.path(), 20);
    assert_eq!(Branch::all(&place).unwrap(), []);
    let (disk, tiered) = host(&place.path, tier.path()).unwrap();
    let (repository, away) = (repository_of(&place.path), nas.path().join("away"));
    fs::rename(&repository, &away).unwrap();
    write(&disk, tier_support::place(21), &block(21)).unwrap();
    sync(&tiered).unwrap_err();
    assert!(tiered.stop(soon()));
    disk.close().unwrap();
    drop(disk);
    fs::rename(&away, &repository).unwrap();
    let owner = newest_of(&place.path).owner;
    let published = newest_of(&place.path).epoch.number;
    take_over(&place.path, other.path()).unwrap();
    let aside = take_over(&place.path, tier.path()).unwrap().expect("its copy of before");
    let [branch] = &Branch::all(&place).unwrap()[..] else { panic!("one branch") };
    assert_eq!((&branch.path, branch.owner), (&aside, Some(owner)));
    assert_eq!(branch.unpublished, [published.next()]);
    assert!(branch.bytes > 0 && branch.written_ns > 0);
    let image = branch.path.join("web.qcow2");
    assert_eq!(writes_of(&content(&image, "qcow2")), 21);
    // One that somebody reads stays.
    let mut reader =
        std::process::Command::new("sleep").arg("60").stdin(fs::File::open(&image).unwrap()).spawn().unwrap();
    assert!(matches!(branch.clone().remove(None).unwrap_err(), Error::Held { .. }));
    reader.kill().unwrap();
    reader.wait().unwrap();
    let repository = place.open_repository().unwrap().expect("it is published");
    let pins = || Pin::all(&*repository).unwrap().len();
    let before = pins();
    branch.clone().remove(Some(&*repository)).unwrap();
    assert_eq!(pins(), before - 1, "what it stood on is let go of");
    assert_eq!(Branch::all(&place).unwrap(), []);
    qemu_img(&["info", path_str(&place.path)]);
    fs::File::open(&place.path).unwrap().read_exact_at(&mut [0], 0).unwrap();
}
