//! The workers: each has a connection, draws requests, and tells the model what was asked and what was answered.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use rand::Rng as _;
use rand::rngs::SmallRng;

use super::config::{Config, Style};
use super::export::{Ask, Export, Reply, Request};
use super::history::Tick;
use super::model::{Change, Claim, Watch};
use super::shared::Shared;
use super::view::Sectors;

/// The longest that an answer may take.
const ANSWER_MAX: Duration = Duration::from_secs(60);
/// How often a worker looks whether it is to end.
const LOOK: Duration = Duration::from_millis(20);

enum Doing {
    Change(Claim),
    Read(Watch),
    Flush(Tick),
}

struct InFlight {
    doing: Doing,
    request: Request,
    since: Instant,
    full_changes: u64,
    /// There was hardly room when it was asked for.
    scarce: bool,
}

/// A connection at work.
pub(super) struct Worker<D> {
    pub(super) export: D,
    pub(super) name: String,
    pub(super) style: Style,
    pub(super) random: SmallRng,
    pub(super) shared: Arc<Shared>,
    /// What was drawn and is to come next.
    pub(super) next: VecDeque<(Ask, Sectors)>,
}

impl<D: Export> Worker<D> {
    /// Works until it is told to stop, or the server dies.
    pub(super) fn run(mut self) {
        let mut slots: Vec<Option<InFlight>> = (0..self.shared.config.depth).map(|_| None).collect();
        let worked = self.work(&mut slots);
        // Dropped by a kill, or at an error: what it asked for may have happened.
        for lost in slots.into_iter().flatten() {
            self.shared.counts.lost.fetch_add(1, Ordering::Relaxed);
            self.forget(lost.doing);
        }
        if let Err(error) = worked {
            self.shared.fail(error.context(self.name));
        }
    }

    fn forget(&self, doing: Doing) {
        let mut model = self.shared.model();
        match doing {
            Doing::Change(claim) => model.doubt(claim),
            Doing::Read(watch) => drop(model.viewed(watch)),
            Doing::Flush(_) => {}
        }
    }

    fn work(&mut self, slots: &mut [Option<InFlight>]) -> anyhow::Result<()> {
        let flag = |flag: &AtomicBool| flag.load(Ordering::SeqCst);
        loop {
            if flag(&self.shared.dead) {
                return Ok(());
            }
            if !flag(&self.shared.stop) {
                for (number, slot) in slots.iter_mut().enumerate().filter(|(_, slot)| slot.is_none()) {
                    let Some((doing, request)) = self.draw() else { continue };
                    let data = match &doing {
                        Doing::Change(claim) => claim.data(),
                        Doing::Read(_) | Doing::Flush(_) => Vec::new(),
                    };
                    let (full_changes, scarce) =
                        (self.shared.full_changes(), self.shared.place.images.is_scarce());
                    *slot = Some(InFlight { doing, request, since: Instant::now(), full_changes, scarce });
                    if let Err(error) = self.export.submit(number, &request, &data) {
                        return self.lost(error);
                    }
                }
            } else if slots.iter().all(Option::is_none) {
                return Ok(());
            }
            if slots.iter().all(Option::is_none) {
                continue;
            }
            match self.export.replies(LOOK) {
                Ok(replies) => replies.into_iter().try_for_each(|reply| self.answered(slots, reply))?,
                Err(error) => return self.lost(error),
            }
            if let Some(slow) = slots.iter().flatten().find(|doing| doing.since.elapsed() > ANSWER_MAX)
                && !flag(&self.shared.kill)
            {
                return Err(anyhow!("no answer for {ANSWER_MAX:?} to {:?}", slow.request));
            }
        }
    }

    fn lost(&self, error: io::Error) -> anyhow::Result<()> {
        if self.shared.kill.load(Ordering::SeqCst) { Ok(()) } else { Err(error).context("connection lost") }
    }

    fn answered(&self, slots: &mut [Option<InFlight>], reply: Reply) -> anyhow::Result<()> {
        let slot = slots.get_mut(reply.slot).and_then(Option::take);
        let InFlight { doing, request, full_changes, scarce, .. } = slot.context("an answer to nothing")?;
        let found = match reply.result {
            Ok(found) => found,
            Err(errno) => {
                self.forget(doing);
                if scarce || self.shared.met_full(full_changes) {
                    self.shared.counts.refused.fetch_add(1, Ordering::Relaxed);
                    return Ok(());
                }
                return Err(anyhow!("error {errno} though there is room: {request:?}"));
            }
        };
        self.shared.counts.count(request.ask);
        let mut model = self.shared.model();
        match doing {
            Doing::Change(claim) => model.done(claim, request.fua),
            Doing::Flush(asked) => model.flushed(asked),
            Doing::Read(watch) => {
                let range = watch.range;
                model.read(watch, &found).with_context(|| format!("read of {range:?}"))?;
            }
        }
        Ok(())
    }

