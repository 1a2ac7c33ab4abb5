//! `vmstrata tier`: what of a disk is published, and who publishes it.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::process::ExitCode;
use std::slice;
use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use serde::Serialize;
use vmstrata_api::{
    DiskDetail, DurableAt, HostRate, JobSpec, OnOutage, TakeOver, TierCache, TierHold, TierState, TierStatus,
    encode_segment,
};
use vmstrata_disk::snapshot::now_ns;
use vmstrata_disk::{OpenOptions, ResourceOptions, Resources, probe_layer};
use vmstrata_tier::{
    Branch, CACHE_NAME, Cache, CachedFiles, Detach, Elsewhere, Head, OnMissing, Place, Whole, newest_whole,
};
use vmstrata_types::path_to_text;

use super::named::name_of;
use super::snapshot::live::Live;
use super::snapshot::resources;
use super::status::duration;
use super::tiered::{Found, address_of, published, repository_at, tiered};
use crate::args::{
    BranchesArgs, DetachArgs, JournalArgs, TakeoverArgs, TierArgs, TierAttachArgs, TierCommand, TierDiskArgs,
    TierHoldArgs, TierRateArgs,
};
use crate::audit;
use crate::client::Client;
use crate::output::{Progress, Table, answer, counted};
use crate::units::short_size;

