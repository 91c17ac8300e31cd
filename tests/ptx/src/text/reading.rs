//! Reads the text of a module.

use super::{
    Body, Content, Instruction, KernelText, Operand, Registers, Space, Statement, Text, Variable,
};
use crate::finding::Refusal;

/// Bytes of a fundamental type: `u32`.
pub(crate) fn type_bytes(name: &str) -> Option<u64> {
    Some(match name {
        "b8" | "u8" | "s8" => 1,
        "b16" | "u16" | "s16" | "f16" | "bf16" => 2,
        "b32" | "u32" | "s32" | "f32" | "f16x2" | "bf16x2" => 4,
        "b64" | "u64" | "s64" | "f64" => 8,
        _ => return None,
    })
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
    line: u32,
    source: (u32, u32),
}

impl<'a> Reader<'a> {
    fn refuse<T>(&self, message: impl Into<String>) -> Result<T, Refusal> {
        Err(Refusal::at(self.line, message))
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn advance(&mut self, bytes: usize) {
        let passed = &self.text.as_bytes()[self.at..self.at + bytes];
        self.line += passed.iter().filter(|byte| **byte == b'\n').count() as u32;
        self.at += bytes;
    }

    /// To what is neither white space nor a comment.
    fn skip(&mut self) {
        loop {
            let rest = self.rest();
            let blank = rest.len() - rest.trim_start().len();
            self.advance(blank);
            let rest = self.rest();
            if rest.starts_with("//") {
                self.advance(rest.find('\n').unwrap_or(rest.len()));
            } else if rest.starts_with("/*") {
                self.advance(rest.find("*/").map_or(rest.len(), |at| at + 2));
            } else {
                return;
            }
        }
    }

    /// The rest of the line.
    fn line_rest(&mut self) -> &'a str {
        let rest = self.rest();
        let end = rest.find('\n').unwrap_or(rest.len());
        self.advance(end);
        &rest[..end]
    }

    /// Up to one of `ends`, which is passed, too.
    fn until(&mut self, ends: &[char]) -> Result<(&'a str, char), Refusal> {
        let rest = self.rest();
        let Some(end) = rest.find(ends) else {
            return self.refuse(format!(
                "expected one of {ends:?} before the end of the text"
            ));
        };
        self.advance(end + 1);
        let found = rest[end..].chars().next().expect("an end was found there");
        Ok((&rest[..end], found))
    }

    fn module(&mut self) -> Result<Text, Refusal> {
        let mut text = Text::default();
        loop {
            self.skip();
            let rest = self.rest();
            if rest.is_empty() {
                return Ok(text);
            }
            let directive = word(rest);
            match directive {
                ".target" => {
                    let names = self.line_rest().trim_start_matches(".target");
                    let first = names.split(',').next().unwrap_or_default();
                    text.target = first.trim().to_owned();
                }
                ".version" | ".address_size" => drop(self.line_rest()),
                ".file" => {
                    let mut words = self.line_rest().split_whitespace().skip(1);
                    if let (Some(Ok(number)), Some(path)) =
                        (words.next().map(str::parse), words.next())
                    {
                        let name = path
                            .trim_matches(['"', ','])
                            .rsplit('/')
                            .next()
                            .unwrap_or_default();
                        text.files.push((number, name.to_owned()));
                    }
                }
                ".section" => drop(self.until(&['}'])?),
                ".visible" | ".weak" | ".extern" if follows(rest, directive, ".entry") => {
                    text.kernels.push(self.kernel()?);
                }
                ".entry" => text.kernels.push(self.kernel()?),
                ".visible" | ".weak" | ".extern" | ".global" | ".const" | ".shared" => {
                    let (declaration, _) = self.until(&[';'])?;
                    text.variables.push(self.variable(declaration)?);
                }
                _ => {
                    return self
                        .refuse(format!("a module with {directive}, which is not simulated"));
                }
            }
        }
    }

