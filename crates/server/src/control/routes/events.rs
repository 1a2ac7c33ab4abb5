//! `/v1/events`.

use std::convert::Infallible;
use std::sync::Arc;

use axum::extract::State;
use axum::response::sse::{Event as Message, KeepAlive, Sse};
use futures_util::stream::{Stream, unfold};
use tokio::sync::broadcast::error::RecvError;
use vmstrata_api::Event;

use crate::control::listen::CONNECTIONS_MAX;
use crate::control::problem::Failure;
use crate::host::Host;

/// Streams at one time: half of all connections are left to those who ask something.
const READERS_MAX: usize = CONNECTIONS_MAX / 2;

/// What happens from now on, as server-sent events
#[utoipa::path(get, path = "/v1/events", tag = "server", responses((status = OK, description = "A stream that ends with the server", content_type = "text/event-stream", body = Event)))]
pub(in crate::control) async fn events(
    State(host): State<Arc<Host>>,
) -> Result<Sse<impl Stream<Item = Result<Message, Infallible>>>, Failure> {
    if host.event_readers() >= READERS_MAX {
        let detail = format!("{READERS_MAX} streams of events are open: end one of them");
        return Err(Failure::new(503, "too-many-streams", detail));
    }
    let messages = unfold(host.events(), |mut events| async move {
        let event = match events.recv().await {
            Ok(event) => event,
            Err(RecvError::Lagged(count)) => Event::Missed { count },
            Err(RecvError::Closed) => return None,
        };
        let data = serde_json::to_string(&event).expect("an event is plain data");
        Some((Ok(Message::default().event(event.name()).data(data)), events))
    });
    Ok(Sse::new(messages).keep_alive(KeepAlive::default()))
}
