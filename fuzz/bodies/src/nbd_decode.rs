//! One message of an NBD client, as each message there is.

use vmstrata_export::nbd::protocol::MAX_STRING;
use vmstrata_export::nbd::protocol::option::{
    ContextQuery, InfoQuery, OptionHeader, OptionKind, decode_export_name,
};
use vmstrata_export::nbd::protocol::request::{Request, StatusFilter};

/// Decodes `data` in every way.
///
/// # Panics
/// When a decoder finds more in it than there is, or a request does not survive being written.
pub fn nbd_decode(data: &[u8]) {
    for extended in [false, true] {
        if let Ok(request) = Request::decode(data, extended) {
            let mut bytes = Vec::new();
            request.encode(extended, &mut bytes);
            assert_eq!(bytes, data[..Request::size(extended)]);
            assert!(request.payload_len(extended) <= request.length);
        }
    }
    if let Some(head) = data.first_chunk() {
        let kind = OptionHeader::decode(head).map(|header| header.kind);
        assert!(kind.is_err() || kind.is_ok_and(|kind| OptionKind::from_wire(kind.to_wire()) == kind));
    }
    if let Ok(query) = InfoQuery::decode(data) {
        assert!(query.export.len() <= MAX_STRING && query.export.len() + 6 <= data.len());
    }
    if let Ok(query) = ContextQuery::decode(data) {
        assert_eq!(query.queries().count(), query.count as usize);
        let len: usize = query.queries().map(|query| 4 + query.len()).sum();
        assert_eq!(len + query.export.len() + 8, data.len());
    }
    if let Ok(filter) = StatusFilter::decode(data) {
        assert_eq!(filter.context_ids().count() * 4 + 8, data.len());
    }
    if let Ok(name) = decode_export_name(data) {
        assert_eq!(name.as_bytes(), data);
    }
}
