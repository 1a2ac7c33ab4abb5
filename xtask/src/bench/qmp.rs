//! Stock QEMU's control: QMP, one JSON object a line on a unix socket.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(60);

/// A connection that has agreed on capabilities.
#[derive(Debug)]
pub(super) struct Qmp {
    stream: BufReader<UnixStream>,
    asked: u32,
}

impl Qmp {
    /// Connects to the monitor at `socket`.
    ///
    /// # Errors
    /// When nobody answers there.
    pub(super) fn connect(socket: &Path) -> Result<Self> {
        let stream = UnixStream::connect(socket).with_context(|| format!("QMP at {}", socket.display()))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut qmp = Self { stream: BufReader::new(stream), asked: 0 };
        // QEMU may tell of something, or answer a client that is gone, before it greets.
        while qmp.line()?.get("QMP").is_none() {}
        qmp.execute("qmp_capabilities", &json!({}))?;
        Ok(qmp)
    }

    /// Has a command carried out.
    ///
    /// # Errors
    /// What QEMU says.
    pub(super) fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value> {
        self.asked += 1;
        let id = format!("{}-{}", std::process::id(), self.asked);
        let request = json!({ "execute": command, "arguments": arguments, "id": id });
        writeln!(self.stream.get_mut(), "{request}")?;
        loop {
            let mut answer = self.line()?;
            if answer.get("id").is_some_and(|answered| *answered != id) {
                continue;
            }
            if let Some(error) = answer.get("error") {
                bail!("{command}: {error}");
            }
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
        }
    }

    fn line(&mut self) -> Result<Value> {
        let mut line = String::new();
        ensure!(self.stream.read_line(&mut line)? > 0, "QEMU closed the connection");
        serde_json::from_str(&line).with_context(|| format!("no JSON: {line}"))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn events_are_passed_over_and_errors_told() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("qmp");
        let listener = UnixListener::bind(&socket).unwrap();
        let server = std::thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            let answers = "{\"QMP\":{}}\n{\"return\":{}}\n{\"event\":\"E\"}\n{\"return\":7}\n{\"error\":{\"desc\":\"bad\"}}\n";
            stream.write_all(answers.as_bytes()).unwrap();
            std::io::copy(&mut stream, &mut std::io::sink()).unwrap();
        });
        let mut qmp = Qmp::connect(&socket).unwrap();
        assert_eq!(qmp.execute("a", &json!({})).unwrap(), 7);
        assert!(qmp.execute("b", &json!({})).unwrap_err().to_string().contains("bad"));
        drop(qmp);
        server.join().unwrap();
    }
}
