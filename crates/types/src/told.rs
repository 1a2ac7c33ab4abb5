//! Errors as people read them.

use std::error::Error;

/// The error and its causes, leaving out a cause whose words the error above it has already.
pub fn told(error: &(dyn Error + 'static)) -> String {
    let mut told = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        let words = next.to_string();
        if !told.contains(&words) {
            told = format!("{told}: {words}");
        }
        cause = next.source();
    }
    told
}
