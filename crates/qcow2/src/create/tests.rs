use super::*;
use crate::extension::FeatureNames;

fn refused(change: impl FnOnce(&mut CreateOptions)) -> CreateError {
    let mut options = CreateOptions::new(1 << 30);
    change(&mut options);
    new_image(&options).unwrap_err()
}

#[test]
fn the_default_image_has_one_cluster_of_each_kind() {
    let image = new_image(&CreateOptions::new(1 << 30)).unwrap();
    let header = &image.header;
    assert_eq!(header.refcount_table_offset, HostOffset::new(0x1_0000));
    assert_eq!(header.l1_table_offset, HostOffset::new(0x3_0000));
    assert_eq!((header.l1_size, header.refcount_table_clusters), (2, 1));
    assert_eq!(image.file_len, 0x4_0000);
    let (at, blocks) = &image.parts[1];
    assert_eq!(*at, HostOffset::new(0x2_0000));
    assert_eq!(blocks[..10], [0, 1, 0, 1, 0, 1, 0, 1, 0, 0]);
    assert_eq!(image.parts[2].0, HostOffset::ZERO, "the header is written last");
}

#[test]
fn refcount_blocks_cover_just_what_is_there() {
    // With 512 B clusters a block holds 64 refcounts of 64 bits: header, table, block and 61 clusters of L1
    // table fill it; one more needs a second block, which is a cluster itself.
    let l1_cluster = 64 * 64 * 512;
    let blocks = |l1_clusters: u64| {
        let (cluster_bits, refcount_order) = (ClusterBits::MIN, RefcountOrder::MAX);
        let options =
            CreateOptions { cluster_bits, refcount_order, ..CreateOptions::new(l1_clusters * l1_cluster) };
        let image = new_image(&options).unwrap();
        (image.parts[1].1.len() / 512, image.file_len / 512)
    };
    assert_eq!(blocks(61), (1, 64));
    assert_eq!(blocks(62), (2, 66));
    assert_eq!(blocks(124), (2, 128));
    assert_eq!(blocks(125), (3, 130));
}

#[test]
fn an_empty_disk_has_no_l1_table() {
    let image = new_image(&CreateOptions::new(0)).unwrap();
    assert_eq!((image.header.l1_size, image.header.l1_table_offset), (0, HostOffset::ZERO));
    assert_eq!(image.file_len, 0x3_0000);
}

#[test]
fn what_is_written_parses_to_what_was_asked() {
    let mut options = CreateOptions::new(123 << 20);
    options.backing = Some(NewBacking { name: b"base.qcow2".to_vec(), format: Some("qcow2".into()) });
    options.compression_type = CompressionType::Zstd;
    options.lazy_refcounts = true;
    let image = new_image(&options).unwrap();
    let mut cluster = image.parts[2].1.clone();
    cluster.resize(1 << 16, 0);
    let header = Header::parse(&cluster, image.file_len).unwrap();
    assert_eq!(header, image.header);
    assert_eq!(header.backing_name(&cluster).unwrap(), Some(&b"base.qcow2"[..]));
    let extensions = header.extensions(&cluster).unwrap();
    assert_eq!(extensions.backing_format(), Some("qcow2"));
    assert_eq!(extensions.feature_names(), Some(&FeatureNames::known()));
}

#[test]
fn features_are_named_where_there_is_room() {
    let mut options = CreateOptions::new(1 << 20);
    let names = |options: &CreateOptions| {
        let image = new_image(options).unwrap();
        let mut cluster = image.parts[2].1.clone();
        cluster.resize(options.cluster_bits.size() as usize, 0);
        image.header.extensions(&cluster).unwrap().feature_names().is_some()
    };
    assert!(names(&options));
    options.cluster_bits = ClusterBits::new(13).unwrap();
    assert!(names(&options));
    options.cluster_bits = ClusterBits::new(12).unwrap();
    assert!(!names(&options));
    let plain = CreateOptions::new(1 << 20);
    assert!(!names(&CreateOptions { feature_names: false, ..plain.clone() }));
    assert!(!names(&CreateOptions { version: 2, ..plain }));
}

#[test]
fn version_2_is_refused_what_it_cannot_have() {
    let needs = |change: fn(&mut CreateOptions)| {
        let error = refused(|options| {
            options.version = 2;
            change(options);
        });
        let CreateError::NeedsVersion3 { feature } = error else { panic!("{error}") };
        feature
    };
    assert_eq!(needs(|o| o.lazy_refcounts = true), "lazy refcounts");
    assert_eq!(needs(|o| o.compression_type = CompressionType::Zstd), "a compression type other than zlib");
    assert_eq!(needs(|o| o.refcount_order = RefcountOrder::MAX), "refcounts of other than 16 bits");
    assert_eq!(refused(|o| o.version = 4), CreateError::Version(4));
}

#[test]
fn the_largest_disk_fits_and_one_byte_more_does_not() {
    for bits in 9..=21 {
        let mut options = CreateOptions::new(0);
        options.cluster_bits = ClusterBits::new(bits).unwrap();
        let max = max_size(options.cluster_bits);
        options.size = max;
        let image = new_image(&options).unwrap();
        assert_eq!(image.header.l1_size, MAX_L1_ENTRIES);
        assert!(Header::parse(&image.parts[2].1, image.file_len).is_ok());
        options.size = max + 1;
        let cluster_size = options.cluster_bits.size();
        assert_eq!(new_image(&options), Err(CreateError::TooLarge { size: max + 1, cluster_size, max }));
    }
    assert_eq!(max_size(ClusterBits::MIN), 128 << 30);
}

#[test]
fn backing_names_and_formats_are_checked() {
    let backing = |name: &[u8], format: Option<&str>| {
        refused(|options| {
            options.backing = Some(NewBacking { name: name.to_vec(), format: format.map(str::to_owned) });
        })
    };
    assert_eq!(backing(b"", None), EncodeError::BackingNameUnusable.into());
    assert_eq!(backing(b"a\0b", None), EncodeError::BackingNameUnusable.into());
    assert_eq!(backing(&[b'a'; 1024], None), EncodeError::BackingNameTooLong { len: 1024 }.into());
    for format in ["", "sixteen-letters-", "a\0"] {
        assert_eq!(backing(b"a", Some(format)), CreateError::BackingFormat(format.into()));
    }
}

#[test]
fn a_name_that_fills_the_cluster_fits_and_one_byte_more_does_not() {
    let make = |len: usize| {
        let mut options = CreateOptions::new(1 << 20);
        options.cluster_bits = ClusterBits::MIN;
        options.backing = Some(NewBacking { name: vec![b'n'; len], format: None });
        new_image(&options)
    };
    let room = 512 - V3_LEN as usize - 8;
    assert_eq!(make(room).unwrap().header.backing_file.unwrap().len as usize, room);
    assert_eq!(make(room + 1), Err(EncodeError::DoesNotFit { needed: 513, have: 512 }.into()));
}
