//! The first cluster of an image: parsed, and what was understood written and parsed again.

use vmstrata_qcow2::header::is_qcow2;
use vmstrata_qcow2::{EncodeError, Header};

/// Longer than any image we know of, so that tables may lie anywhere.
const LONG: u64 = 1 << 50;

/// Parses `data` as the start of a file that ends with it, and of one that goes on for long.
///
/// # Panics
/// When what was understood does not survive being written.
pub fn qcow2_header(data: &[u8]) {
    for file_len in [data.len() as u64, LONG] {
        match Header::parse(data, file_len) {
            Ok(header) => understood(data, &header),
            // The message is made of what was found.
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
}

fn understood(data: &[u8], header: &Header) {
    assert!(is_qcow2(data));
    assert!(header.header_length as u64 <= header.cluster_bits.size());
    assert_eq!(header.crypt_method, 0);
    let (Ok(extensions), Ok(name)) = (header.extensions(data), header.backing_name(data)) else { return };
    let encoded = match header.encode(&extensions, name) {
        Ok(encoded) => encoded,
        // Parsed without an end mark, or over one another: then there is no room for both.
        Err(EncodeError::DoesNotFit { needed, have }) => return assert!(needed > have),
        Err(error) => panic!("parsed, and yet: {error}"),
    };
    let again = Header::parse(&encoded, LONG).expect("what was written is understood");
    let expected = Header { backing_file: again.backing_file, ..header.clone() };
    assert_eq!(again, expected);
    // Parsing wants the whole of the first cluster.
    let mut cluster = encoded;
    cluster.resize(header.cluster_bits.size() as usize, 0);
    assert_eq!(again.extensions(&cluster).as_ref(), Ok(&extensions));
    assert_eq!(again.backing_name(&cluster), Ok(name));
}
