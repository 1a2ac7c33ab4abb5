//! `cargo xtask bench`: the benchmark's command line.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::{Args, Subcommand};
use xtask::bench::history::Part;
use xtask::bench::run::{self, Options};
use xtask::bench::server::Kind;
use xtask::bench::session::Timing;
use xtask::bench::{
    base, convert, flush, fragmented, fresh, fuse, history, memory, migrate, moving, publish, rocksdb, tier,
};
use xtask::size::parse_size;

/// Measure, and write the results below docs and into README.md.
#[derive(Args)]
pub(crate) struct Bench {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Stock QEMU, vmstrata and the floor over chains of several lengths.
    Chain(ChainBench),
    /// Disks converted to qcow2, plain and compressed, and a long chain to raw, beside `qemu-img convert` (15 GiB of files).
    Convert(PlainBench),
    /// A disk of one layer, and what a snapshot every few seconds costs (30 GiB of files).
    Fresh(FreshBench),
    /// Disks whose 4 KiB blocks lie all over a long history, beside a fresh one (20 GiB of files).
    Fragmented(PlainBench),
    /// Disks as files on loop devices, beside a raw file (3 GiB of files). As the superuser.
    Fuse(PlainBench),
    /// A thousand snapshots of a live 50 GiB disk: what a guest feels, opening, differences, bytes.
    History(HistoryBench),
    /// Memory snapshots of guests at work, beside full copies and QEMU's own: bytes, times, what comes after.
    Memory(MemoryBench),
    /// RocksDB in a guest, on a disk of 500 layers and of one, beside stock QEMU (3 GiB of files).
    Rocksdb(PlainBench),
    /// Disks whose epochs go to a NAS: what a guest feels, bytes, take-over, outage. As the superuser.
    Tier(PartsBench<tier::Part>),
    /// Guests that boot from one base, upgrade, swap and wait, beside a local disk and stock QEMU on the NAS. As the superuser.
    Base(PartsBench<base::Part>),
    /// Moves that follow their guests: traces on a modelled disk, on this machine's and from a NAS, and a real guest (10 GiB of files). As the superuser.
    Migrate(MigrateBench),
    /// A disk in use that moves to another directory, beside stock QEMU's mirror (10 GiB of files).
    Move(PartsBench<moving::Part>),
    /// Guests that flush often, with a flush log and without, beside stock QEMU. As the superuser.
    Flush(PartsBench<flush::Part>),
    /// Draw plot and tables again from docs/measurements.
    Render,
}

/// Options of a benchmark that has no others.
#[derive(Args)]
struct PlainBench {
    /// Small disks and one short round, in two minutes at most; prints, writes nothing.
    #[arg(long)]
    quick: bool,
    /// Rounds.
    #[arg(long)]
    rounds: Option<u32>,
    /// Directory for the files, which are removed at the end.
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Print only; write no file below docs, nor README.md.
    #[arg(long)]
    no_write: bool,
}

#[derive(Args)]
struct FreshBench {
    /// Only these parts; prints, writes nothing.
    #[arg(long, value_delimiter = ',')]
    only: Vec<fresh::Part>,
    #[command(flatten)]
    plain: PlainBench,
}

#[derive(Args)]
struct PartsBench<P: clap::ValueEnum + Send + Sync + 'static> {
    /// Only these parts; prints, writes nothing.
    #[arg(long, value_delimiter = ',')]
    only: Vec<P>,
    /// Write their rows into what is kept.
    #[arg(long, requires = "only")]
    amend: bool,
    #[command(flatten)]
    plain: PlainBench,
}

#[derive(Args)]
struct HistoryBench {
    /// 1 GiB and 50 snapshots, in under a minute; prints, writes nothing.
    #[arg(long)]
    quick: bool,
    /// Size of the disk.
    #[arg(long, value_parser = parse_size)]
    size: Option<u64>,
    /// Number of snapshots.
    #[arg(long)]
    snapshots: Option<usize>,
    /// Only these parts; prints, writes nothing.
    #[arg(long, value_delimiter = ',')]
    only: Vec<Part>,
    /// Directory for the files, which are removed at the end (about 15 GiB).
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Print only; write no file below docs, nor README.md.
    #[arg(long)]
    no_write: bool,
}

#[derive(Args)]
struct MemoryBench {
    /// Kinds of work.
    #[arg(long, value_delimiter = ',', default_value = "files,database,search,build")]
    works: Vec<String>,
    /// Snapshots of each guest.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// MiB of a guest.
    #[arg(long, default_value_t = 1024)]
    mib: u32,
    /// MiB of the large guests; 0 leaves them out.
    #[arg(long, default_value_t = 4096)]
    large_mib: u32,
    /// Directory for disks and vaults, which are removed at the end (about 10 GiB).
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Print only; write no file below docs, nor README.md.
    #[arg(long)]
    no_write: bool,
}

#[derive(Args)]
struct MigrateBench {
    /// Directory of the traces; `traces` beside the checkout by default.
    #[arg(long)]
    traces: Option<PathBuf>,
    #[command(flatten)]
    parts: PartsBench<migrate::Part>,
}

