//! What a guest asks of its disk while it boots, writes and reads: taken once from a real one, and done again by many clients.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::super::client::Client;
use crate::chain::pattern::Writer;
use crate::guest::{Attach, Guest, Task, Vm};

/// For a guest that boots and works.
const WORK_MAX: Duration = Duration::from_secs(600);
/// QEMU's events: a request begins, a read or a write is done, any request is done.
const READ: &str = "virtio_blk_handle_read";
const WRITE: &str = "virtio_blk_handle_write";
const MOVED: &str = "virtio_blk_rw_complete";
const DONE: &str = "virtio_blk_req_complete";
const SECTOR: u64 = 512;
/// A guest that asks for nothing for so long begins something else.
const PAUSE: Duration = Duration::from_millis(10);
/// The most bytes of a request that is done again: the rest of a larger one follows.
const PIECE: u64 = 1 << 20;
/// The guest's data is not what it wrote, but as much.
const WRITER: Writer = Writer::client(1);

#[derive(Clone, Copy, Debug, PartialEq)]
enum Ask {
    Read(u64, u64),
    Write(u64, u64),
    Flush,
}

/// One request.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Step {
    /// The guest began it so long after the one before; a flush is noted at its end.
    after: Duration,
    ask: Ask,
}

/// The requests of a guest, from power-on until it has done its work.
#[derive(Clone, Debug)]
pub(super) struct Work {
    steps: Vec<Step>,
}

impl Work {
    /// Has stock QEMU boot a guest on a copy of a local disk, where it writes and reads trees of files, and notes what it asks for.
    pub(super) fn record(guest: &Guest, disk: &Path, rounds: u32, dir: &Path) -> Result<Self> {
        let (log, overlay) = (dir.join("requests.log"), dir.join("worked.qcow2"));
        fs::copy(disk, &overlay)?;
        let mut more = vec!["-D".to_owned(), log.display().to_string(), "-msg".into(), "timestamp=on".into()];
        for event in [READ, WRITE, MOVED, DONE] {
            more.extend(["-trace".to_owned(), event.to_owned()]);
        }
        let option = format!("driver=qcow2,file.driver=file,file.filename={}", overlay.display());
        Vm::boot_with(guest, &Attach::Blockdev(option), Task::Workload { rounds }, &more)?
            .wait_for_end(WORK_MAX)?;
        fs::remove_file(overlay)?;
        let work = Self::parse(&fs::read_to_string(log)?)?;
        let has = |of_kind: fn(&Ask) -> bool| work.steps.iter().any(|step| of_kind(&step.ask));
        let all = has(|ask| matches!(ask, Ask::Read(..)))
            && has(|ask| matches!(ask, Ask::Write(..)))
            && has(|ask| *ask == Ask::Flush);
        ensure!(all, "the guest did not read, write and flush");
        Ok(work)
    }

    fn parse(log: &str) -> Result<Self> {
        let (mut steps, mut before, mut moved) = (Vec::new(), None, "");
        for line in log.lines() {
            let Some((time, event, words)) = event(line) else { continue };
            let number = |name: &str| after(&words, name)?.parse::<u64>().ok();
            let place = || Some((number("sector")? * SECTOR, number("nsectors")? * SECTOR));
            let request = after(&words, "req").with_context(|| line.to_owned())?;
            let ask = match event {
                READ => place().map(|(at, len)| Ask::Read(at, len)),
                WRITE => place().map(|(at, len)| Ask::Write(at, len)),
                MOVED => {
                    moved = request;
                    continue;
                }
                DONE if moved == request => {
                    moved = "";
                    continue;
                }
                // It has moved nothing.
                DONE => Some(Ask::Flush),
                _ => continue,
            };
            let ask = ask.with_context(|| line.to_owned())?;
            let waited = time - before.replace(time).unwrap_or(time);
            steps.push(Step { after: Duration::from_secs_f64(waited.max(0.0)), ask });
        }
        ensure!(!steps.is_empty(), "QEMU noted no request of its guest");
        Ok(Self { steps })
    }

    /// Does the same again, each request as long after the one before as the guest took to think, divided by `speed`. Returns for
    /// each burst, which has no pause in it, how long the guest waited for its disk.
    pub(super) fn again(&self, client: &mut Client, speed: u32) -> Result<Vec<Duration>> {
        let mut bursts = vec![Duration::ZERO];
        for step in &self.steps {
            // The guest's own work: nothing is waited for.
            thread::sleep(step.after / speed);
            if step.after >= PAUSE {
                bursts.push(Duration::ZERO);
            }
            let start = Instant::now();
            step.ask.again(client)?;
            *bursts.last_mut().expect("one") += start.elapsed();
        }
        Ok(bursts)
    }
}

impl Ask {
    fn again(self, client: &mut Client) -> Result<()> {
        let pieces = |at: u64, len: u64| {
            (at..at + len)
                .step_by(PIECE as usize)
                .map(move |from| (from, PIECE.min(at + len - from) as usize))
        };
        match self {
            Self::Read(at, len) => pieces(at, len).try_for_each(|(at, len)| client.read(at, len).map(drop)),
            Self::Write(at, len) => pieces(at, len).try_for_each(|(at, len)| client.write(at, len, WRITER)),
            Self::Flush => client.flush(),
        }
    }
}

/// A line of QEMU's log, `PID@SECONDS:EVENT NAME VALUE NAME VALUE ...`.
fn event(line: &str) -> Option<(f64, &str, Vec<&str>)> {
    let (head, rest) = line.split_once('@').map(|(_, rest)| rest.split_once(':'))??;
    let mut words = rest.split_whitespace();
    Some((head.parse().ok()?, words.next()?, words.collect()))
}

fn after<'a>(words: &[&'a str], name: &str) -> Option<&'a str> {
    words.iter().position(|word| *word == name).and_then(|at| words.get(at + 1)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_taken_from_the_log_of_qemu() {
        let log = "7@10.250000:virtio_blk_handle_read vdev 0x1 req 0x2 sector 8 nsectors 2\nother\n\
                   7@10.260000:virtio_blk_rw_complete vdev 0x1 req 0x2 ret 0\n\
                   7@10.260000:virtio_blk_req_complete vdev 0x1 req 0x2 status 0\n\
                   7@10.500000:virtio_blk_handle_write vdev 0x1 req 0x3 sector 0 nsectors 1\n\
                   7@10.750000:virtio_blk_req_complete vdev 0x1 req 0x4 status 0\n";
        let work = Work::parse(log).unwrap();
        let step = |ms, ask| Step { after: Duration::from_millis(ms), ask };
        assert_eq!(
            work.steps,
            [step(0, Ask::Read(4096, 1024)), step(250, Ask::Write(0, 512)), step(250, Ask::Flush)]
        );
        assert!(Work::parse("other\n").is_err());
    }
}
