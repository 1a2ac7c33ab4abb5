//! What a run is at, said every few seconds, whatever it waits for.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// From one line to the next.
const EVERY: Duration = Duration::from_secs(10);

/// Who does something.
#[derive(Clone, Copy, Debug)]
pub(super) enum Who {
    /// The thread that takes snapshots, kills, and judges in the end.
    Taker,
    /// The thread that deletes.
    Deleter,
}

/// What each of them does, and since when.
type Doing = [Option<(String, Instant)>; 2];

/// Prints lines until its last clone is dropped.
#[derive(Clone, Debug)]
pub(super) struct Progress(Arc<Mutex<Doing>>);

impl Progress {
    /// Begins to print to standard error.
    pub(super) fn begin() -> Self {
        let doing = Arc::new(Mutex::new(Doing::default()));
        let (shown, start) = (Arc::downgrade(&doing), Instant::now());
        std::thread::spawn(move || show(&shown, start));
        Self(doing)
    }

    /// `who` goes on to something else.
    pub(super) fn now(&self, who: Who, what: String) {
        let mut doing = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        doing[who as usize] = Some((what, Instant::now()));
    }

    /// `who` has come to its end.
    pub(super) fn done(&self, who: Who) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)[who as usize] = None;
    }
}

fn show(shown: &Weak<Mutex<Doing>>, start: Instant) {
    loop {
        sleep(EVERY);
        let Some(doing) = shown.upgrade() else { return };
        let doing = doing.lock().unwrap_or_else(PoisonError::into_inner).clone();
        eprintln!("{}", line(start.elapsed(), &doing));
    }
}

fn line(since: Duration, doing: &Doing) -> String {
    let each =
        doing.iter().flatten().map(|(what, since)| format!("{what} ({} s)", since.elapsed().as_secs()));
    format!("soak, {} s: {}", since.as_secs(), each.collect::<Vec<_>>().join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_tells_what_each_does_until_it_is_done() {
        let progress = Progress::begin();
        let said = || line(Duration::from_secs(70), &progress.0.lock().unwrap());
        progress.now(Who::Taker, "3 of 9 snapshots".to_owned());
        progress.now(Who::Deleter, "1 of 5 deletes".to_owned());
        assert_eq!(said(), "soak, 70 s: 3 of 9 snapshots (0 s); 1 of 5 deletes (0 s)");
        progress.done(Who::Deleter);
        assert_eq!(said(), "soak, 70 s: 3 of 9 snapshots (0 s)");
    }
}
