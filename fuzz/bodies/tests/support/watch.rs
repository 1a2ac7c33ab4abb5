//! Runs a body on an input: a panic on any thread fails the test, and so does a body that does not end.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Longest run of a body on one input, on a machine that has much else to do.
const TIME_MAX: Duration = Duration::from_secs(60);

static PANICS: Mutex<Vec<String>> = Mutex::new(Vec::new());

type Running = Option<(Instant, &'static str, Vec<u8>)>;

/// See the module documentation.
pub struct Watch {
    running: Arc<Mutex<Running>>,
}

impl Watch {
    /// From now on panics are noted, whichever thread they are on.
    pub fn start() -> Self {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            PANICS.lock().unwrap_or_else(|broken| broken.into_inner()).push(info.to_string());
            before(info);
        }));
        let running: Arc<Mutex<Running>> = Arc::default();
        let watched = Arc::clone(&running);
        std::thread::spawn(move || {
            loop {
                std::thread::sleep(Duration::from_secs(1));
                if let Some((since, name, input)) = &*watched.lock().unwrap()
                    && since.elapsed() > TIME_MAX
                {
                    eprintln!("{name} does not end: {}", super::keep(name, input));
                    std::process::abort();
                }
            }
        });
        Self { running }
    }

    /// Runs `body` on `input`.
    pub fn run(&self, name: &'static str, input: &[u8], body: fn(&[u8])) {
        *self.running.lock().unwrap() = Some((Instant::now(), name, input.to_vec()));
        let result = catch_unwind(AssertUnwindSafe(|| body(input)));
        *self.running.lock().unwrap() = None;
        let panics = std::mem::take(&mut *PANICS.lock().unwrap());
        if result.is_err() || !panics.is_empty() {
            panic!("{name} on {}: {}", super::keep(name, input), panics.join("; "));
        }
    }
}
