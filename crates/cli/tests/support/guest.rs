//! A guest that stays connected: qemu-io on an NBD export.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdout, Command, Stdio};

use super::server::Server;

/// See the module documentation.
pub struct Guest {
    child: Child,
    said: BufReader<ChildStdout>,
}

impl Guest {
    /// Of the server's disk `web`.
    pub fn new(server: &Server) -> Self {
        Self::of(server, "web")
    }

    /// Of one of the server's disks.
    pub fn of(server: &Server, disk: &str) -> Self {
        // It says at once what it has done.
        let mut guest = Command::new("stdbuf");
        guest
            .args(["-o0", "qemu-io", "-f", "raw", &server.uri(disk)])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = guest.spawn().unwrap();
        let said = BufReader::new(child.stdout.take().unwrap());
        Self { child, said }
    }

    /// Has it write, with FUA. One command at a time: it looks for more of them when its input has some.
    pub fn write(&mut self, what: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "write -f {what}").unwrap();
        let mut line = String::new();
        while !line.contains(" ops; ") {
            line.clear();
            assert!(self.said.read_line(&mut line).unwrap() > 0, "it has ended");
            assert!(!line.contains("failed"), "{line}");
        }
    }

    /// Has it end by itself.
    pub fn end(mut self) {
        drop(self.child.stdin.take());
        assert!(self.child.wait().unwrap().success());
    }

    /// Kills it.
    pub fn kill(mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
