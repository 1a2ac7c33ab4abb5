//! Which path leads to which handler, and the OpenAPI document made from the same list.

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::Router;
use serde_json::{Map, Value, json};
use utoipa::OpenApi as _;
use utoipa::openapi::{ContentBuilder, OpenApi, Ref, Response, ResponseBuilder};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::problem::{no_such_method, no_such_path};
use super::routes::{disks, events, exports, jobs, metrics, snapshots, standby, status};
use crate::host::Host;

#[derive(utoipa::OpenApi)]
#[openapi(
    info(
        title = "vmstrata",
        version = "1",
        description = "Controls a running `vmstrata serve` through its control socket. Fields may be added to answers \
                       in this version; requests are checked strictly. Every error is a problem as RFC 9457 has it."
    ),
    components(schemas(vmstrata_api::Problem, vmstrata_api::Event)),
    tags(
        (name = "server", description = "The server as a whole"),
        (name = "disks", description = "Disks come and go while others are served"),
        (name = "exports", description = "Where guests and NBD clients come in"),
        (name = "jobs", description = "Long work beside the guests")
    )
)]
struct Document;

/// Every route; new ones are named here.
fn routes() -> OpenApiRouter<Arc<Host>> {
    OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(status::status))
        .routes(routes!(status::stats))
        .routes(routes!(status::shutdown))
        .routes(routes!(status::document))
        .routes(routes!(metrics::metrics))
        .routes(routes!(events::events))
        .routes(routes!(disks::list, disks::add))
        .routes(routes!(disks::show, disks::remove))
        .routes(routes!(disks::resize))
        .routes(routes!(disks::limit))
        .routes(routes!(disks::sync_tier))
        .routes(routes!(disks::hold_tier))
        .routes(routes!(standby::follow))
        .routes(routes!(standby::hand_over, standby::take_back))
        .routes(routes!(standby::take_over))
        .routes(routes!(disks::tier_rate, disks::set_tier_rate))
        .routes(routes!(disks::replicas))
        .routes(routes!(disks::pin_replica, disks::drop_replica))
        .routes(routes!(exports::list, exports::add))
        .routes(routes!(exports::show, exports::remove))
        .routes(routes!(snapshots::take))
        .routes(routes!(snapshots::revert))
        .routes(routes!(snapshots::withdraw))
        .routes(routes!(jobs::list, jobs::start))
        .routes(routes!(jobs::show, jobs::change))
        .routes(routes!(jobs::move_rate, jobs::set_move_rate))
}

/// The router of the control socket.
pub(super) fn full(host: Arc<Host>) -> Router {
    let (router, _) = routes().split_for_parts();
    router.fallback(no_such_path).method_not_allowed_fallback(no_such_method).with_state(host)
}

/// The router of the port for metrics: nothing else can be asked there.
pub(super) fn metrics(host: Arc<Host>) -> Router {
    let metrics = axum::routing::get(metrics::metrics);
    let router = Router::new().route("/metrics", metrics.clone()).route("/v1/metrics", metrics);
    router.fallback(no_such_path).method_not_allowed_fallback(no_such_method).with_state(host)
}

/// The API as an OpenAPI document; `docs/openapi.json` is a copy.
pub fn openapi() -> OpenApi {
    let mut document = routes().into_openapi();
    for path in document.paths.paths.values_mut() {
        let operations = [&mut path.get, &mut path.post, &mut path.delete, &mut path.put, &mut path.patch];
        for operation in operations.into_iter().flatten() {
            operation.responses.responses.insert("default".to_owned(), problem().into());
        }
    }
    let mut document = serde_json::to_value(&document).expect("a document is plain data");
    close_requests(&mut document);
    serde_json::from_value(document).expect("it is a document still")
}

