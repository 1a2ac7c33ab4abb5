//! Waiters of chunks: who fetches one of them, and whose time is over.

use std::sync::Arc;
use std::thread;
use std::time::Instant;

use super::{Cache, Cached};

impl Cached {
    /// As [`Cached::wait`] for who waits for nothing: true for the first one, who has the chunk brought and answers the others.
    pub(crate) fn begin(&self, chunk: usize) -> bool {
        let mut waiting = self.waiting.lock();
        let is_first = !waiting.contains_key(&chunk);
        waiting.entry(chunk).or_default();
        is_first
    }
}

impl Cache {
    /// Sees to it that waiters whose time is over by then are told.
    pub(crate) fn expire_at(self: &Arc<Self>, until: Instant) {
        let mut watch = self.watch.lock();
        watch.next = watch.next.into_iter().chain([until]).min();
        if watch.is_running {
            self.watched.notify_one();
            return;
        }
        let cache = Arc::clone(self);
        match thread::Builder::new().name("cache-watch".to_owned()).spawn(move || cache.watch()) {
            Ok(_) => watch.is_running = true,
            Err(error) => tracing::warn!(%error, "reads may wait longer for a repository than they should"),
        }
    }

    /// Runs while somebody waits who will not wait for ever.
    fn watch(&self) {
        let mut watch = self.watch.lock();
        while let Some(next) = watch.next {
            if next > Instant::now() {
                self.watched.wait_until(&mut watch, next);
                continue;
            }
            watch.next = None;
            drop(watch);
            let layers = self.room.lock().layers.clone();
            let now = Instant::now();
            let next = layers.iter().filter_map(|layer| layer.expire(now)).min();
            watch = self.watch.lock();
            watch.next = watch.next.into_iter().chain(next).min();
        }
        watch.is_running = false;
    }
}
