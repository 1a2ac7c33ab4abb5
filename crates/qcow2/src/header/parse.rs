//! Bytes to [`Header`].

use vmstrata_types::{ClusterBits, HostOffset};

use super::{BackingName, Header, MAGIC, MAX_BACKING_NAME_LEN, V2_LEN, V3_MIN_LEN, field};
use crate::bytes::{be32, be64};
use crate::error::{ParseError, ParseErrorKind};
use crate::extension::{Extensions, FeatureKind};
use crate::feature::{Autoclear, Compatible, CompressionType, Incompatible};
use crate::geometry::MIN_EXTENDED;
use crate::refcount::RefcountOrder;

/// Disks are counted in sectors.
const SECTOR: u64 = 512;

/// Whether a file that starts with `bytes` claims to be qcow2 (of any version).
pub fn is_qcow2(bytes: &[u8]) -> bool {
    bytes.len() >= 4 && be32(bytes, 0) == MAGIC
}

impl Header {
    /// Parses and checks the header of a file of `file_len` bytes that starts with `bytes`.
    ///
    /// `bytes` must reach to the end of the header: 72 bytes for version 2, `header_length` for version 3.
    /// With the whole first cluster in it, unknown features are reported by the image's own names for them.
    ///
    /// # Errors
    /// The first field that is wrong, with its byte offset: see [`ParseErrorKind`]. `Truncated` says how many
    /// bytes to read when there are more in the file.
    pub fn parse(bytes: &[u8], file_len: u64) -> Result<Self, ParseError> {
        let raw = Raw { bytes };
        raw.need(8)?;
        raw.magic_and_version()?;
        let version = raw.u32(field::VERSION);
        raw.need(if version == 2 { V2_LEN } else { V3_MIN_LEN })?;
        let cluster_bits = raw.cluster_bits()?;
        let header_length = raw.header_length(version, cluster_bits)?;
        raw.need(header_length)?;
        let incompatible = raw.incompatible(version, cluster_bits)?;
        let v3 = |at| if version == 2 { 0 } else { raw.u64(at) };
        let header = Self {
            version,
            backing_file: raw.backing_file(header_length, cluster_bits)?,
            cluster_bits,
            size: raw.u64(field::SIZE) & !(SECTOR - 1),
            crypt_method: raw.crypt_method()?,
            l1_size: raw.u32(field::L1_SIZE),
            l1_table_offset: HostOffset::new(raw.u64(field::L1_TABLE_OFFSET)),
            refcount_table_offset: HostOffset::new(raw.u64(field::REFCOUNT_TABLE_OFFSET)),
            refcount_table_clusters: raw.u32(field::REFCOUNT_TABLE_CLUSTERS),
            snapshot_count: raw.u32(field::SNAPSHOT_COUNT),
            snapshots_offset: HostOffset::new(raw.u64(field::SNAPSHOTS_OFFSET)),
            incompatible,
            compatible: Compatible::from_bits_retain(v3(field::COMPATIBLE)),
            autoclear: Autoclear::from_bits_retain(v3(field::AUTOCLEAR)),
            refcount_order: raw.refcount_order(version)?,
            header_length,
            compression_type: raw.compression_type(header_length, incompatible)?,
            additional: raw.additional(header_length),
        };
        header.check_tables(file_len)?;
        Ok(header)
    }

    /// The backing file's name, taken from the file's first cluster. `None` without a backing file.
    ///
    /// # Errors
    /// Too few bytes, or a zero byte in the name: stock tools would read a shorter name and open another file
    /// than the one that was checked.
    pub fn backing_name<'a>(&self, first_cluster: &'a [u8]) -> Result<Option<&'a [u8]>, ParseError> {
        let Some(BackingName { offset, len }) = self.backing_file else { return Ok(None) };
        let fail = |kind| ParseError::new("backing file name", offset.get(), kind);
        let end = offset.get() + u64::from(len);
        let have = first_cluster.len() as u64;
        if have < end {
            return Err(fail(ParseErrorKind::Truncated { needed: end, have }));
        }
        let name = &first_cluster[offset.get() as usize..end as usize];
        if name.contains(&0) {
            return Err(fail(ParseErrorKind::ContainsNul));
        }
        Ok(Some(name))
    }

    /// The header extensions, taken from the file's first cluster.
    ///
    /// # Errors
    /// See [`Extensions::parse`].
    pub fn extensions(&self, first_cluster: &[u8]) -> Result<Extensions, ParseError> {
        Extensions::parse(first_cluster, self.header_length as usize, self.extensions_end())
    }
}

/// Header bytes not yet believed.
struct Raw<'a> {
    bytes: &'a [u8],
}

