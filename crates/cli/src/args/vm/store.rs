//! Those commands of `vmstrata vm` that look after snapshots that were taken.

use clap::{Args, Subcommand};
use vmstrata_disk::snapshot::Keep;
use vmstrata_memory::vault::Which;
use vmstrata_repo::Address;

use super::super::ControlArgs;
use super::super::snapshot::parse_label;

/// Commands about snapshots that were taken.
#[derive(Debug, Subcommand)]
pub enum VmStoreCommand {
    /// List snapshots of memory, newest first
    List(VmListArgs),
    /// Show one snapshot of memory: what it holds, what it costs, and what saved how much
    Show(VmShowArgs),
    /// Delete snapshots of memory
    Delete(VmDeleteArgs),
    /// Delete the snapshots of a guest's memory that no rule keeps
    Prune(VmPruneArgs),
    /// Give back the space of deleted snapshots
    Gc(VmGcArgs),
    /// Read every byte of every copy of snapshots
    Verify(VmVerifyArgs),
    /// Make missing and damaged copies again from those that are whole
    Repair(VmRepairArgs),
}

/// Where snapshots of memory are kept.
#[derive(Clone, Debug, Args)]
pub struct VaultArgs {
    /// A directory that holds copies, each best on a device of its own; or hdfs://NAMENODE[:PORT]/DIR, which keeps as many
    /// copies as you ask for; or s3://BUCKET[/PREFIX][?endpoint=http[s]://HOST[:PORT]], which counts as one copy (repeatable)
    #[arg(long, value_name = "REPOSITORY", required = true, env = "VMSTRATA_VAULT", value_parser = parse_repositories)]
    pub vault: Vec<Repositories>,
}

impl VaultArgs {
    /// The same from the words of [`VaultArgs::repositories`].
    pub fn of(repositories: &[String]) -> Self {
        Self { vault: repositories.iter().map(|repository| Repositories::of(repository)).collect() }
    }

    /// One word for each repository.
    pub fn repositories(&self) -> Vec<String> {
        self.vault.iter().flat_map(|repositories| repositories.0.clone()).collect()
    }
}

/// Repositories in one word, with `:` between them.
#[derive(Clone, Debug)]
pub struct Repositories(pub Vec<String>);

impl Repositories {
    fn of(text: &str) -> Self {
        Self(Address::split_list(text).into_iter().map(str::to_owned).collect())
    }
}

fn parse_repositories(text: &str) -> Result<Repositories, &'static str> {
    let repositories = Repositories::of(text);
    if repositories.0.is_empty() { Err("no directory is named") } else { Ok(repositories) }
}

/// The snapshots of disks that were taken with snapshots of memory.
#[derive(Clone, Debug, Args)]
pub struct DiskSnapshotArgs {
    /// Delete the snapshots of the disks that were taken with them, too
    #[arg(long)]
    pub disks: bool,
    /// The server that may be serving the disks.
    #[command(flatten)]
    pub server: ControlArgs,
}