    /// The next request; `None` where a change to the same sectors is in flight.
    fn draw(&mut self) -> Option<(Doing, Request)> {
        let (ask, drawn) = match self.next.pop_front() {
            Some((ask, range)) => (ask, Some(range)),
            None => (self.ask(), None),
        };
        let fua = self.export.has_fua()
            && !matches!(ask, Ask::Read | Ask::Flush)
            && self.random.random_ratio(1, 12);
        let mut model = self.shared.model();
        if ask == Ask::Flush {
            let request = Request { ask, range: Sectors::new(0, 0), fua: false };
            return Some((Doing::Flush(model.flush()), request));
        }
        let limit = model.limit().min(self.export.sectors());
        let range = drawn.filter(|range| range.end() <= limit);
        let range =
            range.unwrap_or_else(|| range_of(&self.shared.config, self.style, ask, limit, &mut self.random));
        if self.style == Style::Rewriter && ask == Ask::Trim {
            // Two parts of what is given back, at once.
            let part = (range.count / 16).max(1);
            let parts = [self.random.random_range(0..16), self.random.random_range(0..16)];
            let part = parts.map(|number| (Ask::Write, Sectors::new(range.start + number * part, part)));
            self.next.extend(part.into_iter().filter(|(_, part)| part.end() <= range.end()));
        }
        let request = Request { ask, range, fua };
        let change = match ask {
            Ask::Write => Change::Write,
            Ask::Zero { .. } => Change::Zero,
            Ask::Trim => Change::Trim,
            Ask::Read | Ask::Flush => return Some((Doing::Read(model.watch(range)), request)),
        };
        let Some(claim) = model.claim(range, change) else {
            // What was to come next waits for what is in flight there.
            self.next.extend(drawn.map(|range| (ask, range)));
            self.next.rotate_right(usize::from(drawn.is_some()));
            return None;
        };
        Some((Doing::Change(claim), request))
    }

    fn ask(&mut self) -> Ask {
        let [reads, writes, trims, zeroes, _flushes] = match self.style {
            Style::Mixed => [30, 40, 12, 12, 6],
            Style::Rewriter => [6, 10, 80, 2, 2],
            Style::Long => [25, 45, 12, 15, 3],
            Style::Flusher => [4, 8, 3, 0, 85],
            Style::Reader => [88, 6, 2, 2, 2],
        };
        let drawn = self.random.random_range(0..100);
        if drawn < reads {
            Ask::Read
        } else if drawn < reads + writes {
            Ask::Write
        } else if drawn < reads + writes + trims {
            Ask::Trim
        } else if drawn < reads + writes + trims + zeroes {
            Ask::Zero { unmap: self.random.random() }
        } else {
            Ask::Flush
        }
    }
}

/// Draws where a request falls: parts of a cluster, whole clusters, or runs that begin and end anywhere.
fn range_of(config: &Config, style: Style, ask: Ask, limit: u64, random: &mut SmallRng) -> Sectors {
    let cluster = config.cluster();
    let clusters = limit.div_ceil(cluster);
    let hot = config.hot.min(clusters);
    let which = if random.random_ratio(4, 5) {
        random.random_range(0..hot)
    } else {
        random.random_range(0..clusters)
    };
    let base = which * cluster;
    let shape = match (style, ask) {
        (Style::Rewriter, Ask::Trim) => 4,
        (Style::Rewriter, Ask::Write) => random.random_range(0..3),
        (Style::Long, _) => random.random_range(4..8),
        _ => random.random_range(0..8),
    };
    let longest = config.longest();
    let (start, count) = match shape {
        // A sixteenth of a cluster, which may be noted as written alone.
        0 | 1 => {
            let part = (cluster / 16).max(1);
            (base + random.random_range(0..cluster.min(16)) * part, part)
        }
        2 => (base + random.random_range(0..cluster), random.random_range(1..=cluster.min(64))),
        3 => (base + random.random_range(0..cluster), 1),
        4 => (base, cluster),
        5 => (base, cluster * random.random_range(1..=4)),
        _ => (base + random.random_range(0..cluster), random.random_range(1..=longest)),
    };
    let start = start.min(limit - 1);
    Sectors::new(start, count.min(longest.max(cluster)).min(limit - start))
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng as _;

    use super::*;

    #[test]
    fn ranges_are_of_every_kind_and_stay_on_the_disk() {
        let mut random = SmallRng::seed_from_u64(1);
        for seed in 0..13 {
            let config = Config::draw(seed, &mut random);
            let (cluster, mut whole, mut parts, mut crossing) = (config.cluster(), 0, 0, 0);
            for _ in 0..500 {
                let range = range_of(&config, Style::Mixed, Ask::Write, config.sectors, &mut random);
                assert!(range.count > 0 && range.end() <= config.sectors, "{range:?}");
                whole += usize::from(range.start.is_multiple_of(cluster) && range.count == cluster);
                parts += usize::from(range.count < cluster);
                crossing += usize::from(range.start / cluster != (range.end() - 1) / cluster);
            }
            assert!(
                whole > 20 && crossing > 20 && (parts > 20 || cluster == 1),
                "{whole} {parts} {crossing}"
            );
        }
    }
}
