//! The header of a new image as bytes: what it says beyond its fixed part.

use vmstrata_types::HostOffset;

use super::{CreateError, CreateOptions, MIN_NAMED};
use crate::extension::{Extension, Extensions, FeatureNames, magic};
use crate::header::{BackingName, Header};
use crate::index::IndexLink;

/// The header's bytes; enters the place of the backing file's name into the header too.
pub(super) fn encode_header(header: &mut Header, options: &CreateOptions) -> Result<Vec<u8>, CreateError> {
    let mut extensions = Extensions::default();
    let name = options.backing.as_ref().map(|backing| backing.name.as_slice());
    if let Some(format) = options.backing.as_ref().and_then(|backing| backing.format.clone()) {
        extensions.items.push(Extension::BackingFormat(format));
    }
    if let Some(record) = &options.record {
        extensions.items.push(Extension::Unknown { magic: magic::SNAPSHOT, data: record.encode()? });
    }
    if options.feature_names && options.version >= 3 && options.cluster_bits >= MIN_NAMED {
        extensions.items.push(Extension::FeatureNames(FeatureNames::known()));
    }
    let bytes =
        with_index_room(header, &extensions, options).map_or_else(|| header.encode(&extensions, name), Ok)?;
    if let Some(name) = name {
        let offset = HostOffset::new((bytes.len() - name.len()) as u64);
        header.backing_file = Some(BackingName { offset, len: name.len() as u32 });
    }
    Ok(bytes)
}

/// The header's bytes with room for a link right after the backing format, so within the first sector.
fn with_index_room(header: &Header, extensions: &Extensions, options: &CreateOptions) -> Option<Vec<u8>> {
    if !options.index_room || options.version < 3 {
        return None;
    }
    let mut extensions = extensions.clone();
    let room = Extension::Unknown { magic: magic::INDEX, data: IndexLink::encode(None).to_vec() };
    extensions.items.insert(usize::from(extensions.backing_format().is_some()), room);
    header.encode(&extensions, options.backing.as_ref().map(|backing| backing.name.as_slice())).ok()
}
