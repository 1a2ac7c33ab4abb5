//! The disks that file systems lie on, and where on them.

use std::collections::HashMap;

use super::folio::Placed;
use super::origin::{Device, DeviceIndex, Disk, DiskIndex, Origin};
use super::shapes::{Disks, Start};
use super::view::View;
use crate::address::{Frame, PAGE_BYTES, Virtual};

const SECTOR_BITS: u32 = 9;
/// A guest with more disks than this is not believed.
const DISKS_MAX: usize = 4096;

impl Device {
    /// A block of a folio as bytes of one of its pages; `None` where it is no such thing, as a block larger than a page.
    pub(super) fn origin(self, folio: Frame, block: &Placed) -> Option<Origin> {
        let within_page = block.within % PAGE_BYTES as u64;
        (within_page + block.len <= PAGE_BYTES as u64).then_some(())?;
        Some(Origin {
            frame: Frame::new(folio.get() + block.within / PAGE_BYTES as u64),
            within_page: u16::try_from(within_page).ok()?,
            len: u16::try_from(block.len).ok()?,
            disk: self.disk,
            offset: self.start.checked_add(block.on_device)?,
        })
    }
}

/// The devices met so far.
#[derive(Debug, Default)]
pub(super) struct DiskTable {
    disks: Vec<Disk>,
    devices: Vec<Device>,
    known: HashMap<Virtual, Option<DeviceIndex>>,
    /// The device asked for last, as it is mostly the next one.
    last: Option<(Virtual, Option<DeviceIndex>)>,
}

impl DiskTable {
    /// What the block device at `device` is; `None` when that cannot be read.
    pub(super) fn device(
        &mut self,
        view: &mut View<'_>,
        shape: &Disks,
        device: Virtual,
    ) -> Option<(DeviceIndex, Device)> {
        let last = self.last.filter(|(last, _)| *last == device).map(|(_, index)| index);
        let index = last.or_else(|| self.known.get(&device).copied());
        let index = index.unwrap_or_else(|| self.learn(view, shape, device));
        self.last = Some((device, index));
        index.map(|index| (index, self.devices[index.0 as usize]))
    }

    fn learn(&mut self, view: &mut View<'_>, shape: &Disks, device: Virtual) -> Option<DeviceIndex> {
        let read = self.read(view, shape, device);
        let index = u32::try_from(self.devices.len()).ok().map(DeviceIndex);
        let index = read.and(index);
        self.devices.extend(index.and(read));
        self.known.insert(device, index);
        index
    }

    /// The disks, as [`DiskIndex`] counts them, and the devices, as [`DeviceIndex`] does.
    pub(super) fn into_parts(self) -> (Vec<Disk>, Vec<Device>) {
        (self.disks, self.devices)
    }

    fn read(&mut self, view: &mut View<'_>, shape: &Disks, device: Virtual) -> Option<Device> {
        let member = |at: Virtual, offset: usize| at.checked_add(offset as u64);
        let disk = view.pointer(member(device, shape.disk)?)?;
        let start = match shape.start {
            Start::Here(start) => view.u64(member(device, start)?)?,
            Start::There { partition, start } => {
                let partition = view.pointer(member(device, partition)?)?;
                view.u64(member(partition, start)?)?
            }
        };
        let start = start.checked_mul(1 << SECTOR_BITS)?;
        let disk = Disk {
            name: printable(&view.bytes::<32>(member(disk, shape.name)?)?),
            major: view.u32(member(disk, shape.major)?)?,
            minor: view.u32(member(disk, shape.minor)?)?,
        };
        let known = self.disks.iter().position(|other| *other == disk);
        let index = known.or_else(|| {
            self.disks.push(disk);
            (self.disks.len() <= DISKS_MAX).then_some(self.disks.len() - 1)
        })?;
        Some(Device { disk: DiskIndex(u32::try_from(index).ok()?), start })
    }
}

/// A name that is fit for a terminal and for a file of ours.
fn printable(name: &[u8]) -> String {
    let fit = |&byte: &u8| match byte {
        b'-' | b'_' | b'!' => char::from(byte),
        _ if byte.is_ascii_alphanumeric() => char::from(byte),
        _ => '?',
    };
    name.iter().take_while(|&&byte| byte != 0).map(fit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_of_a_large_folio_lies_in_one_of_its_pages() {
        let place = Device { disk: DiskIndex(0), start: 1 << 20 };
        let block = Placed { within: 0x2400, on_device: 0x10_0000, len: 0x400 };
        let origin = place.origin(Frame::new(8), &block).unwrap();
        assert_eq!((origin.frame, origin.within_page, origin.len), (Frame::new(10), 0x400, 0x400));
        assert_eq!(origin.offset, 0x20_0000);
        assert_eq!(place.origin(Frame::new(8), &Placed { len: 0x2000, ..block }), None);
        assert_eq!(place.origin(Frame::new(8), &Placed { on_device: u64::MAX, ..block }), None);
    }

    #[test]
    fn names_cannot_drive_a_terminal() {
        assert_eq!(printable(b"vda\0junk"), "vda");
        assert_eq!(printable(b"\x1b[2Jcciss!c0d0"), "??2Jcciss!c0d0");
    }
}