impl Raw<'_> {
    fn u32(&self, at: u64) -> u32 {
        be32(self.bytes, at as usize)
    }

    fn u64(&self, at: u64) -> u64 {
        be64(self.bytes, at as usize)
    }

    fn need(&self, len: u32) -> Result<(), ParseError> {
        let (needed, have) = (u64::from(len), self.bytes.len() as u64);
        if have < needed {
            return Err(ParseError::new("header", 0, ParseErrorKind::Truncated { needed, have }));
        }
        Ok(())
    }

    fn magic_and_version(&self) -> Result<(), ParseError> {
        let found = self.u32(field::MAGIC);
        if found != MAGIC {
            return Err(ParseError::new("magic", field::MAGIC, ParseErrorKind::BadMagic { found }));
        }
        let found = self.u32(field::VERSION);
        if !(2..=3).contains(&found) {
            let kind = ParseErrorKind::UnsupportedVersion { found };
            return Err(ParseError::new("version", field::VERSION, kind));
        }
        Ok(())
    }

    fn cluster_bits(&self) -> Result<ClusterBits, ParseError> {
        let found = self.u32(field::CLUSTER_BITS);
        ClusterBits::new(found).ok_or_else(|| {
            let (min, max) = (ClusterBits::MIN.get(), ClusterBits::MAX.get());
            out_of_range("cluster_bits", field::CLUSTER_BITS, found.into(), min.into(), max.into())
        })
    }

    /// A length that is no multiple of 8 is against the specification but opened by QEMU, and here.
    fn header_length(&self, version: u32, cluster_bits: ClusterBits) -> Result<u32, ParseError> {
        if version == 2 {
            return Ok(V2_LEN);
        }
        let found = self.u32(field::HEADER_LENGTH);
        let (value, min, max) = (found.into(), V3_MIN_LEN.into(), cluster_bits.size());
        if value < min || value > max {
            return Err(out_of_range("header_length", field::HEADER_LENGTH, value, min, max));
        }
        Ok(found)
    }

    fn crypt_method(&self) -> Result<u32, ParseError> {
        let feature = match self.u32(field::CRYPT_METHOD) {
            0 => return Ok(0),
            1 => "AES encryption",
            2 => "LUKS encryption",
            value => return Err(out_of_range("crypt_method", field::CRYPT_METHOD, value.into(), 0, 2)),
        };
        Err(ParseError::new("crypt_method", field::CRYPT_METHOD, ParseErrorKind::Unsupported { feature }))
    }

    fn incompatible(&self, version: u32, cluster_bits: ClusterBits) -> Result<Incompatible, ParseError> {
        if version == 2 {
            return Ok(Incompatible::empty());
        }
        let bits = self.u64(field::INCOMPATIBLE);
        let fail = |kind| Err(ParseError::new("incompatible_features", field::INCOMPATIBLE, kind));
        let Some(features) = Incompatible::from_bits(bits) else {
            let bits = bits & !Incompatible::all().bits();
            return fail(ParseErrorKind::UnknownFeatures { bits, names: self.feature_names(bits) });
        };
        if features.contains(Incompatible::EXTERNAL_DATA) {
            return fail(ParseErrorKind::Unsupported { feature: "external data file" });
        }
        if features.contains(Incompatible::EXTENDED_L2) && cluster_bits < MIN_EXTENDED {
            let [value, min, max] =
                [cluster_bits, MIN_EXTENDED, ClusterBits::MAX].map(|bits| bits.get().into());
            return Err(out_of_range("cluster_bits", field::CLUSTER_BITS, value, min, max));
        }
        Ok(features)
    }

    /// What the image calls these incompatible bits, as far as it can be found out.
    fn feature_names(&self, bits: u64) -> Vec<String> {
        let start = self.u32(field::HEADER_LENGTH) as usize;
        let end = match self.u64(field::BACKING_FILE_OFFSET) {
            0 => self.bytes.len(),
            offset => self.bytes.len().min(offset.try_into().unwrap_or(usize::MAX)),
        };
        let Ok(extensions) = Extensions::parse(self.bytes, start, end) else { return Vec::new() };
        let Some(names) = extensions.feature_names() else { return Vec::new() };
        (0..64)
            .filter(|bit| bits >> bit & 1 == 1)
            .filter_map(|bit| names.name(FeatureKind::Incompatible, bit))
            .map(|name| name.into_owned())
            .collect()
    }

    /// QEMU reads an empty name as "no backing file"; so do we.
    fn backing_file(&self, header_len: u32, bits: ClusterBits) -> Result<Option<BackingName>, ParseError> {
        let (offset, len) = (self.u64(field::BACKING_FILE_OFFSET), self.u32(field::BACKING_FILE_SIZE));
        if offset == 0 || len == 0 {
            return Ok(None);
        }
        let (min, max) = (u64::from(header_len), bits.size() - 1);
        if offset < min || offset > max {
            return Err(out_of_range("backing_file_offset", field::BACKING_FILE_OFFSET, offset, min, max));
        }
        let max = u64::from(MAX_BACKING_NAME_LEN).min(bits.size() - offset);
        if u64::from(len) > max {
            return Err(out_of_range("backing_file_size", field::BACKING_FILE_SIZE, len.into(), 1, max));
        }
        Ok(Some(BackingName { offset: HostOffset::new(offset), len }))
    }

    fn refcount_order(&self, version: u32) -> Result<RefcountOrder, ParseError> {
        if version == 2 {
            return Ok(RefcountOrder::DEFAULT);
        }
        let found = self.u32(field::REFCOUNT_ORDER);
        let max = RefcountOrder::MAX.order().into();
        RefcountOrder::new(found)
            .ok_or_else(|| out_of_range("refcount_order", field::REFCOUNT_ORDER, found.into(), 0, max))
    }

    fn compression_type(&self, len: u32, features: Incompatible) -> Result<CompressionType, ParseError> {
        let at = field::COMPRESSION_TYPE;
        let value = if u64::from(len) > at { self.bytes[at as usize] } else { 0 };
        let bit_set = features.contains(Incompatible::COMPRESSION_TYPE);
        if bit_set != (value != 0) {
            let kind = ParseErrorKind::CompressionBit { value, bit_set };
            return Err(ParseError::new("compression_type", at, kind));
        }
        CompressionType::from_byte(value)
            .ok_or_else(|| out_of_range("compression_type", at, value.into(), 0, 1))
    }

    fn additional(&self, header_length: u32) -> Vec<u8> {
        self.bytes.get(field::ADDITIONAL as usize..header_length as usize).unwrap_or_default().to_vec()
    }
}

fn out_of_range(field: &'static str, at: u64, value: u64, min: u64, max: u64) -> ParseError {
    ParseError::new(field, at, ParseErrorKind::OutOfRange { value, min, max })
}
