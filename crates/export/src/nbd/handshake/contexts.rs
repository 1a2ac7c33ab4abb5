//! The options that list and select metadata contexts.

use super::Handshake;
use crate::nbd::contexts::{Context, ContextSet, DIFF_PREFIX};
use crate::nbd::diff_base::{self, Selection};
use crate::nbd::exports::Export;
use crate::nbd::protocol::option::{ContextQuery, OptionKind, ReplyKind, encode_reply_header};

impl Handshake<'_> {
    pub(super) fn meta_context(&mut self, kind: OptionKind, data: &[u8]) {
        let is_set = kind == OptionKind::SetMetaContext;
        if is_set {
            // A selection replaces the one before, even where it fails.
            self.contexts = None;
        }
        if !self.style.is_chunked() {
            return self.put(kind, ReplyKind::ErrInvalid, b"structured replies must come first");
        }
        let Ok(query) = ContextQuery::decode(data) else {
            return self.put(kind, ReplyKind::ErrInvalid, b"malformed data");
        };
        let Some(export) = self.exports.resolve(query.export, &self.names) else {
            return self.put(kind, ReplyKind::ErrUnknown, b"no export has this name");
        };
        let export = export.export;
        if is_set {
            let selection = Selection::of(query.queries(), export.disk());
            for (context, name) in selection.names() {
                self.put_context(kind, &name, context.id());
            }
            self.contexts = Some((export, selection));
        } else {
            self.list_contexts(&query, &export);
        }
        self.put(kind, ReplyKind::Ack, &[]);
    }

    /// Names what the queries are about; the layers of a long chain only to those who ask for them.
    fn list_contexts(&mut self, query: &ContextQuery<'_>, export: &Export) {
        let option = OptionKind::ListMetaContext;
        let mut fixed = if query.count == 0 { ContextSet::FIXED } else { ContextSet::EMPTY };
        query.queries().for_each(|name| fixed.select(name, true));
        for (_, name) in Context::FIXED.into_iter().filter(|(context, _)| fixed.contains(*context)) {
            self.put_context(option, name, 0);
        }
        if query.queries().any(|name| name == DIFF_PREFIX) {
            for name in diff_base::list(export.disk()) {
                self.put_context(option, &name, 0);
            }
            return;
        }
        let named = query.queries().filter(|name| name.starts_with(DIFF_PREFIX));
        for (_, name) in Selection::of(named, export.disk()).names() {
            self.put_context(option, &name, 0);
        }
    }

    fn put_context(&mut self, option: OptionKind, name: &str, id: u32) {
        self.reply.extend(encode_reply_header(option, ReplyKind::MetaContext, 4 + name.len()));
        self.reply.extend(id.to_be_bytes());
        self.reply.extend(name.as_bytes());
    }
}
