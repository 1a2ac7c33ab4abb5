//! An operation that is killed at one call after the other, each time on images of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::killed::{calls, killed_at, some_of};
use super::{Images, run, run_ok, stderr, tool, tool_ok};

/// How many of the writes and flushes of an operation it is killed at.
const KILLS: usize = 20;

/// Images that an operation begins with, of which each kill gets its own copy, and the states they hold.
pub struct Trial {
    made: Images,
    /// What each image reads as before the operation, in raw files elsewhere.
    states: BTreeMap<String, String>,
    _raw: Images,
}

/// An operation on the images in a directory.
pub struct Operation<'a> {
    pub args: &'a dyn Fn(&Images) -> Vec<String>,
    /// The states, by the images that have them at the beginning, that an image may have after a kill, where that is not its own.
    pub may_be: &'a [(&'a str, &'a [&'a str])],
    /// What it says when it is made again after all was done.
    pub done: &'a str,
    /// Files that a killed one may never make.
    pub may_lack: &'a [&'a str],
    /// A command that comes next, which sweeps up what is left.
    pub next: &'a dyn Fn(&Images) -> Vec<String>,
}

impl<'a> Operation<'a> {
    /// One that makes no images, never says that it was done before, and makes all that it makes or nothing.
    pub fn of(args: &'a dyn Fn(&Images) -> Vec<String>, next: &'a dyn Fn(&Images) -> Vec<String>) -> Self {
        Self { args, may_be: &[], done: "-", may_lack: &[], next }
    }
}

fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}

/// The words of a command, with the directory before each name of a file, which begins with `%`.
pub fn command(images: &Images, line: &str) -> Vec<String> {
    let place = |word: String| match word.strip_prefix('%') {
        Some(name) => images.name(name),
        None => word,
    };
    words(line).into_iter().map(place).collect()
}

/// All images below a directory, by their paths from there.
fn images_in(dir: &Path) -> BTreeSet<String> {
    let found = tool_ok("find", [dir.to_str().unwrap(), "-name", "*.qcow2", "-type", "f", "-printf", "%P\n"]);
    found.lines().map(str::to_owned).collect()
}

/// All names below a directory, but for those of indices that belong to a layer, and of journals, which go with the next start
/// of the host.
fn names_in(dir: &Path) -> BTreeSet<String> {
    let found = tool_ok("find", [dir.to_str().unwrap(), "-mindepth", "1", "-printf", "%y %P\n"]);
    let belongs = |name: &str| {
        name.ends_with(".journal") || name.strip_suffix(".vmsx").is_some_and(|layer| dir.join(layer).exists())
    };
    let names = found.lines().map(|line| line.split_once(' ').unwrap()).filter(|(_, name)| !belongs(name));
    // A link to a disk ends with a hash of the disk's path.
    names
        .map(|(kind, name)| if kind == "l" { name.rsplit_once('.').unwrap().0 } else { name }.to_owned())
        .collect()
}

/// What a killed process had claimed is lost until then.
fn repair_leaks(images: &Images) {
    for name in images_in(&images.path("")) {
        let image = images.name(&name);
        if tool("qemu-img", ["check", "-q", &image]).status.code() == Some(3) {
            run_ok(["check", "--repair", "leaks", "--quiet", &image]);
        }
    }
}

impl Trial {
    pub fn new(make: impl FnOnce(&Images)) -> Self {
        let (made, raw) = (Images::new(), Images::new());
        std::fs::create_dir(made.path("run")).unwrap();
        make(&made);
        let content = |(number, name): (usize, &String)| {
            let (image, content) = (made.name(name), raw.name(&number.to_string()));
            tool_ok("qemu-img", ["convert", "-O", "raw", &image, &content]);
            (name.clone(), content)
        };
        let states = images_in(&made.path("")).iter().enumerate().map(content).collect();
        Self { made, states, _raw: raw }
    }

    /// Another copy, links, times and all.
    fn copy(&self) -> Images {
        let images = Images::new();
        tool_ok("cp", ["-a", &self.made.name("."), &images.name("")]);
        images
    }

    fn is(&self, image: &str, state: &str) -> bool {
        tool("qemu-img", ["compare", "-q", "-U", "-F", "raw", image, &self.states[state]]).status.success()
    }

    /// Every image there is has a state that it may have; returns which, of those that may have several.
    fn assert_sound(
        &self,
        images: &Images,
        operation: &Operation<'_>,
        clean: bool,
        what: &str,
    ) -> Vec<String> {
        let mut found = Vec::new();
        for name in images_in(&images.path("")) {
            // What has no state of its own was made by the operation, or is of nobody's chain.
            let (image, own) = (images.name(&name), [name.as_str()]);
            let several = operation.may_be.iter().find(|(of, _)| *of == name).map(|(_, states)| *states);
            let states = several.unwrap_or(if self.states.contains_key(&name) { &own[..] } else { &[] });
            let state = states.iter().find(|state| self.is(&image, state));
            assert!(state.is_some() || states.is_empty(), "{what}: {name} is not as {states:?}");
            found.extend(several.and(state).map(|state| format!("{name} as {state}")));
            let checked = tool("qemu-img", ["check", "-U", &image]);
            let code = checked.status.code().unwrap();
            let said = String::from_utf8_lossy(&checked.stdout).into_owned() + &stderr(&checked);
            assert!(code == 0 || code == 3 && !clean, "{what}: {name}: {said}");
        }
        found
    }

    /// Kills the operation at its calls in turn.
    pub fn kill_anywhere(&self, operation: &Operation<'_>) {
        let whole = self.copy();
        let made = calls(&(operation.args)(&whole));
        let states = self.assert_sound(&whole, operation, true, "not killed");
        run_ok((operation.next)(&whole));
        let names = names_in(&whole.path(""));
        let mut seen = BTreeSet::new();
        for call in some_of(made, KILLS) {
            let images = self.copy();
            let args = (operation.args)(&images);
            let what = format!("killed at {call:?} of {args:?}");
            assert!(killed_at(&call, &args), "not {what}");
            let left = self.assert_sound(&images, operation, false, &what);
            let again = run(&args);
            let said = stderr(&again);
            assert!(again.status.success() || said.contains(operation.done), "{what}, again: {said}");
            seen.insert(again.status.success());
            let now = self.assert_sound(&images, operation, false, &format!("{what}, again"));
            assert_eq!(now, states, "{what}, which left {left:?}");
            run_ok((operation.next)(&images));
            repair_leaks(&images);
            self.assert_sound(&images, operation, true, &format!("{what}, and after the next"));
            let mut now = names_in(&images.path(""));
            now.extend(operation.may_lack.iter().map(|&name| name.to_owned()));
            assert_eq!(now, names, "{what}");
        }
        assert!(seen.contains(&true), "killed before it was done");
    }
}
