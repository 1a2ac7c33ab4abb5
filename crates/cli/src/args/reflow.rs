//! How this process's arguments are read, and the texts below the options: written in lines as wide as the source, and shown as
//! wide as the terminal.

use std::any::TypeId;

use clap::builder::NonEmptyStringValueParser;
use clap::error::ErrorKind;
use clap::{Command, CommandFactory as _, FromArgMatches as _};

use super::{Cli, states};

/// A line of the source that is at least so long goes on in the next one.
const FULL: usize = 90;

impl Cli {
    /// What this process was asked.
    ///
    /// # Errors
    /// Wrong usage, and help.
    pub fn of_process() -> Result<Self, clap::Error> {
        // Who asks for no help waits for none of its texts.
        let matches = refusing_empty(Self::command()).try_get_matches();
        let parsed = matches.and_then(|mut matches| Self::from_arg_matches_mut(&mut matches));
        let mut asked = parsed.map_err(|error| match error.kind() {
            ErrorKind::DisplayHelp => reflowed(Self::command()).try_get_matches().err().unwrap_or(error),
            _ => error,
        })?;
        states::split_snapshots(&mut asked.command)?;
        Ok(asked)
    }
}

/// A command that refuses empty names, as clap refuses empty paths. What follows `--` belongs to another program, and an argument
/// with a default may be left out.
fn refusing_empty(command: Command) -> Command {
    let command = command.mut_args(|arg| {
        let is_text = arg.get_value_parser().type_id() == TypeId::of::<String>();
        let may_be_empty = arg.is_last_set() || !arg.get_default_values().is_empty();
        if is_text && !may_be_empty { arg.value_parser(NonEmptyStringValueParser::new()) } else { arg }
    });
    command.mut_subcommands(refusing_empty)
}

/// A command whose help, and whose subcommands', is wrapped by paragraphs.
fn reflowed(command: Command) -> Command {
    let text = command.get_after_help().map(|text| reflow(&text.to_string()));
    let command = match text {
        Some(text) => command.after_help(text),
        None => command,
    };
    command.mut_subcommands(reflowed)
}

/// Joins the lines of paragraphs; examples and lists, which are indented, stay as they are.
fn reflow(text: &str) -> String {
    let mut out = String::new();
    let mut is_open = false;
    for line in text.lines() {
        if !out.is_empty() {
            let goes_on = is_open && !line.is_empty() && !line.starts_with([' ', '\t']);
            out.push(if goes_on && !line.starts_with("Exit codes:") { ' ' } else { '\n' });
        }
        out.push_str(line);
        is_open = line.len() >= FULL && !line.starts_with([' ', '\t']);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paragraphs_are_joined_and_examples_are_not() {
        let long = "x".repeat(FULL);
        let text =
            format!("Examples:\n  {long}\n  short\n\n{long}\n{long}\nend.\nNext.\n{long}\nExit codes: 0");
        let expected =
            format!("Examples:\n  {long}\n  short\n\n{long} {long} end.\nNext.\n{long}\nExit codes: 0");
        assert_eq!(reflow(&text), expected);
    }

    #[test]
    fn every_text_keeps_its_words() {
        fn check(before: &Command, after: &Command) {
            let words = |command: &Command| {
                let text = command.get_after_help().map(ToString::to_string).unwrap_or_default();
                text.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
            };
            assert_eq!(words(before), words(after));
            before.get_subcommands().zip(after.get_subcommands()).for_each(|(one, other)| check(one, other));
        }
        check(&Cli::command(), &reflowed(Cli::command()));
    }
}
