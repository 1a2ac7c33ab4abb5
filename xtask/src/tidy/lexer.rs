//! Just enough of Rust's lexical structure to find code: comments, strings and characters are left out.
//!
//! Source: The Rust Reference, "Lexical structure". Nothing here builds a syntax tree.

/// A word or one character of punctuation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    /// The word, or the punctuation character.
    pub text: String,
    /// Line it begins on, from 1.
    pub line: usize,
}

/// The tokens of `text`, in order. Literals other than numbers yield none.
pub fn tokens(text: &str) -> Vec<Token> {
    let mut lexer = Lexer { chars: text.chars().collect(), at: 0, line: 1, tokens: Vec::new() };
    while lexer.at < lexer.chars.len() {
        lexer.step();
    }
    lexer.tokens
}

struct Lexer {
    chars: Vec<char>,
    at: usize,
    line: usize,
    tokens: Vec<Token>,
}

impl Lexer {
    fn peek(&self, ahead: usize) -> Option<char> {
        self.chars.get(self.at + ahead).copied()
    }

    fn advance(&mut self) {
        if self.peek(0) == Some('\n') {
            self.line += 1;
        }
        self.at += 1;
    }

    fn step(&mut self) {
        match (self.peek(0).expect("not at the end"), self.peek(1)) {
            ('/', Some('/')) => {
                while self.peek(0).is_some_and(|next| next != '\n') {
                    self.advance();
                }
            }
            ('/', Some('*')) => self.block_comment(),
            ('"', _) => self.string(),
            ('\'', _) => self.quote(),
            (first, _) if first == '_' || first.is_alphanumeric() => self.word(),
            (first, _) => {
                if !first.is_whitespace() {
                    self.tokens.push(Token { text: first.to_string(), line: self.line });
                }
                self.advance();
            }
        }
    }

    fn block_comment(&mut self) {
        let mut depth = 0;
        while let Some(next) = self.peek(0) {
            match (next, self.peek(1)) {
                ('/', Some('*')) => depth += 1,
                ('*', Some('/')) => depth -= 1,
                _ => {
                    self.advance();
                    continue;
                }
            }
            self.advance();
            self.advance();
            if depth == 0 {
                return;
            }
        }
    }

    fn string(&mut self) {
        self.advance();
        while let Some(next) = self.peek(0) {
            self.advance();
            match next {
                '\\' => self.advance(),
                '"' => return,
                _ => {}
            }
        }
    }

    /// A character literal, or a lifetime (which yields nothing either).
    fn quote(&mut self) {
        self.advance();
        let lifetime = self.peek(0).is_some_and(|next| next == '_' || next.is_alphabetic())
            && self.peek(1) != Some('\'');
        if lifetime {
            while self.peek(0).is_some_and(|next| next == '_' || next.is_alphanumeric()) {
                self.advance();
            }
            return;
        }
        while let Some(next) = self.peek(0) {
            self.advance();
            match next {
                '\\' => self.advance(),
                '\'' => return,
                _ => {}
            }
        }
    }

    fn word(&mut self) {
        let (start, line) = (self.at, self.line);
        while self.peek(0).is_some_and(|next| next == '_' || next.is_alphanumeric()) {
            self.advance();
        }
        let text: String = self.chars[start..self.at].iter().collect();
        match (text.as_str(), self.peek(0)) {
            ("r" | "br" | "cr", Some('"' | '#')) if self.raw_string() => {}
            ("b" | "c", Some('"')) => self.string(),
            ("b", Some('\'')) => self.quote(),
            _ => self.tokens.push(Token { text, line }),
        }
    }

    /// Skips `#*"..."#*`; `false` when this is a raw identifier instead.
    fn raw_string(&mut self) -> bool {
        let hashes = (0..).take_while(|ahead| self.peek(*ahead) == Some('#')).count();
        if self.peek(hashes) != Some('"') {
            return false;
        }
        (0..=hashes).for_each(|_| self.advance());
        while self.peek(0).is_some() {
            let ends = self.peek(0) == Some('"') && (1..=hashes).all(|ahead| self.peek(ahead) == Some('#'));
            self.advance();
            if ends {
                (0..hashes).for_each(|_| self.advance());
                break;
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        tokens(text).into_iter().map(|token| token.text).collect()
    }

    #[test]
    fn comments_and_literals_are_left_out() {
        assert_eq!(words("a // b\n/* c /* d */ e */ f"), ["a", "f"]);
        assert_eq!(words(r#"x = "un\"safe" ; y"#), ["x", "=", ";", "y"]);
        assert_eq!(words("r#\"a \" b\"# z b\"q\" w"), ["z", "w"]);
        assert_eq!(words("'{' '\\'' b'}' q"), ["q"]);
    }

    #[test]
    fn lifetimes_are_not_character_literals() {
        assert_eq!(
            words("fn f<'a>(x: &'a u8) {}"),
            ["fn", "f", "<", ">", "(", "x", ":", "&", "u8", ")", "{", "}"]
        );
        assert_eq!(words("r#fn x"), ["r", "#", "fn", "x"]);
    }

    #[test]
    fn lines_are_counted_through_strings_and_comments() {
        let tokens = tokens("a\n\"x\ny\"\n/* \n */ b");
        assert_eq!(tokens[1], Token { text: "b".into(), line: 5 });
    }
}
