//! The connection to an object store: an asynchronous client with its own threads, and a limit to how long anything is waited for.

use std::future::Future;
use std::io;
use std::time::Duration;

use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey, S3ConditionalPut};
use object_store::client::{HttpClient, HttpConnector as _, ReqwestConnector};
use object_store::path::Path;
use object_store::{ClientOptions, Error, ObjectStoreExt as _, RetryConfig};
use tokio::runtime::{Builder, Runtime};

use crate::address::S3Address;

/// Worker threads of the client, which send and receive.
const THREADS: usize = 2;
/// What `object_store` takes for the region that is not said.
const REGION: &str = "us-east-1";
/// How long a connection may take.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// How long a request may take, and for how long one that fails is tried again.
pub(super) const REQUEST_MAX: Duration = Duration::from_secs(60);
/// How long to try what others do later as well.
pub(super) const TIDY_MAX: Duration = Duration::from_secs(5);

/// A client of an object store.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) store: AmazonS3,
    /// For requests that `store` does not make.
    pub(super) http: HttpClient,
    pub(super) bucket: String,
    pub(super) region: String,
    /// Where the store is.
    pub(super) place: String,
    runtime: Runtime,
}

impl Link {
    /// A client for a bucket, configured by the variables that other clients of S3 read; nothing is asked of the store yet.
    pub(super) fn new(address: &S3Address) -> io::Result<Self> {
        let runtime =
            Builder::new_multi_thread().worker_threads(THREADS).thread_name("s3").enable_all().build()?;
        // The first of the process, which may be another's, is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut builder = AmazonS3Builder::from_env()
            .with_bucket_name(&address.bucket)
            .with_conditional_put(S3ConditionalPut::ETagMatch);
        if let Some(endpoint) = &address.endpoint {
            builder = builder.with_endpoint(endpoint);
        }
        let value = |key| builder.get_config_value(&key);
        let region = value(AmazonS3ConfigKey::Region).unwrap_or_else(|| REGION.to_owned());
        let place = value(AmazonS3ConfigKey::Endpoint).unwrap_or_else(|| region.clone());
        let client = ClientOptions::new()
            .with_allow_http(place.starts_with("http://"))
            .with_connect_timeout(CONNECT_MAX)
            .with_timeout(REQUEST_MAX)
            .with_user_agent(http::HeaderValue::from_static("vmstrata"));
        let http = ReqwestConnector::default().connect(&client).map_err(to_io)?;
        let retry = RetryConfig { retry_timeout: REQUEST_MAX, ..RetryConfig::default() };
        let store = builder.with_client_options(client).with_retry(retry).build().map_err(to_io)?;
        Ok(Self { store, http, bucket: address.bucket.clone(), region, place, runtime })
    }

    /// Waits for the store's answer.
    pub(super) fn ask<T>(&self, asked: impl Future<Output = object_store::Result<T>>) -> io::Result<T> {
        self.runtime.block_on(asked).map_err(to_io)
    }

    /// Removes, not for long, what others remove later if it is not done now.
    pub(super) fn tidy(&self, path: &Path) -> io::Result<()> {
        match self.ask(async { Ok(tokio::time::timeout(TIDY_MAX, self.store.delete(path)).await) })? {
            Ok(deleted) => deleted.map_err(to_io),
            Err(_) => Err(io::ErrorKind::TimedOut.into()),
        }
    }

    /// Removes a file; one that is not there is removed.
    pub(super) fn remove(&self, path: &Path) -> io::Result<()> {
        match self.ask(self.store.delete(path)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }
}

/// What went wrong, in one line: of a refusal what the store says in it, too.
pub(super) fn to_io(error: Error) -> io::Error {
    let told = error.to_string();
    let kind = match &error {
        Error::NotFound { .. } => io::ErrorKind::NotFound,
        Error::AlreadyExists { .. } => io::ErrorKind::AlreadyExists,
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => io::ErrorKind::PermissionDenied,
        Error::NotSupported { .. } | Error::NotImplemented { .. } => io::ErrorKind::Unsupported,
        // It tells the bucket from its objects, and not in a type.
        _ if told.contains("<Code>NoSuchBucket</Code>") => io::ErrorKind::NotFound,
        _ => io::ErrorKind::Other,
    };
    let line = told.split("<?xml").next().and_then(|told| told.lines().next()).unwrap_or_default();
    let said = message(&told).map(|said| format!(" {said}")).unwrap_or_default();
    io::Error::new(kind, format!("{}{said}", line.trim_end()))
}

/// What the body of a refusal says to people.
pub(super) fn message(body: &str) -> Option<&str> {
    between(body, "<Message>", "</Message>")
}

pub(super) fn between<'a>(text: &'a str, start: &str, end: &str) -> Option<&'a str> {
    Some(text.split_once(start)?.1.split_once(end)?.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_told_in_one_line() {
        let body = "<?xml version=\"1.0\"?>\n<Error><Code>NoSuchBucket</Code><Message>no such bucket</Message>\n</Error>";
        let error = Error::Generic { store: "S3", source: format!("list: 404 Not Found: {body}").into() };
        let told = to_io(error);
        assert_eq!(told.kind(), io::ErrorKind::NotFound);
        assert_eq!(told.to_string(), "Generic S3 error: list: 404 Not Found: no such bucket");
        let error = Error::Generic { store: "S3", source: "no answer\nwithin a minute".into() };
        assert_eq!(to_io(error).to_string(), "Generic S3 error: no answer");
    }
}
