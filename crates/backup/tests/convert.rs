//! Disks of every shape converted into targets of every shape, against what the disks read as; and failures on the way.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::flat::SECTOR;
use crate::common::shape::{LayerShape, Made, make};
use crate::common::stock::{assert_clean, content, path_str, qemu_img, qemu_io};
use crate::common::{for_seeds, open_read_only, patiently, random, scratch};
use crate::faults::{entries, fail_each_read};
use rand::Rng as _;
use rand::rngs::SmallRng;
use vmstrata_backup::{
    BackupFault, ConvertOptions, ConvertReport, ConvertSource, ConvertTarget, RestoreFormat, convert,
    data_bytes,
};
use vmstrata_disk::{Disk, Error, OpenOptions, Resources};
use vmstrata_qcow2::{CompressionType, NewBacking};
use vmstrata_store::{MemoryStore, Segment, Store};
use vmstrata_types::{ClusterBits, HostOffset};

fn to_path(disk: &Arc<Disk>, path: &Path, options: &ConvertOptions) -> Result<ConvertReport, Error> {
    let (source, target) = (ConvertSource::Disk(Arc::clone(disk)), ConvertTarget::Path(path.to_owned()));
    convert(source, target, options, &mut |_, _| true)
}

fn to_store(
    disk: &Arc<Disk>,
    store: Arc<dyn Store>,
    options: &ConvertOptions,
) -> Result<ConvertReport, Error> {
    let (source, target) = (ConvertSource::Disk(Arc::clone(disk)), ConvertTarget::Store("it".into(), store));
    convert(source, target, options, &mut |_, _| true)
}

fn raw() -> ConvertOptions {
    ConvertOptions { format: RestoreFormat::Raw, ..ConvertOptions::default() }
}

/// An image of any kind.
fn some_image(random: &mut SmallRng, bits: u32) -> ConvertOptions {
    ConvertOptions {
        cluster_bits: ClusterBits::new(bits).expect("a cluster size"),
        subclusters: bits >= 14 && random.random(),
        compression: [None, Some(CompressionType::Zlib), Some(CompressionType::Zstd)]
            [random.random_range(0..3)],
        verify: random.random(),
        threads: random.random_range(1..4),
        ..ConvertOptions::default()
    }
}

/// Converts into a raw disk and into an image, and has stock tools read both.
fn check_converts(dir: &Path, disk: &Arc<Disk>, expected: &[u8], image: &ConvertOptions) {
    let [flat, made] = ["flat", "made"].map(|name| dir.join(name));
    patiently(|| to_path(disk, &flat, &ConvertOptions { verify: image.verify, ..raw() })).expect("converts");
    assert!(std::fs::read(&flat).unwrap() == expected, "raw differs");
    patiently(|| to_path(disk, &made, image)).unwrap_or_else(|error| panic!("{image:?}: {error}"));
    assert_clean(&made);
    assert!(content(&made, "qcow2") == expected, "{image:?} differs");
    for file in [flat, made] {
        std::fs::remove_file(file).unwrap();
    }
}

/// A chain of any kind.
fn some_chain(dir: &Path, random: &mut SmallRng) -> Made {
    let depth = random.random_range(1..=4);
    let mut shapes: Vec<LayerShape> = (0..depth)
        .map(|_| {
            let (bits, size) = (random.random_range(9..=21), random.random_range(200..20_000) * SECTOR);
            let compressed = random.random_ratio(1, 3).then_some(["zlib", "zstd"][random.random_range(0..2)]);
            let subclusters = bits >= 14 && random.random();
            LayerShape { compressed, subclusters, operations: 8, ..LayerShape::qcow2(bits, size) }
        })
        .collect();
    if random.random() {
        shapes[0] = LayerShape::raw(random.random_range(1000..9_000_000));
    }
    make(dir, &shapes, random)
}

