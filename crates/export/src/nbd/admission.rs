//! What a request may ask for: every check that needs no disk, in one place.

use super::contexts::ContextSet;
use super::exports::Export;
use super::protocol::reply::Style;
use super::protocol::request::{Command, Request};
use super::protocol::{CommandFlags, Errno, MAX_PAYLOAD};

/// Longest read that is answered in chunks, in bytes; it is never in memory as a whole.
const MAX_CHUNKED_READ: u64 = u32::MAX as u64;

/// What of a connection decides whether a request is in order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    pub(crate) size: u64,
    pub(crate) read_only: bool,
    pub(crate) style: Style,
    pub(crate) contexts: ContextSet,
    /// Whole clusters can be zeroed without being written.
    pub(crate) cluster_size: u64,
}

impl Terms {
    pub(crate) fn new(export: &Export, read_only: bool, style: Style, contexts: ContextSet) -> Self {
        let disk = export.disk();
        Self { size: disk.size(), read_only, style, contexts, cluster_size: disk.cluster_bits().size() }
    }
}

/// Why a request is not carried out: an error of the protocol, and words for a person.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) errno: Errno,
    pub(crate) message: &'static str,
}

const fn refuse<T>(errno: Errno, message: &'static str) -> Result<T, Refusal> {
    Err(Refusal { errno, message })
}

/// Checks everything about a request but the payload of a block status.
///
/// # Errors
/// The first thing that is wrong. The request's payload, if any, must then be passed over.
pub(crate) fn check(request: &Request, terms: &Terms) -> Result<(), Refusal> {
    check_flags(request, terms)?;
    let writes = matches!(request.command, Command::Write | Command::Trim | Command::WriteZeroes);
    if writes && terms.read_only {
        return refuse(Errno::Perm, "the export is read-only");
    }
    match request.command {
        Command::Flush if (request.offset, request.length) != (0, 0) => {
            refuse(Errno::Inval, "a flush has neither offset nor length")
        }
        Command::Flush | Command::Disconnect => Ok(()),
        // The payload says how long the range is.
        Command::BlockStatus if request.flags.contains(CommandFlags::PAYLOAD_LEN) => Ok(()),
        _ => check_range(request, terms),
    }
}

fn check_flags(request: &Request, terms: &Terms) -> Result<(), Refusal> {
    use CommandFlags as F;
    let own = match request.command {
        Command::Read if terms.style.is_chunked() => F::DF,
        Command::Write if terms.style.is_extended() => F::PAYLOAD_LEN,
        Command::WriteZeroes => F::NO_HOLE | F::FAST_ZERO,
        Command::BlockStatus if terms.style.is_extended() => F::REQ_ONE | F::PAYLOAD_LEN,
        Command::BlockStatus => F::REQ_ONE,
        Command::Disconnect => F::all(),
        Command::Unknown(_) => return refuse(Errno::Inval, "this command is not supported"),
        _ => F::empty(),
    };
    // FUA is allowed, if pointless, on every command.
    if !(own | F::FUA).contains(request.flags) {
        return refuse(Errno::Inval, "the command has flags that it does not know");
    }
    match request.command {
        Command::BlockStatus if terms.contexts.is_empty() => {
            refuse(Errno::Inval, "no metadata context was selected")
        }
        _ => Ok(()),
    }
}

fn check_range(request: &Request, terms: &Terms) -> Result<(), Refusal> {
    let end = request.offset.checked_add(request.length).filter(|end| *end <= terms.size);
    let Some(end) = end else {
        let errno = match request.command {
            Command::Write | Command::WriteZeroes => Errno::NoSpc,
            _ => Errno::Inval,
        };
        return refuse(errno, "the range passes the end of the export");
    };
    match request.command {
        Command::Read => check_read_length(request, terms),
        Command::WriteZeroes if request.flags.contains(CommandFlags::FAST_ZERO) => {
            let mask = terms.cluster_size - 1;
            let whole = request.offset & mask == 0 && (end & mask == 0 || end == terms.size);
            if whole && !request.flags.contains(CommandFlags::NO_HOLE) {
                Ok(())
            } else {
                refuse(Errno::NotSup, "only holes of whole clusters are faster than writing")
            }
        }
        Command::BlockStatus if request.length == 0 => refuse(Errno::Inval, "the range is empty"),
        _ => Ok(()),
    }
}

