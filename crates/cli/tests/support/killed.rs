//! Killing the command at each of the system calls in which it changes files.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt as _;
use std::process::Output;

use tempfile::NamedTempFile;

use super::{stderr, tool};

/// The calls that change a file or a directory, or make a change last.
const CHANGES: &str = "rename,renameat,renameat2,link,linkat,unlink,unlinkat,symlink,symlinkat,mkdir,mkdirat,\
rmdir,fsync,fdatasync,write,pwrite64,pwritev,pwritev2,ftruncate,fallocate,copy_file_range,utimensat";

/// Of those, the ones of which a command makes many that are alike.
const MANY: [&str; 7] = ["write", "pwrite64", "pwritev", "pwritev2", "fsync", "fdatasync", "fallocate"];

/// One of the calls that a command makes: the `number`th of its name, in whichever thread makes so many first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    pub name: String,
    pub number: usize,
}

/// Which calls that change files the command makes, in order; it is carried out, and must succeed.
pub fn calls<S: AsRef<str>>(args: &[S]) -> Vec<Call> {
    let log = NamedTempFile::new().expect("a file for the calls");
    let path = log.path().to_str().expect("UTF-8");
    let output = traced(&["-o", path, "-e", &format!("trace={CHANGES}")], args);
    assert!(output.status.success(), "{:?}: {}", output.status, stderr(&output));
    let mut made: Vec<Call> = Vec::new();
    for (_, call, _) in calls_in(&std::fs::read_to_string(path).expect("written by strace")) {
        if !made.contains(&call) {
            made.push(call);
        }
    }
    made
}

/// The calls in a log of `strace -f`: with the thread that made each, and the line.
fn calls_in(log: &str) -> Vec<(&str, Call, &str)> {
    let mut counts: BTreeMap<(String, String), usize> = BTreeMap::new();
    let mut made = Vec::new();
    for line in log.lines() {
        // `PID  name(...) = result`; the second half of a call that another thread interrupted is `PID  <... name resumed>`.
        let Some((thread, call)) = line.split_once(' ') else { continue };
        let Some((name, _)) = call.trim_start().split_once('(').filter(|(name, _)| is_name(name)) else {
            continue;
        };
        let number = counts.entry((thread.to_owned(), name.to_owned())).or_default();
        *number += 1;
        made.push((thread, Call { name: name.to_owned(), number: *number }, line));
    }
    made
}

/// Options of `strace` that write what a server changes to the file `log`. The server stays the child of who starts it.
pub fn logging(log: &str) -> Vec<String> {
    ["-D", "-f", "-qq", "-s", "4096", "-o", log, "-e", &format!("trace={CHANGES}")]
        .map(str::to_owned)
        .to_vec()
}

/// Options that kill a server when a thread of it is about to make the call.
pub fn killing(Call { name, number }: &Call) -> Vec<String> {
    let inject = format!("inject={name}:signal=KILL:when={number}");
    ["-D", "-f", "-qq", "-o", "/dev/null", "-e", &format!("trace={name}"), "-e", &inject]
        .map(str::to_owned)
        .to_vec()
}

/// The calls of the thread that made one with `text` in it, as far as they can be told from those of other threads by their numbers.
pub fn calls_of_thread_with(log: &str, text: &str) -> Vec<Call> {
    let all = calls_in(log);
    let (of, ..) = all.iter().find(|(.., line)| line.contains(text)).expect("such a call");
    let is_other = |call: &Call| all.iter().any(|(thread, other, _)| thread != of && other == call);
    all.iter()
        .filter(|(thread, call, _)| thread == of && !is_other(call))
        .map(|(_, call, _)| call.clone())
        .collect()
}

fn is_name(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

/// All of the calls that change names, and of the others about `count`, evenly.
pub fn some_of(calls: Vec<Call>, count: usize) -> Vec<Call> {
    let is_one_of_many = |call: &Call| MANY.contains(&call.name.as_str());
    let many = calls.iter().filter(|call| is_one_of_many(call)).count();
    let stride = many.div_ceil(count).max(1);
    let mut seen = 0;
    let mut chosen = calls;
    chosen.retain(|call| {
        seen += usize::from(is_one_of_many(call));
        !is_one_of_many(call) || seen % stride == 0
    });
    chosen
}

/// Runs the command, which is killed when it is about to make the call; whether it was.
pub fn killed_at<S: AsRef<str>>(call: &Call, args: &[S]) -> bool {
    // The calls are counted by name: one number for a list of names would only meet the one that is made most often.
    let Call { name, number } = call;
    let inject = format!("inject={name}:signal=KILL:when={number}");
    let output = traced(&["-o", "/dev/null", "-e", &format!("trace={name}"), "-e", &inject], args);
    let killed = output.status.signal() == Some(9);
    assert!(killed || output.status.success(), "{:?}: {}", output.status, stderr(&output));
    killed
}

fn traced<S: AsRef<str>>(options: &[&str], args: &[S]) -> Output {
    let program = [env!("CARGO_BIN_EXE_vmstrata")];
    let args = args.iter().map(AsRef::as_ref);
    let all = ["-f", "-qq"].into_iter().chain(options.iter().copied()).chain(program).chain(args);
    tool("strace", all)
}
