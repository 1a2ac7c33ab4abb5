//! The options in a QEMU command line, as keys and values, to be looked through and changed.

use serde_json::Value;

/// A key and its value; the key is empty for a word that has none.
pub type Pair = (String, String);

/// Calls `change` with the pairs of each argument in turn, and returns the arguments with what it changed in the values.
///
/// An argument is a list of `key=value` in which a doubled comma is a comma, an object in JSON, of which the pairs are the
/// texts at any depth, or else one value. One in which nothing changes is returned byte for byte.
pub fn edit(arguments: &[String], mut change: impl FnMut(&mut [Pair])) -> Vec<String> {
    arguments.iter().map(|argument| edited(argument, &mut change)).collect()
}

fn edited(argument: &str, change: &mut impl FnMut(&mut [Pair])) -> String {
    if let Ok(mut json @ Value::Object(_)) = serde_json::from_str(argument) {
        let mut pairs = Vec::new();
        visit(&mut json, "", &mut |key, text| pairs.push((key.to_owned(), text.clone())));
        let before = pairs.clone();
        change(&mut pairs);
        if pairs == before {
            return argument.to_owned();
        }
        let mut values = pairs.into_iter().map(|(_, value)| value);
        visit(&mut json, "", &mut |_, text| *text = values.next().expect("one for each text"));
        return json.to_string();
    }
    let mut pairs: Vec<Pair> = split(argument).into_iter().map(pair).collect();
    let before = pairs.clone();
    change(&mut pairs);
    if pairs == before {
        return argument.to_owned();
    }
    let words = pairs.into_iter().map(|(key, value)| match key.is_empty() {
        true => value.replace(',', ",,"),
        false => format!("{key}={}", value.replace(',', ",,")),
    });
    words.collect::<Vec<_>>().join(",")
}

fn pair(word: String) -> Pair {
    let is_key = |key: &str| key.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
    match word.split_once('=') {
        Some((key, value)) if !key.is_empty() && is_key(key) => (key.to_owned(), value.to_owned()),
        _ => (String::new(), word),
    }
}

/// Calls `each` with the texts in `value`, always in the same order.
fn visit(value: &mut Value, key: &str, each: &mut impl FnMut(&str, &mut String)) {
    match value {
        Value::String(text) => each(key, text),
        Value::Object(fields) => fields.iter_mut().for_each(|(key, value)| visit(value, key, each)),
        Value::Array(values) => values.iter_mut().for_each(|value| visit(value, key, each)),
        _ => {}
    }
}

/// The words of a list in which a doubled comma is a comma.
pub(super) fn split(list: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut rest = list.chars().peekable();
    while let Some(next) = rest.next() {
        let word = words.last_mut().expect("never empty");
        match next {
            ',' if rest.next_if_eq(&',').is_some() => word.push(','),
            ',' => words.push(String::new()),
            _ => word.push(next),
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replaced(argument: &str) -> String {
        edit(&[argument.to_owned()], |pairs| {
            for (_, value) in pairs.iter_mut().filter(|(_, value)| value == "/a,b") {
                *value = "/c,d".to_owned();
            }
        })
        .remove(0)
    }

    #[test]
    fn values_change_in_lists_in_json_and_alone() {
        assert_eq!(replaced("if=virtio,file=/a,,b,format=qcow2"), "if=virtio,file=/c,,d,format=qcow2");
        assert_eq!(replaced("/a,,b"), "/c,,d");
        let json = replaced(r#"{"driver":"qcow2","file":{"driver":"file","filename":"/a,b"},"n":1}"#);
        assert_eq!(json, r#"{"driver":"qcow2","file":{"driver":"file","filename":"/c,d"},"n":1}"#);
        for other in ["-drive", "q35,accel=tcg", "a,,b=1,c", "nbd+unix:///web?socket=/a,,b", r#"{ "a":1 }"#] {
            assert_eq!(replaced(other), other);
        }
    }

    #[test]
    fn an_address_is_one_value() {
        let mut seen = Vec::new();
        let _ =
            edit(&["file=nbd+unix:///web?socket=/s,format=raw".to_owned()], |pairs| seen = pairs.to_vec());
        assert_eq!(seen[0], ("file".to_owned(), "nbd+unix:///web?socket=/s".to_owned()));
        let _ = edit(&["nbd+unix:///web?socket=/s".to_owned()], |pairs| seen = pairs.to_vec());
        assert_eq!(seen, [(String::new(), "nbd+unix:///web?socket=/s".to_owned())]);
    }
}
