//! BTF: the types of a kernel, as it carries them in its memory.
//!
//! ```text
//!   header (magic 0xeb9f, version, lengths) │ types, one after another │ strings, each ended by a zero
//! ```
//!
//! Only what classification asks is offered: offsets of members, values of enumerators, names of functions. Nothing in it
//! is believed: offsets are checked, references followed a bounded number of steps.
//! Source: Linux `Documentation/bpf/btf.rst`, `include/uapi/linux/btf.h`.

mod find;

pub use find::find;

/// Magic number, version 1.
pub(super) const MAGIC: [u8; 3] = [0x9f, 0xeb, 1];
/// Bytes of the header that this reader understands; later kernels have longer ones.
pub(super) const HEADER_BYTES: usize = 24;
const HEADER_BYTES_MAX: usize = 256;
/// Each of types and strings; Linux 7.3 has 3 MB of types.
const SECTION_BYTES_MAX: usize = 32 << 20;
/// Typedefs and qualifiers before a type.
const REFERENCES_MAX: usize = 32;
/// Anonymous structs inside one another.
const NESTING_MAX: u32 = 16;
/// Members looked at for one question: a few thousand in any real kernel.
const STEPS_MAX: u32 = 1 << 16;

/// Kinds of types; numbers of the format.
mod kind {
    pub(super) const INT: u32 = 1;
    pub(super) const PTR: u32 = 2;
    pub(super) const ARRAY: u32 = 3;
    pub(super) const STRUCT: u32 = 4;
    pub(super) const UNION: u32 = 5;
    pub(super) const ENUM: u32 = 6;
    pub(super) const TYPEDEF: u32 = 8;
    pub(super) const VOLATILE: u32 = 9;
    pub(super) const CONST: u32 = 10;
    pub(super) const RESTRICT: u32 = 11;
    pub(super) const FUNC: u32 = 12;
    pub(super) const FUNC_PROTO: u32 = 13;
    pub(super) const VAR: u32 = 14;
    pub(super) const DATASEC: u32 = 15;
    pub(super) const DECL_TAG: u32 = 17;
    pub(super) const TYPE_TAG: u32 = 18;
    pub(super) const ENUM64: u32 = 19;
    /// Those that are asked for by name.
    pub(super) const ASKED: [u32; 4] = [STRUCT, UNION, ENUM, ENUM64];
}

/// Where the parts of a blob of BTF lie in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    types: (usize, usize),
    strings: (usize, usize),
}

impl Extent {
    /// Reads the first [`HEADER_BYTES`] bytes of a blob; `None` if they are no header, or of something absurdly large.
    pub fn of(header: &[u8]) -> Option<Self> {
        let header = header.first_chunk::<HEADER_BYTES>()?;
        let word = |at: usize| u32::from_le_bytes(header[at..][..4].try_into().expect("four bytes")) as usize;
        let own = word(4);
        let sound = header[..3] == MAGIC && (HEADER_BYTES..=HEADER_BYTES_MAX).contains(&own);
        let part = |offset: usize, len: usize| {
            let within = offset <= 2 * SECTION_BYTES_MAX && (1..=SECTION_BYTES_MAX).contains(&len);
            within.then_some((own + offset, len))
        };
        Some(Self { types: part(word(8), word(12))?, strings: part(word(16), word(20))? }).filter(|_| sound)
    }

    /// Bytes of the whole blob.
    pub fn bytes(&self) -> usize {
        (self.types.0 + self.types.1).max(self.strings.0 + self.strings.1)
    }
}

/// A member of a struct.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// Bytes from the start of the struct.
    pub offset: usize,
    /// Bytes of it.
    pub size: usize,
}

/// The types of a kernel.
#[derive(Debug)]
pub struct Btf {
    types: Vec<u8>,
    strings: Vec<u8>,
    /// `[type id - 1]`: where the type begins in `types`.
    starts: Vec<u32>,
    /// Of those, the types that are asked for by name: structs, unions and enums. One in ten, and asked for often.
    asked: Vec<u32>,
}

