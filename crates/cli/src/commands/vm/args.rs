//! `vmstrata vm args`: how a guest must be started for its memory to be snapshotted.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use serde::Serialize;

use crate::args::VmArgsArgs;
use crate::attach::{absolute, indent, shell_lines, xml_escape};
use crate::key_values::escape;
use crate::output::answer;

/// What to start a guest with.
#[derive(Debug, Serialize)]
struct Options {
    /// Arguments of QEMU, two by two.
    qemu: Vec<String>,
    /// Elements of a libvirt domain.
    libvirt: String,
}

/// Prints the options.
///
/// # Errors
/// When stdout does not take them.
pub(super) fn run(args: &VmArgsArgs) -> Result<ExitCode> {
    let default = PathBuf::from(format!("/dev/shm/{}.memory", args.guest));
    let file = args.memory_file.as_deref().unwrap_or(&default);
    let options = Options::new(args.memory, file, &super::monitor(&args.guest, args.qmp.as_deref()));
    answer(args.json, &options, || {
        let (qemu, libvirt) = (indent(&shell_lines(&options.qemu)), indent(&options.libvirt));
        format!("{}\n  QEMU:\n{qemu}\n  libvirt:\n{libvirt}\n", args.guest)
    })?;
    Ok(ExitCode::SUCCESS)
}

impl Options {
    fn new(bytes: u64, file: &Path, monitor: &Path) -> Self {
        let size =
            if bytes.is_multiple_of(1 << 20) { format!("{}M", bytes >> 20) } else { format!("{bytes}B") };
        let (file, monitor) = (absolute(file), absolute(monitor));
        let memory = format!("memory-backend-file,id=mem,size={size},mem-path={},share=on", escape(&file));
        let qmp = format!("unix:{},server=on,wait=off", escape(&monitor));
        let qemu = ["-m", &size, "-object", &memory, "-machine", "memory-backend=mem", "-qmp", &qmp];
        let directory = Path::new(&file).parent().unwrap_or(Path::new("/")).display().to_string();
        let libvirt = format!(
            "<!-- in qemu.conf: memory_backing_dir = \"{}\" -->
<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <memoryBacking>
    <source type='file'/>
    <access mode='shared'/>
  </memoryBacking>
  <qemu:commandline>
    <qemu:arg value='-qmp'/>
    <qemu:arg value='{}'/>
  </qemu:commandline>",
            xml_escape(&directory),
            xml_escape(&qmp)
        );
        Self { qemu: qemu.map(str::to_owned).to_vec(), libvirt }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_a_shared_file_and_the_monitor_a_socket() {
        let options = Options::new(4 << 30, Path::new("/dev/shm/a,b"), Path::new("/run/<q>"));
        assert_eq!(
            options.qemu.join(" "),
            "-m 4096M -object memory-backend-file,id=mem,size=4096M,mem-path=/dev/shm/a,,b,share=on \
             -machine memory-backend=mem -qmp unix:/run/<q>,server=on,wait=off"
        );
        assert!(options.libvirt.contains("memory_backing_dir = \"/dev/shm\""), "{}", options.libvirt);
        assert!(options.libvirt.contains("unix:/run/&lt;q&gt;,server=on"), "{}", options.libvirt);
        assert_eq!(Options::new(4097, Path::new("/a"), Path::new("/b")).qemu[1], "4097B");
    }
}
