//! Damage: every byte of an index and of the headers that lead to it, flipped in turn, and roots that lie. What an index
//! then says is what the tables say, or nothing: `verify` would find the first wrong word.

use std::fs::OpenOptions;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use crate::index_support::{Chain, Damage, Maker, name_of, root_of};
use vmstrata_disk::index::{IndexOptions, verify};
use vmstrata_qcow2::Header;
use vmstrata_qcow2::index::{IndexLink, PAGE_LEN, PagePointer, Root};
use vmstrata_types::{ClusterBits, HostOffset, LayerIndex};

/// Small clusters, so that a case takes no time; two layers with an index of each kind, and a disk on top.
fn small_chain(makers: [Maker; 2]) -> Chain {
    let mut chain = Chain::new();
    for (number, maker) in makers.into_iter().enumerate() {
        let bits = if maker == Maker::Subclusters {
            ClusterBits::new(14).expect("16 KiB")
        } else {
            ClusterBits::MIN
        };
        chain.add(maker, 3 << 20, bits);
        chain.write(number, &[&format!("write -q -P 5 {number}M 3k"), "write -q -z 2M 1k"]);
    }
    chain.add(Maker::Ours, 3 << 20, ClusterBits::MIN);
    chain.build();
    chain
}

/// Flips each byte of `range` in turn; returns how many made a difference that was noticed.
fn noticed(damage: &Damage, chain: &Chain, range: impl Iterator<Item = u64>) -> usize {
    // A chain that cannot be read any more has noticed too.
    let is_good = || {
        verify(chain.top(), &IndexOptions::default())
            .is_ok_and(|files| files.iter().all(|file| name_of(&file.verdict) == "good"))
    };
    range.filter(|&at| !damage.flipped(at, is_good)).count()
}

/// Flips every byte, or every so many.
fn bytes_are_guarded(layer: usize, step: usize) {
    let chain = small_chain([Maker::Ours, Maker::Ours]);
    let (root, _) = root_of(&chain.files[layer]);
    let area = (root.area.start.get()..root.area.end.get()).step_by(step);
    let bytes = area.clone().count();
    assert_eq!(noticed(&Damage::of(&chain.files[layer], true), &chain, area), bytes);
}

#[test]
fn every_byte_of_an_index_in_a_file_is_guarded() {
    bytes_are_guarded(1, 1);
}

/// What it shares with the one above, and what only its own layer needs.
#[test]
fn an_index_that_another_stands_on_is_guarded() {
    bytes_are_guarded(0, 5);
}

#[test]
fn every_byte_of_a_sidecar_is_guarded() {
    let chain = small_chain([Maker::Stock, Maker::Stock]);
    let sidecar = chain.sidecar(1);
    let damage = Damage::of(&sidecar, true);
    assert_eq!(noticed(&damage, &chain, 0..damage.len()), damage.len() as usize);
}

#[test]
fn fine_leaves_are_guarded() {
    let chain = small_chain([Maker::Subclusters, Maker::Subclusters]);
    let sidecar = chain.sidecar(1);
    let damage = Damage::of(&sidecar, true);
    let bytes = (0..damage.len()).step_by(9);
    assert_eq!(noticed(&damage, &chain, bytes.clone()), bytes.count());
}

/// What an index depends on in a header of 112 bytes: magic and version, (backing name,) cluster size, disk size (but for
/// what is rounded away), encryption and L1 table, incompatible features, session number and the index's bit, refcount width, header length, compression.
const BASE: [Range<u64>; 7] = [0..8, 20..30, 32..48, 72..80, 88..92, 96..105, LINK];
const LAYER: [Range<u64>; 7] = [0..30, 32..48, 72..80, 88..92, 96..105, BACKING_FORMAT, 128..160];
/// The extension with the link, and, where there is a backing file, the one before it; the backing file's name comes last.
const LINK: Range<u64> = 112..144;
const BACKING_FORMAT: Range<u64> = 112..125;

/// A header whose bytes change is a changed layer, or says the same as before.
#[test]
fn no_byte_of_a_header_makes_an_index_lie() {
    let chain = small_chain([Maker::Ours, Maker::Ours]);
    for (file, needed) in chain.files.iter().zip([&BASE[..], &LAYER[..]]) {
        let (_, link) = root_of(file);
        assert!(needed.iter().any(|range| range.start + 8 == link.get()), "the link is where it was");
        let damage = Damage::of(file, false);
        let header = Header::parse(&std::fs::read(file).expect("reads"), damage.len()).expect("a header");
        let name = header
            .backing_file
            .map_or(0..0, |name| name.offset.get()..name.offset.get() + u64::from(name.len));
        for at in 0..512 {
            let is_noticed = noticed(&damage, &chain, at..=at) == 1;
            let is_needed = name.contains(&at) || needed.iter().any(|range| range.contains(&at));
            assert!(is_noticed || !is_needed, "byte {at} of {}", file.display());
        }
    }
}

/// Writes another root, with a checksum that matches, in place of the one that is there.
fn forge(path: &Path, change: &dyn Fn(&mut Root)) {
    let (mut root, place) = root_of(path);
    let at = root.at;
    change(&mut root);
    let (page, root_crc) = root.encode();
    let link = IndexLink { root: at, generation: root.generation, root_crc };
    let file = OpenOptions::new().write(true).open(path).expect("opens");
    let modified = file.metadata().and_then(|data| data.modified()).expect("exists");
    file.write_all_at(&page[..], at.get()).expect("writes");
    file.write_all_at(&IndexLink::encode(Some(link)), place.get()).expect("writes");
    file.set_modified(modified).expect("sets");
}

/// Roots whose checksum is right, of someone who wants to be read for ever or to be believed.
#[test]
fn forged_roots_are_refused() {
    let other = PagePointer::new(
        &vmstrata_qcow2::index::ChainId([9; 16]),
        LayerIndex::new(1),
        HostOffset::new(0x10_0000),
        1,
        &[0; PAGE_LEN],
    );
    let forgeries: [&dyn Fn(&mut Root); 9] = [
        &|root| root.layer = LayerIndex::new(65_000),
        &|root| root.layer = LayerIndex::new(2),
        &|root| root.layer = LayerIndex::BASE,
        &|root| root.size <<= 9,
        &|root| root.unit = ClusterBits::MAX,
        &|root| std::mem::swap(&mut root.map, &mut root.table),
        &|root| root.map = other,
        &|root| root.table = other,
        &|root| root.chain.0[3] ^= 1,
    ];
    for (number, forgery) in forgeries.iter().enumerate() {
        let chain = small_chain([Maker::Ours, Maker::Ours]);
        forge(&chain.files[1], forgery);
        let files = verify(chain.top(), &IndexOptions::default()).expect("the chain itself is sound");
        assert_eq!(name_of(&files[0].verdict), "good", "forgery {number}");
        assert_eq!(name_of(&files[1].verdict), "missing", "forgery {number}");
    }
}
