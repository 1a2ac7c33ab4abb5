//! A QEMU command line, made to start a guest from a snapshot.
//!
//! The command line is the one the guest was started with. Its memory backends are pointed to the files that hold the
//! snapshot's memory; what is lacking is added: a backend, `-incoming defer`, a monitor for us.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::options::split;

/// The file that is to be a backend's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackendFile {
    /// QEMU's id of the object.
    pub id: String,
    /// Bytes.
    pub bytes: u64,
    /// The file.
    pub path: PathBuf,
    /// Whether the guest writes to the file (others, such as a disk's server, then see it) or to a copy of its own.
    pub share: bool,
}

/// Why a command line cannot start a guest from a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommandError {
    /// An option at the end lacks its value.
    #[error("{option} has no value")]
    NoValue {
        /// The option.
        option: String,
    },
    /// A path that QEMU's options cannot express.
    #[error("{}: QEMU cannot be given a path that is not UTF-8", path.display())]
    Path {
        /// The path.
        path: PathBuf,
    },
}

/// `arguments` (without the program) so that QEMU takes its memory from `files`, waits for devices, and serves `monitor`.
/// It does not allocate memory in advance: that would touch pages that are being put in place.
///
/// # Errors
/// [`CommandError`] names the argument.
pub fn restart(
    arguments: &[String],
    files: &[BackendFile],
    monitor: &Path,
) -> Result<Vec<String>, CommandError> {
    let mut out = Vec::new();
    let mut lacking: Vec<&BackendFile> = files.iter().collect();
    let (mut has_machine_memory, mut has_size) = (false, false);
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let name = argument.trim_start_matches('-');
        let value = || CommandError::NoValue { option: argument.clone() };
        match name {
            "incoming" => drop(rest.next().ok_or_else(value)?),
            "mem-prealloc" => {}
            "object" => {
                let object = rest.next().ok_or_else(value)?;
                out.push(argument.clone());
                out.push(match pointed(object, &lacking)? {
                    Some((object, index)) => {
                        lacking.remove(index);
                        object
                    }
                    None => object.clone(),
                });
            }
            "machine" | "M" | "m" => {
                let words = rest.next().ok_or_else(value)?;
                has_size |= name == "m";
                has_machine_memory |= name != "m" && words.contains("memory-backend=");
                out.extend([argument.clone(), words.clone()]);
            }
            _ => out.push(argument.clone()),
        }
    }
    out.extend(added(files, &lacking, has_machine_memory, has_size)?);
    let monitor = format!("unix:{},server=on,wait=off", escaped(monitor)?);
    out.extend(["-incoming", "defer", "-qmp", &monitor].map(str::to_owned));
    Ok(out)
}

/// What a command line lacks that does not have `lacking` of `files`.
fn added(
    files: &[BackendFile],
    lacking: &[&BackendFile],
    has_machine_memory: bool,
    has_size: bool,
) -> Result<Vec<String>, CommandError> {
    let mut out = Vec::new();
    if let ([one], false) = (lacking, has_machine_memory) {
        out.extend(["-machine".to_owned(), format!("memory-backend={}", one.id)]);
    }
    if !has_size {
        let bytes: u64 = files.iter().map(|file| file.bytes).sum();
        out.extend(["-m".to_owned(), format!("{bytes}B")]);
    }
    for file in lacking {
        out.extend(["-object".to_owned(), object(file)?]);
    }
    Ok(out)
}

