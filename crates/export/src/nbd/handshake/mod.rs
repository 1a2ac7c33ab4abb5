//! From a fresh connection to a chosen export: fixed newstyle negotiation.
//!
//! Everything is read to the byte, nothing ahead, so that no plain text can slip in behind STARTTLS. The
//! whole phase has one deadline and a bounded number of options.

mod contexts;

use std::sync::Arc;
use std::time::Instant;

use vmstrata_disk::{AttachedWriter, HasWriter};

use super::diff_base::Selection;
use super::error::End;
use super::exports::{Export, Exports, Visible};
use super::limits::Limits;
use super::listener::Address;
use super::protocol::option::{
    INFO_BLOCK_SIZE, INFO_DESCRIPTION, INFO_EXPORT, INFO_NAME, InfoQuery, MAX_OPTION_DATA, OptionHeader,
    OptionKind, ReplyKind, decode_export_name, encode_reply_header,
};
use super::protocol::reply::Style;
use super::protocol::{ClientFlags, HandshakeFlags, INIT_MAGIC, MAX_PAYLOAD, OPTION_MAGIC};
use super::registry::Ticket;
use super::tls::TlsMode;
use super::transport::Transport;

/// Smallest and preferred block, in bytes: any byte can be addressed, pages go fastest.
const BLOCK_SIZES: (u32, u32) = (1, 4096);
/// Option data beyond [`MAX_OPTION_DATA`] that is skipped, in bytes; past this the client is hung up on.
const MAX_SKIPPED: u32 = 1 << 20;

/// What the two sides agreed on.
#[derive(Debug)]
pub(crate) struct Agreement {
    pub(crate) visible: Visible,
    pub(crate) style: Style,
    pub(crate) contexts: Selection,
    /// The connection's place among the disk's writers, if it may write.
    pub(crate) writer: Option<AttachedWriter>,
}

/// A client, and where it came in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Caller<'a> {
    pub(crate) ticket: &'a Ticket,
    /// The address that it connected to.
    pub(crate) export: &'a Address,
}

/// Negotiates with a new client.
///
/// Returns `None` when the client ends the session by agreement.
pub(crate) fn negotiate(
    transport: &mut Transport,
    exports: &Exports,
    tls: &TlsMode,
    limits: &Limits,
    caller: Caller<'_>,
) -> Result<Option<Agreement>, End> {
    let deadline = Instant::now() + limits.handshake;
    let mut handshake = Handshake {
        transport,
        exports,
        tls,
        caller,
        names: Vec::new(),
        deadline,
        client: ClientFlags::empty(),
        style: Style::Simple,
        contexts: None,
        data: Vec::new(),
        reply: Vec::new(),
    };
    handshake.greet()?;
    for _ in 0..limits.options {
        match handshake.option()? {
            Step::Next => {}
            Step::Abort => return Ok(None),
            Step::Transmit(agreement) => return Ok(Some(agreement)),
        }
    }
    Err(End::TooManyOptions)
}

enum Step {
    Next,
    Abort,
    Transmit(Agreement),
}

struct Handshake<'a> {
    transport: &'a mut Transport,
    exports: &'a Exports,
    tls: &'a TlsMode,
    caller: Caller<'a>,
    /// Names in the client's certificate.
    names: Vec<String>,
    deadline: Instant,
    client: ClientFlags,
    style: Style,
    /// The last selection of contexts, and the export it was made for.
    contexts: Option<(Arc<Export>, Selection)>,
    /// Data of the current option.
    data: Vec<u8>,
    /// Replies to the current option, sent in one go.
    reply: Vec<u8>,
}

