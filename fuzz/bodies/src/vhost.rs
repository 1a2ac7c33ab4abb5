//! A guest, or a frontend, that writes anything at all into the memory it shares.
//!
//! ```text
//!   flags (1) │ log2 of ring size (1) │ first index (2) │ offsets of the three parts of the ring (6)
//!   length of the inflight region's bytes (2), the bytes
//!   length of the memory's bytes (2), the bytes           memory from 0 on, the rest zeros
//!   patches: offset (2), length (1), the bytes            written one after the other while requests run
//! ```
//!
//! Integers are little-endian. Guest addresses and those of the frontend both start at 0.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vmstrata_export::vhost_user::fuzzing::{HostileQueue, MEMORY_LEN, Setup};

use crate::scratch;

const EVENT_IDX: u8 = 1;
const INDIRECT: u8 = 2;
const READ_ONLY: u8 = 4;
const WRITE_THROUGH: u8 = 8;
const INFLIGHT: u8 = 16;
const LOG: u8 = 32;
/// Patches written at most.
const PATCHES_MAX: usize = 32;

/// Runs a queue on what `data` says is in memory; see the module documentation.
///
/// # Panics
/// When a request is lost, or the disk is not sound in the end.
pub fn vhost_request(data: &[u8]) {
    let mut input = Input(data);
    let Some(setup) = setup(&mut input) else { return };
    let memory = memory(input.block());
    let disk = scratch::disk(setup.read_only);
    if let Some(mut queue) = HostileQueue::new(disk.clone(), &setup, &memory) {
        for _ in 0..PATCHES_MAX {
            queue.take();
            // Before the requests are done, so that the device must not look at them twice.
            let patched = input.patch(&memory);
            queue.finish();
            if !patched {
                break;
            }
        }
        queue.take();
        queue.finish();
    }
    scratch::finish(disk);
}

fn memory(bytes: &[u8]) -> File {
    let file = memfd_create("fuzz-guest", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("memory");
    ftruncate(&file, MEMORY_LEN).expect("memory");
    let file = File::from(file);
    file.write_all_at(&bytes[..bytes.len().min(MEMORY_LEN as usize)], 0).expect("memory");
    file
}

fn setup(input: &mut Input<'_>) -> Option<Setup> {
    let [flags, size] = input.take()?;
    let start = input.u16()?;
    let ring = [input.u16()?, input.u16()?, input.u16()?];
    let inflight = input.block().to_vec();
    Some(Setup {
        size: 1 << (size % 9),
        start,
        ring,
        event_idx: flags & EVENT_IDX != 0,
        indirect: flags & INDIRECT != 0,
        read_only: flags & READ_ONLY != 0,
        write_through: flags & WRITE_THROUGH != 0,
        inflight: (flags & INFLIGHT != 0).then_some(inflight),
        log: flags & LOG != 0,
    })
}

/// What is left of a fuzzer's bytes.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*bytes)
    }

    fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_le_bytes)
    }

    fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (bytes, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        bytes
    }

    /// A length and as many bytes, or as many as there are.
    fn block(&mut self) -> &'a [u8] {
        let len = self.u16().unwrap_or(0);
        self.bytes(len.into())
    }

    /// Writes the next patch; whether there was one.
    fn patch(&mut self, memory: &File) -> bool {
        let (Some(at), Some([len])) = (self.u16(), self.take()) else { return false };
        let bytes = self.bytes(len.into());
        let room = (MEMORY_LEN - u64::from(at)).min(bytes.len() as u64) as usize;
        memory.write_all_at(&bytes[..room], at.into()).expect("memory");
        true
    }
}
