//! A snapshot of a guest's memory: damaged, and made up by someone who knows how.
//!
//! ```text
//!   first byte: which object (0 metadata, 1 critical, 2 clean pages, modulo 3), and with 128
//!     not set: edits of 4 bytes (xor, place) anywhere in it                                       damage
//!     set:     the same in what the metadata's sections hold, or in an object's pages, then
//!              stored and summed anew                                                             made up
//! ```

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, LazyLock, Mutex};

use vmstrata_memory::hide::Clear;
use vmstrata_memory::vault::{
    Closing, DiskPiece, DiskState, NewSnapshot, ObjectId, ObjectKind, Page, Policy, Refill, Vault, Which,
};
use vmstrata_memory::{Frame, Layout, PAGE_BYTES, PageClass, Physical};
use vmstrata_repo::{
    Capabilities, DeviceId, Error, Held, Hold, NewObject, ObjectInfo, ObjectName, ObjectReader, Repository,
    Result, Swept,
};

const PAGES: u64 = 12;
const HEADER: usize = 36;
/// Of an object of pages: its header, an extent's, an entry of its table, a hash, its tail.
const OBJECT_HEADER: usize = 64;
const EXTENT_HEADER: usize = 16;
const EXTENT_ENTRY: usize = 16;
const HASH: usize = 16;
const TAIL: usize = 40;

type Objects = BTreeMap<ObjectName, Arc<Vec<u8>>>;

/// Objects in memory.
#[derive(Debug, Default)]
struct Shelf(Arc<Mutex<Objects>>);

impl Repository for Shelf {
    fn describe(&self) -> String {
        "shelf".to_owned()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            conditional_create: false,
            rename: false,
            read_back: true,
            early_read_back: false,
            max_copies: 1,
            ranged_reads: true,
            free_space: false,
            holds: true,
        }
    }

    fn device(&self) -> DeviceId {
        DeviceId(0)
    }

    fn list(&self, prefix: &str) -> Result<Vec<ObjectInfo>> {
        let objects = self.0.lock().expect("no panic in between");
        let stored = |(name, bytes): (&ObjectName, &Arc<Vec<u8>>)| ObjectInfo {
            name: name.clone(),
            len: bytes.len() as u64,
            allocated: bytes.len() as u64,
            copies: 1,
        };
        Ok(objects.iter().filter(|(name, _)| name.as_str().starts_with(prefix)).map(stored).collect())
    }

    fn replace(&self, name: &ObjectName, _copies: u8) -> Result<Box<dyn NewObject>> {
        Ok(Box::new(Writing { name: name.clone(), bytes: Vec::new(), shelf: Arc::clone(&self.0) }))
    }

    fn open(&self, name: &ObjectName) -> Result<Box<dyn ObjectReader>> {
        let found = self.0.lock().expect("no panic in between").get(name).cloned();
        let missing = || Error::of_object("shelf", "opening", name)(io::ErrorKind::NotFound.into());
        Ok(Box::new(Reading(found.ok_or_else(missing)?)))
    }

    fn delete(&self, name: &ObjectName) -> Result<()> {
        self.0.lock().expect("no panic in between").remove(name);
        Ok(())
    }

    fn sweep(&self) -> Result<Swept> {
        Ok(Swept::default())
    }

    fn hold(&self, _how: Hold) -> Result<Option<Held>> {
        Ok(Some(Box::new(())))
    }
}

struct Writing {
    name: ObjectName,
    bytes: Vec<u8>,
    shelf: Arc<Mutex<Objects>>,
}

impl NewObject for Writing {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.bytes.extend(bytes);
        Ok(())
    }

    fn sync(&mut self) -> Result<()> {
        Ok(())
    }

    fn read_back(&self) -> Result<Box<dyn ObjectReader>> {
        Ok(Box::new(Reading(Arc::new(self.bytes.clone()))))
    }

    fn finish(self: Box<Self>) -> Result<()> {
        self.shelf.lock().expect("no panic in between").insert(self.name, Arc::new(self.bytes));
        Ok(())
    }
}

struct Reading(Arc<Vec<u8>>);

