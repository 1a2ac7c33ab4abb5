//! Who stands on whom, as the overlays say.

use vmstrata_disk::Format;

use crate::crawl::Found;
use crate::image::{Below, Fault, Image};
use crate::risk::RiskKind;

/// The links between images, as the overlays name them, and what is wrong with them.
pub(super) struct Links {
    pub(super) below: Vec<Option<usize>>,
    pub(super) users: Vec<u32>,
    pub(super) used_as_raw: Vec<bool>,
    pub(super) faults: Vec<(usize, Fault)>,
}

impl Links {
    pub(super) fn new(found: &Found) -> Self {
        let images = &found.images[..];
        let uses = uses(found);
        let mut links = Self {
            below: vec![None; images.len()],
            users: vec![0; images.len()],
            used_as_raw: uses.iter().map(|(_, raw)| *raw > 0).collect(),
            faults: Vec::new(),
        };
        for (at, image) in images.iter().enumerate() {
            // A file that is only ever used as raw has no header, whatever its guest wrote there.
            let (all, raw) = uses[at];
            let is_raw = raw > 0 && raw == all;
            let counts = |fault: &&Fault| !is_raw || fault.kind != RiskKind::Unsupported;
            links.faults.extend(image.fault.as_ref().filter(counts).map(|fault| (at, fault.clone())));
            let Some(facts) = image.qcow2.as_ref().filter(|_| !is_raw) else { continue };
            match &facts.below {
                None => {}
                Some(Below::Broken(fault)) => links.faults.push((at, fault.clone())),
                Some(Below::File(id, format)) => match found.position(*id) {
                    Some(below) => links.join(images, at, below, *format),
                    None => links.fault(at, RiskKind::Unreadable, not_examined(image)),
                },
            }
        }
        links
    }

    fn join(&mut self, images: &[Image], at: usize, below: usize, format: Option<Format>) {
        self.below[at] = Some(below);
        self.users[below] += 1;
        let base = &images[below];
        if format == Some(Format::Qcow2) && base.qcow2.is_none() && base.fault.is_none() {
            let (name, base) = (images[at].path.display(), base.path.display());
            self.fault(
                at,
                RiskKind::Corrupt,
                format!("{name}: its backing file {base} should be qcow2 and is not"),
            );
        }
    }

    pub(super) fn fault(&mut self, at: usize, kind: RiskKind, message: String) {
        self.faults.push((at, Fault { kind, message }));
    }
}

fn not_examined(image: &Image) -> String {
    let backing = image.qcow2.as_ref().and_then(|facts| facts.backing_name.as_deref()).unwrap_or_default();
    format!("{}: its backing file {backing} was not looked at", image.path.display())
}

/// For each image, how many overlays name it, and how many of them as raw.
fn uses(found: &Found) -> Vec<(u32, u32)> {
    let mut uses = vec![(0u32, 0u32); found.images.len()];
    for facts in found.images.iter().filter_map(|image| image.qcow2.as_ref()) {
        let Some(Below::File(id, format)) = &facts.below else { continue };
        let Some(at) = found.position(*id) else { continue };
        uses[at].0 += 1;
        uses[at].1 += u32::from(*format == Some(Format::Raw));
    }
    uses
}
