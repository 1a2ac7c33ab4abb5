//! Streams as QEMU writes them, put together by hand, and streams that are not.

use super::*;

/// A stream in the making.
#[derive(Clone, Default)]
struct Stream(Vec<u8>);

impl Stream {
    fn begin() -> Self {
        let mut stream = Self::default();
        stream.u32(MAGIC).u32(VERSION).u8(CONFIGURATION).u32(4).bytes(b"q35x");
        stream
    }

    /// With a section of memory that has the blocks `mem` (4 pages) and `rom` (1 page).
    fn with_blocks() -> Self {
        let mut stream = Self::begin();
        stream.u8(SECTION_START).u32(2).name("ram").u32(0).u32(4);
        stream.u64((5 * 4096) | MEM_SIZE).name("mem").u64(4 * 4096).name("rom").u64(4096);
        stream.end_of_section();
        stream
    }

    fn u8(&mut self, value: u8) -> &mut Self {
        self.bytes(&[value])
    }

    fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes(&value.to_be_bytes())
    }

    fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes(&value.to_be_bytes())
    }

    fn name(&mut self, name: &str) -> &mut Self {
        self.u8(name.len() as u8).bytes(name.as_bytes())
    }

    fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend(bytes);
        self
    }

    fn part(&mut self) -> &mut Self {
        self.u8(SECTION_PART).u32(2)
    }

    fn end_of_section(&mut self) -> &mut Self {
        self.u64(EOS).u8(SECTION_FOOTER).u32(2)
    }

    fn devices(&mut self) -> &mut Self {
        self.u8(SECTION_FULL).bytes(b"whatever devices say, and the description")
    }
}

/// A change to a stream.
type Edit = fn(&mut Stream) -> &mut Stream;

type Seen = Vec<(usize, u64, u8, u8)>;

fn run(stream: &Stream) -> (Result<Vec<u8>, StreamError>, Seen) {
    let mut seen = Seen::new();
    let rest = split(stream.0.as_slice(), &|name| (name == "mem").then_some(7), &mut |page| {
        seen.push((page.block, page.offset, page.bytes[0], page.bytes[PAGE_BYTES - 1]));
        Ok(())
    });
    (rest, seen)
}

#[test]
fn pages_are_taken_out_and_the_rest_stays_a_stream() {
    let mut stream = Stream::with_blocks();
    stream.part().u64(PAGE).name("mem").bytes(&[1; 4096]).u64(4096 | PAGE | CONTINUE).bytes(&[2; 4096]);
    stream.end_of_section();
    // Continued across sections.
    stream.part().u64((2 * 4096) | ZERO | CONTINUE).u8(0).u64(ZERO).name("rom").u8(9).end_of_section();
    stream.part().u64((3 * 4096) | PAGE).name("mem").bytes(&[4; 4096]).end_of_section().devices();
    let (rest, seen) = run(&stream);
    assert_eq!(seen, [(7, 0, 1, 1), (7, 4096, 2, 2), (7, 8192, 0, 0), (7, 12288, 4, 4)]);
    let mut expected = Stream::with_blocks();
    expected.part().end_of_section();
    expected.part().u64(ZERO).name("rom").u8(9).end_of_section();
    expected.part().end_of_section().devices();
    assert_eq!(rest.unwrap(), expected.0);
}

#[test]
fn what_stays_names_its_block_where_the_page_before_was_taken_out() {
    let mut stream = Stream::with_blocks();
    stream.part().u64(PAGE).name("rom").bytes(&[5; 4096]).u64(PAGE | CONTINUE).bytes(&[6; 4096]);
    stream.end_of_section().devices();
    let (rest, seen) = run(&stream);
    assert!(seen.is_empty());
    let mut expected = Stream::with_blocks();
    expected.part().u64(PAGE).name("rom").bytes(&[5; 4096]).u64(PAGE).name("rom").bytes(&[6; 4096]);
    expected.end_of_section().devices();
    assert_eq!(rest.unwrap(), expected.0);
}

#[test]
fn every_prefix_of_a_stream_is_an_error_up_to_its_devices() {
    let mut stream = Stream::with_blocks();
    stream.part().u64(ZERO).name("mem").u8(0).end_of_section();
    for len in 0..stream.0.len() {
        run(&Stream(stream.0[..len].to_vec())).0.unwrap_err();
    }
    stream.devices();
    run(&stream).0.unwrap();
}

#[test]
fn streams_of_other_kinds_are_refused() {
    let edited = |edit: Edit| {
        let mut stream = Stream::with_blocks();
        edit(&mut stream);
        stream.devices();
        run(&stream).0.unwrap_err().to_string()
    };
    let cases: [(&str, Edit); 9] = [
        ("unknown block", |stream| stream.part().u64(PAGE).name("x").bytes(&[0; 4096])),
        ("unknown block", |stream| stream.part().u64(ZERO | CONTINUE).u8(0)),
        ("past the end", |stream| stream.part().u64((4 * 4096) | ZERO).name("mem").u8(0)),
        ("unknown kind (compressed", |stream| stream.part().u64(0x100).name("mem")),
        ("unknown kind (compressed", |stream| stream.part().u64(EOS | CONTINUE)),
        ("unknown section", |stream| stream.u8(SECTION_PART).u32(3)),
        ("without its footer", |stream| stream.part().u64(EOS).u8(0)),
        ("comes in parts", |stream| stream.u8(SECTION_START).u32(3).name("vfio").u32(0).u32(1)),
        ("unknown kind before", |stream| stream.u8(8)),
    ];
    for (part, edit) in cases {
        let error = edited(edit);
        assert!(error.contains(part), "{part}: {error}");
    }
    let mut early = Stream::begin();
    assert!(run(early.devices()).0.unwrap_err().to_string().contains("devices before memory"));
    let mut many = Stream::begin();
    many.u8(SECTION_START).u32(2).name("ram").u32(0).u32(4).u64(4096 | MEM_SIZE).name("mem").u64(8192);
    assert!(run(&many).0.unwrap_err().to_string().contains("more than all memory"));
}

#[test]
fn a_sink_that_fails_ends_the_reading() {
    let mut stream = Stream::with_blocks();
    stream.part().u64(ZERO).name("mem").u8(0).end_of_section().devices();
    let failed = split(stream.0.as_slice(), &|_| Some(0), &mut |_| Err("full".into()));
    assert!(matches!(failed, Err(StreamError::Sink(_))), "{failed:?}");
}