/// Runs the command.
///
/// # Errors
/// What could not be done.
pub fn run(args: &TierArgs) -> Result<ExitCode> {
    match &args.command {
        TierCommand::Attach(args) => attach(args)?,
        TierCommand::Status(args) => status(args)?,
        TierCommand::Sync(args) => sync(args)?,
        TierCommand::Hold(args) => hold(args)?,
        TierCommand::Rate(args) => rate(args)?,
        TierCommand::Takeover(args) => take_over(args)?,
        TierCommand::Pins(args) => super::tiered::pins(args)?,
        TierCommand::Branches(args) => branches(args)?,
        TierCommand::Detach(args) => detach(args)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// What a repository says of a disk.
#[derive(Debug, Serialize)]
struct Published {
    disk: String,
    /// The disks that are published together, itself among them, if there are more.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    group: Vec<String>,
    repository: String,
    owner: String,
    generation: u64,
    epoch: u64,
    epoch_age_seconds: u64,
    epoch_layers: u64,
    /// Bytes of its layers.
    bytes: u64,
    /// An earlier copy that was put aside.
    #[serde(skip_serializing_if = "Option::is_none")]
    branch: Option<String>,
}

impl Published {
    fn of(disk: &Path, (found, head): (&Found, &Head)) -> Self {
        let epoch = &head.epoch;
        Self {
            disk: path_to_text(disk),
            group: match &epoch.disks[..] {
                [_] => Vec::new(),
                disks => disks.iter().map(|disk| path_to_text(&found.disk_called(&disk.name))).collect(),
            },
            repository: path_to_text(&found.name),
            owner: head.owner.to_string(),
            generation: head.generation.get(),
            epoch: epoch.number.get(),
            epoch_age_seconds: now_ns().saturating_sub(epoch.time_ns) / 1_000_000_000,
            epoch_layers: epoch.objects().count() as u64,
            bytes: epoch.objects().map(|object| object.bytes).sum(),
            branch: None,
        }
    }

    fn text(&self) -> String {
        let (age, layers) = (duration(self.epoch_age_seconds), counted(self.epoch_layers, "layer"));
        let Self { disk, epoch, generation, owner, .. } = self;
        let together = match &self.group[..] {
            [] => String::new(),
            disks => format!(" of {}", disks.join(", ")),
        };
        format!(
            "{disk}: epoch {epoch}{together}, {age} old, {layers}; published by copy {owner}, generation {generation}\n"
        )
    }

    /// Of the disk that a command names.
    fn find(disk: &Path) -> Result<Self> {
        let (found, head) = published(disk)?;
        let disk = if found.is_directory { disk.canonicalize()? } else { disk.to_owned() };
        Ok(Self::of(&disk, (&found, &head)))
    }
}

/// What a repository that lost something says of that.
fn lost(whole: &Whole) -> String {
    let lost = whole.lost.iter().map(|(number, why)| format!("the NAS has lost {number}: {why}\n"));
    let text: String = lost.collect();
    if text.is_empty() { text } else { format!("{text}{} is the newest that is whole\n", whole.head.number) }
}

/// A tiered disk as a command changes it, beside a server that may use its cache.
struct Here {
    found: Option<Found>,
    place: Place,
    resources: Arc<Resources>,
}

impl Here {
    fn find(disk: &Path, tier: &Path, journal: &JournalArgs) -> Result<Self> {
        let found = repository_at(disk)?;
        let Some(far) = found.as_ref().filter(|found| !found.is_directory) else {
            let (place, resources) = (Place::of(disk, tier)?, resources(journal)?);
            return Ok(Self { found, place, resources });
        };
        // The cache that a server of this host uses; missing chunks are read from the repository.
        let dir = tier.join(CACHE_NAME);
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&dir)
            .with_context(|| format!("{}: cannot be made", dir.display()))?;
        let cache = Cache::beside(&dir)?;
        let files = Arc::<CachedFiles>::default();
        let options = ResourceOptions { journal_dir: journal.dir(), ..ResourceOptions::default() };
        let resources = Resources::start_with(options, files.clone())?;
        let elsewhere = Elsewhere::new(far.repository.clone(), &cache, files, OnMissing::Wait);
        let place = Place::published_elsewhere(tier, elsewhere)?;
        Ok(Self { found, place, resources })
    }
}

fn status(args: &TierDiskArgs) -> Result<()> {
    let Some(live) = Live::find(slice::from_ref(&args.disk), &args.server)? else {
        let published = Published::find(&args.disk)?;
        return answer(args.json, &published, || published.text());
    };
    let path = format!("/v1/disks/{}", encode_segment(live.name()));
    let shown: DiskDetail = live.client().get(&path)?;
    let status = shown.disk.tier.with_context(|| format!("disk '{}' is not tiered", live.name()))?;
    answer(args.json, &status, || format!("{}: {}\n{}", live.name(), line(&status), places(&status)))
}

fn attach(args: &TierAttachArgs) -> Result<()> {
    let tier = std::path::absolute(&args.tier)?;
    let keys = args.with.as_deref().cloned().unwrap_or_default();
    if let Some(live) = Live::find(slice::from_ref(&args.disk), &args.server)? {
        let asked = JobSpec::TierAttach {
            disk: live.name().to_owned(),
            tier: path_to_text(&tier),
            window: keys.window,
            epochs: keys.epochs,
            on_missing: keys.on_missing,
            on_outage: keys.on_outage,
            outage_bytes: keys.outage_bytes,
            durability: keys.durability,
            bytes_per_second: args.limit,
        };
        live.wait_job(&asked, args.json)?;
        let shown: DiskDetail = live.client().get(&format!("/v1/disks/{}", encode_segment(live.name())))?;
        let status = shown.disk.tier.with_context(|| format!("disk '{}' is being closed", live.name()))?;
        return answer(args.json, &status, || {
            format!(
                "attached: {}: {}\n{}  give its key tier={} in your configuration, too\n",
                live.name(),
                line(&status),
                places(&status),
                tier.display()
            )
        });
    }
    let Here { found, place, resources } = Here::find(&args.disk, &tier, &args.journal)?;
    if found.is_some() {
        bail!("{}: it is a tiered disk already: serve it with tier={}", args.disk.display(), tier.display());
    }
    let head = audit::change(audit::of("tier_attach", [&args.disk]), |_| {
        Ok(vmstrata_tier::attach_image(&place, &OpenOptions::default(), &resources)?)
    })?;
    let found = repository_at(&args.disk)?.context("it was made just now")?;
    let published = Published::of(&place.path, (&found, &head));
    answer(args.json, &published, || {
        let (path, tier) = (place.path.display(), tier.display());
        format!(
            "attached: {}from now on, what a guest has flushed is durable on the host that serves it, and in the repository within the disk's window\n\
             serve it: vmstrata serve --disk path={path},tier={tier} ...\n",
            published.text()
        )
    })
}

/// The server that serves a disk.
///
/// # Errors
/// None does.
pub fn served(args: &TierDiskArgs) -> Result<Live> {
    let live = Live::find(slice::from_ref(&args.disk), &args.server)?;
    live.with_context(|| format!("{}: no server serves it here", args.disk.display()))
}

fn hold(args: &TierHoldArgs) -> Result<()> {
    let live = served(&args.disk)?;
    let path = format!("/v1/disks/{}/tier/hold", encode_segment(live.name()));
    let seconds = args.period.map_or(0, |period| period.as_secs());
    let status: TierStatus = live.client().put(&path, &TierHold { seconds })?;
    answer(args.disk.json, &status, || format!("{}: {}\n", live.name(), line(&status)))
}

fn rate(args: &TierRateArgs) -> Result<()> {
    let client = Client::new(&args.server)?;
    let rate: HostRate = match &args.rate {
        Some(rate) => client.put("/v1/tier/rate", rate)?,
        None => client.get("/v1/tier/rate")?,
    };
    answer(args.json, &rate, || match rate.bytes_a_second {
        Some(bytes) => format!("tiered disks ship {} a second together\n", short_size(bytes)),
        None => "tiered disks ship without limit\n".to_owned(),
    })
}

fn sync(args: &TierDiskArgs) -> Result<()> {
    let live = served(args)?;
    let path = format!("/v1/disks/{}/tier/sync", encode_segment(live.name()));
    let status: TierStatus = live.client().post(&path, &())?;
    answer(args.json, &status, || format!("{}: {}\n", live.name(), line(&status)))
}

/// Has the server take a disk over that stands by for it.
fn take_over_served(args: &TakeoverArgs) -> Result<()> {
    let client = Client::new(&args.server)?;
    let name = name_of(&path_to_text(&args.disk), &client)?;
    let path = |what| format!("/v1/disks/{}/tier/{what}", encode_segment(&name));
    if !args.yes {
        let followed: TierStatus = client.post(&path("follow"), &())?;
        bail!(
            "{name}: {}; what its host wrote after that is lost to this one: make sure that host is off, then add --yes",
            line(&followed)
        );
    }
    let status: TierStatus = client.post(&path("take-over"), &TakeOver::default())?;
    answer(args.json, &status, || format!("{name}: taken over: {}\n", line(&status)))
}

fn take_over(args: &TakeoverArgs) -> Result<()> {
    let Some(tier) = &args.tier else { return take_over_served(args) };
    if !args.yes {
        let found = tiered(&args.disk)?;
        let whole = newest_whole(&*found.repository)?;
        let whole = whole.with_context(|| format!("{}: nothing of it is published", args.disk.display()))?;
        let found = Published::of(&args.disk, (&found, &whole.head));
        bail!(
            "{}{}what its host wrote after that is lost to this one: make sure that host is off, then add --yes",
            lost(&whole),
            found.text()
        );
    }
    let Here { found, place, resources } = Here::find(&args.disk, tier, &JournalArgs::default())?;
    let found = found.context("it was read just now")?;
    let taken = audit::change(audit::of("tier_takeover", [&args.disk]), |what| {
        let (head, branch) = vmstrata_tier::take_over(&place, &OpenOptions::default(), &resources)?;
        what.object = Some(format!("epoch {}", head.epoch.number));
        let disk = if found.is_directory { &place.path } else { &args.disk };
        let published = Published::of(disk, (&found, &head));
        Ok(Published { branch: branch.as_deref().map(path_to_text), ..published })
    })?;
    let repository = address_of(&args.disk)?.map(|address| format!(",repository={}", address.repository));
    let group = place.group_name().map(|group| format!(",group={group}"));
    let keys = format!("tier={}{}{}", path_to_text(tier), text(&repository), text(&group));
    answer(args.json, &taken, || {
        let aside = taken.branch.iter().map(|branch| format!("this host's earlier copy is now {branch}\n"));
        let disk = |disk: &Place| format!(" --disk path={},{keys}", path_to_text(&disk.path));
        let disks: String = place.members().iter().map(disk).collect();
        let next = format!("serve it: vmstrata serve{disks} ...\n");
        format!("taken over: {}{}{next}", taken.text(), aside.collect::<String>())
    })
}

fn text(text: &Option<String>) -> &str {
    text.as_deref().unwrap_or_default()
}

/// A copy that was put aside, for scripts.
#[derive(Debug, Serialize)]
struct AsideCopy {
    branch: String,
    path: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    owner: Option<String>,
    unpublished_epochs: Vec<u64>,
    bytes: u64,
    age_seconds: u64,
}

impl AsideCopy {
    fn of(branch: &Branch) -> Self {
        Self {
            branch: path_to_text(branch.name().as_ref()),
            path: path_to_text(&branch.path),
            owner: branch.owner.map(|owner| owner.to_string()),
            unpublished_epochs: branch.unpublished.iter().map(|epoch| epoch.get()).collect(),
            bytes: branch.bytes,
            age_seconds: now_ns().saturating_sub(branch.written_ns) / 1_000_000_000,
        }
    }

    /// What it alone has.
    fn epochs(&self) -> String {
        match &self.unpublished_epochs[..] {
            [] => "none".to_owned(),
            [one] => one.to_string(),
            [first, .., last] => format!("{first} to {last}"),
        }
    }
}

fn branches(args: &BranchesArgs) -> Result<()> {
    let Here { place, .. } = Here::find(&args.disk, &args.tier, &JournalArgs::default())?;
    let found = Branch::all(&place)?;
    let Some(name) = &args.drop else {
        let shown: Vec<AsideCopy> = found.iter().map(AsideCopy::of).collect();
        return answer(args.json, &shown, || {
            let mut table =
                Table::new(["BRANCH", "OWNER", "UNPUBLISHED EPOCHS", ">SIZE ON DISK", ">LAST WRITTEN"]);
            for aside in &shown {
                let (size, age) = (short_size(aside.bytes), format!("{} ago", duration(aside.age_seconds)));
                let owner = aside.owner.clone().unwrap_or_else(|| "-".to_owned());
                table.row([aside.branch.clone(), owner, aside.epochs(), size, age]);
            }
            table.to_string()
        });
    };
    let path = Path::new(name);
    let is_it = |branch: &Branch| branch.name() == *name || branch.path == path;
    let Some(branch) = found.into_iter().find(is_it) else {
        bail!("{}: no branch of {}", path.display(), args.disk.display());
    };
    let lost = AsideCopy::of(&branch);
    if !args.yes {
        bail!(
            "{}: unpublished epochs {}, and what was written after them, would be lost ({}, last written {} ago): add --yes",
            lost.branch,
            lost.epochs(),
            short_size(lost.bytes),
            duration(lost.age_seconds)
        );
    }
    audit::change(audit::of("tier_branch_drop", [&args.disk]).object(lost.branch.clone()), |what| {
        what.bytes = Some(lost.bytes);
        Ok(branch.remove(place.open_repository()?.as_deref())?)
    })?;
    answer(args.json, &lost, || format!("deleted: {}, {}\n", lost.branch, short_size(lost.bytes)))
}

/// What a disk is once it is detached, for scripts.
#[derive(Debug, Serialize)]
struct Detached {
    disk: String,
    /// The directory of its backing files.
    #[serde(skip_serializing_if = "Option::is_none")]
    layers: Option<String>,
}

fn detach(args: &DetachArgs) -> Result<()> {
    if let Some(found) = repository_at(&args.disk)? {
        found.refuse_elsewhere("a disk is detached")?;
    }
    let place = Place::of(&args.disk, &args.tier)?;
    if !args.yes {
        let published = match place.open_repository()? {
            Some(_) => Published::find(&place.path)?.text(),
            None => String::new(),
        };
        bail!(
            "{published}{}: its earlier states, pins and this host's copy are deleted: add --yes",
            place.repository.display()
        );
    }
    let resources = resources(&args.journal)?;
    let progress = Progress::endless(args.json);
    audit::change(audit::of("tier_detach", [&args.disk]), |_| {
        let mut detach = Detach::begin(&place, args.flatten, &OpenOptions::default(), &resources)?;
        let mut steps = 0;
        while detach.step()? {
            steps += 1;
            progress.show(|| counted(steps, "step"));
        }
        Ok(())
    })?;
    drop(progress);
    let stands_on = probe_layer(&place.path, None)?.backing_path;
    let layers = stands_on.and_then(|layer| Some(path_to_text(layer.parent()?)));
    let detached = Detached { disk: path_to_text(&place.path), layers };
    answer(args.json, &detached, || {
        let stands = detached.layers.iter().map(|layers| format!("; its backing files are in {layers}"));
        format!("detached: {} is an ordinary image{}\n", detached.disk, stands.collect::<String>())
    })
}

/// What is published and what is not, in a line.
pub fn line(status: &TierStatus) -> String {
    let epoch = format!("epoch {}, {} old", status.epoch, duration(status.epoch_age_seconds));
    let rest = match status.unpublished_seconds {
        None => "all is published".to_owned(),
        Some(seconds) => {
            format!("{} of {} not published", short_size(status.unpublished_bytes), duration(seconds))
        }
    };
    let why = status.error.as_deref().unwrap_or_default();
    let rest = rest + &noticed(status);
    let state = match status.state {
        TierState::Attaching => "; BEING ATTACHED: nothing is published until its image is read".to_owned(),
        TierState::Standby => "; STANDS BY: requests wait until this host takes the disk over".to_owned(),
        TierState::Publishing => String::new(),
        TierState::HandedOver => {
            format!("; HANDED OVER from {}: requests wait until another host has the disk", status.head)
        }
        TierState::Stalled => {
            let since = duration(status.stalled_seconds.unwrap_or_default());
            format!("; NOT PUBLISHED for {since}, and tried again: {why}")
        }
        TierState::Fenced => format!("; FENCED: {why}"),
    };
    let waiting = status.reads_wait_seconds.map(duration);
    let waiting =
        waiting.map(|since| format!("; READS WAIT for the repository, which has not answered for {since}"));
    format!("{epoch}; {rest}{state}{}", waiting.unwrap_or_default())
}

/// What is kept of layers that are in repositories, in a line.
pub fn cache_line(cache: &TierCache) -> String {
    let TierCache { directory, bytes, max_bytes, fetched_chunks } = cache;
    let (used, most) = (short_size(*bytes), short_size(*max_bytes));
    format!("cache {directory}: {used} of {most}, {} fetched", counted(*fetched_chunks, "chunk"))
}

/// Holds, slowed writes, and waiting writes and flushes.
fn noticed(status: &TierStatus) -> String {
    let held = status.held_seconds.map(|seconds| format!("HELD on this host for {} more", duration(seconds)));
    let slowed = status.slowed_to_bytes_a_second;
    let slowed = slowed.map(|bytes| format!("writes slowed to {} a second", short_size(bytes)));
    let waits = status.writes_wait.then(|| "WRITES WAIT: the budget is used up".to_owned());
    let flushes = (status.flushes_wait > 0).then(|| match status.durability {
        DurableAt::Host => format!("{} WAIT", counted(status.flushes_wait, "flush")),
        DurableAt::Repository => format!("{} under way", counted(status.flushes_wait, "flush")),
    });
    let names: Vec<&str> = status.pending_snapshots.iter().map(|pending| &*pending.name).collect();
    let pending = (!names.is_empty()).then(|| format!("snapshots not published yet: {}", names.join(", ")));
    let all = [held, slowed, waits, flushes, pending].into_iter().flatten();
    all.map(|said| format!("; {said}")).collect()
}

fn places(status: &TierStatus) -> String {
    let layers = counted(status.epoch_layers, "layer");
    let warnings = status.mount_warnings.iter().chain(&status.advice);
    let warnings = warnings.map(|warning| format!("  {warning}\n")).collect::<String>();
    let cache = status.cache.iter().map(|cache| format!("  {}\n", cache_line(cache))).collect::<String>();
    let window = duration(status.window_seconds);
    let durable = match status.durability {
        DurableAt::Host => {
            format!("what was flushed is durable on this host at once, and in the repository within {window}")
        }
        DurableAt::Repository => "what was flushed is durable in the repository".to_owned(),
    };
    let outage = match status.on_outage {
        OnOutage::Continue => "goes on",
        OnOutage::Stall => "has its flushes wait after that time",
    };
    let group =
        status.group.iter().map(|group| format!("  group {group}: all of this is of its disks together\n"));
    let group = group.collect::<String>();
    format!(
        "{group}  repository {} ({layers})\n  this host's copy {}: {}, generation {}\n{cache}{warnings}  {durable}; while that does not answer, the guest {outage}\n",
        status.repository, status.owner, status.local, status.generation
    )
}
