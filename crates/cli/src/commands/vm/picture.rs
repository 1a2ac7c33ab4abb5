//! Pictures of a guest's memory: one pixel a page for a file, one character for many pages for a terminal.

use std::fmt::Write;

use vmstrata_memory::introspect::{Cause, CauseMap};
use vmstrata_memory::{ClassMap, Frame, Layout, PageClass};

/// Pages in a row of a picture: 4 MiB.
const PICTURE_WIDTH: u64 = 1024;
/// Rows of a picture; holes between blocks are left out first, so this is 256 GiB of memory.
const PICTURE_ROWS_MAX: u64 = 1 << 16;
const MAP_WIDTH: u64 = 64;
const MAP_ROWS: u64 = 24;

/// The frames there is memory for, in order, without the holes between blocks.
fn frames(layout: &Layout) -> impl Iterator<Item = Frame> + '_ {
    layout.blocks().iter().flat_map(|block| {
        let first = Frame::of(block.start).get();
        (first..first + (block.len >> vmstrata_memory::PAGE_BITS)).map(Frame::new)
    })
}

/// A picture in the portable pixmap format, as most viewers and converters read it.
pub fn ppm(layout: &Layout, causes: &CauseMap) -> Vec<u8> {
    let pages = layout.bytes() >> vmstrata_memory::PAGE_BITS;
    let rows = pages.div_ceil(PICTURE_WIDTH).min(PICTURE_ROWS_MAX);
    let mut picture = format!("P6 {PICTURE_WIDTH} {rows} 255\n").into_bytes();
    let pixels = (rows * PICTURE_WIDTH) as usize;
    let colours = frames(layout).map(|frame| colour(causes.get(frame)));
    picture.extend(colours.chain(std::iter::repeat([255; 3])).take(pixels).flatten());
    picture
}

const fn colour(cause: Cause) -> [u8; 3] {
    match cause {
        Cause::Free => [0, 0, 0],
        Cause::CleanExt4 => [60, 180, 75],
        Cause::CleanXfs => [0, 130, 200],
        Cause::DirtyCache => [245, 130, 48],
        Cause::MappedCache | Cause::BusyCache | Cause::OtherCache | Cause::BlockCache => [255, 225, 25],
        Cause::Shmem => [240, 50, 230],
        Cause::Anonymous | Cause::Huge => [230, 25, 75],
        Cause::Slab => [170, 170, 170],
        Cause::PageTable | Cause::Kernel => [128, 128, 128],
        Cause::Reserved => [90, 90, 90],
        Cause::Unknown => [200, 200, 255],
    }
}

/// A map in characters, each for the same number of pages: what most of them are.
pub fn map(layout: &Layout, classes: &ClassMap) -> String {
    let pages = layout.bytes() >> vmstrata_memory::PAGE_BITS;
    let each = pages.div_ceil(MAP_WIDTH * MAP_ROWS).next_power_of_two().max(1);
    let size = crate::units::short_size(each << vmstrata_memory::PAGE_BITS);
    let mut text = format!("\neach character {size}: █ critical, ▒ clean cache, · free\n");
    let mut frames = frames(layout).peekable();
    while let Some(&first) = frames.peek() {
        _ = write!(text, "{:>12x}  ", first.get() << vmstrata_memory::PAGE_BITS);
        for _ in 0..MAP_WIDTH {
            let mut counts = [0_u64; 3];
            for frame in frames.by_ref().take(each as usize) {
                counts[classes.get(frame) as usize] += 1;
            }
            text.push(character(counts));
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    }
    text
}

/// For so many pages of each class.
fn character(counts: [u64; 3]) -> char {
    let [critical, clean, free] =
        [PageClass::Critical, PageClass::Clean, PageClass::Free].map(|class| counts[class as usize]);
    match critical.max(clean).max(free) {
        0 => ' ',
        most if most == critical => '█',
        most if most == clean => '▒',
        _ => '·',
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmstrata_memory::{Block, Physical};

    fn layout() -> Layout {
        let block = |start, pages: u64, file_offset| Block {
            start: Physical::new(start),
            len: pages << 12,
            file_offset,
        };
        Layout::new(vec![block(0, 3, 0), block(0x10_0000, 2, 0x3000)]).unwrap()
    }

    #[test]
    fn a_pixel_a_page_without_the_holes() {
        let mut causes = CauseMap::new(0x102);
        causes.set(Frame::new(1), 1, Cause::Free);
        causes.set(Frame::new(0x101), 1, Cause::CleanXfs);
        let picture = ppm(&layout(), &causes);
        let pixels = picture.strip_prefix(b"P6 1024 1 255\n").unwrap();
        assert_eq!(pixels.len(), 1024 * 3);
        assert_eq!(pixels[3..6], [0, 0, 0]);
        assert_eq!(pixels[12..15], colour(Cause::CleanXfs));
        assert_eq!(pixels[15..18], [255; 3], "past the last page");
    }

    #[test]
    fn a_character_says_what_most_pages_are() {
        let mut classes = ClassMap::new(0x102);
        classes.set(Frame::new(1), 1, PageClass::Free);
        classes.set(Frame::new(0x100), 2, PageClass::Clean);
        let text = map(&layout(), &classes);
        assert!(text.ends_with("           0  █·█▒▒\n"), "{text}");
        assert_eq!(character([1, 2, 3]), '·');
        assert_eq!(character([0; 3]), ' ');
    }
}
