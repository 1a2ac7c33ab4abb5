//! Damage: every byte of an index and of the headers that lead to it, flipped in turn, and roots that lie. What an index
//! then says is what the tables say, or nothing: `verify` would find the first wrong word.

mod common;
mod index_support;

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::SystemTime;

use index_support::{Chain, Maker, name_of};
use vmstrata_disk::index::{IndexOptions, verify};
use vmstrata_qcow2::Header;
use vmstrata_qcow2::index::{IndexLink, PAGE_LEN, PagePointer, Root, link_place};
use vmstrata_types::{ClusterBits, HostOffset, LayerIndex};

/// Small clusters, so that a case takes no time; two layers with an index of each kind, and a disk on top.
fn small_chain(makers: [Maker; 2]) -> Chain {
    let mut chain = Chain::new();
    for (number, maker) in makers.into_iter().enumerate() {
        chain.add(maker, 3 << 20, ClusterBits::MIN);
        chain.write(number, &[&format!("write -q -P 5 {number}M 3k"), "write -q -z 2M 1k"]);
    }
    chain.add(Maker::Ours, 3 << 20, ClusterBits::MIN);
    chain.build();
    chain
}

struct Flipper {
    file: File,
    /// Time of change to put back after each flip, so that only checksums can notice it.
    hide: Option<SystemTime>,
}

impl Flipper {
    fn new(path: &Path, hide: bool) -> Self {
        let file = OpenOptions::new().read(true).write(true).open(path).expect("opens");
        let modified = file.metadata().and_then(|data| data.modified()).expect("exists");
        Self { file, hide: hide.then_some(modified) }
    }

    fn flip(&self, at: u64) {
        let mut byte = [0];
        self.file.read_exact_at(&mut byte, at).expect("reads");
        self.file.write_all_at(&[byte[0] ^ (1 << (at % 8))], at).expect("writes");
        if let Some(time) = self.hide {
            self.file.set_modified(time).expect("sets");
        }
    }

    /// Flips each byte of `range` in turn; returns how many made a difference that was noticed.
    fn each(&self, chain: &Chain, range: impl Iterator<Item = u64>) -> usize {
        let mut noticed = 0;
        for at in range {
            self.flip(at);
            // A chain that cannot be read any more has noticed too.
            let good = verify(chain.top(), &IndexOptions::default())
                .is_ok_and(|files| files.iter().all(|file| name_of(&file.verdict) == "good"));
            noticed += usize::from(!good);
            self.flip(at);
        }
        noticed
    }
}

/// The root of a file that has an index in it, and where the link to it lies.
fn root_of(path: &Path) -> (Root, HostOffset) {
    let bytes = std::fs::read(path).expect("reads");
    let header = Header::parse(&bytes, bytes.len() as u64).expect("a header");
    let place = link_place(&bytes[..512], &header).expect("room");
    let link = IndexLink::parse(&bytes[place.get() as usize..][..IndexLink::LEN]).expect("a link");
    let page = bytes[link.root.get() as usize..][..PAGE_LEN].try_into().expect("a page");
    (Root::parse(page, link.root).expect("a root").0, place)
}

/// Flips every byte, or every so many.
fn bytes_are_guarded(layer: usize, step: usize) {
    let chain = small_chain([Maker::Ours, Maker::Ours]);
    let (root, _) = root_of(&chain.files[layer]);
    let area = (root.area.start.get()..root.area.end.get()).step_by(step);
    let bytes = area.clone().count();
    assert_eq!(Flipper::new(&chain.files[layer], true).each(&chain, area), bytes);
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
    let len = sidecar.metadata().expect("exists").len();
    assert_eq!(Flipper::new(&sidecar, true).each(&chain, 0..len), len as usize);
}

/// A header whose bytes change is a changed layer, or says the same as before.
#[test]
fn no_byte_of_a_header_makes_an_index_lie() {
    let chain = small_chain([Maker::Ours, Maker::Ours]);
    for file in &chain.files[..2] {
        let noticed = Flipper::new(file, false).each(&chain, 0..512);
        assert!(noticed > 100, "only {noticed} of 512");
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
