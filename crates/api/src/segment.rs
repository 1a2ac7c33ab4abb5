//! Names in paths.

/// `text` as one segment of a URL's path: everything but RFC 3986's unreserved characters is percent-encoded.
///
/// `.` and `..` stay what they are: no name of the API may be one of them.
pub fn encode_segment(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_name_leaves_its_segment() {
        assert_eq!(encode_segment("web-1.a_b~c"), "web-1.a_b~c");
        assert_eq!(encode_segment("a/b?c#d e%"), "a%2Fb%3Fc%23d%20e%25");
        assert_eq!(encode_segment("ü"), "%C3%BC");
    }
}