/// A type's common part.
#[derive(Clone, Copy)]
struct Type<'a> {
    name: u32,
    kind: u32,
    /// Whether bit 31 is set: bit fields in a struct, signed values in an enum.
    flag: bool,
    /// A size, or the id of another type.
    size_or_type: u32,
    /// What follows: members, enumerators, an array's description.
    rest: &'a [u8],
    count: usize,
}

fn word(bytes: &[u8], index: usize) -> Option<u32> {
    bytes.get(index * 4..)?.first_chunk().map(|word| u32::from_le_bytes(*word))
}

/// Bytes that follow the common part of a type with `count` elements.
fn rest_bytes(kind: u32, count: usize) -> Option<usize> {
    Some(match kind {
        kind::PTR | kind::TYPEDEF | kind::VOLATILE | kind::CONST | kind::RESTRICT | kind::FUNC => 0,
        7 | 16 | kind::TYPE_TAG => 0,
        kind::INT | kind::VAR | kind::DECL_TAG => 4,
        kind::ARRAY => 12,
        kind::STRUCT | kind::UNION | kind::DATASEC | kind::ENUM64 => 12 * count,
        kind::ENUM | kind::FUNC_PROTO => 8 * count,
        _ => return None,
    })
}

impl Btf {
    /// Reads a blob; `None` unless it parses to its end: every type of a known kind, every name within the strings.
    pub fn parse(blob: &[u8]) -> Option<Self> {
        let extent = Extent::of(blob)?;
        let part = |(start, len): (usize, usize)| Some(blob.get(start..start.checked_add(len)?)?.to_vec());
        let (types, strings) = (part(extent.types)?, part(extent.strings)?);
        if strings.first() != Some(&0) || strings.last() != Some(&0) {
            return None;
        }
        let mut btf = Self { types, strings, starts: Vec::new(), asked: Vec::new() };
        let mut at = 0;
        while at < btf.types.len() {
            let start = u32::try_from(at).ok()?;
            let (name, info) = (word(&btf.types[at..], 0)?, word(&btf.types[at..], 1)?);
            let kind = info >> 24 & 0x1f;
            btf.starts.push(start);
            btf.asked.extend(kind::ASKED.contains(&kind).then_some(start));
            at += 12 + rest_bytes(kind, (info & 0xffff) as usize)?;
            if name as usize >= btf.strings.len() {
                return None;
            }
        }
        (at == btf.types.len() && !btf.starts.is_empty()).then_some(btf)
    }

    /// Number of types.
    pub fn types(&self) -> usize {
        self.starts.len()
    }

    /// The place and size of a member, found also in anonymous structs and unions inside.
    pub fn member(&self, of: &str, name: &str) -> Option<Member> {
        let mut steps = STEPS_MAX;
        self.named(of, &[kind::STRUCT, kind::UNION])
            .filter(|found| found.count > 0)
            .find_map(|found| self.member_in(found, name, 0, &mut steps))
    }

    /// Bytes of a struct.
    pub fn size_of(&self, name: &str) -> Option<usize> {
        let found = self.named(name, &[kind::STRUCT, kind::UNION]).find(|found| found.count > 0)?;
        Some(found.size_or_type as usize)
    }

    /// The value of an enumerator of a named enum.
    pub fn constant(&self, of: &str, name: &str) -> Option<u64> {
        self.named(of, &[kind::ENUM, kind::ENUM64]).find_map(|found| {
            let words = if found.kind == kind::ENUM { 2 } else { 3 };
            (0..found.count).find_map(|index| {
                let value = |at: usize| word(found.rest, index * words + at);
                let high = if words == 3 { value(2)? } else { 0 };
                self.is_named(value(0)?, name).then_some(u64::from(high) << 32 | u64::from(value(1)?))
            })
        })
    }

