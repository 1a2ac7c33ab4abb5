//! Asking a running server: HTTP over its control socket, one question at a time.
//!
//! A [`Client`] holds a path, not a connection: each question connects anew, so a server that was replaced in between
//! is found again. A problem that the server reports becomes an error with its words.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Error, Result, anyhow};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::{Method, Request, StatusCode, header};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;
use vmstrata_api::{JobChange, JobState, JobStatus, Problem};

use crate::args::ControlArgs;

/// How long a question may take that changes nothing.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often a job is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// The longest answer that is taken: a disk of 65,535 layers fits.
const ANSWER_BYTES_MAX: usize = 256 << 20;

/// See the module documentation.
#[derive(Debug)]
pub struct Client {
    path: PathBuf,
    runtime: tokio::runtime::Runtime,
}

impl Client {
    /// A client of the server that `args` mean.
    ///
    /// # Errors
    /// When the host is out of descriptors.
    pub fn new(args: &ControlArgs) -> Result<Self> {
        let default = || vmstrata_server::default_dir().join(vmstrata_api::CONTROL_SOCKET);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        Ok(Self { path: args.control.clone().unwrap_or_else(default), runtime })
    }

    /// The socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `GET path`.
    ///
    /// # Errors
    /// When no server answers, or it answers with a problem.
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        let asked = async { tokio::time::timeout(PATIENCE, self.ask(Method::GET, path, Bytes::new())).await };
        let answer = self.runtime.block_on(asked);
        self.read(&answer.with_context(|| format!("{}: the server does not answer", self.path.display()))??)
    }

    /// `POST path` with a body. Takes as long as what is asked for takes.
    ///
    /// # Errors
    /// When no server answers, or it answers with a problem.
    pub fn post<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T> {
        let body = serde_json::to_vec(body)?;
        self.read(&self.runtime.block_on(self.ask(Method::POST, path, body.into()))?)
    }

    /// `PUT path` with a body. Takes as long as what is asked for takes.
    ///
    /// # Errors
    /// When no server answers, or it answers with a problem.
    pub fn put<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T> {
        let body = serde_json::to_vec(body)?;
        self.read(&self.runtime.block_on(self.ask(Method::PUT, path, body.into()))?)
    }

    /// `DELETE path`. Takes as long as what is asked for takes.
    ///
    /// # Errors
    /// When no server answers, or it answers with a problem.
    pub fn delete(&self, path: &str) -> Result<()> {
        self.runtime.block_on(self.ask(Method::DELETE, path, Bytes::new())).map(drop)
    }

    /// As [`Client::delete`], where what was deleted is told.
    ///
    /// # Errors
    /// As there.
    pub fn take_away<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        self.read(&self.runtime.block_on(self.ask(Method::DELETE, path, Bytes::new()))?)
    }

    /// `POST path` without a body and without an answer but that it is accepted.
    ///
    /// # Errors
    /// When no server answers, or it answers with a problem.
    pub fn tell(&self, path: &str) -> Result<()> {
        self.runtime.block_on(self.ask(Method::POST, path, Bytes::new())).map(drop)
    }

    /// Waits until a job has ended. `goes_on` is asked at each look; once it says no, the job is cancelled.
    ///
    /// # Errors
    /// When no server answers, or it answers with a problem. That the job failed is none.
    pub fn until_ended(
        &self,
        mut job: JobStatus,
        mut goes_on: impl FnMut(&JobStatus) -> bool,
    ) -> Result<JobStatus> {
        let path = format!("/v1/jobs/{}", job.id);
        while !job.state.is_ended() {
            if !goes_on(&job) && job.state != JobState::Cancelling {
                let _: JobStatus = self.post(&path, &JobChange::Cancel {})?;
            }
            std::thread::sleep(LOOK_EVERY);
            job = self.get(&path)?;
        }
        Ok(job)
    }

    /// Whether a server listens.
    pub fn is_answered(&self) -> bool {
        std::os::unix::net::UnixStream::connect(&self.path).is_ok()
    }

    fn read<T: DeserializeOwned>(&self, answer: &[u8]) -> Result<T> {
        let read = serde_json::from_slice(answer);
        read.with_context(|| format!("{}: the server speaks another version", self.path.display()))
    }

    async fn ask(&self, method: Method, path: &str, body: Bytes) -> Result<Bytes> {
        let stream = UnixStream::connect(&self.path).await.map_err(|error| no_server(&self.path, error))?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        let connection = tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, "vmstrata")
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(body))?;
        let lost = || format!("{}: the server went away before it answered", self.path.display());
        let response = sender.send_request(request).await.with_context(lost)?;
        let status = response.status();
        let received = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
        let answer = received.map_err(|error| anyhow!(error)).with_context(lost)?.to_bytes();
        connection.abort();
        if status.is_success() { Ok(answer) } else { Err(refusal(status, &answer)) }
    }
}

fn no_server(path: &Path, error: io::Error) -> Error {
    let shown = path.display();
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            anyhow!(
                "no server listens at {shown}: start one with `vmstrata serve`, or name its socket with --control"
            )
        }
        io::ErrorKind::PermissionDenied => {
            anyhow!("{shown}: permission denied: a server is controlled by the user that runs it")
        }
        _ => Error::new(error).context(format!("cannot connect to {shown}")),
    }
}

/// The server's own words, if it is one of ours.
fn refusal(status: StatusCode, answer: &[u8]) -> Error {
    match serde_json::from_slice::<Problem>(answer) {
        Ok(problem) => problem.into(),
        Err(_) => anyhow!("the server answered {status}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(path: PathBuf) -> Client {
        Client::new(&ControlArgs { control: Some(path) }).unwrap()
    }

    #[test]
    fn a_socket_nobody_listens_on_says_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.sock");
        let told = |path: &Path| {
            client(path.to_owned()).get::<serde_json::Value>("/v1/status").unwrap_err().to_string()
        };
        assert!(told(&path).contains("vmstrata serve"), "{}", told(&path));
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(told(&path).contains("no server listens"), "{}", told(&path));
    }

    #[test]
    fn a_problem_becomes_its_detail_and_anything_else_its_status() {
        let problem = serde_json::to_vec(&Problem::new(404, "no-such-disk", "no disk is named 'x'")).unwrap();
        assert_eq!(refusal(StatusCode::NOT_FOUND, &problem).to_string(), "no disk is named 'x'");
        let other = refusal(StatusCode::BAD_GATEWAY, b"<html>");
        assert_eq!(other.to_string(), "the server answered 502 Bad Gateway");
    }
}
