//! What `docs/openapi.json` promises of requests and answers, checked of real ones.
//!
//! OpenAPI 3.1 schemas are JSON Schemas. An answer may have nothing that the document does not name: clients are told to pass
//! over what they do not know, but what the server says is to be documented.

use std::collections::BTreeSet;
use std::sync::OnceLock;

use serde_json::{Map, Value, json};

use super::http::Answer;

/// Operations of the document: method in capitals, and path with its parameters in braces.
pub fn operations() -> BTreeSet<(String, String)> {
    let paths = document()["paths"].as_object().expect("paths");
    let operations = paths.iter().flat_map(|(path, methods)| {
        let methods = methods.as_object().expect("methods").keys();
        methods.map(|method| (method.to_uppercase(), path.clone()))
    });
    operations.collect()
}

/// Checks a request and its answer; returns the operation that it was, if any.
///
/// # Panics
/// Where they are not as the document says.
pub fn check(method: &str, path: &str, body: &str, answer: &Answer) -> Option<(String, String)> {
    let Some((template, methods)) = resource(path) else {
        assert_eq!(answer.status, 404, "the document has no {path}, yet: {answer:?}");
        assert_is(&problem(), answer, path);
        return None;
    };
    let Some(operation) = methods.get(&method.to_lowercase()).filter(|it| it["responses"].is_object()) else {
        assert_eq!(answer.status, 405, "the document has no {method} {path}, yet: {answer:?}");
        assert_is(&problem(), answer, path);
        return None;
    };
    let documented = operation["responses"].get(answer.status.to_string());
    assert!(documented.is_some() || answer.status >= 400, "{method} {path}: {answer:?} is not documented");
    assert_is(documented.unwrap_or(&operation["responses"]["default"]), answer, path);
    if documented.is_some() {
        assert_asks(operation, body);
    }
    Some((method.to_owned(), template.to_owned()))
}

/// Checks the data of an event.
///
/// # Panics
/// When it is none of the documented ones.
pub fn check_event(event: &Value) {
    assert_matches(&json!({ "$ref": "#/components/schemas/Event" }), event);
}

/// The path of the document that `path` is one of, and what can be done with it.
fn resource(path: &str) -> Option<(&'static str, &'static Map<String, Value>)> {
    let is_parameter = |part: &str| part.starts_with('{');
    let fits = |template: &str| {
        let (template, path) = (template.split('/'), path.split('/'));
        template.clone().count() == path.clone().count()
            && template.zip(path).all(|(is, asked)| is == asked || is_parameter(is) && !asked.is_empty())
    };
    let mut paths = document()["paths"].as_object().expect("paths").iter();
    let (template, methods) = paths.find(|(template, _)| fits(template))?;
    Some((template, methods.as_object().expect("methods")))
}

fn problem() -> Value {
    document()["paths"]["/v1/status"]["get"]["responses"]["default"].clone()
}

/// The answer has a body of the documented type, or none where none is documented.
fn assert_is(documented: &Value, answer: &Answer, path: &str) {
    let Some(content) = documented["content"].as_object() else {
        assert_eq!(answer.body, "", "{path}");
        return;
    };
    let said = answer.header.lines().find_map(|line| line.strip_prefix("content-type: "));
    let media = said.and_then(|said| said.split(';').next()).unwrap_or_default();
    let content = content.get(media).unwrap_or_else(|| panic!("{path}: '{media}' is not documented"));
    if media.ends_with("json") && content["schema"].is_object() {
        assert_matches(&content["schema"], &answer.json());
    }
}

/// A request that was carried out is one that the document allows.
fn assert_asks(operation: &Value, body: &str) {
    let schema = &operation["requestBody"]["content"]["application/json"]["schema"];
    if schema.is_object() {
        assert_matches(schema, &serde_json::from_str(body).expect("a request's body is JSON"));
    }
}

fn assert_matches(schema: &Value, value: &Value) {
    let mut root = schema.clone();
    root["components"] = document()["components"].clone();
    if schema["$ref"].is_string() {
        root["unevaluatedProperties"] = false.into();
    }
    let validator = jsonschema::draft202012::new(&root).expect("a schema");
    let errors: Vec<String> =
        validator.iter_errors(value).map(|error| format!("{error} ({})", error.instance_path())).collect();
    assert!(errors.is_empty(), "{value} is not as documented: {errors:#?}\n{schema}");
}

fn document() -> &'static Value {
    static DOCUMENT: OnceLock<Value> = OnceLock::new();
    DOCUMENT.get_or_init(|| {
        let text = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/openapi.json"));
        let mut document: Value = serde_json::from_str(text).expect("JSON");
        let extended = BTreeSet::from_iter(extended(&document));
        for (name, schema) in document["components"]["schemas"].as_object_mut().expect("schemas") {
            if schema["type"] == "object"
                && !extended.contains(name)
                && schema.get("additionalProperties").is_none()
            {
                schema["additionalProperties"] = false.into();
            }
        }
        document
    })
}

/// Schemas to which others add something.
fn extended(value: &Value) -> Vec<String> {
    let inside = match value {
        Value::Array(values) => values.iter().flat_map(extended).collect(),
        Value::Object(values) => values.values().flat_map(extended).collect(),
        _ => Vec::new(),
    };
    let parts = value["allOf"].as_array().into_iter().flatten();
    let names = parts.filter_map(|part| part["$ref"].as_str()?.rsplit('/').next().map(str::to_owned));
    names.chain(inside).collect()
}
