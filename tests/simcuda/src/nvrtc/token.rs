//! Tokens of preprocessed C++, as far as needed to find kernels and shared memory: names, numbers,
//! literals and single punctuation marks, each with its position and source line.

use std::ops::Range;

/// What a token is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenKind {
    Name,
    Number,
    Literal,
    Mark,
}

/// One token.
#[derive(Clone, Debug)]
pub(super) struct Token<'a> {
    pub(super) kind: TokenKind,
    pub(super) range: Range<usize>,
    /// The source file, by line markers.
    pub(super) file: &'a str,
    /// In the source, by line markers.
    pub(super) line: u32,
}

/// A source in tokens.
pub(super) struct Tokens<'a> {
    pub(super) text: &'a str,
    pub(super) all: Vec<Token<'a>>,
    /// Lines that the preprocessor left for the compiler: `#pragma …`.
    pub(super) directives: Vec<&'a str>,
}

impl<'a> Tokens<'a> {
    /// Splits `text`, the output of `g++ -E`.
    pub(super) fn of(text: &'a str) -> Self {
        let mut tokens = Self {
            text,
            all: Vec::new(),
            directives: Vec::new(),
        };
        let bytes = text.as_bytes();
        let (mut at, mut line, mut file, mut begins_line) = (0, 1_u32, "", true);
        while at < bytes.len() {
            let byte = bytes[at];
            if byte == b'\n' {
                (at, line, begins_line) = (at + 1, line.saturating_add(1), true);
                continue;
            }
            if byte.is_ascii_whitespace() {
                at += 1;
                continue;
            }
            if byte == b'#' && begins_line {
                let end = text[at..]
                    .find('\n')
                    .map_or(bytes.len(), |length| at + length);
                let directive = text[at + 1..end].trim();
                match line_marker(directive) {
                    // The marker names the next line. Line 0 is the compiler's prologue.
                    Some(marked) => {
                        line = marked.saturating_sub(1);
                        file = directive.split('"').nth(1).unwrap_or(file);
                    }
                    None => tokens.directives.push(directive),
                }
                at = end;
                continue;
            }
            begins_line = false;
            let (kind, end) = token_at(text, at);
            tokens.all.push(Token {
                kind,
                range: at..end,
                file,
                line,
            });
            line += text[at..end].matches('\n').count() as u32;
            at = end;
        }
        tokens
    }

    /// The text of a token; empty after the last.
    pub(super) fn word(&self, index: usize) -> &'a str {
        self.all
            .get(index)
            .map_or("", |token| &self.text[token.range.clone()])
    }

    /// The index after the bracket that closes the one at `open`.
    pub(super) fn behind_bracket(&self, open: usize) -> usize {
        let mut depth = 0_usize;
        for index in open..self.all.len() {
            match self.word(index) {
                "(" | "[" | "{" => depth += 1,
                ")" | "]" | "}" => {
                    depth = depth.saturating_sub(1);
                    if depth == 0 {
                        return index + 1;
                    }
                }
                _ => {}
            }
        }
        self.all.len()
    }

    /// The text from one token up to, but excluding, another.
    pub(super) fn between(&self, from: usize, to: usize) -> &'a str {
        match (
            self.all.get(from),
            to.checked_sub(1).and_then(|last| self.all.get(last)),
        ) {
            (Some(first), Some(last)) if from < to => &self.text[first.range.start..last.range.end],
            _ => "",
        }
    }
}

/// The line of `# 12 "file" 1` and `#line 12`.
fn line_marker(directive: &str) -> Option<u32> {
    directive
        .strip_prefix("line")
        .unwrap_or(directive)
        .split_whitespace()
        .next()?
        .parse()
        .ok()
}

fn token_at(text: &str, at: usize) -> (TokenKind, usize) {
    let bytes = text.as_bytes();
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte >= 0x80;
    let word_end = |from: usize| {
        from + bytes[from..]
            .iter()
            .take_while(|byte| is_word(**byte))
            .count()
    };
    match bytes[at] {
        b'"' | b'\'' => (TokenKind::Literal, quoted_end(bytes, at)),
        byte if byte.is_ascii_digit() => {
            // Digits may contain quotes and a point, and exponents a sign.
            let mut end = at + 1;
            while end < bytes.len()
                && (is_word(bytes[end])
                    || bytes[end] == b'.'
                    || (bytes[end] == b'\''
                        && bytes.get(end + 1).is_some_and(|next| is_word(*next)))
                    || (matches!(bytes[end], b'+' | b'-')
                        && matches!(bytes[end - 1], b'e' | b'E' | b'p' | b'P')))
            {
                end += 1;
            }
            (TokenKind::Number, end)
        }
        byte if is_word(byte) => {
            let end = word_end(at);
            let is_raw = bytes.get(end) == Some(&b'"')
                && matches!(&text[at..end], "R" | "LR" | "uR" | "UR" | "u8R");
            if is_raw {
                (TokenKind::Literal, raw_end(text, end))
            } else {
                (TokenKind::Name, end)
            }
        }
        _ => (TokenKind::Mark, at + 1),
    }
}

fn quoted_end(bytes: &[u8], at: usize) -> usize {
    let mut end = at + 1;
    while end < bytes.len() && bytes[end] != bytes[at] && bytes[end] != b'\n' {
        end += if bytes[end] == b'\\' { 2 } else { 1 };
    }
    (end + 1).min(bytes.len())
}

/// The end of `"delimiter(…)delimiter"`.
fn raw_end(text: &str, quote: usize) -> usize {
    let Some(open) = text[quote..].find('(') else {
        return text.len();
    };
    let close = format!("){}\"", &text[quote + 1..quote + open]);
    text[quote + open..]
        .find(&close)
        .map_or(text.len(), |length| quote + open + length + close.len())
}