impl Handshake<'_> {
    fn greet(&mut self) -> Result<(), End> {
        let mut greeting = [0; 18];
        greeting[..8].copy_from_slice(&INIT_MAGIC.to_be_bytes());
        greeting[8..16].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
        greeting[16..].copy_from_slice(&HandshakeFlags::all().bits().to_be_bytes());
        self.transport.write_all(&greeting, self.deadline)?;
        let mut flags = [0; 4];
        self.transport.read_exact(&mut flags, self.deadline)?;
        let flags = u32::from_be_bytes(flags);
        self.client = ClientFlags::from_bits(flags).ok_or(End::UnknownFlags { flags })?;
        Ok(())
    }

    fn option(&mut self) -> Result<Step, End> {
        let mut head = [0; OptionHeader::SIZE];
        self.transport.read_exact(&mut head, self.deadline)?;
        let OptionHeader { kind, len } = OptionHeader::decode(&head)?;
        self.reply.clear();
        if len as usize > MAX_OPTION_DATA {
            return self.skip(kind, len);
        }
        self.data.resize(len as usize, 0);
        self.transport.read_exact(&mut self.data, self.deadline)?;
        let data = std::mem::take(&mut self.data);
        let step = self.answer(kind, &data);
        if let Ok(Step::Transmit(agreement)) = &step {
            // Before the client knows: it must not be taken for a silent one any more.
            self.caller.ticket.choose(&agreement.visible.export);
        }
        self.data = data;
        self.transport.write_all(&self.reply, self.deadline)?;
        match step? {
            Step::Next if kind == OptionKind::StartTls && self.accepts_tls(&self.data) => self.start_tls(),
            step => Ok(step),
        }
    }

    /// Passes over an option too long to be read, so that the next one is understood.
    fn skip(&mut self, kind: OptionKind, len: u32) -> Result<Step, End> {
        if len > MAX_SKIPPED || kind == OptionKind::ExportName {
            return Err(End::TooBig { len: len.into() });
        }
        let mut left = len as usize;
        self.data.resize(4096, 0);
        while left > 0 {
            let now = left.min(self.data.len());
            self.transport.read_exact(&mut self.data[..now], self.deadline)?;
            left -= now;
        }
        self.put(kind, ReplyKind::ErrTooBig, &[]);
        self.transport.write_all(&self.reply, self.deadline)?;
        Ok(Step::Next)
    }

    /// Collects the replies to an option and says how to go on.
    fn answer(&mut self, kind: OptionKind, data: &[u8]) -> Result<Step, End> {
        let needs_tls = matches!(self.tls, TlsMode::Require(_)) && !self.transport.is_tls();
        match kind {
            // A client of plain newstyle understands no replies: it can only take an export.
            OptionKind::ExportName if !needs_tls => return self.export_name(data),
            OptionKind::ExportName => return Err(End::NoExport),
            _ if !self.client.contains(ClientFlags::FIXED_NEWSTYLE) => return Err(End::NoExport),
            OptionKind::Abort => {
                self.put(kind, ReplyKind::Ack, &[]);
                return Ok(Step::Abort);
            }
            OptionKind::StartTls => self.answer_starttls(data),
            _ if needs_tls => self.put(kind, ReplyKind::ErrTlsReqd, b"TLS is required"),
            OptionKind::List => self.list(data),
            OptionKind::Info | OptionKind::Go => return Ok(self.info(kind, data)),
            OptionKind::StructuredReply => self.set_style(kind, data, Style::Structured),
            OptionKind::ExtendedHeaders => self.set_style(kind, data, Style::Extended),
            OptionKind::ListMetaContext | OptionKind::SetMetaContext => self.meta_context(kind, data),
            OptionKind::Unknown(_) => self.put(kind, ReplyKind::ErrUnsup, &[]),
        }
        Ok(Step::Next)
    }

    fn export_name(&mut self, data: &[u8]) -> Result<Step, End> {
        let export = decode_export_name(data).ok().and_then(|name| self.exports.resolve(name, &self.names));
        let Some(visible) = export.filter(|_| !self.style.is_extended()) else {
            return Err(End::NoExport);
        };
        let mut agreement = self.agree(visible);
        agreement.writer = self.attach_writer(&agreement.visible)?;
        self.reply.extend(agreement.visible.export.disk().size().to_be_bytes());
        let flags = agreement.visible.flags(agreement.style, !agreement.contexts.set.is_empty());
        self.reply.extend(flags.bits().to_be_bytes());
        if !self.client.contains(ClientFlags::NO_ZEROES) {
            self.reply.extend([0; 124]);
        }
        Ok(Step::Transmit(agreement))
    }

    fn agree(&self, visible: Visible) -> Agreement {
        // Contexts count only for the export they were selected for.
        let contexts = match &self.contexts {
            Some((selected, contexts)) if Arc::ptr_eq(selected, &visible.export) => contexts.clone(),
            _ => Selection::default(),
        };
        Agreement { visible, style: self.style, contexts, writer: None }
    }

    /// The place of a client that may write among the disk's writers: connections through one export have one together.
    fn attach_writer(&self, visible: &Visible) -> Result<Option<AttachedWriter>, HasWriter> {
        if visible.read_only {
            return Ok(None);
        }
        let name = format!("NBD clients of {}", self.caller.export);
        visible.export.disk().attach_writer(&name, visible.export.shares()).map(Some)
    }

    fn list(&mut self, data: &[u8]) {
        if !data.is_empty() {
            return self.put(OptionKind::List, ReplyKind::ErrInvalid, b"LIST takes no data");
        }
        for Visible { export, .. } in self.exports.list_for(&self.names) {
            let name = export.name().as_bytes();
            let item = [&(name.len() as u32).to_be_bytes(), name, export.description().as_bytes()].concat();
            self.put(OptionKind::List, ReplyKind::Server, &item);
        }
        self.put(OptionKind::List, ReplyKind::Ack, &[]);
    }

    fn info(&mut self, kind: OptionKind, data: &[u8]) -> Step {
        let Ok(query) = InfoQuery::decode(data) else {
            self.put(kind, ReplyKind::ErrInvalid, b"malformed data");
            return Step::Next;
        };
        let Some(visible) = self.exports.resolve(query.export, &self.names) else {
            self.put(kind, ReplyKind::ErrUnknown, b"no export has this name");
            return Step::Next;
        };
        let mut agreement = self.agree(visible.clone());
        if kind == OptionKind::Go {
            match self.attach_writer(&visible) {
                Ok(writer) => agreement.writer = writer,
                Err(error) => {
                    tracing::warn!(export = visible.export.name(), "NBD client refused: {error}");
                    self.put(kind, ReplyKind::ErrPolicy, error.to_string().as_bytes());
                    return Step::Next;
                }
            }
        }
        let export = &visible.export;
        let flags = visible.flags(agreement.style, !agreement.contexts.set.is_empty());
        let size = export.disk().size().to_be_bytes();
        self.put_info(kind, INFO_EXPORT, &[&size[..], &flags.bits().to_be_bytes()].concat());
        if query.wants_name {
            self.put_info(kind, INFO_NAME, export.name().as_bytes());
        }
        if query.wants_description && !export.description().is_empty() {
            self.put_info(kind, INFO_DESCRIPTION, export.description().as_bytes());
        }
        if query.wants_block_size {
            let (minimum, preferred) = BLOCK_SIZES;
            let sizes = [minimum, preferred, MAX_PAYLOAD].map(u32::to_be_bytes).concat();
            self.put_info(kind, INFO_BLOCK_SIZE, &sizes);
        }
        self.put(kind, ReplyKind::Ack, &[]);
        if kind == OptionKind::Go { Step::Transmit(agreement) } else { Step::Next }
    }

    fn set_style(&mut self, kind: OptionKind, data: &[u8], style: Style) {
        if !data.is_empty() {
            self.put(kind, ReplyKind::ErrInvalid, b"this option takes no data");
        } else if self.style.is_extended() && style == Style::Structured {
            self.put(kind, ReplyKind::ErrExtHeaderReqd, b"extended headers are agreed on already");
        } else {
            self.style = style;
            self.put(kind, ReplyKind::Ack, &[]);
        }
    }

    fn accepts_tls(&self, data: &[u8]) -> bool {
        data.is_empty() && !self.transport.is_tls() && self.tls.config().is_some()
    }

    fn answer_starttls(&mut self, data: &[u8]) {
        let kind = OptionKind::StartTls;
        if self.accepts_tls(data) {
            self.put(kind, ReplyKind::Ack, &[]);
        } else if self.transport.is_tls() || !data.is_empty() {
            self.put(kind, ReplyKind::ErrInvalid, b"STARTTLS comes once and takes no data");
        } else {
            self.put(kind, ReplyKind::ErrPolicy, b"this server has no TLS");
        }
    }

    fn start_tls(&mut self) -> Result<Step, End> {
        let config = self.tls.config().expect("checked in accepts_tls");
        self.transport.start_tls(config, self.deadline)?;
        self.names = self.transport.client_names();
        // What was agreed on in plain text may have been tampered with.
        self.style = Style::Simple;
        self.contexts = None;
        Ok(Step::Next)
    }

    fn put(&mut self, option: OptionKind, reply: ReplyKind, data: &[u8]) {
        self.reply.extend(encode_reply_header(option, reply, data.len()));
        self.reply.extend(data);
    }

    fn put_info(&mut self, option: OptionKind, item: u16, data: &[u8]) {
        self.reply.extend(encode_reply_header(option, ReplyKind::Info, 2 + data.len()));
        self.reply.extend(item.to_be_bytes());
        self.reply.extend(data);
    }
}