/// Says of each object in a request that it has no fields but those that are named: the server refuses others.
fn close_requests(document: &mut Value) {
    let schemas = document["components"]["schemas"].clone();
    let mut asked = BTreeSet::new();
    let paths = document["paths"].as_object().into_iter().flat_map(Map::values);
    for operation in paths.filter_map(Value::as_object).flat_map(Map::values) {
        refer(&operation["requestBody"], &schemas, &mut asked);
    }
    for name in asked {
        close(&mut document["components"]["schemas"][name], &schemas);
    }
}

/// Collects the names of the schemas that `value` refers to.
fn refer(value: &Value, schemas: &Value, found: &mut BTreeSet<String>) {
    match value {
        Value::Array(values) => values.iter().for_each(|value| refer(value, schemas, found)),
        Value::Object(fields) => {
            let name = fields.get("$ref").and_then(Value::as_str).and_then(|to| to.rsplit('/').next());
            if let Some(name) = name.filter(|name| found.insert((*name).to_owned())) {
                refer(&schemas[name], schemas, found);
            }
            fields.values().for_each(|value| refer(value, schemas, found));
        }
        _ => {}
    }
}

/// Parts that make one object become one: each alone would refuse the fields of the others.
fn close(schema: &mut Value, schemas: &Value) {
    if let Some(parts) = schema.get("allOf").and_then(Value::as_array) {
        let mut whole = json!({ "type": "object", "required": [], "properties": {} });
        for part in parts {
            let name = part["$ref"].as_str().and_then(|to| to.rsplit('/').next());
            let part = name.map_or(part, |name| &schemas[name]);
            for (to, from) in [("required", &part["required"]), ("properties", &part["properties"])] {
                match (&mut whole[to], from) {
                    (Value::Array(to), Value::Array(from)) => to.extend(from.iter().cloned()),
                    (Value::Object(to), Value::Object(from)) => to.extend(from.clone()),
                    _ => {}
                }
            }
        }
        if let Some(said) = schema.get("description") {
            whole["description"] = said.clone();
        }
        *schema = whole;
    }
    match schema {
        Value::Array(values) => values.iter_mut().for_each(|value| close(value, schemas)),
        Value::Object(fields) => {
            if fields.contains_key("properties") {
                fields.entry("additionalProperties").or_insert(Value::Bool(false));
            }
            fields.values_mut().for_each(|value| close(value, schemas));
        }
        _ => {}
    }
}

/// What every operation may answer.
fn problem() -> Response {
    let content = ContentBuilder::new().schema(Some(Ref::from_schema_name("Problem"))).build();
    ResponseBuilder::new()
        .description("Why the request was not carried out")
        .content(vmstrata_api::PROBLEM_TYPE, content)
        .build()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    #[test]
    fn what_a_request_may_not_have_is_refused_by_its_schema() {
        let document = serde_json::to_value(super::openapi()).unwrap();
        let schemas = &document["components"]["schemas"];
        let closed = |schema: &serde_json::Value| schema["additionalProperties"] == false;
        assert!(
            ["DiskSpec", "SizeSpec", "SnapshotSpec", "RevertSpec"].iter().all(|name| closed(&schemas[name]))
        );
        for name in ["ExportSpec", "JobSpec", "JobChange", "LayerRef"] {
            let variants = schemas[name]["oneOf"].as_array().unwrap();
            assert!(variants.iter().all(closed), "{name}: {variants:?}");
        }
        assert_eq!(schemas["ExportSpec"]["oneOf"][0]["properties"]["queues"]["maximum"], 256);
    }

    #[test]
    fn the_committed_openapi_document_is_that_of_the_types() {
        let committed = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/openapi.json");
        let generated = super::openapi().to_pretty_json().unwrap() + "\n";
        if std::env::var_os("VMSTRATA_BLESS").is_some() {
            std::fs::write(&committed, &generated).unwrap();
        }
        let found = std::fs::read_to_string(&committed).unwrap_or_default();
        assert!(
            found == generated,
            "docs/openapi.json is not up to date: set VMSTRATA_BLESS=1 and test again"
        );
    }
}