/// `vmstrata vm list`
#[derive(Debug, Args)]
#[command(after_help = LIST_HELP)]
pub struct VmListArgs {
    /// Only those of this guest
    pub guest: Option<String>,
    /// Where they are kept.
    #[command(flatten)]
    pub vault: VaultArgs,
    /// The server that may be serving tiered disks.
    #[command(flatten)]
    pub server: ControlArgs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

const LIST_HELP: &str = "\
Examples:
  vmstrata vm list --vault /srv/a --vault /srv/b --vault /srv/c
  VMSTRATA_VAULT=/srv/a:/srv/b:/srv/c vmstrata vm list web --json | jq -r '.snapshots[].name'
  vmstrata vm list --vault hdfs://namenode:8020/vault
  vmstrata vm list --vault 's3://bucket/vault?endpoint=http://minio:9000'

COST is what a snapshot added to the vault, all copies; it shares the rest with older ones. Nothing is read but what is \
said of each snapshot: whether its pages are whole is what `vmstrata vm verify` finds out.
STATE says whether a tiered guest's disks are kept: complete; incomplete until their states are published; unknown while their \
repository does not answer; lost if that never will be. Only complete snapshots can be restored.
Exit codes: 0 listed, 1 the vault cannot be read, 64 wrong usage.";

/// `vmstrata vm show`
#[derive(Debug, Args)]
#[command(after_help = SHOW_HELP)]
pub struct VmShowArgs {
    /// The snapshot: GUEST@NAME, GUEST for its newest, or an id
    pub snapshot: Which,
    /// Where it is kept.
    #[command(flatten)]
    pub vault: VaultArgs,
    /// The server that may be serving tiered disks.
    #[command(flatten)]
    pub server: ControlArgs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

const SHOW_HELP: &str = "\
Examples:
  vmstrata vm show web@mon --vault /srv/a --vault /srv/b --vault /srv/c
  vmstrata vm show web --vault /srv/a --json | jq .savings
  vmstrata vm show web --vault /srv/a --json | jq '.objects[]'

What was saved is counted against as many full copies of the guest's memory as there are copies of what it needs: one \
cause after another, so that they add up. Objects hold the pages of several snapshots. When all copies of one are lost, every snapshot \
with critical pages in it is lost, and others lose clean pages.
Exit codes: 0 shown, 1 not found or lost, 64 wrong usage.";

/// `vmstrata vm delete`
#[derive(Debug, Args)]
#[command(after_help = DELETE_HELP)]
pub struct VmDeleteArgs {
    /// The snapshots: GUEST@NAME, or an id
    #[arg(required = true, value_name = "SNAPSHOT")]
    pub snapshots: Vec<Which>,
    /// Say what would be deleted, and delete nothing
    #[arg(long, short = 'n')]
    pub dry_run: bool,
    /// Where they are kept.
    #[command(flatten)]
    pub vault: VaultArgs,
    /// What becomes of their disks' snapshots.
    #[command(flatten)]
    pub disks: DiskSnapshotArgs,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

const DELETE_HELP: &str = "\
Examples:
  vmstrata vm delete web@mon --dry-run --vault /srv/a --vault /srv/b --vault /srv/c
  vmstrata vm delete web@mon --disks --vault /srv/a --vault /srv/b --vault /srv/c

A guest alone names no snapshot here: it is refused with the names there are. Others keep every page they share with what is deleted; the space of \
the rest is freed at once, unless others use the vault (vmstrata vm gc). All repositories must be there. Without --disks, \
the snapshots of the guest's disks that were taken at the same instant stay; the command lists them. --disks also releases \
what keeps a tiered disk's state, or gives up one that is not published yet.
Exit codes: 0 deleted, 1 not, or not everywhere: delete again, 64 wrong usage.";

/// `vmstrata vm prune`
#[derive(Debug, Args)]
#[command(after_help = PRUNE_HELP)]
pub struct VmPruneArgs {
    /// The guest
    pub guest: String,
    /// What to keep: last, hourly, daily, weekly, monthly, yearly, each with how many
    #[arg(long, value_name = "RULES")]
    pub keep: Keep,
    /// Look only at snapshots with this label (repeatable)
    #[arg(long, short, value_name = "KEY=VALUE", value_parser = parse_label)]
    pub label: Vec<(String, String)>,
    /// Say what would be deleted, and delete nothing
    #[arg(long, short = 'n')]
    pub dry_run: bool,
    /// Where its snapshots are kept.
    #[command(flatten)]
    pub vault: VaultArgs,
    /// What becomes of their disks' snapshots.
    #[command(flatten)]
    pub disks: DiskSnapshotArgs,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

const PRUNE_HELP: &str = "\
Examples:
  vmstrata vm prune web --keep hourly=24,daily=7 --disks --vault /srv/a --vault /srv/b --vault /srv/c
  vmstrata vm prune web --keep last=3 --label job=nightly --dry-run --vault /srv/a

A rule keeps the newest snapshot of each of the last so many periods that have one, in UTC; what one rule keeps is kept. Rules do not \
count snapshots that are not complete, and leave them alone.
Exit codes: 0 done (also when there was nothing to do), 1 not, or not everywhere, 64 wrong usage.";

/// `vmstrata vm gc`
#[derive(Debug, Args)]
#[command(after_help = GC_HELP)]
pub struct VmGcArgs {
    /// Compact every object that gets smaller, however little
    #[arg(long)]
    pub all: bool,
    /// Say what would be freed, and change nothing
    #[arg(long, short = 'n')]
    pub dry_run: bool,
    /// Where snapshots are kept.
    #[command(flatten)]
    pub vault: VaultArgs,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    /// Show no progress
    #[arg(long, short)]
    pub quiet: bool,
}

const GC_HELP: &str = "\
Examples:
  vmstrata vm gc --dry-run --vault /srv/a --vault /srv/b --vault /srv/c
  vmstrata vm gc --vault /srv/a --vault /srv/b --vault /srv/c
  vmstrata vm gc --all --vault /srv/a --json | jq .freed

gc removes objects that no snapshot uses. It compacts objects of which snapshots use less than half: it writes them anew without \
the other pages. While unused pages take more than a fifth of what is used, it compacts those with the largest share of them, too. \
`vm snapshot`, `vm delete` and `vm prune` do the same if no other process uses the vault. gc needs all repositories. \
Commands that read or write the vault wait until it is done. It can be killed at any moment and run again.
Exit codes: 0 done (also when there was nothing to do), 1 not, for example as the vault is in use, 64 wrong usage.";

/// `vmstrata vm verify`
#[derive(Debug, Args)]
#[command(after_help = VERIFY_HELP)]
pub struct VmVerifyArgs {
    /// The snapshots: GUEST@NAME, GUEST for its newest, or an id; all if omitted
    #[arg(value_name = "SNAPSHOT")]
    pub snapshots: Vec<Which>,
    /// Where they are kept.
    #[command(flatten)]
    pub vault: VaultArgs,
    /// The server that may be serving tiered disks.
    #[command(flatten)]
    pub server: ControlArgs,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    /// Show no progress
    #[arg(long, short)]
    pub quiet: bool,
}

const VERIFY_HELP: &str = "\
Examples:
  vmstrata vm verify --vault /srv/a --vault /srv/b --vault /srv/c
  vmstrata vm verify web@mon --vault /srv/a --json | jq '.[].problems'

Exit codes:
  0   every copy is there and whole
  1   the vault cannot be read
  2   a snapshot cannot be restored any more, or not before its disks' states are published
  3   all can be restored, and copies are missing or damaged: vmstrata vm repair
  64  wrong usage";

/// `vmstrata vm repair`
#[derive(Debug, Args)]
#[command(after_help = REPAIR_HELP)]
pub struct VmRepairArgs {
    /// The snapshots: GUEST@NAME, GUEST for its newest, or an id; all if omitted
    #[arg(value_name = "SNAPSHOT")]
    pub snapshots: Vec<Which>,
    /// Where they are kept.
    #[command(flatten)]
    pub vault: VaultArgs,
    /// Let copies lie on one device, where they are lost together
    #[arg(long)]
    pub one_device: bool,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

const REPAIR_HELP: &str = "\
Examples:
  vmstrata vm repair --vault /srv/a --vault /srv/new --vault /srv/c     /srv/b is lost, /srv/new is empty
  vmstrata vm repair web@mon --vault /srv/a --vault /srv/b --vault /srv/c

Each page is taken from any copy that has it, so copies that have each lost something mend each other.
Exit codes: as of `vmstrata vm verify`, for what there is afterwards.";