    /// `.shared .align 4 .b8 name[128]`, perhaps with a value.
    fn variable(&self, declaration: &str) -> Result<Variable, Refusal> {
        let declared = declaration.split('=').next().unwrap_or_default();
        let (mut space, mut alignment, mut element) = (Space::Param, None, None);
        let mut words = declared.split_whitespace();
        let mut is_pointer = false;
        while let Some(word) = words.next() {
            match word {
                ".visible" | ".weak" | ".extern" => {}
                ".global" | ".shared" | ".local" | ".const" if is_pointer => {}
                ".global" => space = Space::Global,
                ".const" => space = Space::Const,
                ".shared" => space = Space::Shared,
                ".local" => space = Space::Local,
                ".param" => space = Space::Param,
                // What the parameter points to.
                ".ptr" => is_pointer = true,
                ".align" if is_pointer => drop(words.next()),
                ".align" => alignment = words.next().and_then(|word| word.parse().ok()),
                _ => match word.strip_prefix('.') {
                    Some(kind) => element = type_bytes(kind),
                    None => {
                        let Some(element) = element else {
                            return self.refuse(format!("a variable of no known type: {declared}"));
                        };
                        let rest: String = std::iter::once(word).chain(words).collect();
                        let mut parts = rest.split('[');
                        let name = parts.next().unwrap_or_default().to_owned();
                        let (mut bytes, mut is_open) = (element, false);
                        for part in parts {
                            let count = part.trim_end_matches(']');
                            is_open |= count.is_empty();
                            bytes *= count.parse::<u64>().unwrap_or(0);
                        }
                        let alignment = alignment.unwrap_or(element);
                        return Ok(Variable {
                            name,
                            space,
                            alignment,
                            bytes,
                            is_open,
                        });
                    }
                },
            }
        }
        self.refuse(format!("a declaration without a name: {declared}"))
    }

    fn kernel(&mut self) -> Result<KernelText, Refusal> {
        let (head, end) = self.until(&['(', '{'])?;
        let name = head
            .split_whitespace()
            .last()
            .unwrap_or_default()
            .to_owned();
        let mut parameters = Vec::new();
        let mut threads_max = None;
        if end == '(' {
            let (list, _) = self.until(&[')'])?;
            for declaration in list.split(',').filter(|text| !text.trim().is_empty()) {
                parameters.push(self.variable(declaration)?);
            }
            let (tuning, _) = self.until(&['{'])?;
            let mut words = tuning
                .split(|c: char| c.is_whitespace() || c == ',')
                .filter(|word| !word.is_empty());
            let mut is_counted = false;
            for word in &mut words {
                match word.parse::<u32>() {
                    Ok(count) if is_counted => {
                        threads_max = Some(threads_max.unwrap_or(1) * count);
                    }
                    Ok(_) => {}
                    Err(_) => is_counted = word == ".maxntid" || word == ".reqntid",
                }
            }
        }
        Ok(KernelText {
            name,
            parameters,
            threads_max,
            body: self.body()?,
        })
    }

    /// Passes what is between a brace that was just passed and the one that closes it.
    fn body(&mut self) -> Result<Body, Refusal> {
        let (rest, line) = (self.rest(), self.line);
        let (mut depth, mut at) = (1, 0);
        while let Some(next) = rest[at..].find(['{', '}', '/']) {
            at += next;
            match &rest[at..] {
                comment if comment.starts_with("//") => {
                    at += comment.find('\n').unwrap_or(comment.len());
                    continue;
                }
                comment if comment.starts_with("/*") => {
                    at += comment.find("*/").map_or(comment.len(), |end| end + 2);
                    continue;
                }
                brace if brace.starts_with('{') => depth += 1,
                brace if brace.starts_with('}') => depth -= 1,
                _ => {}
            }
            at += 1;
            if depth == 0 {
                self.advance(at);
                return Ok(Body {
                    text: rest[..at].to_owned(),
                    line,
                });
            }
        }
        self.refuse("expected } before the end of the text")
    }

