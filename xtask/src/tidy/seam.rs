//! Files beside an image are made, opened, named and removed by `vmstrata_store::Place` alone: by a path, a link or another
//! directory that somebody put there would be followed.

use super::Source;
use super::sizes::test_modules;

/// Where the rule holds.
const ENGINE: [&str; 3] = ["crates/check/src/", "crates/disk/src/", "crates/backup/src/"];
/// What `std::fs` and `rustix::fs` do by a path.
const BY_PATH: [&str; 26] = [
    "copy",
    "create_dir",
    "create_dir_all",
    "hard_link",
    "link",
    "linkat",
    "mkdir",
    "mkdirat",
    "open",
    "openat",
    "read",
    "read_dir",
    "read_link",
    "read_to_string",
    "remove_dir",
    "remove_dir_all",
    "remove_file",
    "rename",
    "renameat",
    "renameat_with",
    "set_permissions",
    "symlink",
    "symlinkat",
    "unlink",
    "unlinkat",
    "write",
];
const OF_FILE: [&str; 5] = ["create", "create_new", "open", "options", "create_buffered"];

/// The offences of one file.
pub(super) fn check(source: &Source) -> Vec<String> {
    if source.is_test() || !ENGINE.iter().any(|engine| source.path.starts_with(engine)) {
        return Vec::new();
    }
    let tests = test_modules(&source.tokens);
    let in_tests = |line: usize| tests.iter().any(|lines| lines.contains(&line));
    let calls = source.tokens.windows(4).filter(|tokens| {
        let [module, one, two, name] = tokens else { return false };
        let is_path = one.text == ":" && two.text == ":" && !in_tests(name.line);
        let names: &[&str] = match &*module.text {
            "fs" => &BY_PATH,
            "File" => &OF_FILE,
            _ => &[],
        };
        is_path && names.contains(&&*name.text)
    });
    let complain = |tokens: &[super::Token]| {
        let (module, name) = (&tokens[0], &tokens[3]);
        format!(
            "{}:{}: `{}::{}` goes by a path: use `vmstrata_store::Place`",
            source.path, name.line, module.text, name.text
        )
    };
    calls.map(complain).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_by_a_path_is_found_in_the_engine_and_not_in_its_tests() {
        let code = "//! x\nfn a() {\n    std::fs::remove_file(p)?;\n    File::open(p)?;\n    rustix::fs::fstat(f)?;\n}\n\
                    #[cfg(test)]\nmod tests {\n    fn b() { std::fs::write(p, q) }\n}\n";
        let found = check(&Source::new("crates/disk/src/a.rs".into(), code.into()));
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].starts_with("crates/disk/src/a.rs:3: `fs::remove_file`"), "{found:?}");
        assert_eq!(check(&Source::new("crates/store/src/a.rs".into(), code.into())), [""; 0]);
    }
}