impl ObjectReader for Reading {
    fn len(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> Result<()> {
        let from = usize::try_from(at).ok().and_then(|at| self.0.get(at..)?.get(..into.len()));
        let short = || Error::of("shelf", "reading")(io::ErrorKind::UnexpectedEof.into());
        into.copy_from_slice(from.ok_or_else(short)?);
        Ok(())
    }
}

fn id(name: &ObjectName) -> ObjectId {
    ObjectId::parse(name.as_str()).expect("a vault's")
}

fn class(page: u64) -> PageClass {
    [PageClass::Critical, PageClass::Clean, PageClass::Free][page as usize % 3]
}

fn content(page: u64) -> [u8; PAGE_BYTES] {
    std::array::from_fn(|at| (at as u64 * page / 100) as u8)
}

static SAVED: LazyLock<Objects> = LazyLock::new(|| {
    let shelf = Shelf::default();
    let objects = Arc::clone(&shelf.0);
    let vault = Vault::open(vec![Arc::new(shelf)]);
    let layout = Layout::split_at_4g(PAGES << 12, PAGES << 12).expect("whole pages");
    let policy = Policy { critical_copies: 1, extent_pages: 2, threads: 1, ..Policy::default() };
    let new = NewSnapshot { guest: "web".to_owned(), name: "mon".to_owned(), layout, policy };
    let mut writer = vault.begin(new).expect("room");
    for page in 0..PAGES {
        let frame = Frame::new(page);
        let piece = DiskPiece { disk: 0, offset: page << 12, len: 4096 };
        match page {
            4 => writer.refill(frame, Refill::new(&content(page), vec![piece])).expect("a page"),
            _ => writer.page(frame, class(page), &content(page)).expect("a page"),
        }
    }
    let clear = Clear { at: Physical::new(0x1000), mask: 8 };
    let closing = Closing {
        disks: vec![DiskState::new("web.qcow2", "mon")],
        hiding: (1..5).map(|at| (Frame::new(at), [clear; 2])).collect(),
        blobs: BTreeMap::from([("state".to_owned(), vec![7; 100])]),
        ..Closing::default()
    };
    writer.finish(closing).expect("room");
    objects.lock().expect("no panic in between").clone()
});

/// Reads the snapshot that `data` makes; see the module documentation.
///
/// # Panics
/// When a snapshot that was only damaged has other pages than were given.
pub fn vault(data: &[u8]) {
    let Some((&kind, edits)) = data.split_first() else { return };
    let is_made_up = kind & 128 != 0;
    let wanted = match (kind & 127) % 3 {
        1 => ObjectKind::Critical,
        2 => ObjectKind::Clean,
        _ => ObjectKind::Metadata,
    };
    let mut objects = SAVED.clone();
    let (_, object) = objects.iter_mut().find(|(name, _)| id(name).kind == wanted).expect("one of each kind");
    *object = Arc::new(match (is_made_up, wanted) {
        (false, _) => edited(object.to_vec(), edits),
        (true, ObjectKind::Metadata) => make_up(object, edits),
        (true, _) => make_up_pages(object, edits),
    });
    look(objects, is_made_up);
}

fn edited(mut bytes: Vec<u8>, edits: &[u8]) -> Vec<u8> {
    for edit in edits.as_chunks::<4>().0 {
        let place = u32::from_le_bytes([edit[1], edit[2], edit[3], 0]) as usize % bytes.len().max(1);
        if let Some(byte) = bytes.get_mut(place) {
            *byte ^= edit[0];
        }
    }
    bytes
}

/// The metadata with its content changed, and length and checksum right.
fn make_up(metadata: &[u8], edits: &[u8]) -> Vec<u8> {
    let (head, stored) = metadata.split_at(HEADER);
    let len = u32::from_le_bytes(*head.last_chunk().expect("a header")) as usize;
    let plain = edited(zstd::bulk::decompress(stored, len).expect("our own"), edits);
    let mut made = [head, &zstd::bulk::compress(&plain, 1).expect("memory")].concat();
    made[12..16].fill(0);
    let crc = crc32c::crc32c(&made);
    made[12..16].copy_from_slice(&crc.to_le_bytes());
    made
}

/// An object with its pages changed, and every length and checksum right but the hashes, which only who verifies looks at.
fn make_up_pages(object: &[u8], edits: &[u8]) -> Vec<u8> {
    let number = |at: usize| u32::from_le_bytes(*object[at..].first_chunk().expect("a number")) as usize;
    let tail = object.len() - TAIL;
    let (hashes, extents) = (number(tail + 8), number(tail + 16));
    let table = hashes + number(tail + 20) * HASH;
    let entries = || (0..extents).map(|extent| table + extent * EXTENT_ENTRY);
    let mut plain = Vec::new();
    for at in entries() {
        let (bytes, pages) = (&object[number(at)..][..number(at + 8)], usize::from(object[at + 12]));
        match bytes.split_at_checked(EXTENT_HEADER) {
            None => {}
            Some((head, pages)) if head[13] == 0 => plain.extend(pages),
            Some((_, packed)) => {
                plain.extend(zstd::bulk::decompress(packed, pages * PAGE_BYTES).expect("our own"));
            }
        }
    }
    let (plain, mut from) = (edited(plain, edits), 0);
    let (mut made, mut new_table) = (object[..OBJECT_HEADER].to_vec(), object[table..tail].to_vec());
    for (extent, at) in entries().enumerate().filter(|(_, at)| number(at + 8) > 0) {
        let len = usize::from(object[at + 12]) * PAGE_BYTES;
        let mut bytes = vec![0; EXTENT_HEADER];
        bytes[4..8].copy_from_slice(&(extent as u32).to_le_bytes());
        bytes[8..12].copy_from_slice(&(len as u32).to_le_bytes());
        bytes[12] = object[at + 12];
        bytes.extend(&plain[from..from + len]);
        from += len;
        // Whose it is: the id, and the byte of the header behind it.
        let crc = crc32c::crc32c_append(crc32c::crc32c(&object[16..33]), &bytes[4..]);
        bytes[..4].copy_from_slice(&crc.to_le_bytes());
        let entry = &mut new_table[extent * EXTENT_ENTRY..];
        entry[..8].copy_from_slice(&(made.len() as u64).to_le_bytes());
        entry[8..12].copy_from_slice(&(bytes.len() as u32).to_le_bytes());
        made.extend(bytes);
    }
    let mut end = object[tail..].to_vec();
    end[8..16].copy_from_slice(&(made.len() as u64).to_le_bytes());
    end[28..32].copy_from_slice(&crc32c::crc32c(&new_table).to_le_bytes());
    let crc = crc32c::crc32c(&end[..TAIL - 4]);
    end[TAIL - 4..].copy_from_slice(&crc.to_le_bytes());
    made.extend(&object[hashes..table]);
    made.extend(new_table);
    made.extend(end);
    made
}

fn look(objects: Objects, is_made_up: bool) {
    let id = id(objects.keys().next().expect("objects")).owner;
    let vault = Vault::open(vec![Arc::new(Shelf(Arc::new(Mutex::new(objects))))]);
    let listed = vault.list().expect("a shelf can be listed");
    assert_eq!(listed.len(), 1);
    let health = vault.verify(&[id], |_, _| ()).expect("a shelf can be listed");
    let Ok(snapshot) = vault.snapshot(&Which::Id(id)) else {
        assert!(!health[0].is_whole());
        return;
    };
    let mut page = [0; PAGE_BYTES];
    for number in 0..PAGES {
        let read = snapshot.read_page(Frame::new(number), &mut page);
        let is_right = match read {
            Ok(Page::Data) => page == content(number),
            Ok(Page::Zero) => number == 0,
            Ok(Page::Free) => class(number) == PageClass::Free,
            Ok(Page::Lost) => class(number) == PageClass::Clean,
            Err(_) => class(number) == PageClass::Critical && !health[0].is_whole(),
        };
        assert!(is_made_up || is_right, "page {number}: {read:?}");
    }
    let (hiding, refill) = (snapshot.hiding(), snapshot.refill());
    let all_there = hiding.is_ok() && refill.is_ok();
    assert!(is_made_up || all_there || !health[0].is_whole(), "{hiding:?} {refill:?}");
    let entries = [hiding.map_or(0, |hiding| hiding.iter().count()), refill.map_or(0, <[_]>::len)];
    assert!(entries.iter().all(|entries| *entries < 1 << 16), "{entries:?}");
    // A made-up machine may be large; ours is not.
    if snapshot.info().layout.frames() <= 1 << 16 {
        assert!(snapshot.classes().iter().count() <= 1 << 16);
    }
}
