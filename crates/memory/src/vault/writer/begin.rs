//! The first step of a writer: where the copies go, what the store has already, and the threads.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::thread::Builder;

use crossbeam_channel::bounded;
use parking_lot::Mutex;
use vmstrata_repo::Hold;

use super::super::error::{Result, VaultError};
use super::super::info::{Info, check_layout};
use super::super::known::{Known, Shares};
use super::super::name::{ObjectId, ObjectKind, SnapshotId, check_name};
use super::super::place::{self, Share};
use super::super::stats::Stats;
use super::super::survey::Survey;
use super::super::{Listed, Vault};
use super::output::Output;
use super::{BATCH_PAGES, Batch, HeldRepositories, NewSnapshot, Shared, Writer, worker};
use crate::address::PAGE_BYTES;

impl Writer {
    pub(in super::super) fn begin(vault: &Arc<Vault>, new: NewSnapshot) -> Result<Self> {
        new.policy.check()?;
        check_name(&new.guest)?;
        check_name(&new.name)?;
        check_layout(&new.layout)?;
        vault.remove_if_idle();
        let held = HeldRepositories(vault.hold(Hold::Write)?.unwrap_or_default());
        let survey = Survey::take(vault)?;
        let mut info = describe(&new);
        let listed = survey.snapshots(vault);
        refuse_second(&listed, &info)?;
        let shares = place::choose(vault, &new.policy, &repositories_of_last(&listed, &survey, &info))?;
        let known = if new.policy.dedup {
            let to = Shares { critical: &shares, clean_copies: new.policy.clean_copies };
            Known::load(vault, (&survey, &listed), &info, (to, new.policy.full_every))
        } else {
            Known::nothing()
        };
        info.parent = known.parent;
        let pages = new.layout.bytes() / PAGE_BYTES as u64;
        let output = |kind, shares: Vec<Share>| {
            Output::new(vault, ObjectId { owner: info.id, kind }, known.own[kind as usize], shares)
        };
        let critical = output(ObjectKind::Critical, shares.clone());
        let clean = output(ObjectKind::Clean, place::choose_clean(vault, &shares, new.policy.clean_copies));
        let shared = Arc::new(Shared {
            words: (0..pages).map(|_| AtomicU64::new(0)).collect(),
            known,
            critical,
            clean,
            policy: new.policy,
            failed: AtomicBool::new(false),
            error: Mutex::new(None),
        });
        Self::start(vault, info, shares, shared, held)
    }

    fn start(
        vault: &Arc<Vault>,
        info: Info,
        shares: Vec<Share>,
        shared: Arc<Shared>,
        held: HeldRepositories,
    ) -> Result<Self> {
        let waiting = (shared.policy.buffer_bytes / (BATCH_PAGES * PAGE_BYTES)).max(1);
        let (send, receive) = bounded(waiting);
        let (emptied_send, emptied) = bounded(waiting);
        let start = |_| {
            let (shared, receive, emptied) = (Arc::clone(&shared), receive.clone(), emptied_send.clone());
            let work = move || worker::run(&shared, &receive, &emptied);
            Builder::new().name("store".into()).spawn(work).map_err(VaultError::Thread)
        };
        let threads = (0..shared.policy.crew()).map(start).collect::<Result<_>>()?;
        let stats = Stats { pages: shared.words.len() as u64, ..Stats::default() };
        Ok(Self {
            vault: Arc::clone(vault),
            info,
            shares,
            shared,
            batch: Batch::default(),
            send: Some(send),
            emptied,
            threads,
            refill: Vec::new(),
            stats,
            is_saved: false,
            _held: held,
        })
    }
}

fn describe(new: &NewSnapshot) -> Info {
    Info {
        id: SnapshotId::draw(),
        guest: new.guest.clone(),
        name: new.name.clone(),
        taken_ns: 0,
        labels: Vec::new(),
        disks: Vec::new(),
        layout: new.layout.clone(),
        critical_copies: new.policy.critical_copies,
        clean_copies: new.policy.clean_copies,
        parent: None,
        step: 0,
        objects: BTreeMap::new(),
        stats: Stats::default(),
    }
}

/// One name, one snapshot.
pub(super) fn refuse_second(listed: &[Listed], info: &Info) -> Result<()> {
    let is_same = |other: &Info| other.guest == info.guest && other.name == info.name;
    if listed.iter().any(|listed| listed.info.as_ref().is_ok_and(is_same)) {
        return Err(VaultError::Exists { guest: info.guest.clone(), name: info.name.clone() });
    }
    Ok(())
}

/// Where the guest's last snapshot is: the new one shares pages with it if it goes there too.
fn repositories_of_last(listed: &[Listed], survey: &Survey, info: &Info) -> Vec<usize> {
    let is_of_guest = |other: &&Listed| other.info.as_ref().is_ok_and(|other| other.guest == info.guest);
    let Some(last) = listed.iter().find(is_of_guest) else { return Vec::new() };
    let name = ObjectId { owner: last.id, kind: ObjectKind::Metadata };
    survey.copies(name).iter().map(|copy| copy.repository).collect()
}
