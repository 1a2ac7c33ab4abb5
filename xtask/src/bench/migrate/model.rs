//! The study on a modelled disk in virtual time.
//!
//! ```text
//!   trace  ──► replay (guests, caches, schedulers, turns: the code of vmstrata-migrate) ◄── disk (seek, turn, transfer)
//!                 └──► study (tables, rows beside their bounds) ──► docs/measurements/migrate.{json,md,svg}
//! ```
//!
//! Nothing of it depends on the machine: the same traces give the same figures.

use anyhow::{Result, ensure};
use vmstrata_migrate::follow::{Kind, Order, Ratio};

use super::super::report::Row;
use super::super::results::quantile;
use super::disk;
use super::replay::{self, Cached, How, Outcome};
use super::study::{Study, Table};
use super::trace::{TRACES, Trace};
use super::{FACTOR, Options, mean};

/// By how much the standard move slows guests in the paper's figure 4, on average.
const SLOWED: f64 = (60.0 / 35.0 + 52.0 / 22.0 + 68.0 / 25.0 + 62.0 / 37.0) / 4.0;
/// What the disk is busy with the guest alone, at most and at least, where that load is looked for.
const BUSY: [f64; 2] = [0.5, 0.02];
/// All parts, with what we add to the paper's.
const OURS: How = How { order: Order::Predicted, idle: 128 << 10, ..How::FOLLOW };
/// The same, with a move that hardly reads while guests wait.
const IDLE: How = How { ratio: Ratio::new(32), ..OURS };
/// That with the controller.
const CONTROLLED: How = How { factor: Some(FACTOR), ..IDLE };

/// Runs the study and, when asked to, writes its files.
///
/// # Errors
/// When traces cannot be read, or files cannot be written.
pub fn model(options: &Options) -> Result<Study> {
    let mut studied = Vec::new();
    for (name, file) in TRACES {
        let trace = Trace::read(name, &options.traces.join(file), (options.requests, options.image_max))?;
        let trace = loaded(&trace);
        let standard = moved(&trace, 1, How::STANDARD)?;
        studied.push(Studied { trace, standard });
    }
    let mut study = Study::new(parameters());
    study.tables.push(traces(&studied));
    study.tables.extend(variants(&studied, &mut study.rows)?);
    study.tables.push(caches(&studied)?);
    study.tables.push(chunks(&studied)?);
    study.tables.push(ratios(&studied)?);
    study.tables.push(several(&studied, &mut study.rows)?);
    study.publish(options.publish.as_deref())?;
    Ok(study)
}

