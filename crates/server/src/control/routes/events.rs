//! `/v1/events`.

use std::convert::Infallible;
use std::sync::Arc;

use axum::extract::State;
use axum::response::sse::{Event as Message, KeepAlive, Sse};
use futures_util::stream::{Stream, unfold};
use tokio::sync::broadcast::error::RecvError;
use vmstrata_api::Event;

use crate::host::Host;

/// What happens from now on, as server-sent events
#[utoipa::path(get, path = "/v1/events", tag = "server", responses((status = OK, description = "A stream that ends with the server", content_type = "text/event-stream", body = Event)))]
pub(in crate::control) async fn events(
    State(host): State<Arc<Host>>,
) -> Sse<impl Stream<Item = Result<Message, Infallible>>> {
    let messages = unfold(host.events(), |mut events| async move {
        let event = match events.recv().await {
            Ok(event) => event,
            Err(RecvError::Lagged(count)) => Event::Missed { count },
            Err(RecvError::Closed) => return None,
        };
        let data = serde_json::to_string(&event).expect("an event is plain data");
        Some((Ok(Message::default().event(event.name()).data(data)), events))
    });
    Sse::new(messages).keep_alive(KeepAlive::default())
}
