//! How a ring can be wrong.

/// How a driver broke the rules of its ring.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(in crate::vhost_user) enum RingError {
    #[error("the available index ran {ahead} entries ahead of a ring of {size}")]
    AvailableIndex { ahead: u16, size: u16 },
    #[error("head descriptor {head} is outside a ring of {size}")]
    HeadOutside { head: u16, size: u16 },
    #[error("head descriptor {head} was made available while its request was in flight")]
    HeadBusy { head: u16 },
    #[error("descriptor {next} is outside a table of {len}")]
    DescriptorOutside { next: u16, len: u16 },
    #[error("a chain of descriptors is longer than {limit}, or loops")]
    ChainTooLong { limit: u16 },
    #[error(
        "an indirect descriptor is nested, chained on, not negotiated, or its table of {len:#x} bytes is malformed"
    )]
    Indirect { len: u32 },
    #[error("a device-readable descriptor follows a device-writable one")]
    Order,
    #[error("no guest memory at {guest:#x}")]
    Unmapped { guest: u64 },
    #[error("a request has {readable} readable and {writable} writable bytes: no header or no status byte")]
    Truncated { readable: u64, writable: u64 },
}