#[derive(Args)]
struct ChainBench {
    /// One round of half-second runs on a 1 GiB disk; prints, writes nothing.
    #[arg(long)]
    quick: bool,
    /// Rounds for each chain length.
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// Chain lengths.
    #[arg(long, value_delimiter = ',', default_value = "1,50,500,1000")]
    layers: Vec<u32>,
    /// Size of the disk.
    #[arg(long, value_parser = parse_size, default_value = "4G")]
    size: u64,
    /// Seconds of a timed run.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Directory for the chains (about 15 GiB for the default lengths).
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Print only; write no file below docs, nor README.md.
    #[arg(long)]
    no_write: bool,
    /// Leave out the guest boots.
    #[arg(long)]
    no_boot: bool,
    /// Servers that take part.
    #[arg(long, value_delimiter = ',', default_value = "qemu,vmstrata,floor")]
    servers: Vec<Server>,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Server {
    Qemu,
    Vmstrata,
    Floor,
}

impl Bench {
    pub(crate) fn run(self) -> Result<()> {
        let root = super::root();
        match self.what {
            What::Chain(chain) => run::run(&chain.options(root)?).map(|_| ()),
            What::Convert(bench) => {
                let dir = bench.dir(root, "convert");
                let usual =
                    if bench.quick { convert::Options::quick(dir) } else { convert::Options::full(dir) };
                let (rounds, publish) = (bench.rounds.unwrap_or(usual.rounds), bench.publish(root));
                convert::run(&convert::Options { rounds, publish, ..usual }).map(|_| ())
            }
            What::Fragmented(bench) => {
                let dir = bench.dir(root, "fragmented");
                let usual = if bench.quick {
                    fragmented::Options::quick(dir)
                } else {
                    fragmented::Options::full(dir)
                };
                let (rounds, publish) = (bench.rounds.unwrap_or(usual.rounds), bench.publish(root));
                fragmented::run(&fragmented::Options { rounds, publish, ..usual }).map(|_| ())
            }
            What::Fresh(FreshBench { only, plain: bench }) => {
                let dir = bench.dir(root, "fresh");
                let usual = if bench.quick { fresh::Options::quick(dir) } else { fresh::Options::full(dir) };
                let publish = bench.publish(root).filter(|_| only.is_empty());
                let parts = if only.is_empty() { usual.parts } else { only };
                let rounds = bench.rounds.unwrap_or(usual.rounds);
                fresh::run(&fresh::Options { rounds, publish, parts, ..usual }).map(|_| ())
            }
            What::Fuse(bench) => {
                let dir = bench.dir(root, "fuse");
                let usual = if bench.quick { fuse::Options::quick(dir) } else { fuse::Options::full(dir) };
                let (rounds, publish) = (bench.rounds.unwrap_or(usual.rounds), bench.publish(root));
                fuse::run(&fuse::Options { rounds, publish, ..usual }).map(|_| ())
            }
            What::History(bench) => history::run(&bench.options(root)).map(|_| ()),
            What::Memory(bench) => memory::run(&bench.options(root)?).map(|_| ()),
            What::Rocksdb(bench) => {
                let dir = bench.dir(root, "rocksdb");
                let usual =
                    if bench.quick { rocksdb::Options::quick(dir) } else { rocksdb::Options::full(dir) };
                let (rounds, publish) = (bench.rounds.unwrap_or(usual.rounds), bench.publish(root));
                rocksdb::run(&rocksdb::Options { rounds, publish, ..usual }).map(|_| ())
            }
            What::Tier(bench) => {
                let dir = bench.plain.dir(root, "tier");
                let usual =
                    if bench.plain.quick { tier::Options::quick(dir) } else { tier::Options::full(dir) };
                let publish = bench.publish(root);
                let rounds = bench.plain.rounds.unwrap_or(usual.rounds);
                let parts = bench.parts().unwrap_or(usual.parts);
                tier::run(&tier::Options { rounds, publish, parts, ..usual }).map(|_| ())
            }
            What::Base(bench) => {
                let dir = bench.plain.dir(root, "base");
                let usual =
                    if bench.plain.quick { base::Options::quick(dir) } else { base::Options::full(dir) };
                let publish = bench.publish(root);
                let rounds = bench.plain.rounds.unwrap_or(usual.rounds);
                let parts = bench.parts().unwrap_or(usual.parts);
                base::run(&base::Options { rounds, publish, parts, ..usual }).map(|_| ())
            }
            What::Migrate(MigrateBench { traces, parts: bench }) => {
                let traces = traces.unwrap_or_else(|| migrate::traces_beside(root));
                let dir = bench.plain.dir(root, "migrate");
                let usual = if bench.plain.quick {
                    migrate::Options::quick(traces, dir)
                } else {
                    migrate::Options::full(traces, dir)
                };
                let publish = bench.publish(root);
                let rounds = bench.plain.rounds.unwrap_or(usual.rounds);
                let parts = bench.parts().unwrap_or_else(|| usual.parts.clone());
                migrate::run(&migrate::Options { rounds, publish, parts, ..usual })
            }
            What::Move(bench) => {
                let dir = bench.plain.dir(root, "move");
                let usual =
                    if bench.plain.quick { moving::Options::quick(dir) } else { moving::Options::full(dir) };
                let publish = bench.publish(root);
                let rounds = bench.plain.rounds.unwrap_or(usual.rounds);
                let parts = bench.parts().unwrap_or(usual.parts);
                moving::run(&moving::Options { rounds, publish, parts, ..usual }).map(|_| ())
            }
            What::Flush(bench) => {
                let dir = bench.plain.dir(root, "flush");
                let usual =
                    if bench.plain.quick { flush::Options::quick(dir) } else { flush::Options::full(dir) };
                let publish = bench.publish(root);
                let rounds = bench.plain.rounds.unwrap_or(usual.rounds);
                let parts = bench.parts().unwrap_or(usual.parts);
                flush::run(&flush::Options { rounds, publish, parts, ..usual }).map(|_| ())
            }
            What::Render => render(root),
        }
    }
}

fn render(root: &Path) -> Result<()> {
    let results = publish::kept(root)?.context("no measurement yet: cargo xtask bench chain")?;
    publish::write(root, &results)?;
    if let Some(study) = migrate::kept(root)? {
        study.write(root)?;
    }
    let reports = [
        base::SHOWN,
        convert::SHOWN,
        flush::SHOWN,
        fragmented::SHOWN,
        fresh::SHOWN,
        fuse::SHOWN,
        history::SHOWN,
        memory::SHOWN,
        migrate::REAL,
        moving::SHOWN,
        rocksdb::SHOWN,
        tier::SHOWN,
    ];
    for shown in reports {
        if let Some(blocks) = shown.of_report(root)? {
            shown.write(root, &blocks)?;
        }
    }
    Ok(())
}

impl<P: clap::ValueEnum + Send + Sync + 'static> PartsBench<P> {
    fn parts(self) -> Option<Vec<P>> {
        Some(self.only).filter(|only| !only.is_empty())
    }

