//! Sizes as people write them on a command line: `512`, `64K`, `4G`.

use anyhow::{Context, Result, bail};

/// Parses a number of bytes with an optional binary suffix `K`, `M`, `G` or `T` (an `iB` after it is allowed).
///
/// # Errors
/// Anything else, and products past 2^64.
pub fn parse_size(text: &str) -> Result<u64> {
    let digits = text.trim_end_matches("iB").trim_end_matches('B');
    let (number, shift) = match digits.char_indices().next_back() {
        Some((at, 'k' | 'K')) => (&digits[..at], 10),
        Some((at, 'm' | 'M')) => (&digits[..at], 20),
        Some((at, 'g' | 'G')) => (&digits[..at], 30),
        Some((at, 't' | 'T')) => (&digits[..at], 40),
        Some(_) => (digits, 0),
        None => bail!("a size is needed, for example 64K"),
    };
    let number: u64 = number.parse().with_context(|| format!("{text:?} is not a size such as 64K or 4G"))?;
    number.checked_mul(1 << shift).with_context(|| format!("{text} does not fit 64 bits"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suffixes_are_binary() {
        assert_eq!(parse_size("512").unwrap(), 512);
        assert_eq!(parse_size("64K").unwrap(), 65_536);
        assert_eq!(parse_size("4GiB").unwrap(), 4 << 30);
        assert_eq!(parse_size("1T").unwrap(), 1 << 40);
    }

    #[test]
    fn what_is_no_size_is_refused() {
        for text in ["", "K", "4X", "-1", "17179869184G"] {
            assert!(parse_size(text).is_err(), "{text:?} was taken");
        }
    }
}
