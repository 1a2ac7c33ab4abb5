//! Boot storms: one client, the guests of one host, and those of all hosts do the same reads at once.

use std::fs;

use anyhow::Result;

use super::super::machine::settle;
use super::super::report::{Report, Row};
use super::super::results::{median, ratios};
use super::Options;
use super::boot::Boot;
use super::stage::{Overlays, Stage, Storm};

/// What each side found, round by round.
#[derive(Debug, Default)]
struct Found {
    local: Vec<f64>,
    plain_one: Vec<Storm>,
    plain: Vec<Storm>,
    one: Vec<Storm>,
    host: Vec<Storm>,
    again: Vec<Storm>,
    hosts: Vec<Storm>,
}

pub(super) fn run(options: &Options, stage: &Stage<'_>, boot: &Boot, report: &mut Report) -> Result<()> {
    stage.publish(1)?;
    let found = storms(options, stage, boot)?;
    rows(options, &found, fs::metadata(stage.local)?.len() as f64, report);
    Ok(())
}

fn storms(options: &Options, stage: &Stage<'_>, boot: &Boot) -> Result<Found> {
    let clones: Vec<_> = (1..=options.hosts)
        .map(|host| stage.clones(host, &stage.host_dir(host), options.guests))
        .collect::<Result<_>>()?;
    let mut found = Found::default();
    let forget = || (1..=options.hosts).try_for_each(|host| stage.forget(host));
    // Guests of the first hosts.
    let replica = |hosts: u8, guests: usize| -> Result<Storm> {
        let (mut served, mut sockets) = (Vec::new(), Vec::new());
        for host in 1..=hosts {
            let (server, more) = stage.serve(host, &clones[usize::from(host) - 1][..guests])?;
            served.push(server);
            sockets.extend(more);
        }
        stage.storm((served, sockets), boot, options.speed)
    };
    let plain = |guests: usize| -> Result<Storm> {
        let served = stage.serve_plain(1, guests, Overlays::OnHost)?;
        stage.storm(served.into_iter().unzip(), boot, options.speed)
    };
    for _ in 0..options.rounds {
        settle();
        let (server, sockets) = stage.serve_local()?;
        found.local.push(stage.storm((vec![server], sockets), boot, options.speed)?.time_s);
        found.plain_one.push(plain(1)?);
        found.plain.push(plain(options.guests)?);
        forget()?;
        found.one.push(replica(1, 1)?);
        forget()?;
        found.host.push(replica(1, options.guests)?);
        found.again.push(replica(1, options.guests)?);
        forget()?;
        found.hosts.push(replica(options.hosts, options.guests)?);
    }
    Ok(found)
}

fn rows(options: &Options, found: &Found, allocated: f64, report: &mut Report) {
    let times = |storms: &[Storm]| storms.iter().map(|storm| storm.time_s).collect::<Vec<_>>();
    // Of the host that had most.
    let most = |storm: &Storm| storm.bytes.iter().copied().fold(0.0, f64::max);
    let bytes = |storms: &[Storm]| storms.iter().map(most).collect::<Vec<_>>();
    let mib = |bytes: &[f64]| bytes.iter().map(|bytes| bytes / f64::from(1 << 20)).collect::<Vec<_>>();
    let (guests, all) = (options.guests, options.guests * usize::from(options.hosts));
    report.add(Row::median("boot, 1 guest on a local disk", "s", &found.local));
    for (what, storms, plain) in [
        ("1 guest".to_owned(), &found.one, Some(&found.plain_one)),
        (format!("{guests} guests of one host"), &found.host, Some(&found.plain)),
        (format!("{guests} guests of one host, again"), &found.again, Some(&found.plain)),
        (format!("{all} guests of {} hosts", options.hosts), &found.hosts, None),
    ] {
        let beside = |row: Row, value: &dyn Fn(&[Storm]) -> Vec<f64>| match plain {
            Some(plain) => row.beside(median(&value(plain))),
            None => row,
        };
        let time = Row::median(
            &format!("boot, {what}: the last is up / 1 on a local disk"),
            "",
            &ratios(&times(storms), &found.local),
        );
        report.add(beside(time.at_most(1.2), &|plain| ratios(&times(plain), &found.local)));
        let came = Row::median(&format!("boot, {what}: from the NAS to a host"), "MiB", &mib(&bytes(storms)));
        report.add(beside(came, &|plain| mib(&bytes(plain))));
        let shares: Vec<f64> = bytes(storms).iter().map(|bytes| bytes / allocated).collect();
        let share = Row::median(&format!("boot, {what}: from the NAS to a host / the base"), "", &shares);
        report.add(share.at_most(if what.ends_with("again") { 0.01 } else { 1.0 }));
    }
}