/// The text of an object that is one of `files`' backends, pointed to its file; with the index of the file.
fn pointed(object: &str, files: &[&BackendFile]) -> Result<Option<(String, usize)>, CommandError> {
    if let Ok(Value::Object(mut json)) = serde_json::from_str(object) {
        let is_memory = json.get("qom-type").is_some_and(|kind| kind == "memory-backend-file");
        let index = files.iter().position(|file| json.get("id").is_some_and(|id| *id == file.id));
        let Some(index) = index.filter(|_| is_memory) else { return Ok(None) };
        json.insert("mem-path".to_owned(), text(&files[index].path)?.into());
        json.insert("share".to_owned(), files[index].share.into());
        json.insert("prealloc".to_owned(), false.into());
        return Ok(Some((Value::Object(json).to_string(), index)));
    }
    let mut words = split(object);
    let index = files.iter().position(|file| words.iter().any(|word| *word == format!("id={}", file.id)));
    let Some(index) = index.filter(|_| words[0] == "memory-backend-file") else { return Ok(None) };
    let ours = ["mem-path", "share", "prealloc"];
    words.retain(|word| !ours.contains(&word.split('=').next().unwrap_or_default()));
    words.push(format!("mem-path={}", text(&files[index].path)?));
    words.push(format!("share={}", if files[index].share { "on" } else { "off" }));
    let quoted: Vec<String> = words.iter().map(|word| word.replace(',', ",,")).collect();
    Ok(Some((quoted.join(","), index)))
}

fn object(file: &BackendFile) -> Result<String, CommandError> {
    let (id, bytes, path) = (&file.id, file.bytes, escaped(&file.path)?);
    let share = if file.share { "on" } else { "off" };
    Ok(format!("memory-backend-file,id={id},size={bytes},mem-path={path},share={share}"))
}

fn escaped(path: &Path) -> Result<String, CommandError> {
    Ok(text(path)?.replace(',', ",,"))
}

fn text(path: &Path) -> Result<&str, CommandError> {
    path.to_str().ok_or_else(|| CommandError::Path { path: path.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(id: &str, share: bool) -> BackendFile {
        BackendFile { id: id.to_owned(), bytes: 1 << 30, path: PathBuf::from("/dev/shm/a,b"), share }
    }

    fn restarted(line: &str, files: &[BackendFile]) -> String {
        let arguments: Vec<String> = line.split(' ').map(str::to_owned).collect();
        restart(&arguments, files, Path::new("/run/q")).unwrap().join(" ")
    }

    const TAIL: &str = "-incoming defer -qmp unix:/run/q,server=on,wait=off";

    #[test]
    fn the_command_line_of_the_guest_is_pointed_to_the_files() {
        let line = "-machine q35,memory-backend=mem -mem-prealloc -m 1G \
                    -object memory-backend-file,id=mem,mem-path=/dev/shm/x,,y,size=1G,share=on -incoming tcp:0:1 -S";
        let expected = "-machine q35,memory-backend=mem -m 1G \
                        -object memory-backend-file,id=mem,size=1G,mem-path=/dev/shm/a,,b,share=off -S";
        assert_eq!(restarted(line, &[file("mem", false)]), format!("{expected} {TAIL}"));
    }

    #[test]
    fn objects_of_libvirt_are_json() {
        let object =
            r#"{"qom-type":"memory-backend-file","id":"pc.ram","mem-path":"/var/x","share":false,"size":5}"#;
        let line = format!("-object {object} -m 1 -M pc,memory-backend=pc.ram");
        let line = restarted(&line, &[file("pc.ram", true)]);
        assert!(line.contains(r#""mem-path":"/dev/shm/a,b""#) && line.contains(r#""share":true"#), "{line}");
        assert_eq!(line.matches("memory-backend-file").count(), 1);
    }

    #[test]
    fn what_is_lacking_is_added() {
        let added = "-m 1073741824B -object memory-backend-file,id=mem,size=1073741824,mem-path=/dev/shm/a,,b,share=on";
        let line = restarted("-machine q35", &[file("mem", true)]);
        assert_eq!(line, format!("-machine q35 -machine memory-backend=mem {added} {TAIL}"));
        let two = restarted("-M q35,memory-backend=mem", &[file("mem", true), file("dimm", true)]);
        assert!(!two.contains("-machine") && two.matches("memory-backend-file").count() == 2, "{two}");
    }

    #[test]
    fn objects_of_others_stay_as_they_are() {
        let line = "-m 1 -machine x,memory-backend=mem -object iothread,id=mem -object memory-backend-ram,id=mem,size=5";
        let line_after = restarted(line, &[file("mem", true)]);
        assert!(line_after.starts_with(line), "{line_after}");
        let open = restart(&["-object".to_owned()], &[], Path::new("q")).unwrap_err();
        assert_eq!(open.to_string(), "-object has no value");
    }
}
