//! Little-endian bytes, one after another: written by [`Put`], read back by [`Take`], which trusts no length.

/// The bytes are not what they should be; whoever reads them knows where they lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Malformed(pub(super) &'static str);

/// Builds bytes.
#[derive(Debug, Default)]
pub(super) struct Put(pub(super) Vec<u8>);

impl Put {
    pub(super) fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    pub(super) fn u32(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }

    pub(super) fn u64(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend(bytes);
    }

    /// 7 bits a byte, low ones first, the top bit says that more follow.
    pub(super) fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.u8(value as u8 | 0x80);
            value >>= 7;
        }
        self.u8(value as u8);
    }

    /// How far `value` is from `from`, both ways small.
    pub(super) fn delta(&mut self, from: u64, value: u64) {
        let by = value.wrapping_sub(from) as i64;
        self.varint(((by << 1) ^ (by >> 63)) as u64);
    }
}

/// Reads bytes from front to back.
#[derive(Clone, Debug)]
pub(super) struct Take<'a>(pub(super) &'a [u8]);

impl<'a> Take<'a> {
    pub(super) fn bytes(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let (now, later) = self.0.split_at_checked(len).ok_or(Malformed("it ends too early"))?;
        self.0 = later;
        Ok(now)
    }

    fn array<const LEN: usize>(&mut self) -> Result<[u8; LEN], Malformed> {
        Ok(self.bytes(LEN)?.try_into().expect("just that many"))
    }

    pub(super) fn u8(&mut self) -> Result<u8, Malformed> {
        Ok(self.array::<1>()?[0])
    }

    pub(super) fn u16(&mut self) -> Result<u16, Malformed> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub(super) fn u32(&mut self) -> Result<u32, Malformed> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(super) fn u64(&mut self) -> Result<u64, Malformed> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub(super) fn id(&mut self) -> Result<[u8; 16], Malformed> {
        self.array()
    }

    pub(super) fn varint(&mut self) -> Result<u64, Malformed> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.u8()?;
            if shift == 63 && byte > 1 {
                break;
            }
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(Malformed("a number is longer than 64 bits"))
    }

    pub(super) fn delta(&mut self, from: u64) -> Result<u64, Malformed> {
        let coded = self.varint()?;
        Ok(from.wrapping_add((coded >> 1) ^ (coded & 1).wrapping_neg()))
    }

    /// That nothing is left.
    pub(super) fn end(&self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed("there is more than it should hold")) }
    }
}

/// An object in memory.
#[cfg(test)]
pub(super) struct Bytes(pub(super) Vec<u8>);

#[cfg(test)]
impl vmstrata_repo::ObjectReader for Bytes {
    fn len(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> vmstrata_repo::Result<()> {
        let from = self.0.get(usize::try_from(at).unwrap()..).unwrap_or_default();
        let short =
            || vmstrata_repo::Error::of("memory", "reading")(std::io::ErrorKind::UnexpectedEof.into());
        into.copy_from_slice(from.get(..into.len()).ok_or_else(short)?);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn numbers_read_back(values in prop::collection::vec((any::<u64>(), any::<u64>()), 0..20)) {
            let mut put = Put::default();
            for (from, value) in &values {
                put.varint(*value);
                put.delta(*from, *value);
            }
            let mut take = Take(&put.0);
            for (from, value) in &values {
                prop_assert_eq!(take.varint(), Ok(*value));
                prop_assert_eq!(take.delta(*from), Ok(*value));
            }
            prop_assert_eq!(take.end(), Ok(()));
        }
    }

    #[test]
    fn small_steps_both_ways_are_one_byte() {
        for value in [1000 - 64, 1000, 1000 + 63] {
            let mut put = Put::default();
            put.delta(1000, value);
            assert_eq!(put.0.len(), 1, "{value}");
        }
    }

    #[test]
    fn what_is_too_short_or_too_long_is_refused() {
        assert!(Take(&[1]).u16().is_err());
        assert!(Take(&[0x80]).varint().is_err());
        assert!(Take(&[0xff; 10]).varint().is_err());
        assert_eq!(Take(&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1]).varint(), Ok(u64::MAX));
        assert!(Take(&[0]).end().is_err());
    }
}
