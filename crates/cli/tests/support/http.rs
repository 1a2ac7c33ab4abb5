//! HTTP as bytes on a unix socket: what a test wants to send, right or wrong, and what comes back.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use super::contract;

/// An answer.
#[derive(Debug)]
pub struct Answer {
    /// The HTTP status.
    pub status: u16,
    /// The header's lines after the first.
    pub header: String,
    /// The body.
    pub body: String,
}

impl Answer {
    /// The body as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// Sends a request and waits for its answer, which must be one that the OpenAPI document knows.
pub fn ask(socket: &Path, method: &str, path: &str, body: &str) -> Answer {
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let answer = ask_raw(socket, request.as_bytes()).expect("an answer");
    contract::check(method, path, body, &answer);
    answer
}

/// Sends bytes and waits for what comes back; `None` when the server hangs up without an answer.
pub fn ask_raw(socket: &Path, request: &[u8]) -> Option<Answer> {
    let mut stream = connect(socket);
    // The server may answer, and hang up, before it has taken everything.
    let _ = stream.write_all(request);
    read_answer(&mut stream)
}

/// A connection on which nothing waits for ever.
pub fn connect(socket: &Path) -> UnixStream {
    let stream = UnixStream::connect(socket).expect("the control socket is there");
    stream.set_read_timeout(Some(Duration::from_secs(30))).expect("a socket");
    stream.set_write_timeout(Some(Duration::from_secs(30))).expect("a socket");
    stream
}

/// Reads to the end of the connection.
pub fn read_answer(stream: &mut UnixStream) -> Option<Answer> {
    let mut bytes = Vec::new();
    let mut buffer = [0; 4096];
    // A reset after the answer does not take the answer back.
    while let Ok(len @ 1..) = stream.read(&mut buffer) {
        bytes.extend(&buffer[..len]);
    }
    let text = String::from_utf8(bytes).expect("UTF-8");
    let (head, body) = text.split_once("\r\n\r\n")?;
    let (first, header) = head.split_once("\r\n").unwrap_or((head, ""));
    let status = first.split(' ').nth(1)?.parse().ok()?;
    Some(Answer { status, header: header.to_ascii_lowercase(), body: body.to_owned() })
}
