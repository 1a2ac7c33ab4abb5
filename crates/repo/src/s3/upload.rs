//! Uploads: an object is made of parts, which are sent or are copies of what the store has, and put together if nothing has its name.
//!
//! Until it is put together any process can abort it. An upload that was aborted cannot be put together.
//!
//! `object_store` copies files of up to 5 GiB. It signs these requests, and sends them.

use std::ops::Range;
use std::time::Duration;

use futures_util::{StreamExt as _, TryStreamExt as _};
use http::{HeaderName, Method, StatusCode, header};
use object_store::aws::AwsAuthorizer;
use object_store::client::{HttpRequest, HttpRequestBody};
use object_store::multipart::MultipartStore as _;
use object_store::path::Path;
use object_store::signer::Signer as _;
use object_store::{Error, Result};

use super::link::{Link, REQUEST_MAX, between, message};

/// Bytes of a part: a store takes 10,000 of them, of 5 MiB to 5 GiB.
const PART: u64 = 64 << 20;
/// Parts that are copied at once.
const AT_ONCE: usize = 8;
/// How often a part is copied before that is given up, and the pause before the second time.
const TRIES: u32 = 5;
const PAUSE: Duration = Duration::from_millis(200);

/// Copies a file of `len` bytes, one at least.
///
/// # Errors
/// `AlreadyExists` for one that has that name, unless it is to be replaced; what the store says.
pub(super) async fn copy(link: &Link, from: &Path, to: &Path, (len, replaces): (u64, bool)) -> Result<()> {
    let upload = Upload::begin(link, to).await?;
    let done = match upload.copy(from, len).await {
        Ok(parts) => upload.put_together(&parts, replaces).await,
        Err(error) => Err(error),
    };
    if done.is_err() {
        // What stays, the bucket's rules remove.
        let _ = upload.abort().await;
    }
    done
}

/// An object that is not put together yet.
pub(super) struct Upload<'a> {
    link: &'a Link,
    to: Path,
    id: String,
}

/// What names a part when all are put together, as XML.
pub(super) struct Part(String);

/// What the store answered.
struct Answer {
    status: StatusCode,
    body: String,
}

impl<'a> Upload<'a> {
    /// Begins one, of the object at `to`.
    pub(super) async fn begin(link: &'a Link, to: &Path) -> Result<Self> {
        Ok(Self::begun(link, to, &link.store.create_multipart(to).await?))
    }

    /// One that was begun.
    pub(super) fn begun(link: &'a Link, to: &Path, id: &str) -> Self {
        Self { link, to: to.clone(), id: id.to_owned() }
    }

    /// Tells it from others.
    pub(super) fn id(&self) -> &str {
        &self.id
    }

    /// Sends the only part.
    pub(super) async fn send_part(&self, bytes: Vec<u8>) -> Result<Vec<Part>> {
        let part = self.link.store.put_part(&self.to, &self.id, 0, bytes.into()).await?;
        Ok(vec![Part::new(1, &part.content_id)])
    }

    /// Copies all `len` bytes of a file.
    pub(super) async fn copy(&self, from: &Path, len: u64) -> Result<Vec<Part>> {
        let parts = (0..len).step_by(PART as usize).map(|at| at..(at + PART).min(len)).zip(1..);
        let copies = parts.map(|(range, number)| self.copy_part(from, range, number));
        futures_util::stream::iter(copies).buffered(AT_ONCE).try_collect().await
    }

    /// Gives it up: it is not put together any more, if it was not before.
    pub(super) async fn abort(&self) -> Result<()> {
        match self.link.store.abort_multipart(&self.to, &self.id).await {
            Err(Error::NotFound { .. }) => Ok(()),
            other => other,
        }
    }

