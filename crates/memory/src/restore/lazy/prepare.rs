//! What is done before the guest runs: what may be missed is read or hidden.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use vmstrata_store::on_threads;

use super::memory::LazyMemory;
use super::source::VaultSource;
use crate::address::Frame;
use crate::class::PageClass;
use crate::ram::Layout;
use crate::refill::Refiller;
use crate::restore::Filled;
use crate::restore::clears::Clears;
use crate::restore::error::RestoreError;
use crate::vault::{Snapshot, Vault, Want};

/// How a memory is to be restored while its guest runs.
#[derive(Clone, Copy, Debug)]
pub struct Lazily {
    /// Which pages.
    pub want: Want,
    /// How long to read pages of clean cache before the guest runs.
    pub cache_time: Duration,
    /// Whether those that are not read by then, and lie on the guest's disks, are read while it runs. All others are hidden
    /// from it. Only for a guest whose disks are as they were.
    pub refill_later: bool,
    /// For how long a page that cannot be read is tried again, while the guest waits for it.
    pub patience: Duration,
}

/// A memory that reads `snapshot` of `vault` as it is needed, kept in `local`, which is empty. Clean pages that the vault does
/// not give come from `refill`. What was read already and what is hidden is returned with it.
///
/// # Errors
/// When a clean page that was not read cannot be hidden, or the local file cannot be written.
pub fn prepare(
    vault: Arc<Vault>,
    snapshot: Arc<Snapshot>,
    refill: Option<Refiller<'_>>,
    local: File,
    lazily: Lazily,
) -> Result<(LazyMemory, Filled), RestoreError> {
    let layout = &snapshot.info().layout;
    let mut memory = LazyMemory::new(local, layout, lazily.patience)?;
    let (source, mut lost) = VaultSource::new(vault, Arc::clone(&snapshot), lazily.want);
    let (mut all, mut clean) = (Vec::new(), Vec::new());
    source.for_each_extent(|pages| {
        let of_clean = pages.iter().filter(|(_, class)| *class == PageClass::Clean);
        let of_clean: Vec<Frame> = of_clean.map(|(frame, _)| *frame).collect();
        clean.extend((!of_clean.is_empty()).then_some(of_clean));
        all.extend(pages.into_iter().map(|(frame, _)| frame));
    });
    all.sort_unstable();
    memory.add(Arc::new(source), all);
    let deadline = Instant::now() + lazily.cache_time;
    warm(&memory, layout, &clean, deadline);
    let before = memory.left();
    lost.extend(clean.into_iter().flatten().filter(|frame| memory.give_up(*frame)));
    let mut refilled = 0;
    lost.sort_unstable();
    if let Some(refill) = refill {
        let absent = lost.len();
        lost = refill.pages(&lost, Some(deadline), |frame, bytes| memory.put(frame, bytes))?;
        refilled = (absent - lost.len()) as u64;
        if lazily.refill_later {
            let (later, hidden) = refill.later(&lost, &snapshot.info().disks);
            let frames: Vec<Frame> = later.frames().collect();
            memory.add(Arc::new(later), frames);
            lost = hidden;
        }
    }
    if !lost.is_empty() {
        memory.clear(Clears::hiding(layout, snapshot.hiding()?, &lost)?)?;
    }
    let pages = before.of - before.pages + refilled;
    Ok((memory, Filled { pages, refilled, hidden: lost.len() as u64 }))
}

/// Reads pages, some of each extent named, until `deadline`.
fn warm(memory: &LazyMemory, layout: &Layout, extents: &[Vec<Frame>], deadline: Instant) {
    let next = AtomicUsize::new(0);
    let work = || {
        while Instant::now() < deadline
            && let Some(extent) = extents.get(next.fetch_add(1, Ordering::Relaxed))
        {
            let page = extent[0].start().and_then(|start| layout.find(start));
            let Some((offset, _)) = page else { continue };
            // One that cannot be read is hidden.
            let _ = memory.fetch(offset / crate::PAGE_BYTES as u64, Duration::ZERO);
        }
    };
    let threads = std::thread::available_parallelism().map_or(2, usize::from).min(extents.len());
    on_threads(threads, work);
}