#[test]
fn random_chains_converted_read_as_their_disks() {
    for_seeds(12, |seed| {
        let mut random = random("convert", seed);
        let dir = scratch();
        let made = some_chain(dir.path(), &mut random);
        let disk = open_read_only(&made.top);
        let bits = random.random_range(9..=21);
        let image = some_image(&mut random, bits);
        check_converts(dir.path(), &disk, &made.model, &image);
        if !made.has_backing {
            return;
        }
        let below = made.top.parent().unwrap().join(format!("layer{}", disk.layer_count() - 2));
        let format = disk.layers()[disk.layer_count() - 2].format.to_string();
        let backing = NewBacking { name: path_str(&below).as_bytes().to_vec(), format: Some(format) };
        let kept = ConvertOptions { backing: Some(backing), ..image };
        let overlay = dir.path().join("overlay");
        patiently(|| to_path(&disk, &overlay, &kept)).unwrap_or_else(|error| panic!("{kept:?}: {error}"));
        assert_clean(&overlay);
        assert!(content(&overlay, "qcow2") == made.model, "{kept:?} differs");
    });
}

#[test]
fn every_cluster_size_is_written_with_and_without_subclusters_and_compression() {
    let dir = scratch();
    let mut random = random("sizes", 0);
    // Ends in the middle of a cluster, of a subcluster and of a piece.
    let made = make(dir.path(), &[LayerShape::raw((5 << 20) + 3 * SECTOR + 1)], &mut random);
    let disk = open_read_only(&made.top);
    for bits in 9..=21 {
        for (subclusters, compression) in [
            (false, None),
            (true, None),
            (false, Some(CompressionType::Zstd)),
            (true, Some(CompressionType::Zlib)),
        ] {
            if subclusters && bits < 14 {
                continue;
            }
            let cluster_bits = ClusterBits::new(bits).unwrap();
            let image =
                ConvertOptions { cluster_bits, subclusters, compression, verify: true, ..Default::default() };
            check_converts(dir.path(), &disk, &made.model, &image);
        }
    }
}

#[test]
fn an_overlay_that_is_kept_stores_no_more_than_its_own() {
    let dir = scratch();
    let [base, top, copy] = ["base", "top", "copy"].map(|name| dir.path().join(name));
    qemu_img(&["create", "-q", "-f", "qcow2", path_str(&base), "64M"]);
    let run = |path: &Path, commands: &[&str]| {
        qemu_io(path, &commands.iter().map(|command| (*command).to_owned()).collect::<Vec<_>>());
    };
    run(&base, &["write -q -P 1 0 32M"]);
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base", "-F", "qcow2", path_str(&top)]);
    run(&top, &["write -q -P 2 1M 64k", "write -q -z 2M 1M", "write -q -P 0 4M 64k"]);
    let disk = open_read_only(&top);
    let backing = NewBacking { name: b"base".to_vec(), format: Some("qcow2".to_owned()) };
    let options = ConvertOptions { backing: Some(backing), verify: true, ..ConvertOptions::default() };
    let done = patiently(|| to_path(&disk, &copy, &options)).expect("converts");
    assert_eq!((done.data_bytes, done.disk_bytes), (64 << 10, 64 << 20), "zeros that were written are zeros");
    assert!(content(&copy, "qcow2") == content(&top, "qcow2"));
    assert_clean(&copy);
    assert_eq!(data_bytes(&disk, true, &mut |_, _| true).unwrap(), 128 << 10, "before it is read");
}

#[test]
fn zeros_take_no_space() {
    let dir = scratch();
    let [source, flat, image] = ["source", "flat", "image"].map(|name| dir.path().join(name));
    let mut bytes = vec![0; 64 << 20];
    for at in (0..bytes.len()).step_by(8 << 20) {
        bytes[at..at + 5000].fill(7);
    }
    // All of it is data to the file system.
    std::fs::write(&source, &bytes).unwrap();
    let disk = open_read_only(&source);
    patiently(|| to_path(&disk, &flat, &raw())).unwrap();
    patiently(|| to_path(&disk, &image, &ConvertOptions::default())).unwrap();
    let taken = |path: &Path| path.metadata().unwrap().blocks() * 512;
    assert!(std::fs::read(&flat).unwrap() == bytes && taken(&flat) <= 8 * 8192, "{}", taken(&flat));
    assert!(taken(&image) <= (8 + 6) << 16, "{}", taken(&image));
}

