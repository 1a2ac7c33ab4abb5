//! Sizes as people write and read them: `64K` in, `64 KiB` out.
//!
//! Suffixes are powers of 1024, as qemu-img has them. A number without a suffix is bytes; fractions are refused,
//! because a size that rounds is a disk that has a different size than the one asked for.

use anyhow::{Context, Result, bail, ensure};

/// Powers of 1024 in the order of their suffixes.
const SUFFIXES: [(char, u32); 6] = [('K', 10), ('M', 20), ('G', 30), ('T', 40), ('P', 50), ('E', 60)];

/// Bytes from `512`, `64K`, `64KiB`, `2M`, `10g`, ...
///
/// # Errors
/// When the text is not a whole number with one of the suffixes B, K, M, G, T, P, E (optionally `iB`), or passes 2^64.
pub fn parse_size(text: &str) -> Result<u64> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, suffix) = text.split_at(digits);
    ensure!(!number.is_empty(), "a size starts with digits, as in 10G or 1073741824");
    ensure!(!suffix.starts_with('.'), "write a fraction with a smaller suffix: 1536M instead of 1.5G");
    let number: u64 = number.parse().with_context(|| format!("{number} is more than 64 bits hold"))?;
    let unit = 1_u64 << shift_of(suffix)?;
    number.checked_mul(unit).with_context(|| format!("{text} is more than 64 bits hold"))
}

/// How far a number with this suffix is shifted to the left.
fn shift_of(suffix: &str) -> Result<u32> {
    let mut letters = suffix.chars();
    let Some(first) = letters.next() else { return Ok(0) };
    let rest = letters.as_str();
    if first.eq_ignore_ascii_case(&'b') && rest.is_empty() {
        return Ok(0);
    }
    match SUFFIXES.iter().find(|(letter, _)| first.eq_ignore_ascii_case(letter)) {
        Some((_, shift)) if rest.is_empty() || rest == "iB" => Ok(*shift),
        _ => bail!("unknown size suffix '{suffix}': use B, K, M, G, T, P or E (powers of 1024)"),
    }
}

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
    fn suffixes_are_powers_of_1024_in_either_case() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("512B", 512),
            ("64K", 65536),
            ("64k", 65536),
            ("64KiB", 65536),
            ("2M", 2 << 20),
            ("10G", 10 << 30),
            ("3t", 3 << 40),
            ("1P", 1 << 50),
            ("15E", 15 << 60),
        ] {
            assert_eq!(parse_size(text).unwrap(), bytes, "{text}");
        }
    }

    #[test]
    fn what_is_not_a_size_says_why() {
        for (text, part) in [
            ("", "starts with digits"),
            ("K", "starts with digits"),
            ("-1", "starts with digits"),
            ("1.5G", "1536M"),
            ("10X", "unknown size suffix 'X'"),
            ("10KB", "unknown size suffix 'KB'"),
            ("10 G", "unknown size suffix ' G'"),
            ("16E", "64 bits"),
            ("18446744073709551616", "64 bits"),
        ] {
            let error = format!("{:#}", parse_size(text).unwrap_err());
            assert!(error.contains(part), "{text}: {error}");
        }
    }

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
