//! A vhost-user-blk client, with libblkio's driver as the guest's. One connection; each worker has a queue of its own.
//!
//! The memory of requests is read and written as the file it is.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use blkio::{Blkio, Blkioq, ReqFlags};

use super::export::{Ask, Export, Reply, Request};
use super::stamp::SECTOR;
use crate::bench::client;

/// A queue of a vhost-user-blk connection.
pub(super) struct Vhost {
    queue: Blkioq,
    /// Where this queue's part of the request memory lies: in this process, and in the memory's file.
    address: usize,
    start: u64,
    slot_bytes: usize,
    memory: File,
    sectors: u64,
    /// Bytes that the read in each slot is to find.
    reads: Vec<usize>,
}

/// A connection. It lives as long as its queues are used.
pub(super) struct Guest {
    pub(super) queues: Vec<Vhost>,
    _device: Blkio,
}

/// Connects with `queues` queues of `depth` requests with up to `request_bytes` each.
///
/// # Errors
/// When the server takes no guest.
pub(super) fn connect(socket: &Path, queues: usize, depth: usize, request_bytes: usize) -> Result<Guest> {
    let connected = || -> Result<Guest> {
        let mut device = Blkio::new("virtio-blk-vhost-user")?;
        device.set_str("path", socket.to_str().context("the path is not UTF-8")?)?;
        device.connect()?;
        let sectors = device.get_u64("capacity")? / SECTOR as u64;
        device.set_i32("num-queues", queues as i32)?;
        let started = device.start()?;
        let region = device.alloc_mem_region(queues * depth * request_bytes)?;
        device.map_mem_region(&region)?;
        let queue = |(number, queue)| -> Result<Vhost> {
            let memory = format!("/proc/self/fd/{}", region.fd);
            Ok(Vhost {
                queue,
                address: region.addr + number * depth * request_bytes,
                start: region.fd_offset as u64 + (number * depth * request_bytes) as u64,
                slot_bytes: request_bytes,
                memory: OpenOptions::new().read(true).write(true).open(memory)?,
                sectors,
                reads: vec![0; depth],
            })
        };
        let queues = started.queues.into_iter().enumerate().map(queue).collect::<Result<_>>()?;
        Ok(Guest { queues, _device: device })
    };
    connected().with_context(|| format!("vhost-user at {}", socket.display()))
}

impl Export for Vhost {
    fn submit(&mut self, slot: usize, request: &Request, data: &[u8]) -> io::Result<()> {
        let (at, length) = (request.range.offset(), request.range.bytes());
        assert!(length <= self.slot_bytes || !matches!(request.ask, Ask::Read | Ask::Write), "{request:?}");
        let place = self.start + (slot * self.slot_bytes) as u64;
        let buffer = (self.address + slot * self.slot_bytes) as *mut u8;
        let none = ReqFlags::empty();
        self.reads[slot] = 0;
        match request.ask {
            Ask::Read => {
                self.reads[slot] = length;
                self.memory.write_all_at(&vec![0xee; length], place)?;
                self.queue.read(at, buffer, length, slot, none);
            }
            Ask::Write => {
                self.memory.write_all_at(data, place)?;
                self.queue.write(at, buffer, length, slot, none);
            }
            Ask::Trim => self.queue.discard(at, length as u64, slot, none),
            Ask::Zero { unmap } => {
                let flags = if unmap { none } else { ReqFlags::NO_UNMAP };
                self.queue.write_zeroes(at, length as u64, slot, flags);
            }
            Ask::Flush => self.queue.flush(slot, none),
        }
        // The request is handed over; nothing is waited for.
        client::submit(&mut self.queue).map_err(io::Error::other)
    }

    fn replies(&mut self, wait: Duration) -> io::Result<Vec<Reply>> {
        let completed = client::completed(&mut self.queue, wait).map_err(io::Error::other)?;
        let reply = |(slot, ret): (usize, i32)| -> io::Result<Reply> {
            if ret < 0 {
                return Ok(Reply { slot, result: Err(ret.unsigned_abs()) });
            }
            let mut found = vec![0; self.reads[slot]];
            self.memory.read_exact_at(&mut found, self.start + (slot * self.slot_bytes) as u64)?;
            Ok(Reply { slot, result: Ok(found) })
        };
        completed.into_iter().map(reply).collect()
    }

    fn sectors(&self) -> u64 {
        self.sectors
    }

    fn has_fua(&self) -> bool {
        false
    }
}