#[test]
fn what_is_used_again_reads_as_the_disk_up_to_its_end() {
    let dir = scratch();
    let mut random = random("used", 0);
    for _ in 0..4 {
        let made = some_chain(dir.path(), &mut random);
        let disk = open_read_only(&made.top);
        let end = made.model.len();
        let store = Arc::new(MemoryStore::from_vec(vec![0xee; end + 5000]));
        let options = ConvertOptions { replace: true, verify: true, ..raw() };
        to_store(&disk, Arc::clone(&store) as Arc<dyn Store>, &options).expect("converts");
        let found = store.to_vec();
        assert!(found[..end] == made.model && found[end..] == [0xee; 5000]);
        let small = Arc::new(MemoryStore::from_vec(vec![0xee; end - 1]));
        let error = to_store(&disk, Arc::clone(&small) as Arc<dyn Store>, &options).unwrap_err();
        assert!(matches!(error.fault(), Some(BackupFault::DeviceTooSmall { .. })), "{error}");
        assert!(small.to_vec().iter().all(|byte| *byte == 0xee));
        let careful = ConvertOptions { replace: false, ..options };
        let error = to_store(&disk, store, &careful).unwrap_err();
        assert!(matches!(error.fault(), Some(BackupFault::DeviceNotReplaced)), "{error}");
        drop(disk);
        entries(dir.path()).iter().for_each(|name| std::fs::remove_file(dir.path().join(name)).unwrap());
    }
}

/// Storage that has something else at one place than was written there.
#[derive(Debug)]
struct Forgets(MemoryStore, u64);

impl Forgets {
    fn forget(&self) -> io::Result<()> {
        self.0.write_all(&[0x7f], HostOffset::new(self.1))
    }
}