    async fn copy_part(&self, from: &Path, range: Range<u64>, number: u32) -> Result<Part> {
        let text = number.to_string();
        let query = [("partNumber", &*text), ("uploadId", &*self.id)];
        let source = format!("{}/{from}", self.link.bucket);
        let bytes = format!("bytes={}-{}", range.start, range.end - 1);
        let headers = [
            (HeaderName::from_static("x-amz-copy-source"), &*source),
            (HeaderName::from_static("x-amz-copy-source-range"), &*bytes),
        ];
        let mut tries = 1;
        loop {
            let answer = self.send(Method::PUT, &query, &headers, String::new()).await;
            let is_transient = answer.as_ref().map_or(true, |answer| answer.status.is_server_error());
            if is_transient && tries < TRIES {
                tokio::time::sleep(PAUSE * (1 << tries)).await;
                tries += 1;
                continue;
            }
            let answer = answer?;
            return match tag(&answer.body) {
                Some(tag) if answer.status.is_success() => Ok(Part::new(number, tag)),
                _ if answer.status == StatusCode::NOT_FOUND => {
                    let source = "what was not published is gone: another process swept it".into();
                    Err(Error::NotFound { path: from.to_string(), source })
                }
                _ => Err(answer.refused()),
            };
        }
    }

    /// Makes it an object. Once only: a second answer would be about what the first request made.
    ///
    /// # Errors
    /// `AlreadyExists` for one that has that name, unless it is to be replaced; `NotFound` when it was aborted; what the store says.
    pub(super) async fn put_together(&self, parts: &[Part], replaces: bool) -> Result<()> {
        let parts: String = parts.iter().map(|part| &*part.0).collect();
        let body = format!("<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>");
        let condition = [(header::IF_NONE_MATCH, "*")];
        let headers = if replaces { &[][..] } else { &condition };
        let answer = self.send(Method::POST, &[("uploadId", &self.id)], headers, body).await?;
        match answer.status {
            // A store that takes long begins its answer before it knows.
            StatusCode::OK if tag(&answer.body).is_some() => Ok(()),
            StatusCode::PRECONDITION_FAILED | StatusCode::CONFLICT => {
                Err(Error::AlreadyExists { path: self.to.to_string(), source: answer.body.into() })
            }
            StatusCode::NOT_FOUND => {
                Err(Error::NotFound { path: self.to.to_string(), source: answer.body.into() })
            }
            _ => Err(answer.refused()),
        }
    }

    async fn send(
        &self,
        method: Method,
        query: &[(&str, &str)],
        headers: &[(HeaderName, &str)],
        body: String,
    ) -> Result<Answer> {
        // Where the object is, by the library's rules.
        let mut url = self.link.store.signed_url(method.clone(), &self.to, REQUEST_MAX).await?;
        url.query_pairs_mut().clear().extend_pairs(query);
        let mut request = HttpRequest::new(HttpRequestBody::from(body));
        *request.method_mut() = method;
        *request.uri_mut() = url.as_str().parse().map_err(failed)?;
        for (name, value) in headers {
            request.headers_mut().insert(name, value.parse().map_err(failed)?);
        }
        let credential = self.link.store.credentials().get_credential().await?;
        AwsAuthorizer::new(&credential, "s3", &self.link.region).try_authorize(&mut request, None)?;
        let (parts, body) = self.link.http.execute(request).await.map_err(failed)?.into_parts();
        let body = body.bytes().await.map_err(failed)?;
        Ok(Answer { status: parts.status, body: String::from_utf8_lossy(&body).into_owned() })
    }
}

impl Part {
    fn new(number: u32, tag: &str) -> Self {
        Self(format!("<Part><PartNumber>{number}</PartNumber><ETag>{tag}</ETag></Part>"))
    }
}

impl Answer {
    fn refused(self) -> Error {
        let told = message(&self.body).unwrap_or(&self.body);
        failed(format!("the store answered {}: {told}", self.status))
    }
}

fn failed(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::Generic { store: "S3", source: source.into() }
}

/// The tag of what was made, with its quotes, as XML has it.
fn tag(body: &str) -> Option<&str> {
    between(body, "<ETag>", "</ETag>")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_says_what_was_made_or_why_not() {
        let made = "<CopyPartResult><ETag>&quot;a1&quot;</ETag></CopyPartResult>";
        assert_eq!(tag(made), Some("&quot;a1&quot;"));
        let refused = "<Error><Code>NoSuchUpload</Code><Message>it is gone</Message></Error>";
        assert_eq!(tag(refused), None);
        let answer = Answer { status: StatusCode::NOT_FOUND, body: refused.to_owned() };
        assert!(answer.refused().to_string().ends_with("the store answered 404 Not Found: it is gone"));
    }
}
