//! Gives a file that the store has another name: the store copies it, in parts, and puts them together if nothing has that name.
//!
//! `object_store` does so for files of up to 5 GiB. It signs these requests, and sends them.

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
    let upload = link.store.create_multipart(to).await?;
    let copying = Copying { link, from, to, upload: &upload };
    let done = copying.copy(len, replaces).await;
    if done.is_err() {
        // What stays, the bucket's rules remove.
        let _ = link.store.abort_multipart(to, &upload).await;
    }
    done
}

struct Copying<'a> {
    link: &'a Link,
    from: &'a Path,
    to: &'a Path,
    upload: &'a str,
}

/// What the store answered.
struct Answer {
    status: StatusCode,
    body: String,
}

impl Copying<'_> {
    async fn copy(&self, len: u64, replaces: bool) -> Result<()> {
        let parts = (0..len).step_by(PART as usize).map(|at| at..(at + PART).min(len)).zip(1..);
        let copies = parts.map(|(range, number)| self.copy_part(range, number));
        let parts: Vec<String> = futures_util::stream::iter(copies).buffered(AT_ONCE).try_collect().await?;
        self.put_together(&parts, replaces).await
    }

    /// Returns what names the part when all are put together.
    async fn copy_part(&self, range: Range<u64>, number: u32) -> Result<String> {
        let number = number.to_string();
        let query = [("partNumber", &*number), ("uploadId", self.upload)];
        let source = format!("{}/{}", self.link.bucket, self.from);
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
                Some(tag) if answer.status.is_success() => {
                    Ok(format!("<Part><PartNumber>{number}</PartNumber><ETag>{tag}</ETag></Part>"))
                }
                _ if answer.status == StatusCode::NOT_FOUND => {
                    let source = "what was not published is gone: another process swept it".into();
                    Err(Error::NotFound { path: self.from.to_string(), source })
                }
                _ => Err(answer.refused()),
            };
        }
    }

    /// Once only: a second answer would be about what the first request made.
    async fn put_together(&self, parts: &[String], replaces: bool) -> Result<()> {
        let body = format!("<CompleteMultipartUpload>{}</CompleteMultipartUpload>", parts.concat());
        let condition = [(header::IF_NONE_MATCH, "*")];
        let headers = if replaces { &[][..] } else { &condition };
        let answer = self.send(Method::POST, &[("uploadId", self.upload)], headers, body).await?;
        match answer.status {
            // A store that takes long begins its answer before it knows.
            StatusCode::OK if tag(&answer.body).is_some() => Ok(()),
            StatusCode::PRECONDITION_FAILED | StatusCode::CONFLICT => {
                Err(Error::AlreadyExists { path: self.to.to_string(), source: answer.body.into() })
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
        let mut url = self.link.store.signed_url(method.clone(), self.to, REQUEST_MAX).await?;
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
