//! Sizes as people write them: `64K`, `2M`, `10GiB`.
//!
//! Suffixes are powers of 1024, as qemu-img has them. A number without a suffix is bytes; fractions are refused,
//! because a size that rounds is a disk that has a different size than the one asked for.

/// Powers of 1024 in the order of their suffixes.
const SUFFIXES: [(char, u32); 6] = [('K', 10), ('M', 20), ('G', 30), ('T', 40), ('P', 50), ('E', 60)];

/// Why a text is no size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// It does not start with a digit.
    #[error("a size starts with digits, as in 10G or 1073741824")]
    NoDigits,
    /// A fraction.
    #[error("write a fraction with a smaller suffix: 1536M instead of 1.5G")]
    Fraction,
    /// A suffix that is none.
    #[error("unknown size suffix '{suffix}': use B, K, M, G, T, P or E (powers of 1024)")]
    Suffix {
        /// What follows the digits.
        suffix: String,
    },
    /// More than 2^64.
    #[error("{text} is more than 64 bits hold")]
    TooLarge {
        /// The size as written.
        text: String,
    },
}

/// Bytes from `512`, `64K`, `64KiB`, `2M`, `10g`, ...
///
/// # Errors
/// When the text is not a whole number with one of the suffixes B, K, M, G, T, P, E (optionally `iB`), or passes 2^64.
pub fn parse_size(text: &str) -> Result<u64, SizeError> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, suffix) = text.split_at(digits);
    let too_large = || SizeError::TooLarge { text: text.to_owned() };
    if number.is_empty() {
        return Err(SizeError::NoDigits);
    }
    if suffix.starts_with('.') {
        return Err(SizeError::Fraction);
    }
    let number: u64 = number.parse().map_err(|_| too_large())?;
    number.checked_mul(1 << shift_of(suffix)?).ok_or_else(too_large)
}

/// How far a number with this suffix is shifted to the left.
fn shift_of(suffix: &str) -> Result<u32, SizeError> {
    let mut letters = suffix.chars();
    let Some(first) = letters.next() else { return Ok(0) };
    let rest = letters.as_str();
    if first.eq_ignore_ascii_case(&'b') && rest.is_empty() {
        return Ok(0);
    }
    match SUFFIXES.iter().find(|(letter, _)| first.eq_ignore_ascii_case(letter)) {
        Some((_, shift)) if rest.is_empty() || rest == "iB" => Ok(*shift),
        _ => Err(SizeError::Suffix { suffix: suffix.to_owned() }),
    }
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
            let error = parse_size(text).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
