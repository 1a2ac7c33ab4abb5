//! Errors as their senders see them: one form, a kind for programs, and a sentence for people.

use std::io;

use axum::http::{HeaderValue, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use vmstrata_api::{PROBLEM_TYPE, Problem};
use vmstrata_disk::merge::MergeFault;
use vmstrata_disk::snapshot::SnapshotFault;
use vmstrata_disk::{ErrorKind, ResizeFault};
use vmstrata_export::{fuse, nbd, vhost_user};
use vmstrata_store::FileError;
use vmstrata_types::{path_to_text, told};

use crate::error::Error;
use crate::spec::SpecError;

/// A request that was not carried out.
#[derive(Debug)]
pub(super) struct Failure(Box<Problem>);

impl Failure {
    pub(super) fn new(status: u16, kind: &str, detail: impl Into<String>) -> Self {
        Self(Box::new(Problem::new(status, kind, detail)))
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.0.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, axum::Json(*self.0)).into_response();
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(PROBLEM_TYPE));
        response
    }
}

/// A path that nothing is at.
pub(super) async fn no_such_path(uri: Uri) -> Failure {
    Failure::new(
        404,
        "no-such-path",
        format!("nothing is at {}; GET /v1/openapi.json says what is", uri.path()),
    )
}

/// A path that knows other methods.
pub(super) async fn no_such_method(method: Method, uri: Uri) -> Failure {
    Failure::new(405, "no-such-method", format!("{} cannot be used with {method}", uri.path()))
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let (status, kind) = classify(&error);
        let mut problem = Problem::new(status, kind, told(&error));
        let engine = match &error {
            Error::Disk(engine) | Error::NbdFlush(engine) => Some(engine),
            Error::NotClean { failures } => failures.first().map(|failure| &failure.source),
            _ => None,
        };
        if let Some(engine) = engine {
            problem.file = engine.path().map(path_to_text);
            problem.layer = engine.layer().map(|layer| layer.get());
            problem.offset = engine.offset().map(|offset| offset.get());
        }
        Self(Box::new(problem))
    }
}

/// The HTTP status and the kind: 404 not there, 409 in the way of something that is, 422 not to be had as asked for.
fn classify(error: &Error) -> (u16, &'static str) {
    match error {
        Error::NameTaken { .. } => (409, "name-taken"),
        Error::Spec(SpecError::TwoGuests { .. }) => (409, "two-guests"),
        Error::Spec(_)
        | Error::Tiered { .. }
        | Error::NotTiered { .. }
        | Error::NoReplica { .. }
        | Error::Local { .. }
        | Error::InGroup { .. }
        | Error::NewGroup { .. }
        | Error::GroupDiffers { .. } => (422, "invalid"),
        Error::Tier(tier) => classify_tier(tier),
        Error::Move(moved) => classify_move(moved),
        // A file, or what lies below one.
        Error::TierDirectory { source, .. } if is_no_directory(source) => (422, "invalid"),
        Error::NotAllPublished { .. } => (503, "not-published"),
        Error::Served { .. } => (409, "already-served"),
        Error::NoSuchDisk { .. } => (404, "no-such-disk"),
        Error::NoSuchExport { .. } => (404, "no-such-export"),
        Error::NoSuchJob { .. } => (404, "no-such-job"),
        Error::NotPending { .. } => (404, "no-such-snapshot"),
        Error::JobExists { .. } => (409, "job-exists"),
        Error::TooManyJobs { .. } => (503, "too-many-jobs"),
        Error::Crowded { .. } => (503, "crowded"),
        Error::NotOpen { .. } => (409, "not-open"),
        Error::Busy { .. } | Error::BeingAttached { .. } | Error::StandsBy { .. } => (409, "busy"),
        Error::NoStandby { .. } => (409, "no-standby"),
        Error::Attached { .. } | Error::GuestAttached { .. } | Error::FilesOpen { .. } => (409, "attached"),
        Error::NoAgent { .. } => (422, "no-agent"),
        Error::Agent { .. } => (409, "not-quiesced"),
        Error::StillFrozen { .. } => (500, "guest-frozen"),
        Error::ThawedEarly { .. } => (500, "thawed-early"),
        Error::Ending => (503, "ending"),
        Error::NotClean { .. } => (500, "not-clean"),
        Error::NbdFlush(_) => (500, "not-flushed"),
        Error::NotEnded { .. } => (504, "not-ended"),
        Error::Disk(engine) => classify_engine(engine),
        Error::VhostUser { source, .. } => classify_vhost_user(source),
        Error::Nbd(nbd::Error::Bind { .. }) => (409, "cannot-listen"),
        Error::Nbd(nbd::Error::Start { .. }) => (500, "system"),
        Error::Nbd(_) => (422, "invalid"),
        Error::Fuse(fuse::Error::Start { .. }) => (500, "system"),
        Error::Fuse(_) => (409, "cannot-mount"),
        _ => (500, "system"),
    }
}

