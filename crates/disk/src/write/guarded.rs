//! Writes to the first sector of a raw disk whose format was not said.
//!
//! A guest that writes the header of an image there would have its disk taken for that image by whoever opens it next, and read
//! the files that the header names. QEMU refuses such writes for the same reason.

use vmstrata_qcow2::ImageFormat;
use vmstrata_qcow2::probe::PROBE_LEN;
use vmstrata_store::{Segment, copy_to_slice, total_len};
use vmstrata_types::{GuestOffset, GuestRange, HostOffset};

use crate::error::{ErrorKind, IoContext as _, Result};
use crate::layers::{HeaderGuard, Layers, RawTop};

impl RawTop {
    /// Whether a write at `at` may bring a header.
    #[inline]
    pub(crate) fn guards(&self, at: GuestOffset) -> bool {
        self.guard.is_some() && at.get() < PROBE_LEN as u64
    }

    /// Whether clearing `range` leaves a part of what was guarded.
    pub(crate) fn guards_rest_of(&self, range: GuestRange) -> bool {
        self.guards(range.start) && (range.start.get() != 0 || range.len < PROBE_LEN as u64)
    }
}

impl Layers {
    /// Writes as much of `from` as lies in the first sector; returns how many bytes.
    ///
    /// # Errors
    /// [`ErrorKind::HeaderWrite`] where the sector would be the start of an image: nothing was written.
    pub(super) fn write_guarded(
        &self,
        raw: &RawTop,
        guard: &HeaderGuard,
        at: GuestOffset,
        from: &[Segment<'_>],
    ) -> Result<usize> {
        let mut is_logged = guard.lock();
        let mut sector = [0; PROBE_LEN];
        raw.store.read_padded(&mut sector, HostOffset::ZERO).while_trying("read the first sector")?;
        let start = usize::try_from(at.get()).expect("within the first sector");
        let end = PROBE_LEN.min(start + total_len(from));
        // A copy: the guest may change its memory after the look.
        copy_to_slice(from, &mut sector[start..end]);
        if let Some(format) = ImageFormat::of_start(&sector) {
            let refused = ErrorKind::HeaderWrite { format };
            if !std::mem::replace(&mut *is_logged, true) {
                tracing::warn!(disk = %raw.path.display(), "write refused: {refused}");
            }
            return Err(refused.into());
        }
        let written = self.overwrite(
            &*raw.store,
            &[Segment::from_mut(&mut sector[start..end])],
            HostOffset::new(at.get()),
        );
        written.while_trying("write")?;
        Ok(end - start)
    }
}