    /// The statements of a body.
    fn statements(&mut self) -> Result<Vec<Statement>, Refusal> {
        let mut statements = Vec::new();
        let mut depth = 1;
        while depth > 0 {
            self.skip();
            let Some(statement) = self.statement()? else {
                continue;
            };
            match statement.content {
                Content::Open => depth += 1,
                Content::Close => depth -= 1,
                _ => {}
            }
            if depth > 0 {
                statements.push(statement);
            }
        }
        Ok(statements)
    }

    fn statement(&mut self) -> Result<Option<Statement>, Refusal> {
        let rest = self.rest();
        let (line, first) = (self.line, word(rest));
        let content = match rest.chars().next() {
            None => return self.refuse("expected } before the end of the text"),
            Some('{') => {
                self.advance(1);
                Content::Open
            }
            Some('}') => {
                self.advance(1);
                Content::Close
            }
            Some('.') => match first {
                ".loc" => {
                    let numbers = self.line_rest();
                    let mut numbers = numbers
                        .split_whitespace()
                        .skip(1)
                        .map(|it| it.parse().unwrap_or(0));
                    let place = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
                    // Line 0: the compiler does not know.
                    if place.1 != 0 {
                        self.source = place;
                    }
                    return Ok(None);
                }
                ".pragma" => {
                    self.until(&[';'])?;
                    return Ok(None);
                }
                ".reg" => {
                    let (declaration, _) = self.until(&[';'])?;
                    return self.registers(declaration, line).map(Some);
                }
                _ => {
                    let (declaration, _) = self.until(&[';'])?;
                    Content::Variable(self.variable(declaration)?)
                }
            },
            // `.shared::cta` is part of an opcode.
            Some(_)
                if rest[first.len()..].starts_with(':')
                    && !rest[first.len()..].starts_with("::") =>
            {
                self.advance(first.len() + 1);
                Content::Label(first.to_owned())
            }
            Some(_) => {
                let (text, _) = self.until(&[';'])?;
                Content::Instruction(
                    instruction(text).map_err(|message| Refusal::at(line, message))?,
                )
            }
        };
        Ok(Some(Statement {
            content,
            line,
            source: self.source,
        }))
    }

    /// `.reg .b32 %r<5>` or `.reg .b16 low, high`.
    fn registers(&self, declaration: &str, line: u32) -> Result<Statement, Refusal> {
        let mut words = declaration
            .split(|c: char| c.is_whitespace() || c == ',')
            .filter(|word| !word.is_empty());
        let kind = words
            .nth(1)
            .unwrap_or_default()
            .trim_start_matches('.')
            .to_owned();
        let names: Vec<&str> = words.collect();
        let [name] = names[..] else {
            return self.refuse(format!("a declaration of several registers: {declaration}"));
        };
        let (prefix, count) = match name.split_once('<') {
            Some((prefix, count)) => (prefix, count.trim_end_matches('>').parse().ok()),
            None => (name, None),
        };
        Ok(Statement {
            content: Content::Registers(Registers {
                prefix: prefix.to_owned(),
                count,
                kind,
            }),
            line,
            source: self.source,
        })
    }
}

/// Up to white space or what ends a name.
fn word(text: &str) -> &str {
    let end =
        text.find(|c: char| c.is_whitespace() || matches!(c, ':' | ';' | '{' | '}' | '(' | ','));
    &text[..end.unwrap_or(text.len())]
}

fn follows(text: &str, first: &str, second: &str) -> bool {
    text[first.len()..].trim_start().starts_with(second)
}

