//! What a repository did not do.

use std::fmt;
use std::io;

use thiserror::Error;

use crate::name::ObjectName;

/// Shorthand for results of repositories.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An operation of a repository that failed.
#[derive(Debug, Error)]
#[error("{repository}: {action}{}{}", Before(" ", object), Before(" at byte ", offset))]
pub struct Error {
    /// The repository, as [`Repository::describe`](crate::Repository::describe) calls it, or its address.
    pub repository: String,
    /// What it was doing.
    pub action: &'static str,
    /// With which object.
    pub object: Option<ObjectName>,
    /// From which byte of it on.
    pub offset: Option<u64>,
    /// The cause.
    pub source: io::Error,
}

impl Error {
    /// For `map_err`: `action` in `repository` failed.
    pub fn of(repository: impl fmt::Display, action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self { repository: repository.to_string(), action, object: None, offset: None, source }
    }

    /// For `map_err`: `action` on `object` in `repository` failed.
    pub fn of_object(
        repository: impl fmt::Display,
        action: &'static str,
        object: &ObjectName,
    ) -> impl FnOnce(io::Error) -> Self {
        move |source| Self { object: Some(object.clone()), ..Self::of(repository, action)(source) }
    }

    /// For `map_err`: reading `object` in `repository` from byte `at` on failed.
    pub fn of_read(
        repository: impl fmt::Display,
        object: &ObjectName,
        at: u64,
    ) -> impl FnOnce(io::Error) -> Self {
        move |source| Self { offset: Some(at), ..Self::of_object(repository, "reading", object)(source) }
    }

    /// The kind of its cause.
    pub fn kind(&self) -> io::ErrorKind {
        self.source.kind()
    }
}

/// A value, if there is one, with something before it.
struct Before<'a, T>(&'static str, &'a Option<T>);

impl<T: fmt::Display> fmt::Display for Before<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.1.iter().try_for_each(|value| write!(f, "{}{value}", self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_repository_object_and_offset() {
        let name = ObjectName::new("web.head").unwrap();
        let cause = || io::ErrorKind::NotFound.into();
        assert_eq!(Error::of("/srv/a", "listing")(cause()).to_string(), "/srv/a: listing");
        assert_eq!(
            Error::of_object("/srv/a", "opening", &name)(cause()).to_string(),
            "/srv/a: opening web.head"
        );
        let read = Error::of_read("/srv/a", &name, 4096)(cause());
        assert_eq!(read.to_string(), "/srv/a: reading web.head at byte 4096");
        assert_eq!(read.kind(), io::ErrorKind::NotFound);
    }
}
