//! BTF made up for tests.

use crate::introspect::btf::{HEADER_BYTES, MAGIC};

/// Types in the making; each method gives the id of the type it adds.
pub(crate) struct Types {
    bytes: Vec<u8>,
    strings: Vec<u8>,
    count: u32,
}

impl Types {
    pub(crate) fn new() -> Self {
        Self { bytes: Vec::new(), strings: vec![0], count: 0 }
    }

    /// An integer of `size` bytes.
    pub(crate) fn int(&mut self, size: u32) -> u32 {
        self.add("int", 1, 0, size, &[size * 8])
    }

    pub(crate) fn pointer(&mut self, to: u32) -> u32 {
        self.add("", 2, 0, to, &[])
    }

    pub(crate) fn array(&mut self, of: u32, elements: u32) -> u32 {
        self.add("", 3, 0, 0, &[of, of, elements])
    }

    pub(crate) fn typedef(&mut self, name: &str, of: u32) -> u32 {
        self.add(name, 8, 0, of, &[])
    }

    pub(crate) fn function(&mut self, name: &str) -> u32 {
        self.add(name, 12, 0, 0, &[])
    }

    /// A struct of members `(name, type, byte offset)`.
    pub(crate) fn structure(&mut self, name: &str, size: u32, members: &[(&str, u32, u32)]) -> u32 {
        let mut words = Vec::new();
        for &(member, id, offset) in members {
            words.extend([self.string(member), id, offset * 8]);
        }
        self.add(name, 4, members.len() as u32, size, &words)
    }

    /// An enum of enumerators `(name, value)`.
    pub(crate) fn enumeration(&mut self, name: &str, values: &[(&str, u32)]) -> u32 {
        let mut words = Vec::new();
        for &(enumerator, value) in values {
            words.extend([self.string(enumerator), value]);
        }
        self.add(name, 6, values.len() as u32, 4, &words)
    }

    /// Any type: `info` is its number of elements, and bit 31 its flag.
    pub(crate) fn add(&mut self, name: &str, kind: u32, info: u32, size_or_type: u32, words: &[u32]) -> u32 {
        let name = self.string(name);
        for word in [name, kind << 24 | info, size_or_type].iter().chain(words) {
            self.bytes.extend(word.to_le_bytes());
        }
        self.count += 1;
        self.count
    }

    /// The blob.
    pub(crate) fn finish(&self) -> Vec<u8> {
        let (types, strings) = (self.bytes.len() as u32, self.strings.len() as u32);
        let mut blob = MAGIC.to_vec();
        blob.push(0);
        for word in [HEADER_BYTES as u32, 0, types, types, strings] {
            blob.extend(word.to_le_bytes());
        }
        blob.extend(&self.bytes);
        blob.extend(&self.strings);
        blob
    }

    fn string(&mut self, text: &str) -> u32 {
        if text.is_empty() {
            return 0;
        }
        let at = self.strings.len() as u32;
        self.strings.extend(text.bytes());
        self.strings.push(0);
        at
    }
}