/// An instruction without its semicolon.
fn instruction(text: &str) -> Result<Instruction, String> {
    let mut text = text.trim();
    let mut guard = None;
    if let Some(rest) = text.strip_prefix('@') {
        let (name, rest) = rest
            .split_once(char::is_whitespace)
            .ok_or("a guard without an instruction")?;
        let register = name.trim_start_matches('!');
        guard = Some((register.to_owned(), register.len() < name.len()));
        text = rest.trim_start();
    }
    let end = text
        .find(|c: char| c.is_whitespace() || c == '{')
        .unwrap_or(text.len());
    let parts = text[..end].split('.').map(str::to_owned).collect();
    let operands = list(&text[end..])?;
    Ok(Instruction {
        guard,
        parts,
        operands,
    })
}

/// Operands between commas, those of vectors and addresses left whole.
fn list(text: &str) -> Result<Vec<Operand>, String> {
    let (mut depth, mut start, mut found) = (0, 0, Vec::new());
    for (at, c) in text.char_indices() {
        match c {
            '{' | '[' => depth += 1,
            '}' | ']' => depth -= 1,
            ',' if depth == 0 => {
                found.push(operand(&text[start..at])?);
                start = at + 1;
            }
            _ => {}
        }
    }
    if !text[start..].trim().is_empty() {
        found.push(operand(&text[start..])?);
    }
    Ok(found)
}

fn integer(text: &str) -> Option<i128> {
    let (text, sign) = match text.strip_prefix('-') {
        Some(text) => (text.trim_start(), -1),
        None => (text, 1),
    };
    let text = text.strip_suffix('U').unwrap_or(text);
    let value = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) => i128::from(u64::from_str_radix(digits, 16).ok()?),
        None => i128::from(text.parse::<u64>().ok()?),
    };
    Some(sign * value)
}

fn operand(text: &str) -> Result<Operand, String> {
    let text = text.trim();
    let wrong = || format!("operand {text}");
    if let Some(inner) = text.strip_prefix('{') {
        return Ok(Operand::Vector(list(
            inner.strip_suffix('}').ok_or_else(wrong)?,
        )?));
    }
    if let Some(inner) = text.strip_prefix('[') {
        let inner = inner.strip_suffix(']').ok_or_else(wrong)?.trim();
        if let Some(address) = integer(inner) {
            return Ok(Operand::Address(None, address as i64));
        }
        let (name, offset) = match inner.find('+') {
            Some(at) => (
                &inner[..at],
                integer(inner[at + 1..].trim()).ok_or_else(wrong)?,
            ),
            None => (inner, 0),
        };
        return Ok(Operand::Address(
            Some(name.trim().to_owned()),
            offset as i64,
        ));
    }
    if let Some(digits) = text.strip_prefix("0f").or_else(|| text.strip_prefix("0F")) {
        return u32::from_str_radix(digits, 16)
            .map(Operand::F32)
            .map_err(|_| wrong());
    }
    if let Some(digits) = text.strip_prefix("0d").or_else(|| text.strip_prefix("0D")) {
        return u64::from_str_radix(digits, 16)
            .map(Operand::F64)
            .map_err(|_| wrong());
    }
    if let Some(value) = integer(text) {
        return Ok(Operand::Integer(value));
    }
    if let Some(name) = text.strip_prefix('!') {
        return Ok(Operand::Not(name.trim().to_owned()));
    }
    if let Some((first, second)) = text.split_once('|') {
        return Ok(Operand::Pair(
            first.trim().to_owned(),
            second.trim().to_owned(),
        ));
    }
    if text.is_empty() || text.contains(char::is_whitespace) {
        return Err(wrong());
    }
    Ok(Operand::Name(text.to_owned()))
}

impl<'a> Reader<'a> {
    fn of(text: &'a str, line: u32) -> Self {
        Reader {
            text,
            at: 0,
            line,
            source: (0, 0),
        }
    }
}

/// Reads a module.
pub(crate) fn read(text: &str) -> Result<Text, Refusal> {
    Reader::of(text.trim_end_matches('\0'), 1).module()
}

impl KernelText {
    /// Reads its body.
    pub(crate) fn statements(&self) -> Result<Vec<Statement>, Refusal> {
        Reader::of(&self.body.text, self.body.line).statements()
    }
}
