//! The report of a server that is ready: each disk, and how to attach it.

use std::io;

use serde::Serialize;

use super::Served;
use super::doors::Doors;
use crate::args::ServeArgs;
use crate::attach::{NbdAttachment, VhostUserAttachment};
use crate::output::{counted, print, print_json_line};
use crate::units::short_size;

/// What is printed once.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Always "ready"; other events may follow in later versions.
    event: &'static str,
    disks: Vec<DiskReport>,
}

#[derive(Debug, Serialize)]
struct DiskReport {
    name: String,
    path: String,
    size: u64,
    read_only: bool,
    layers: usize,
    vhost_user: Vec<VhostUserAttachment>,
    nbd: Vec<NbdAttachment>,
}

impl Report {
    pub fn new(args: &ServeArgs, disks: &[Served], doors: &Doors) -> Self {
        let tls = args.nbd_tls_cert.is_some();
        let disks = disks.iter().map(|Served { name, disk }| DiskReport {
            name: name.clone(),
            path: disk.path().display().to_string(),
            size: disk.size(),
            read_only: disk.is_read_only(),
            layers: disk.layers().len(),
            vhost_user: args
                .vhost_user
                .iter()
                .filter(|spec| spec.disk == *name)
                .map(VhostUserAttachment::new)
                .collect(),
            nbd: doors.nbd_addresses().iter().map(|address| NbdAttachment::new(name, address, tls)).collect(),
        });
        Self { event: "ready", disks: disks.collect() }
    }

    /// Prints it for a person, or as one line of JSON.
    pub fn print(&self, json: bool) -> io::Result<()> {
        if json { print_json_line(self) } else { print(&self.to_text()) }
    }

    fn to_text(&self) -> String {
        self.disks.iter().map(DiskReport::to_text).collect()
    }
}

impl DiskReport {
    fn to_text(&self) -> String {
        let mode = if self.read_only { "read-only" } else { "writable" };
        let layers = counted(self.layers as u64, "layer");
        let mut text = format!("{}: {}, {layers}, {mode}, {}\n", self.name, short_size(self.size), self.path);
        self.vhost_user.iter().for_each(|attachment| text.push_str(&attachment.to_text()));
        self.nbd.iter().for_each(|attachment| text.push_str(&attachment.to_text()));
        text
    }
}
