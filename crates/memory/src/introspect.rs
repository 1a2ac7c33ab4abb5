//! What a Linux guest uses its pages for, read from its memory alone (PARS §6.2, for today's kernels).
//!
//! ```text
//!   Ram, Processor ──► Guest::find: VMCOREINFO note ─► page tables ─► BTF, array of struct pages
//!                │
//!                └──► Guest::pages: a pass over all struct pages ──► Pages: ClassMap, causes, what hides a clean page,
//!                                                                    where its bytes lie on the guest's disks
//! ```
//!
//! Nothing of the guest helps, and nothing of it is changed. The guest should be paused: a pass over a running guest ends,
//! within bounds, but what it says may be out of date.
//!
//! Invariants: what is read is hostile. Every walk has a bound, every count a limit; what is unknown, unreadable or
//! inconsistent is critical, and a guest that cannot be read is critical as a whole, for a stated reason ([`Unreadable`]).

pub mod btf;
mod cause;
mod check;
mod chunk;
mod disks;
mod folio;
mod guest;
mod mapping;
mod origin;
mod pass;
mod running;
mod shapes;
#[cfg(test)]
mod testing;
mod view;
pub mod vmcoreinfo;

pub use cause::{Cause, CauseMap};
pub use guest::Guest;
pub use origin::{Device, DeviceFolio, DeviceIndex, Disk, DiskIndex, FilePages, FileSystem, Origin};
pub use running::Processor;

use view::View;

use crate::class::ClassMap;
use crate::hide::Hiding;
use crate::ram::{Ram, RamError};

/// What one pass over a guest's struct pages found.
#[derive(Clone, Debug, Default)]
pub struct Pages {
    /// What losing each page would do.
    pub classes: ClassMap,
    /// Why it would, for people: what the guest uses each page for.
    pub causes: CauseMap,
    /// How to tell the guest that a clean page is gone; covers every clean page.
    pub hiding: Hiding,
    /// Where the bytes of clean pages lie on the guest's disks, as far as its buffer heads tell; in order of frames. A
    /// page may have several (a block each), some, or none. Claims of the guest: compare bytes before believing them.
    pub origins: Vec<Origin>,
    /// The files that clean pages belong to, in order of frames: what their file systems make of that is on the disks.
    pub files: Vec<FilePages>,
    /// What the guest has in memory of its devices themselves; in order of frames.
    pub device_cache: Vec<DeviceFolio>,
    /// The disks that the others name.
    pub disks: Vec<Disk>,
    /// The devices that the others name.
    pub devices: Vec<Device>,
}

/// What a page of cache must pass to count as clean, where tests leave it out to see what it is for. A snapshot by fewer rules
/// is not safe to restore.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// That nothing but the cache refers to it: not a reader who has found it and will not look again.
    pub references: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Self { references: true }
    }
}

/// What reading a guest came to.
#[derive(Debug)]
pub enum Introspection {
    /// Its kernel was understood.
    Read {
        /// The kernel's release, such as `6.1.0-50-cloud-amd64`, as its VMCOREINFO has it.
        release: String,
        /// What its pages are.
        pages: Box<Pages>,
    },
    /// It was not: every page counts as critical.
    Unreadable(Unreadable),
}

impl Introspection {
    /// Finds the kernel that `processor` runs in `ram`, and goes over its pages. Without a processor all of the memory is
    /// looked through for a kernel.
    pub fn of(ram: &dyn Ram, processor: Option<Processor>) -> Self {
        Self::by(ram, processor, Rules::default())
    }

    /// As [`Introspection::of`], by other rules.
    #[doc(hidden)]
    pub fn by(ram: &dyn Ram, processor: Option<Processor>, rules: Rules) -> Self {
        let read = || {
            let guest = Guest::find(ram, processor)?;
            let pages = Box::new(guest.pages(ram, rules)?);
            Ok(Self::Read { release: guest.release, pages })
        };
        read().unwrap_or_else(Self::Unreadable)
    }
}

/// Why a guest could not be read.
#[derive(Debug, thiserror::Error)]
pub enum Unreadable {
    /// No VMCOREINFO note that leads anywhere: another system, encrypted memory, or a kernel without it.
    #[error("no Linux kernel with VMCOREINFO was found in the guest's memory")]
    NoKernel,
    /// More than one kernel could be the running one (left over from before a reboot).
    #[error("the kernels {first} and {second} both seem to run: one may be left over from before a reboot")]
    TwoKernels {
        /// The release found first.
        first: String,
        /// The release found next.
        second: String,
    },
    /// The kernel encrypts its memory (SME, SEV).
    #[error("the guest's memory is encrypted")]
    Encrypted,
    /// The kernel carries no type information.
    #[error("the guest's kernel carries no whole BTF type information")]
    NoTypes,
    /// A symbol, type, member or value that classification needs is not there.
    #[error("the guest's kernel has no {0}")]
    Missing(String),
    /// The kernel reads its page cache without taking references: what hides a page might come too late.
    #[error("the guest's kernel reads files without taking page references ({0})")]
    FastRead(String),
    /// What was read contradicts itself or the kernel's own counters.
    #[error("the guest's memory contradicts itself: {0}")]
    Inconsistent(String),
    /// The memory could not be read.
    #[error(transparent)]
    Ram(#[from] RamError),
}

impl Guest {
    /// Goes over every page of `ram`, which this guest was found in, and since when it has not booted again.
    ///
    /// # Errors
    /// [`Unreadable::Inconsistent`] when what was found is far from the kernel's own counters.
    fn pages(&self, ram: &dyn Ram, rules: Rules) -> Result<Pages, Unreadable> {
        let mut view = View::new(ram, self.tables);
        let pages = pass::run(self, ram, &mut view, rules);
        check::against_counters(self, &mut view, &pages)?;
        Ok(pages)
    }
}

#[cfg(test)]
mod tests;
