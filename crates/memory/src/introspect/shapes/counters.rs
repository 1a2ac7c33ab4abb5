//! The counters that the kernel keeps of its pages.

use super::Find;
use crate::introspect::Unreadable;

/// `struct pglist_data` and `struct zone`: how many pages the kernel thinks are free and in its cache.
#[derive(Clone, Copy, Debug)]
pub(in crate::introspect) struct Counters {
    /// `pglist_data.node_zones`: zones, one after another.
    pub zones: usize,
    /// `pglist_data.nr_zones`, four bytes.
    pub zone_count: usize,
    /// Bytes of a zone.
    pub zone_size: usize,
    /// `zone.free_area`: one for each order.
    pub free_areas: usize,
    /// Bytes of a free area.
    pub free_area_size: usize,
    /// `free_area.nr_free`: blocks of that order, eight bytes.
    pub free_blocks: usize,
    /// From a node on: pages of files and of swap cache, eight bytes, give or take what CPUs have not yet added.
    pub file_pages: usize,
}

impl Counters {
    pub(super) fn of(find: &Find<'_>) -> Result<Self, Unreadable> {
        let size = |name: &str| {
            let size = find.btf.size_of(name).filter(|size| (8..1 << 20).contains(size));
            size.ok_or_else(|| Unreadable::Missing(name.to_owned()))
        };
        let place = |of: &str, name: &str| {
            let member = find.btf.member(of, name).filter(|member| member.offset < 1 << 20);
            member.map(|member| member.offset).ok_or_else(|| Unreadable::Missing(format!("{of}.{name}")))
        };
        let index = find.constant("node_stat_item", "NR_FILE_PAGES")?.min(1 << 10) as usize;
        Ok(Self {
            zones: place("pglist_data", "node_zones")?,
            zone_count: find.half("pglist_data", "nr_zones")?,
            zone_size: size("zone")?,
            free_areas: place("zone", "free_area")?,
            free_area_size: size("free_area")?,
            free_blocks: find.word("free_area", "nr_free")?,
            file_pages: place("pglist_data", "vm_stat")? + 8 * index,
        })
    }
}
