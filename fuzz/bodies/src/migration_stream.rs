//! What QEMU says of a guest while it migrates it, whose pages are taken out as it comes.

use vmstrata_memory::BoxError;
use vmstrata_memory::capture::stream::{StreamPage, split};

/// What the block of memory is called that a caller wants.
const BLOCK: usize = 7;
/// Bytes of the shortest page: a word and the byte that fills it.
const PAGE_LEAST: usize = 9;

/// Memory, but not what is the machine's own.
fn wanted(name: &str) -> Option<usize> {
    (!name.contains("bios") && !name.contains("rom")).then_some(BLOCK)
}

/// All of it, from the first byte on.
///
/// # Panics
/// When a page is given that cannot be one, or what is left is no stream, or one with pages that were taken out.
pub fn migration_stream(input: &[u8]) {
    let mut pages = 0;
    let mut count = |page: StreamPage<'_>| -> Result<(), BoxError> {
        assert!(page.block == BLOCK && page.offset.is_multiple_of(page.bytes.len() as u64), "{page:?}");
        pages += 1;
        Ok(())
    };
    let Ok(rest) = split(input, &wanted, &mut count) else { return };
    assert!(pages <= input.len() / PAGE_LEAST, "{pages} pages");
    let mut none = |page: StreamPage<'_>| -> Result<(), BoxError> { panic!("{page:?} was taken out") };
    let again = split(rest.as_slice(), &wanted, &mut none).expect("what is left is a stream");
    assert!(again == rest, "what is left changes when it is taken apart");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stock_qemu_writes_is_taken_apart() {
        for stream in [
            &include_bytes!("../../seeds/migration_stream/isapc")[..],
            include_bytes!("../../seeds/migration_stream/microvm"),
        ] {
            let mut pages = 0;
            let mut count = |_: StreamPage<'_>| -> Result<(), BoxError> {
                pages += 1;
                Ok(())
            };
            split(stream, &wanted, &mut count).unwrap();
            assert_eq!(pages, 256, "of 1 MiB");
            migration_stream(stream);
        }
    }
}