fn parameters() -> Vec<(String, String)> {
    [
        ("disk", "2 TB, 7,200 rpm, 150 MB/s; a seek takes 1 ms and a part that grows with the root of the distance, 13 ms on average; then the \
            platter turns to the place, from where it is at that time. What goes on where the last request ended costs neither. One request at a time, no cache"),
        ("image", "the stretches of each device that the trace touches, packed, in the largest power of two at which they have at most 32 GiB; all of it is moved. \
            Images of several guests begin in equal parts of the disk"),
        ("load", "each trace is slowed until the standard move slows its guest as much as in the paper on average, 2.12 times; all else has that load. It is replayed at its times, and again \
            from the beginning until the move ends. Of several guests each is slowed by their number, and begins at another place of the trace"),
        ("standard", "from the beginning to the end in chunks of 1 MiB, one after two requests of guests or when none waits"),
        ("response of a move", "from when it could read until it had a MiB: the time of the move / its MiB"),
        ("cache", "256 MiB a guest, unless said otherwise"),
        ("not to be had", "Financial2 and the whole WebSearch traces; these are a part of WebSearch, the first 9,999 requests of Financial1, and a part of TPC-C"),
        ("all of it", "cargo xtask bench migrate --only model --amend, in virtual time"),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .to_vec()
}

/// A trace at its load, and its standard move.
struct Studied {
    trace: Trace,
    standard: Outcome,
}

/// Slowed until the standard move slows its guest as much as in the paper.
fn loaded(trace: &Trace) -> Trace {
    let slow = trace.slower(1e6);
    let alone = replay::without(&slow, 1, trace.requests.len());
    let [mut low, mut high] = BUSY.map(|busy| alone.busy.as_secs_f64() / busy / trace.period.as_secs_f64());
    for _ in 0..25 {
        let middle = (low * high).sqrt();
        let slower = trace.slower(middle);
        let standard = replay::moving(&slower, 1, How::STANDARD);
        if slowed(&slower, &standard).mean > SLOWED { low = middle } else { high = middle }
    }
    trace.slower(high)
}

/// Runs moves, and makes sure that each byte was read once.
fn moved(trace: &Trace, guests: usize, how: How) -> Result<Outcome> {
    let moved = replay::moving(trace, guests, how);
    ensure!(
        moved.read + moved.from_guests == trace.image * guests as u64,
        "{}: {} bytes were read, and {} came from guests, of {guests} images of {}",
        trace.name,
        moved.read,
        moved.from_guests,
        trace.image
    );
    Ok(moved)
}

/// Responses of all guests, in ms.
fn responses(outcome: &Outcome) -> Vec<f64> {
    outcome.responses.iter().flatten().map(|seconds| seconds * 1e3).collect()
}

/// During a move / without, of the same requests.
struct Slowed {
    mean: f64,
    p99: f64,
}

fn slowed(trace: &Trace, moved: &Outcome) -> Slowed {
    let made = moved.responses.iter().map(Vec::len);
    let mut without = replay::without(trace, moved.responses.len(), made.clone().max().unwrap_or(0));
    without.responses.iter_mut().zip(made).for_each(|(all, made)| all.truncate(made));
    let (during, without) = (responses(moved), responses(&without));
    Slowed { mean: mean(&during) / mean(&without), p99: quantile(&during, 0.99) / quantile(&without, 0.99) }
}

/// Milliseconds of the move for each MiB.
fn per_mib(outcome: &Outcome) -> f64 {
    let mib = (outcome.read + outcome.from_guests) as f64 / f64::from(1 << 20);
    outcome.time.as_secs_f64() * 1e3 / mib * outcome.responses.len() as f64
}

/// 1 where all are equal.
fn jain(shares: &[u64]) -> f64 {
    let (sum, squares) = shares
        .iter()
        .map(|share| *share as f64)
        .fold((0.0, 0.0), |(sum, squares), x| (sum + x, squares + x * x));
    sum * sum / (shares.len() as f64 * squares)
}

fn traces(studied: &[Studied]) -> Table {
    let columns = [
        "requests",
        "reads",
        "GiB of the image",
        "MiB of a stretch",
        "times slower",
        "requests/s",
        "disk busy",
        "response, ms",
        "p99, ms",
        "standard move: response of a MiB, ms",
    ];
    let mut table = Table::new("Traces", &columns);
    for Studied { trace, standard } in studied {
        let all = trace.requests.len();
        let reads = trace.requests.iter().filter(|request| request.kind == Kind::Read).count();
        let alone = replay::without(trace, 1, standard.responses[0].len());
        let times = responses(&alone);
        table.add(
            trace.name,
            &[
                all as f64,
                reads as f64 / all as f64,
                trace.image as f64 / f64::from(1 << 30),
                trace.stretch as f64 / f64::from(1 << 20),
                trace.scale,
                all as f64 / trace.period.as_secs_f64(),
                alone.busy.as_secs_f64() / alone.time.as_secs_f64(),
                mean(&times),
                quantile(&times, 0.99),
                per_mib(standard),
            ],
        );
    }
    table
}

/// The names under which parts are looked up again.
const STANDARD: &str = "standard";
const NEAREST: &str = "nearest";
const CACHE: &str = "cache";
const FOLLOW: &str = "nearest and cache: IOFollow";
const ALL: &str = "ours: predicted, cache, short reads";
const CONTROL: &str = "ours, 32:1, with the latency controller";

fn hows() -> Vec<(&'static str, How)> {
    let order = |order| How { order, ..OURS };
    vec![
        (STANDARD, How::STANDARD),
        ("plain cache of what the guest reads and writes", How { cached: Cached::Guest, ..How::STANDARD }),
        ("short reads: 128 KiB while no guest waits", How { idle: OURS.idle, ..How::STANDARD }),
        (NEAREST, How { order: Order::Nearest, ..How::STANDARD }),
        (CACHE, How { order: Order::Sequential, ..How::FOLLOW }),
        (FOLLOW, How::FOLLOW),
        ("sequential, with the rest of ours", order(Order::Sequential)),
        ("nearest, with the rest of ours", order(Order::Nearest)),
        ("hot-first, with the rest of ours", order(Order::HotFirst)),
        ("cold-first, with the rest of ours", order(Order::ColdFirst)),
        ("ours without a cache", How { cached: Cached::Nothing, ..OURS }),
        (ALL, OURS),
        ("ours, 32:1", IDLE),
        (CONTROL, CONTROLLED),
    ]
}

/// The paper's figures 3 and 4, and what each part gives.
fn variants(studied: &[Studied], rows: &mut Vec<Row>) -> Result<Vec<Table>> {
    let names: Vec<&str> = studied.iter().map(|studied| studied.trace.name).chain(["mean"]).collect();
    let mut guests = Table::new("Figure 4: guest's response during the move / without", &names);
    let mut p99s = Table::new("Guest's p99 during the move / without", &names);
    let mut moves = Table::new("Figure 3: response of the move / standard", &names);
    let mut hits = Table::new("Guest's requests that memory answered", &names);
    let mut rates = Vec::new();
    for (name, how) in hows() {
        let mut all: [Vec<f64>; 4] = Default::default();
        for Studied { trace, standard } in studied {
            let moved = moved(trace, 1, how)?;
            let Slowed { mean, p99 } = slowed(trace, &moved);
            let answered = moved.hits as f64 / moved.responses[0].len() as f64;
            let values = [mean, p99, per_mib(&moved) / per_mib(standard), answered];
            all.iter_mut().zip(values).for_each(|(all, value)| all.push(value));
            if how.factor.is_some() {
                rates.push(f64::from(1 << 20) / 1e3 / per_mib(&moved));
            }
        }
        for (table, values) in [&mut guests, &mut p99s, &mut moves, &mut hits].into_iter().zip(all) {
            table.add_with_mean(name, &values);
        }
    }
    guests.add_paper("paper: standard, four traces 1.68 to 2.72", studied.len(), SLOWED);
    let follow = (42.0 / 35.0 + 31.0 / 22.0 + 45.0 / 25.0 + 49.0 / 37.0) / 4.0;
    guests.add_paper("paper: IOFollow, four traces 1.20 to 1.80", studied.len(), follow);
    let moving = (129.0 / 172.0 + 107.0 / 166.0 + 99.0 / 185.0 + 112.0 / 169.0) / 4.0;
    moves.add_paper("paper: IOFollow, four traces 0.54 to 0.75", studied.len(), moving);
    // Without any seek, in the time that the guest leaves.
    let floor = studied.iter().map(|Studied { trace, standard }| {
        let alone = replay::without(trace, 1, standard.responses[0].len());
        let idle = 1.0 - alone.busy.as_secs_f64() / alone.time.as_secs_f64();
        disk::transfer(1 << 20).as_secs_f64() * 1e3 / idle / per_mib(standard)
    });
    moves.add_with_mean("floor: no seek at all, beside the guest's requests", &floor.collect::<Vec<_>>());
    let one = |table: &Table, name: &str| table.mean_of(name).expect("a variant of this name");
    let row = |name: &str, value: f64| Row::median(name, "", &[value]);
    rows.push(row(
        "guest's response during a move / without, 1 MiB, 2:1: standard (the load is chosen by it)",
        one(&guests, STANDARD),
    ));
    for (name, part) in [(NEAREST, "nearest alone"), (CACHE, "cache alone"), (FOLLOW, "both: IOFollow")] {
        rows.push(row(&format!("the same: {part}"), one(&guests, name)));
    }
    rows.push(row("the same: ours", one(&guests, ALL)).at_most(1.5));
    rows.push(row("the same: ours, with the latency controller", one(&guests, CONTROL)).at_most(1.15));
    rows.push(row(&format!("the controller's p99 / without; it aims at {FACTOR}"), one(&p99s, CONTROL)));
    let rate = Row::median("rate of a move with the controller", "MB/s", &[mean(&rates)]);
    rows.push(rate);
    rows.push(row("response of a move / standard: IOFollow", one(&moves, FOLLOW)).at_most(0.6));
    rows.push(row("response of a move / standard: ours", one(&moves, ALL)).at_most(0.6));
    Ok(vec![guests, p99s, moves, hits])
}

/// Guest and move / standard, the means of the traces.
fn beside_standard(studied: &[Studied], standard: How, how: How) -> Result<[f64; 2]> {
    let (mut guests, mut moves) = (Vec::new(), Vec::new());
    for Studied { trace, .. } in studied {
        let (peer, own) = (moved(trace, 1, standard)?, moved(trace, 1, how)?);
        guests.push(mean(&responses(&own)) / mean(&responses(&peer)));
        moves.push(per_mib(&own) / per_mib(&peer));
    }
    Ok([mean(&guests), mean(&moves)])
}

fn add_pairs(table: &mut Table, pairs: &[[f64; 2]], paper: [f64; 2]) {
    for (at, name) in ["guest", "move"].into_iter().enumerate() {
        table.add(
            &format!("{name}'s response / standard"),
            &pairs.iter().map(|pair| pair[at]).collect::<Vec<_>>(),
        );
        table.add(&format!("paper: {name}, mean"), &vec![paper[at]; pairs.len()]);
    }
}

fn caches(studied: &[Studied]) -> Result<Table> {
    let sizes = [16, 64, 256, 1024];
    let names = sizes.map(|mib| format!("{mib} MiB"));
    let mut table = Table::new("Sizes of the cache: guest's response during the move / without", &names);
    for Studied { trace, .. } in studied {
        let of = |mib: usize| Ok(slowed(trace, &moved(trace, 1, How { cache: mib << 20, ..OURS })?).mean);
        table.add(trace.name, &sizes.into_iter().map(of).collect::<Result<Vec<_>>>()?);
    }
    Ok(table)
}

fn chunks(studied: &[Studied]) -> Result<Table> {
    let sizes = [128_u64, 256, 512, 1024, 2048, 4096];
    let mut table =
        Table::new("Figure 5: chunks of several sizes, in KiB", &sizes.map(|kib| kib.to_string()));
    let of = |kib: u64| {
        let chunk = kib << 10;
        let standard = How { chunk, idle: chunk, ..How::STANDARD };
        beside_standard(studied, standard, How { chunk, idle: OURS.idle, ..OURS })
    };
    add_pairs(&mut table, &sizes.into_iter().map(of).collect::<Result<Vec<_>>>()?, [0.803, 0.574]);
    Ok(table)
}

fn ratios(studied: &[Studied]) -> Result<Table> {
    let ratios = [1, 2, 3, 4];
    let mut table = Table::new(
        "Figure 6: requests of guests to one of the move",
        &ratios.map(|guests| format!("{guests}:1")),
    );
    let of = |guests| {
        let ratio = Ratio::new(guests);
        beside_standard(studied, How { ratio, ..How::STANDARD }, How { ratio, ..OURS })
    };
    // The text gives 0.587 for guests and 0.806 for moves, the other way round than figure 5.
    add_pairs(&mut table, &ratios.into_iter().map(of).collect::<Result<Vec<_>>>()?, [0.806, 0.587]);
    Ok(table)
}

/// Several guests at once.
fn several(studied: &[Studied], rows: &mut Vec<Row>) -> Result<Table> {
    let guests = [1, 2, 4, 8];
    let mut table =
        Table::new("Figure 7: guests whose images move at once", &guests.map(|guests| guests.to_string()));
    let (mut pairs, mut sums, mut fair) = (Vec::new(), Vec::new(), Vec::new());
    for guests in guests {
        let mut all: [Vec<f64>; 4] = Default::default();
        for Studied { trace, .. } in studied {
            let trace = trace.slower(guests as f64);
            let (peer, own) = (moved(&trace, guests, How::STANDARD)?, moved(&trace, guests, OURS)?);
            let one_by_one = moved(&trace, guests, How { at_once: false, ..OURS })?;
            let values = [
                mean(&responses(&own)) / mean(&responses(&peer)),
                per_mib(&own) / per_mib(&peer),
                own.time.as_secs_f64() / one_by_one.time.as_secs_f64(),
                jain(&own.shares),
            ];
            all.iter_mut().zip(values).for_each(|(all, value)| all.push(value));
        }
        let [guest, moves, sum, jain] = all.map(|all| mean(&all));
        pairs.push([guest, moves]);
        sums.push(sum);
        fair.push(jain);
    }
    add_pairs(&mut table, &pairs, [0.55, 0.45]);
    table.add("time / one after another", &sums);
    table.add("fairness of moves (Jain)", &fair);
    let row = |name: &str, value: f64| Row::median(name, "", &[value]);
    rows.push(row("8 guests: time of all moves / one after another", sums[3]).at_most(1.1));
    rows.push(row("8 guests: fairness of moves (Jain)", fair[3]).at_least(0.95));
    rows.push(row("8 guests: response of guests / standard", pairs[3][0]).at_most(0.5));
    rows.push(row("8 guests: response of moves / standard", pairs[3][1]).at_most(0.45));
    Ok(table)
}
