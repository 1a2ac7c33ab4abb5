//! The command line itself: help, usage errors, completions, a reader that goes away.

use std::io::Write;
use std::process::{Command, Stdio};

use crate::support::{Images, commands_of, run, run_err, run_ok, vmstrata};

/// Checks a command and those below it; how many there are.
fn check_help(command: &[&str]) -> usize {
    let own = run_ok(command.iter().copied().chain(["--help"]));
    let examples =
        own.split_once("Examples:\n").unwrap_or_else(|| panic!("{command:?}: no examples:\n{own}")).1;
    let name = format!("vmstrata {}", command.join(" "));
    assert!(examples.lines().any(|line| line.contains(&name)), "{command:?}:\n{own}");
    1 + commands_of(command).iter().map(|below| check_help(&[command, &[below]].concat())).sum::<usize>()
}

#[test]
fn every_command_at_every_level_has_help_with_examples() {
    let commands = commands_of(&[]);
    let expected = [
        "create", "info", "snapshot", "index", "merge", "flatten", "resize", "convert", "diff", "backup",
        "restore", "serve", "vm",
    ];
    assert!(expected.iter().all(|name| commands.iter().any(|listed| listed == name)), "{commands:?}");
    let all: usize = commands.iter().map(|command| check_help(&[command])).sum();
    assert!(all > commands.len() + 20, "commands below commands are looked at: {all}");
}

#[test]
fn an_empty_argument_is_refused_by_what_precedes_it() {
    for (args, before) in [
        (&["info", ""][..], "info"),
        (&["disk", "remove", ""], "remove"),
        (&["snapshot", "create", "a.qcow2", "--name", ""], "--name"),
        (&["snapshot", "create", "a.qcow2", "--name="], "a.qcow2"),
        (&["vm", "snapshot", "", "--vault", "v"], "snapshot"),
    ] {
        let said = run_err(64, args);
        assert!(said.contains(&format!("an argument is empty, after '{before}'")), "{args:?}: {said}");
    }
    // What follows -- is QEMU's.
    let said = run_err(1, ["vm", "restore", "web", "--vault", "/absent", "--", "qemu", "-append", ""]);
    assert!(said.contains("/absent"), "{said}");
}

#[test]
fn a_path_that_is_not_there_is_an_error_that_names_it() {
    let images = Images::new();
    let absent = images.name("absent");
    for args in [
        &["survey"][..],
        &["gc"],
        &["gc", "--yes"],
        &["info"],
        &["map"],
        &["check"],
        &["index", "verify"],
        &["snapshot", "list"],
        &["merge", "--layers", "1"],
        &["flatten"],
        &["resize", "--shrink", "1G"],
        &["vm", "list", "--vault"],
    ] {
        let said = match args {
            ["resize", flag, size] => run_err(1, ["resize", flag, &absent, size]),
            args => run_err(1, [args, &[&absent]].concat()),
        };
        assert!(said.contains(&absent) && said.to_lowercase().contains("no such"), "{args:?}: {said}");
    }
}

#[test]
fn usage_errors_are_64_so_that_2_and_3_mean_what_check_found() {
    for args in [
        &[][..],
        &["frobnicate"],
        &["check"],
        &["check", "a.qcow2", "--repair", "everything"],
        &["create", "a.qcow2"],
        &["create", "a.qcow2", "1.5G"],
        &["serve"],
        &["serve", "--disk", "path=a,readonly", "--nbd", "unix:s"],
        &["serve", "--disk", "path=a", "--nbd", "/run/nbd.sock"],
        &["completions", "tcsh"],
    ] {
        run_err(64, args);
    }
}

#[test]
fn disks_and_exports_that_do_not_fit_together_are_told_before_anything_is_opened() {
    for (args, part) in [
        (&["--disk", "path=absent.qcow2"][..], "nothing serves disk 'absent'"),
        (
            &["--disk", "path=a/x.qcow2", "--disk", "path=b/x.qcow2", "--nbd", "unix:s"],
            "two disks are named 'x'",
        ),
        (&["--disk", "path=x.qcow2", "--vhost-user", "y=s"], "no disk has this name"),
    ] {
        let message = run_err(64, [&["serve"], args].concat());
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn bash_completes_commands_and_options() {
    let script = run_ok(["completions", "bash"]);
    let probe = format!(
        "{script}
COMP_WORDS=(vmstrata ch); COMP_CWORD=1; _vmstrata vmstrata ch vmstrata; echo \"${{COMPREPLY[@]}}\"
COMP_WORDS=(vmstrata serve --vho); COMP_CWORD=2; _vmstrata vmstrata --vho serve; echo \"${{COMPREPLY[@]}}\""
    );
    let mut bash = Command::new("bash").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    bash.stdin.take().unwrap().write_all(probe.as_bytes()).unwrap();
    let output = bash.wait_with_output().unwrap();
    assert!(output.status.success());
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "check\n--vhost-user\n");
}

#[test]
fn completion_scripts_name_every_command_and_parse_where_the_shell_is_there() {
    for shell in ["bash", "zsh", "fish"] {
        let script = run_ok(["completions", shell]);
        for command in commands_of(&[]) {
            assert!(script.contains(&command), "{shell}: {command}");
        }
        let Ok(mut child) = Command::new(shell).args(["-n", "/dev/stdin"]).stdin(Stdio::piped()).spawn()
        else {
            continue;
        };
        child.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
        assert!(child.wait().unwrap().success(), "{shell} does not parse its script");
    }
}

#[test]
fn a_reader_that_has_seen_enough_is_no_error() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = vmstrata().args(["completions", "bash"]).stdout(writer).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(output.stderr.is_empty(), "{output:?}");
}

#[test]
fn the_version_is_the_crates() {
    let output = run(["--version"]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), format!("vmstrata {}\n", env!("CARGO_PKG_VERSION")));
}
