//! Images with random bytes anywhere, headers included: a check ends without a panic, a repair ends, and a second
//! repair finds nothing more to do.

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use vmstrata_check::{Options, Repair, check};
use vmstrata_store::MemoryStore;

use crate::support::*;

fn options(repair: Repair) -> Options {
    // Small enough that no damaged offset makes a test slow, large enough for the images below.
    Options { repair, memory_bytes_max: 16 << 20, ..Options::default() }
}

/// Small images with everything in them.
fn seeds() -> Vec<Vec<u8>> {
    let dir = tempfile::tempdir().unwrap();
    let shapes = [
        "cluster_size=512",
        "cluster_size=4k,refcount_bits=64",
        "cluster_size=1k,compat=0.10",
        "cluster_size=64k",
        "cluster_size=16k,extended_l2=on",
    ];
    let images = shapes.iter().enumerate().map(|(number, shape)| {
        let path = dir.path().join(format!("{number}.qcow2"));
        let name = path.to_str().unwrap();
        must("qemu-img", &["create", "-q", "-f", "qcow2", "-o", shape, name, "4M"]);
        qemu_io(&path, &["write -P 1 0 64k", "write -c -P 2 1M 64k", "write -z 2M 64k", "write -P 3 3M 64k"]);
        // A part of a cluster, and zeros in part of it.
        qemu_io(&path, &["write -P 5 129k 1k", "write -z 2560k 3k"]);
        if !shape.contains("compat=0.10") {
            must("qemu-img", &["bitmap", "-f", "qcow2", "--add", name, "b"]);
        }
        must("qemu-img", &["snapshot", "-c", "s", name]);
        qemu_io(&path, &["write -P 4 0 16k"]);
        std::fs::read(&path).unwrap()
    });
    images.collect()
}

/// Offsets in the image that some metadata lies at, so that damage does not vanish in data.
fn hot_spots(image: &[u8]) -> Vec<usize> {
    let word = |at: usize| u64::from_be_bytes(*image[at..].first_chunk().unwrap());
    let mut spots = vec![0, 8, 40, 48, 64, 72, 96, 104, 112, 128, 160];
    for field in [40, 48, 64] {
        let table = word(field) as usize;
        spots.extend((0..8).map(|n| table + n * 8));
        spots.extend((0..4).map(|n| (word(table + n * 8) & OFFSET) as usize).filter(|&at| at != 0));
    }
    spots.retain(|&spot| spot + 64 < image.len());
    spots
}

fn mutate(image: &mut Vec<u8>, spots: &[usize], rng: &mut SmallRng) {
    for _ in 0..rng.random_range(1..5) {
        let spot = spots[rng.random_range(0..spots.len())];
        let at = (spot + rng.random_range(0..64)).min(image.len() - 1);
        match rng.random_range(0..4) {
            0 => image[at] = rng.random(),
            1 => image[at] ^= 1 << rng.random_range(0..8),
            2 => {
                let end = (at + 8).min(image.len());
                image[at..end].fill(if rng.random() { 0xff } else { 0 });
            }
            _ => {
                let from = spots[rng.random_range(0..spots.len())];
                let word: [u8; 8] = *image[from..].first_chunk().unwrap();
                let at = at & !7;
                if at + 8 <= image.len() {
                    image[at..at + 8].copy_from_slice(&word);
                }
            }
        }
    }
    if rng.random_range(0..20) == 0 {
        image.truncate(rng.random_range(1..image.len()));
    }
}

