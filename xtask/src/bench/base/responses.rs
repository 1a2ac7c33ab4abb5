//! How often a guest waits long for its disk: all guests of all hosts boot and work, one after the other of them begins.
//!
//! Clones are served through their host's replica, and lie on the host. Stock QEMU has base and overlays on the NAS.

use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use anyhow::Result;

use super::super::machine::settle;
use super::super::report::{Report, Row};
use super::super::results::median;
use super::Options;
use super::stage::{Overlays, SEED, Served, Stage, at_once};
use super::work::Work;
use crate::chain::pattern::mix;

/// What a user notices.
const LONG: Duration = Duration::from_millis(200);

pub(super) fn run(options: &Options, stage: &Stage<'_>, work: &Work, report: &mut Report) -> Result<()> {
    stage.publish(1)?;
    let hosts = 1..=options.hosts;
    // Shares of bursts that took long, in percent, round by round; and bursts of a guest.
    let (mut local, mut plain, mut ours, mut bursts) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut share = |served: Vec<(Vec<Served>, Vec<PathBuf>)>| -> Result<f64> {
        let (served, sockets): (Vec<_>, Vec<_>) = served.into_iter().unzip();
        let sockets = sockets.concat();
        let found = all_bursts(options, &sockets, work)?;
        served.into_iter().flatten().try_for_each(Served::stop)?;
        bursts.push(found.len() as f64 / sockets.len() as f64);
        let long = found.iter().filter(|burst| **burst > LONG).count();
        Ok(100.0 * long as f64 / found.len() as f64)
    };
    for round in 0..options.rounds {
        settle();
        let (server, sockets) = stage.serve_local()?;
        local.push(share(vec![(vec![server], sockets)])?);
        let on_nas = |host| -> Result<_> {
            Ok(stage.serve_plain(host, options.guests, Overlays::OnNas)?.into_iter().unzip())
        };
        plain.push(share(hosts.clone().map(on_nas).collect::<Result<_>>()?)?);
        let on_replica = |host| -> Result<_> {
            stage.forget(host)?;
            let dir = stage.host_dir(host).join(format!("round{round}"));
            let (server, sockets) = stage.serve(host, &stage.clones(host, &dir, options.guests)?)?;
            Ok((vec![server], sockets))
        };
        ours.push(share(hosts.clone().map(on_replica).collect::<Result<_>>()?)?);
    }
    report.add(Row::median("waits: bursts of a guest", "", &bursts));
    let name = format!("waits above {} ms", LONG.as_millis());
    let guests = options.guests * usize::from(options.hosts);
    report.add(Row::median(&format!("{name}, 1 guest on a local disk"), "%", &local));
    let row = Row::median(&format!("{name}, {guests} guests of {} hosts", options.hosts), "%", &ours);
    report.add(row.at_most(12.0).beside(median(&plain)));
    Ok(())
}

/// Every guest works, and begins some time after the one before. Returns how long each waited in each burst.
fn all_bursts(options: &Options, sockets: &[PathBuf], work: &Work) -> Result<Vec<Duration>> {
    let bursts = at_once(sockets, |number, client| {
        // Users come one by one: nothing is waited for.
        thread::sleep(begins(number, options.apart));
        work.again(client, options.speed)
    })?;
    Ok(bursts.concat())
}

/// When a guest begins: as in a Poisson process, in which guests come `apart` on average.
fn begins(number: usize, apart: Duration) -> Duration {
    let gap = |number: usize| {
        // Above 0, and 1 at most.
        let drawn = (mix(SEED ^ number as u64) >> 11) as f64 + 1.0;
        -(drawn / (1u64 << 53) as f64).ln()
    };
    apart.mul_f64((0..number).map(gap).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guests_begin_in_turn_and_as_far_apart_as_asked_on_average() {
        let apart = Duration::from_secs(1);
        assert_eq!(begins(0, apart), Duration::ZERO);
        assert!((0..100).all(|number| begins(number, apart) < begins(number + 1, apart)));
        let last = begins(1000, apart).as_secs_f64();
        assert!((800.0..1200.0).contains(&last), "{last}");
    }
}