fn is_no_directory(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::AlreadyExists | io::ErrorKind::NotADirectory)
}

fn classify_vhost_user(error: &vhost_user::Error) -> (u16, &'static str) {
    match error {
        vhost_user::Error::InUse { .. } => (409, "socket-in-use"),
        vhost_user::Error::NotASocket { .. } => (409, "not-a-socket"),
        vhost_user::Error::Listen { .. } => (409, "cannot-listen"),
        vhost_user::Error::Option { .. } => (422, "invalid"),
        vhost_user::Error::Disk(engine) => classify_engine(engine),
        _ => (500, "system"),
    }
}

fn classify_tier(error: &vmstrata_tier::Error) -> (u16, &'static str) {
    use vmstrata_tier::Error;
    match error {
        Error::Disk(engine) => classify_engine(engine),
        Error::Fenced { .. } => (409, "fenced"),
        Error::NotHandedOver { .. } => (409, "not-handed-over"),
        Error::NotOffered { .. } | Error::OwnCopy { .. } | Error::Resized { .. } => (409, "busy"),
        Error::NotPublished(_) => (503, "not-published"),
        Error::NameTaken { .. } => (409, "name-taken"),
        Error::TooManyPending { .. } => (503, "crowded"),
        Error::Held { .. } => (409, "file-in-use"),
        Error::Pinned { .. } => (409, "held"),
        Error::NoRoom { .. } => (507, "no-space"),
        Error::NoState { .. } => (404, "no-such-snapshot"),
        Error::NotAttachable { .. }
        | Error::Foreign { .. }
        | Error::NotHeld { .. }
        | Error::Unnamable(_)
        | Error::NoGroup { .. }
        | Error::Incomplete { .. }
        | Error::OtherBase { .. }
        | Error::OtherDisk { .. }
        | Error::Detached { .. } => (422, "invalid"),
        _ => (500, "tier"),
    }
}

fn classify_move(error: &vmstrata_migrate::Error) -> (u16, &'static str) {
    use vmstrata_migrate::Error;
    match error {
        Error::Disk(engine) => classify_engine(engine),
        Error::Refused { .. } => (422, "invalid"),
        Error::Exists { .. } => (409, "name-taken"),
        Error::NoRoom { .. } => (507, "no-space"),
        _ => (500, "move"),
    }
}

fn classify_engine(error: &vmstrata_disk::Error) -> (u16, &'static str) {
    match error.fault() {
        Some(
            SnapshotFault::Exists { .. } | SnapshotFault::NameTaken { .. } | SnapshotFault::KeepExists { .. },
        ) => return (409, "name-taken"),
        Some(SnapshotFault::StaysRaw) => return (409, "stays-raw"),
        Some(SnapshotFault::Held(_)) => return (409, "held"),
        _ => {}
    }
    match error.fault() {
        Some(MergeFault::Held(_)) => return (409, "held"),
        Some(MergeFault::LosesSnapshots { .. }) => return (409, "loses-snapshots"),
        _ => {}
    }
    match error.fault() {
        Some(ResizeFault::WouldShrink { .. }) => return (409, "would-shrink"),
        Some(ResizeFault::Merging) => return (409, "busy"),
        Some(_) => return (422, "invalid"),
        None => {}
    }
    match error.kind() {
        ErrorKind::File(FileError::Lock(_)) => (409, "file-in-use"),
        ErrorKind::File(_) => (422, "file"),
        ErrorKind::Gate(_) => (422, "file-not-allowed"),
        ErrorKind::Io { .. } => (500, "io"),
        ErrorKind::Format(_)
        | ErrorKind::Foreign { .. }
        | ErrorKind::BackingFormat { .. }
        | ErrorKind::BackingName { .. } => (422, "not-supported"),
        ErrorKind::Entry { .. }
        | ErrorKind::Truncated { .. }
        | ErrorKind::Decompress
        | ErrorKind::Refcount { .. }
        | ErrorKind::MarkedCorrupt
        | ErrorKind::Changed => (422, "damaged"),
        ErrorKind::Loop { .. } | ErrorKind::TooLong | ErrorKind::TooLarge { .. } => (422, "chain"),
        ErrorKind::ReadOnly | ErrorKind::Published | ErrorKind::TieredPath => (409, "read-only"),
        ErrorKind::BehindLog => (409, "behind-log"),
        ErrorKind::IsBase { .. } => (409, "stood-on"),
        ErrorKind::Failed { .. } => (500, "failed"),
        ErrorKind::Closed => (409, "busy"),
        _ => (422, "engine"),
    }
}
