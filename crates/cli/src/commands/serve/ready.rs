//! The report of a server that is ready: each disk, and how to attach it.

use std::io;

use serde::Serialize;
use vmstrata_api::{ExportSpec, ExportStatus, ServerStatus};

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
    layers: u64,
    /// Why it is not open, of a server that goes on without it.
    #[serde(skip_serializing_if = "Option::is_none")]
    open_error: Option<String>,
    vhost_user: Vec<VhostUserAttachment>,
    nbd: Vec<NbdAttachment>,
    /// The disk as a file.
    files: Vec<String>,
}

impl Report {
    pub fn new(status: &ServerStatus) -> Self {
        let disks = status.disks.iter().enumerate().map(|(number, disk)| DiskReport {
            name: disk.name.clone(),
            path: disk.path.clone(),
            size: disk.size_bytes.unwrap_or_default(),
            read_only: disk.read_only,
            layers: disk.layers.unwrap_or_default(),
            open_error: disk.open_error.clone(),
            vhost_user: status
                .exports
                .iter()
                .filter_map(|export| vhost_user(export, &disk.name, number))
                .collect(),
            nbd: status.exports.iter().filter_map(|export| nbd(export, &disk.name, number)).collect(),
            files: status.exports.iter().filter_map(|export| file(export, &disk.name)).collect(),
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
        if let Some(why) = &self.open_error {
            return format!("{}: not open, and tried again: {why}\n", self.name);
        }
        let mode = if self.read_only { "read-only" } else { "writable" };
        let layers = counted(self.layers, "layer");
        let mut text = format!("{}: {}, {layers}, {mode}, {}\n", self.name, short_size(self.size), self.path);
        self.vhost_user.iter().for_each(|attachment| text.push_str(&attachment.to_text()));
        self.nbd.iter().for_each(|attachment| text.push_str(&attachment.to_text()));
        self.files.iter().for_each(|file| text.push_str(&file_text(file)));
        text
    }
}

/// How to attach the server's disk of this number, from 0, through these exports, as a person reads it.
pub fn attachments(disk: &str, number: usize, exports: &[ExportStatus]) -> String {
    let guests =
        exports.iter().filter_map(|export| vhost_user(export, disk, number)).map(|guest| guest.to_text());
    let clients =
        exports.iter().filter_map(|export| nbd(export, disk, number)).map(|client| client.to_text());
    let files = exports.iter().filter_map(|export| file(export, disk)).map(|file| file_text(&file));
    guests.chain(clients).chain(files).collect()
}

/// The file that is the disk, if the export mounts it.
fn file(export: &ExportStatus, disk: &str) -> Option<String> {
    match &export.export {
        ExportSpec::Fuse(spec) => Some(spec.file_of(disk)),
        ExportSpec::VhostUser(_) | ExportSpec::Nbd(_) => None,
    }
}

fn file_text(file: &str) -> String {
    format!("  file {file}\n")
}

/// How to attach the disk through this export, if it is a vhost-user socket that leads to it.
fn vhost_user(export: &ExportStatus, disk: &str, number: usize) -> Option<VhostUserAttachment> {
    match &export.export {
        ExportSpec::VhostUser(spec) if spec.disk == disk => Some(VhostUserAttachment::new(spec, number)),
        _ => None,
    }
}

/// How to attach the disk through this export, if it is an NBD address.
fn nbd(export: &ExportStatus, disk: &str, number: usize) -> Option<NbdAttachment> {
    match &export.export {
        ExportSpec::Nbd(spec) => NbdAttachment::new(disk, spec, export.tls, number),
        ExportSpec::VhostUser(_) | ExportSpec::Fuse(_) => None,
    }
}