/// What the guest reads of each cluster, by the simplest possible reader; `None` where it reads an error.
fn guest(image: &[u8]) -> Vec<Option<Vec<u8>>> {
    let word = |at: u64| {
        let at = usize::try_from(at).ok()?;
        Some(u64::from_be_bytes(*image.get(at..)?.first_chunk()?))
    };
    let bytes = |at: u64, len: u64| Some(image.get(at as usize..(at + len) as usize)?.to_vec());
    let half = |at: usize| u32::from_be_bytes(*image[at..].first_chunk().unwrap());
    let (version, bits) = (half(4), half(20));
    let (size, l1) = (word(24).unwrap(), word(40).unwrap());
    let cluster = 1u64 << bits;
    let has_subclusters = version > 2 && word(72).unwrap() & 16 != 0;
    let entry_len = if has_subclusters { 16 } else { 8 };
    let read = |number: u64| -> Option<Vec<u8>> {
        let table = word(l1 + number / (cluster / entry_len) * 8)? & OFFSET;
        if table == 0 {
            return Some(vec![]);
        }
        let place = table + number % (cluster / entry_len) * entry_len;
        let entry = word(place).filter(|_| table.is_multiple_of(cluster))?;
        let host = entry & OFFSET;
        if entry & 1 << 62 != 0 {
            // As good as decompressed: the bytes that would be.
            let shift = 62 - (bits - 8);
            let host = entry & ((1 << shift) - 1);
            let sectors = (entry >> shift & ((1 << (62 - shift)) - 1)) + 1;
            let packed = bytes(host, sectors * 512 - host % 512).filter(|_| host >= cluster)?;
            return Some([b"packed", &packed[..]].concat());
        }
        if has_subclusters {
            let states = word(place + 8)?;
            let (allocated, zero) = (states as u32, (states >> 32) as u32);
            if allocated & zero != 0 || allocated != 0 && (host == 0 || !host.is_multiple_of(cluster)) {
                return None;
            }
            let data = if allocated == 0 { vec![] } else { bytes(host, cluster)? };
            let used =
                data.chunks(cluster as usize / 32).enumerate().filter(|(n, _)| allocated >> n & 1 == 1);
            return Some(
                [&states.to_be_bytes()[..], &used.flat_map(|(_, part)| part.to_vec()).collect::<Vec<_>>()]
                    .concat(),
            );
        }
        match entry & 1 {
            1 => (version >= 3).then(|| vec![0; cluster as usize]),
            _ if host == 0 => Some(vec![]),
            _ => bytes(host, cluster).filter(|_| host.is_multiple_of(cluster)),
        }
    };
    (0..size.div_ceil(cluster).min(1 << 14)).map(read).collect()
}

#[test]
fn no_bytes_make_a_check_panic_and_repairs_converge() {
    let mut rng = SmallRng::seed_from_u64(0x5eed);
    let (mut refused, mut mended, mut beyond) = (0, 0, 0);
    for seed in seeds() {
        let spots = hot_spots(&seed);
        for round in 0..600 {
            let mut image = seed.clone();
            mutate(&mut image, &spots, &mut rng);
            let store = MemoryStore::from_vec(image.clone());
            let Ok(before) = check(&store, &options(Repair::None)) else {
                refused += 1;
                continue;
            };
            assert!(store.to_vec() == image, "a check wrote");
            let Ok(first) = check(&store, &options(Repair::All)) else {
                refused += 1;
                continue;
            };
            let once = store.to_vec();
            for (number, (was, is)) in guest(&image).into_iter().zip(guest(&once)).enumerate() {
                assert!(
                    was.is_none() || was == is,
                    "round {round}: guest cluster {number} changed; {before:#?}"
                );
            }
            let second = check(&store, &options(Repair::All)).unwrap();
            assert!(
                store.to_vec() == once,
                "round {round}: a second repair wrote again; {before:#?} {first:#?} {second:#?}"
            );
            assert_eq!((first.corruptions, first.leaks), (second.corruptions, second.leaks), "round {round}");
            if before.is_clean() {
                assert!(first.is_clean());
            } else if first.is_clean() {
                mended += 1;
            } else {
                beyond += 1;
            }
        }
    }
    assert!(
        refused > 100 && mended > 100 && beyond > 100,
        "{refused} refused, {mended} mended, {beyond} beyond"
    );
}
