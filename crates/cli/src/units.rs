//! Sizes as people write and read them: `64K` in, `64 KiB` out. Suffixes are powers of 1024.

pub use vmstrata_server::size::parse_size;

/// Powers of 1024 in the order of their suffixes.
const SUFFIXES: [(char, u32); 6] = [('K', 10), ('M', 20), ('G', 30), ('T', 40), ('P', 50), ('E', 60)];

/// `1.5 GiB (1610612736 bytes)`: rounded for the eye, exact for the script.
pub fn exact_size(bytes: u64) -> String {
    if bytes < 1024 { format!("{bytes} bytes") } else { format!("{} ({bytes} bytes)", short_size(bytes)) }
}

/// `1.5 GiB`: at most one decimal, rounded down, so that what is shown is really there.
pub fn short_size(bytes: u64) -> String {
    let Some((letter, shift)) = SUFFIXES.iter().rev().find(|(_, shift)| bytes >> shift > 0) else {
        return format!("{bytes} B");
    };
    let whole = bytes >> shift;
    let tenth = ((u128::from(bytes) * 10) >> shift) % 10;
    if tenth == 0 { format!("{whole} {letter}iB") } else { format!("{whole}.{tenth} {letter}iB") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_well_and_stay_exact() {
        assert_eq!(short_size(0), "0 B");
        assert_eq!(short_size(1023), "1023 B");
        assert_eq!(short_size(65536), "64 KiB");
        assert_eq!(short_size(1536 << 20), "1.5 GiB");
        assert_eq!(short_size((1 << 30) - 1), "1023.9 MiB");
        assert_eq!(short_size(u64::MAX), "15.9 EiB");
        assert_eq!(exact_size(512), "512 bytes");
        assert_eq!(exact_size(1536 << 20), "1.5 GiB (1610612736 bytes)");
    }
}