impl Store for Forgets {
    fn read_segments(&self, segments: &[Segment<'_>], at: HostOffset) -> io::Result<usize> {
        self.0.read_segments(segments, at)
    }

    fn write_segments(&self, segments: &[Segment<'_>], at: HostOffset) -> io::Result<()> {
        self.0.write_segments(segments, at).and_then(|()| self.forget())
    }

    fn flush(&self) -> io::Result<()> {
        self.0.flush()
    }

    fn punch_hole(&self, at: HostOffset, len: u64) -> io::Result<()> {
        self.0.punch_hole(at, len).and_then(|()| self.forget())
    }

    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }
}

#[test]
fn verify_finds_what_storage_changed_in_data_and_in_zeros() {
    let dir = scratch();
    let source = dir.path().join("source");
    let mut bytes = vec![0; 9 << 20];
    bytes[3 << 20..4 << 20].fill(5);
    std::fs::write(&source, &bytes).unwrap();
    let disk = open_read_only(&source);
    for place in [(3 << 20) + 77, 8 << 20] {
        let store = || Arc::new(Forgets(MemoryStore::from_vec(vec![0; 9 << 20]), place)) as Arc<dyn Store>;
        let options = ConvertOptions { replace: true, ..raw() };
        to_store(&disk, store(), &options).expect("is not looked at");
        let error = to_store(&disk, store(), &ConvertOptions { verify: true, ..options }).unwrap_err();
        let fault = error.fault::<BackupFault>();
        assert!(matches!(fault, Some(BackupFault::ReadsOtherwise { at }) if at.get() == place), "{error}");
    }
}

#[test]
fn a_stream_becomes_an_image_and_a_disk_becomes_a_stream() {
    let dir = scratch();
    let mut random = random("streams", 0);
    let made = make(dir.path(), &[LayerShape::raw((7 << 20) + 700)], &mut random);
    let bytes = std::fs::read(&made.top).unwrap();
    for (name, options) in [
        ("plain", ConvertOptions::default()),
        ("packed", ConvertOptions { compression: Some(CompressionType::Zstd), ..ConvertOptions::default() }),
        ("small", ConvertOptions { cluster_bits: ClusterBits::MIN, ..ConvertOptions::default() }),
    ] {
        let (path, mut stream) = (dir.path().join(name), &bytes[..]);
        let target = ConvertTarget::Path(path.clone());
        let done = convert(ConvertSource::Stream(&mut stream), target, &options, &mut |_, _| true);
        assert_eq!(done.expect("converts").disk_bytes, made.model.len() as u64);
        assert_clean(&path);
        assert!(content(&path, "qcow2") == made.model, "{name}");
        let mut out = Vec::new();
        let source = ConvertSource::Disk(open_read_only(&path));
        convert(source, ConvertTarget::Stream(&mut out), &raw(), &mut |_, _| true).expect("converts");
        assert!(out == made.model, "{name}");
    }
}

fn open_by(path: &Path, resources: &Arc<Resources>) -> Result<Arc<Disk>, Error> {
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    patiently(|| Disk::open(path, &options, resources))
}

#[test]
fn a_failed_read_fails_a_conversion_and_leaves_nothing() {
    let dir = scratch();
    let mut random = random("failed reads", 0);
    let shape = |compressed| LayerShape { compressed, ..LayerShape::qcow2(16, 6 << 20) };
    let made = make(dir.path(), &[shape(None), shape(Some("zlib"))], &mut random);
    let before = entries(dir.path());
    let path = dir.path().join("copy");
    for options in [raw(), ConvertOptions { compression: Some(CompressionType::Zstd), ..Default::default() }]
    {
        let job = |resources: &Arc<Resources>| {
            let done = open_by(&made.top, resources).and_then(|disk| to_path(&disk, &path, &options));
            assert!(done.is_ok() || entries(dir.path()) == before, "{:?}", entries(dir.path()));
            done.map(drop)
        };
        assert!(fail_each_read(job) > 5, "a conversion reads");
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn a_conversion_that_is_stopped_leaves_nothing() {
    let dir = scratch();
    let source = dir.path().join("source");
    std::fs::write(&source, vec![3; 16 << 20]).unwrap();
    let disk = open_read_only(&source);
    let options = ConvertOptions { bytes_per_second: Some(1), ..ConvertOptions::default() };
    let target = ConvertTarget::Path(dir.path().join("copy"));
    let stopped = convert(ConvertSource::Disk(disk), target, &options, &mut |_, _| false);
    assert!(matches!(stopped.unwrap_err().fault(), Some(BackupFault::Stopped)));
    assert_eq!(entries(dir.path()), ["source"]);
}

#[test]
fn a_disk_is_not_converted_into_a_file_of_its_own_chain() {
    let dir = scratch();
    let made = make(
        dir.path(),
        &[LayerShape::raw(1 << 20), LayerShape::qcow2(16, 1 << 20)],
        &mut random("own chain", 0),
    );
    let disk = open_read_only(&made.top);
    let before: Vec<PathBuf> = vec![dir.path().join("layer0"), made.top.clone()];
    for path in &before {
        let bytes = std::fs::read(path).unwrap();
        let options = ConvertOptions { replace: true, ..ConvertOptions::default() };
        let error = patiently(|| to_path(&disk, path, &options)).unwrap_err();
        assert!(matches!(error.fault(), Some(BackupFault::OntoItself)), "{error}");
        assert!(std::fs::read(path).unwrap() == bytes);
    }
}

#[test]
fn options_that_do_not_go_together_are_refused() {
    let dir = scratch();
    let source = dir.path().join("source");
    std::fs::write(&source, vec![3; 1 << 20]).unwrap();
    let disk = open_read_only(&source);
    let path = dir.path().join("copy");
    let packed = ConvertOptions { compression: Some(CompressionType::Zlib), ..raw() };
    assert!(matches!(to_path(&disk, &path, &packed).unwrap_err().fault(), Some(BackupFault::CompressedRaw)));
    let huge = ConvertOptions { cluster_bits: ClusterBits::MIN, ..ConvertOptions::default() };
    let large = dir.path().join("large");
    std::fs::File::create(&large).unwrap().set_len(1 << 40).unwrap();
    let error = to_path(&open_read_only(&large), &path, &huge).unwrap_err().to_string();
    assert!(error.contains("too large for 512-byte clusters"), "{error}");
    let mut out = Vec::new();
    let target = ConvertTarget::Stream(&mut out);
    let image = convert(ConvertSource::Disk(disk), target, &ConvertOptions::default(), &mut |_, _| true);
    assert!(matches!(image.unwrap_err().fault(), Some(BackupFault::ImageOnDevice)));
    assert_eq!(entries(dir.path()), ["large", "source"]);
}
