//! [`Header`] to bytes.

use thiserror::Error;

use super::{Header, MAGIC, MAX_BACKING_NAME_LEN, V2_LEN, field};
use crate::extension::Extensions;

/// Why a header cannot be written as asked.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum EncodeError {
    /// Header, extensions and backing file name must fit in one cluster.
    #[error("the header, its extensions and the backing file name need {needed} bytes, a cluster has {have}")]
    DoesNotFit {
        /// Bytes of all of them.
        needed: u64,
        /// Bytes in a cluster.
        have: u64,
    },
    /// The format allows 1023 bytes.
    #[error("a backing file name of {len} bytes is too long, the format allows {MAX_BACKING_NAME_LEN}")]
    BackingNameTooLong {
        /// Bytes of the name.
        len: u64,
    },
    /// Stock tools would stop reading the name there.
    #[error("a backing file name cannot be empty or contain a zero byte")]
    BackingNameUnusable,
}

impl Header {
    /// The bytes of the first cluster up to the end of what is used: header, extensions, backing file name.
    ///
    /// The name is placed right after the extensions, and the header's pointer to it made to fit:
    /// `self.backing_file` is not looked at. What follows in the cluster is not to be relied on by anyone.
    ///
    /// # Errors
    /// When it does not fit in a cluster, or the name is unusable.
    ///
    /// # Panics
    /// When `header_length` and `additional` disagree, which no parsed header does.
    pub fn encode(
        &self,
        extensions: &Extensions,
        backing_name: Option<&[u8]>,
    ) -> Result<Vec<u8>, EncodeError> {
        let name = backing_name.unwrap_or_default();
        if backing_name.is_some() && (name.is_empty() || name.contains(&0)) {
            return Err(EncodeError::BackingNameUnusable);
        }
        if name.len() > MAX_BACKING_NAME_LEN as usize {
            return Err(EncodeError::BackingNameTooLong { len: name.len() as u64 });
        }
        let name_at = self.header_length as usize + extensions.encoded_len();
        let (needed, have) = ((name_at + name.len()) as u64, self.cluster_bits.size());
        if needed > have {
            return Err(EncodeError::DoesNotFit { needed, have });
        }
        let mut out = self.encode_fields(if name.is_empty() { 0 } else { name_at as u64 }, name.len() as u32);
        assert_eq!(out.len(), self.header_length as usize, "header_length is what the version says it is");
        out.extend_from_slice(&extensions.encode());
        out.extend_from_slice(name);
        Ok(out)
    }

    pub(super) fn encode_fields(&self, name_at: u64, name_len: u32) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.cluster_bits.size().min(4096) as usize);
        out.extend_from_slice(&MAGIC.to_be_bytes());
        out.extend_from_slice(&self.version.to_be_bytes());
        out.extend_from_slice(&name_at.to_be_bytes());
        out.extend_from_slice(&name_len.to_be_bytes());
        out.extend_from_slice(&self.cluster_bits.get().to_be_bytes());
        out.extend_from_slice(&self.size.to_be_bytes());
        out.extend_from_slice(&self.crypt_method.to_be_bytes());
        out.extend_from_slice(&self.l1_size.to_be_bytes());
        out.extend_from_slice(&self.l1_table_offset.get().to_be_bytes());
        out.extend_from_slice(&self.refcount_table_offset.get().to_be_bytes());
        out.extend_from_slice(&self.refcount_table_clusters.to_be_bytes());
        out.extend_from_slice(&self.snapshot_count.to_be_bytes());
        out.extend_from_slice(&self.snapshots_offset.get().to_be_bytes());
        debug_assert_eq!(out.len(), V2_LEN as usize);
        if self.version >= 3 {
            self.encode_v3_fields(&mut out);
        }
        out
    }

    fn encode_v3_fields(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.incompatible.bits().to_be_bytes());
        out.extend_from_slice(&self.compatible.bits().to_be_bytes());
        out.extend_from_slice(&self.autoclear.bits().to_be_bytes());
        out.extend_from_slice(&self.refcount_order.order().to_be_bytes());
        out.extend_from_slice(&self.header_length.to_be_bytes());
        if u64::from(self.header_length) > field::COMPRESSION_TYPE {
            out.push(self.compression_type.to_byte());
        }
        out.extend_from_slice(&self.additional);
    }
}