    fn publish(&self, root: &Path) -> Option<PathBuf> {
        self.plain.publish(root).filter(|_| self.only.is_empty() || self.amend)
    }
}

impl PlainBench {
    fn dir(&self, root: &Path, name: &str) -> PathBuf {
        self.dir.clone().unwrap_or_else(|| root.join("target").join(name))
    }

    fn publish(&self, root: &Path) -> Option<PathBuf> {
        (!self.quick && !self.no_write).then(|| root.to_owned())
    }
}

impl HistoryBench {
    fn options(self, root: &Path) -> history::Options {
        let dir = self.dir.unwrap_or_else(|| root.join("target/history"));
        let usual = if self.quick { history::Options::quick(dir) } else { history::Options::full(dir) };
        history::Options {
            size: self.size.unwrap_or(usual.size),
            snapshots: self.snapshots.unwrap_or(usual.snapshots),
            publish: (!self.quick && !self.no_write && self.only.is_empty()).then(|| root.to_owned()),
            parts: if self.only.is_empty() { usual.parts } else { self.only },
            ..usual
        }
    }
}

impl MemoryBench {
    fn options(self, root: &Path) -> Result<memory::Options> {
        ensure!(self.rounds > 0, "at least one round");
        let unknown = self.works.iter().find(|work| !memory::WORKS.contains(&work.as_str()));
        ensure!(unknown.is_none(), "no work {unknown:?}: there are {:?}", memory::WORKS);
        Ok(memory::Options {
            mib: self.mib,
            large_mib: Some(self.large_mib).filter(|mib| *mib > 0),
            works: self.works,
            rounds: self.rounds,
            publish: (!self.no_write).then(|| root.to_owned()),
            ..memory::Options::full(self.dir.unwrap_or_else(|| root.join("target/memory")))
        })
    }
}

impl ChainBench {
    fn options(self, root: &Path) -> Result<Options> {
        ensure!(
            self.layers.iter().all(|layers| (1..=65_535).contains(layers)),
            "a chain has 1 to 65,535 layers"
        );
        let kind = |server: &Server| match server {
            Server::Qemu => Kind::Qemu,
            Server::Vmstrata => Kind::Vmstrata,
            Server::Floor => Kind::Floor,
        };
        let seconds = if self.quick { 0.5 } else { self.seconds };
        let timing = Timing {
            run: Duration::from_secs_f64(seconds),
            warm_up: Duration::from_secs_f64(seconds / 5.0),
            check: Duration::from_secs(1),
            whole: true,
        };
        Ok(Options {
            layers: self.layers,
            rounds: if self.quick { 1 } else { self.rounds },
            size: if self.quick { self.size.min(1 << 30) } else { self.size },
            timing,
            dir: self.dir.unwrap_or_else(|| root.join("target/chains")),
            publish: (!self.quick && !self.no_write).then(|| root.to_owned()),
            servers: self.servers.iter().map(kind).collect(),
            boot: !self.no_boot && !self.quick,
        })
    }
}
