//! The options that list and select metadata contexts.

use super::Handshake;
use crate::nbd::contexts::{Context, ContextSet};
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
        let Some(export) = self.exports.resolve(query.export) else {
            return self.put(kind, ReplyKind::ErrUnknown, b"no export has this name");
        };
        let mut contexts = ContextSet::EMPTY;
        if query.count == 0 && !is_set {
            contexts = ContextSet::ALL;
        }
        for name in query.queries() {
            contexts.select(name, !is_set);
        }
        for context in contexts.iter() {
            self.put_context(kind, context, if is_set { context.id() } else { 0 });
        }
        if is_set {
            self.contexts = Some((export, contexts));
        }
        self.put(kind, ReplyKind::Ack, &[]);
    }

    fn put_context(&mut self, option: OptionKind, context: Context, id: u32) {
        self.reply.extend(encode_reply_header(option, ReplyKind::MetaContext, 4 + context.name().len()));
        self.reply.extend(id.to_be_bytes());
        self.reply.extend(context.name().as_bytes());
    }
}