    /// The name of a function that begins with `prefix`.
    pub fn function(&self, prefix: &str) -> Option<String> {
        let functions = self.all().filter(|found| found.kind == kind::FUNC);
        let mut names = functions.map(|found| &self.strings[found.name as usize..]);
        let name = names.find(|name| name.starts_with(prefix.as_bytes()))?;
        let end = name.iter().position(|&byte| byte == 0)?;
        Some(String::from_utf8_lossy(&name[..end]).into_owned())
    }

    fn all(&self) -> impl Iterator<Item = Type<'_>> + '_ {
        self.starts.iter().filter_map(|&start| self.type_at(start as usize))
    }

    fn named<'a>(&'a self, name: &'a str, kinds: &'a [u32]) -> impl Iterator<Item = Type<'a>> + 'a {
        let asked = self.asked.iter().filter_map(|&start| self.type_at(start as usize));
        asked.filter(move |found| kinds.contains(&found.kind) && self.is_named(found.name, name))
    }

    fn is_named(&self, offset: u32, name: &str) -> bool {
        let rest = self.strings.get(offset as usize..).unwrap_or_default();
        rest.strip_prefix(name.as_bytes()).is_some_and(|rest| rest.first() == Some(&0))
    }

    fn type_at(&self, start: usize) -> Option<Type<'_>> {
        let bytes = self.types.get(start..)?;
        let (name, info) = (word(bytes, 0)?, word(bytes, 1)?);
        let (kind, count) = (info >> 24 & 0x1f, (info & 0xffff) as usize);
        let rest = bytes.get(12..12 + rest_bytes(kind, count)?)?;
        Some(Type { name, kind, flag: info >> 31 != 0, size_or_type: word(bytes, 2)?, rest, count })
    }

    /// The type `id`, behind typedefs and qualifiers.
    fn resolve(&self, mut id: u32) -> Option<Type<'_>> {
        for _ in 0..REFERENCES_MAX {
            let start = *self.starts.get((id as usize).checked_sub(1)?)?;
            let found = self.type_at(start as usize)?;
            match found.kind {
                kind::TYPEDEF | kind::VOLATILE | kind::CONST | kind::RESTRICT | kind::TYPE_TAG => {
                    id = found.size_or_type;
                }
                _ => return Some(found),
            }
        }
        None
    }

    fn size(&self, id: u32) -> Option<usize> {
        let (mut id, mut elements) = (id, 1_usize);
        for _ in 0..REFERENCES_MAX {
            let found = self.resolve(id)?;
            match found.kind {
                kind::PTR => return elements.checked_mul(8),
                kind::ARRAY => {
                    elements = elements.checked_mul(word(found.rest, 2)? as usize)?;
                    id = word(found.rest, 0)?;
                }
                kind::INT | kind::STRUCT | kind::UNION | kind::ENUM | kind::ENUM64 => {
                    return elements.checked_mul(found.size_or_type as usize);
                }
                _ => return None,
            }
        }
        None
    }

    fn member_in(&self, within: Type<'_>, name: &str, depth: u32, steps: &mut u32) -> Option<Member> {
        for index in 0..within.count {
            *steps = steps.checked_sub(1)?;
            let value = |at: usize| word(within.rest, index * 3 + at);
            let (member_name, id, bits) = (value(0)?, value(1)?, value(2)?);
            let (bits, field) = if within.flag { (bits & 0xff_ffff, bits >> 24) } else { (bits, 0) };
            let offset = (bits / 8) as usize;
            if member_name != 0 && self.is_named(member_name, name) {
                let whole_bytes = field == 0 && bits.is_multiple_of(8);
                return if whole_bytes { Some(Member { offset, size: self.size(id)? }) } else { None };
            }
            let anonymous = self.resolve(id).filter(|inner| {
                member_name == 0 && matches!(inner.kind, kind::STRUCT | kind::UNION) && depth < NESTING_MAX
            });
            if let Some(found) = anonymous.and_then(|inner| self.member_in(inner, name, depth + 1, steps)) {
                return Some(Member { offset: offset.checked_add(found.offset)?, size: found.size });
            }
        }
        None
    }
}

#[cfg(test)]
mod tests;
