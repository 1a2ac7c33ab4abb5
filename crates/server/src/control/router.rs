//! Which path leads to which handler, and the OpenAPI document made from the same list.

use std::sync::Arc;

use axum::Router;
use utoipa::OpenApi as _;
use utoipa::openapi::schema::{Components, Schema};
use utoipa::openapi::{ContentBuilder, OpenApi, Ref, RefOr, Response, ResponseBuilder};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::problem::{no_such_method, no_such_path};
use super::routes::{disks, doors, events, jobs, metrics, snapshots, status};
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
        (name = "doors", description = "Where guests and NBD clients come in"),
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
        .routes(routes!(doors::list, doors::add))
        .routes(routes!(doors::show, doors::remove))
        .routes(routes!(snapshots::take))
        .routes(routes!(snapshots::revert))
        .routes(routes!(jobs::list, jobs::start))
        .routes(routes!(jobs::show, jobs::change))
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
    document.components.iter_mut().for_each(open_what_is_extended);
    document
}

/// A schema to which others add fields must not say that there are no more: nothing would be valid as one of those.
fn open_what_is_extended(components: &mut Components) {
    let extended: Vec<String> = components.schemas.values().flat_map(extended_by).collect();
    for name in extended {
        if let Some(RefOr::T(Schema::Object(object))) = components.schemas.get_mut(&name) {
            object.additional_properties = None;
        }
    }
}

/// The schemas that this one, or one of its variants, adds to.
fn extended_by(schema: &RefOr<Schema>) -> Vec<String> {
    let name = |part: &RefOr<Schema>| match part {
        RefOr::Ref(part) => part.ref_location.rsplit('/').next().map(str::to_owned),
        RefOr::T(_) => None,
    };
    match schema {
        RefOr::T(Schema::OneOf(one)) => one.items.iter().flat_map(extended_by).collect(),
        RefOr::T(Schema::AllOf(all)) => all.items.iter().filter_map(name).collect(),
        _ => Vec::new(),
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