fn check_read_length(request: &Request, terms: &Terms) -> Result<(), Refusal> {
    let limit = MAX_PAYLOAD.into();
    if request.flags.contains(CommandFlags::DF) && request.length > limit {
        refuse(Errno::Overflow, "too long to be sent in one chunk")
    } else if request.length > if terms.style.is_chunked() { MAX_CHUNKED_READ } else { limit } {
        refuse(Errno::Inval, "too long for one read")
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TERMS: Terms = Terms {
        size: 1 << 40,
        read_only: false,
        style: Style::Extended,
        contexts: ContextSet::FIXED,
        cluster_size: 65536,
    };

    fn request(command: Command, flags: CommandFlags, offset: u64, length: u64) -> Request {
        Request { flags, command, cookie: 0, offset, length }
    }

    fn errno(request: &Request, terms: &Terms) -> Option<Errno> {
        check(request, terms).err().map(|refusal| refusal.errno)
    }

    #[test]
    fn ranges_past_the_end_are_refused_as_the_protocol_says() {
        let at_end = |command, flags| errno(&request(command, flags, TERMS.size - 512, 1024), &TERMS);
        let none = CommandFlags::empty();
        assert_eq!(at_end(Command::Read, none), Some(Errno::Inval));
        assert_eq!(at_end(Command::Trim, none), Some(Errno::Inval));
        assert_eq!(at_end(Command::Cache, none), Some(Errno::Inval));
        assert_eq!(at_end(Command::BlockStatus, none), Some(Errno::Inval));
        assert_eq!(at_end(Command::WriteZeroes, none), Some(Errno::NoSpc));
        assert_eq!(at_end(Command::Write, CommandFlags::PAYLOAD_LEN), Some(Errno::NoSpc));
        assert_eq!(errno(&request(Command::Read, none, u64::MAX, 2), &TERMS), Some(Errno::Inval));
        assert_eq!(errno(&request(Command::Read, none, TERMS.size - 512, 512), &TERMS), None);
    }

    #[test]
    fn flags_belong_to_their_commands() {
        use CommandFlags as F;
        let simple = Terms { style: Style::Simple, ..TERMS };
        let refused =
            |command, flags, terms: &Terms| errno(&request(command, flags, 0, 512), terms).is_some();
        assert!(refused(Command::Read, F::DF, &simple) && !refused(Command::Read, F::DF, &TERMS));
        assert!(refused(Command::Trim, F::NO_HOLE, &TERMS) && !refused(Command::Trim, F::FUA, &TERMS));
        assert!(refused(Command::Read, F::from_bits_retain(0x80), &TERMS));
        assert!(
            !refused(Command::Write, F::PAYLOAD_LEN, &TERMS)
                && refused(Command::Write, F::PAYLOAD_LEN, &simple)
        );
        assert!(!refused(Command::Write, F::FUA, &simple) && !refused(Command::Write, F::FUA, &TERMS));
        assert!(refused(Command::Unknown(8), F::empty(), &TERMS), "RESIZE is not supported");
    }

    #[test]
    fn read_only_exports_refuse_writing_before_anything_else() {
        let terms = Terms { read_only: true, ..TERMS };
        for command in [Command::Trim, Command::WriteZeroes] {
            assert_eq!(
                errno(&request(command, CommandFlags::empty(), u64::MAX, 9), &terms),
                Some(Errno::Perm)
            );
        }
        assert_eq!(errno(&request(Command::Flush, CommandFlags::empty(), 0, 0), &terms), None);
    }

    #[test]
    fn a_fast_zero_is_whole_clusters_that_may_become_holes() {
        let fast = |flags, offset, length| {
            let terms = Terms { size: 200_000, ..TERMS };
            errno(&request(Command::WriteZeroes, flags | CommandFlags::FAST_ZERO, offset, length), &terms)
        };
        let none = CommandFlags::empty();
        assert_eq!(fast(none, 65536, 65536), None);
        assert_eq!(fast(none, 65536, 200_000 - 65536), None, "the last cluster ends with the disk");
        assert_eq!(fast(none, 65536, 512), Some(Errno::NotSup));
        assert_eq!(fast(none, 512, 65536), Some(Errno::NotSup));
        assert_eq!(fast(CommandFlags::NO_HOLE, 0, 65536), Some(Errno::NotSup));
    }

    #[test]
    fn long_reads_are_served_only_in_chunks() {
        let read = |style, flags, length| {
            errno(&request(Command::Read, flags, 0, length), &Terms { style, ..TERMS })
        };
        let (none, limit) = (CommandFlags::empty(), u64::from(MAX_PAYLOAD));
        assert_eq!(read(Style::Simple, none, limit), None);
        assert_eq!(read(Style::Simple, none, limit + 1), Some(Errno::Inval));
        assert_eq!(read(Style::Structured, none, u32::MAX.into()), None);
        assert_eq!(read(Style::Structured, CommandFlags::DF, limit + 1), Some(Errno::Overflow));
        assert_eq!(read(Style::Extended, none, 1 << 32), Some(Errno::Inval));
    }

    #[test]
    fn block_status_needs_contexts_and_a_range() {
        let none = CommandFlags::empty();
        let terms = Terms { contexts: ContextSet::EMPTY, ..TERMS };
        assert_eq!(errno(&request(Command::BlockStatus, none, 0, 512), &terms), Some(Errno::Inval));
        assert_eq!(errno(&request(Command::BlockStatus, none, 0, 0), &TERMS), Some(Errno::Inval));
        assert_eq!(errno(&request(Command::BlockStatus, none, 0, 512), &TERMS), None);
    }

    proptest! {
        /// Whatever is let through lies on the disk.
        #[test]
        fn admitted_ranges_fit(command in 0u16..10, flags in 0u16..64, offset: u64, length: u64) {
            let request =
                request(Command::from_wire(command), CommandFlags::from_bits_retain(flags), offset, length);
            let has_range = match request.command {
                Command::Disconnect => false,
                Command::BlockStatus => !request.flags.contains(CommandFlags::PAYLOAD_LEN),
                _ => true,
            };
            if check(&request, &TERMS).is_ok() && has_range {
                prop_assert!(offset.checked_add(length).is_some_and(|end| end <= TERMS.size));
            }
        }
    }
}
