//! Who has a file open is found out though another file system does not answer.

use crate::common;
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::process::{Command, Stdio};
use std::sync::{Arc, mpsc};

use crate::common::{Held, PATIENCE, Question};
use vmstrata_store::{FileId, Holders, OpenFiles};

#[test]
fn open_files_of_a_hung_file_system_keep_nobody_waiting() {
    let (dir, held) = (tempfile::tempdir().unwrap(), Arc::new(Held::default()));
    let Some(session) = common::mount(dir.path(), &held) else { return };
    let hung = File::open(dir.path().join("disk")).unwrap();
    let image = tempfile::NamedTempFile::new().unwrap();
    let id = FileId::of(&image.as_file().metadata().unwrap());
    let mut child = Command::new("sleep")
        .arg("60")
        .stdin(hung.try_clone().unwrap())
        .stderr(Stdio::from(image.reopen().unwrap()))
        .spawn()
        .unwrap();
    held.hold(Some(Question::Attributes));
    // That it hangs: this is what must not be asked.
    let link = format!("/proc/self/fd/{}", hung.as_raw_fd());
    let asks = std::thread::spawn(move || std::fs::metadata(link).is_ok());
    held.wait_for_one();
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || tell.send((OpenFiles::own().unwrap().count(id), Holders::of([&id]).pids)));
    let found = told.recv_timeout(PATIENCE);
    held.hold(None);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(found.expect("it did not wait"), (1, vec![child.id()]));
    assert!(asks.join().unwrap());
    drop((hung, session));
}
