//! The chat template of a tokenizer: a Jinja template that turns the messages of a conversation
//! into text. It is rendered as transformers does, by the crate `minijinja`.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use crate::text::{CHAT_FILES, Vocabulary};

/// What `tokenizer_config.json` says of conversations.
#[derive(Debug, Default, Deserialize)]
struct TokenizerConfig {
    chat_template: Option<Source>,
    #[serde(flatten)]
    others: BTreeMap<String, Value>,
}

/// A template, or several with names.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Source {
    One(String),
    Several(Vec<Named>),
}

#[derive(Debug, Deserialize)]
struct Named {
    name: String,
    template: String,
}

/// How a tokenizer writes conversations.
#[derive(Debug)]
pub(crate) struct ChatFormat {
    /// Its template, if it has one.
    pub(crate) template: Option<Template>,
    /// The texts of its special tokens by name, such as `eos_token`.
    pub(crate) special: BTreeMap<String, String>,
}

impl ChatFormat {
    /// That of a tokenizer's files. As in transformers, the template in a file of its own counts.
    pub(crate) fn of(vocabulary: &Vocabulary) -> Result<ChatFormat, String> {
        let [config_file, template_file] = CHAT_FILES;
        let config = vocabulary.chat_files.get(config_file);
        let config: TokenizerConfig = match config {
            Some(bytes) => serde_json::from_slice(bytes)
                .map_err(|error| format!("{config_file}: {error}; help: download it again"))?,
            None => TokenizerConfig::default(),
        };
        let texts = config.others.into_iter().filter_map(|(name, value)| {
            let text = value.as_str().or_else(|| value.get("content")?.as_str());
            Some((name, text?.to_string())).filter(|(name, _)| name.ends_with("_token"))
        });
        let special: BTreeMap<String, String> = texts.collect();
        let file = vocabulary.chat_files.get(template_file);
        let sources = match (file, config.chat_template) {
            (Some(bytes), _) => {
                let text = String::from_utf8(bytes.clone());
                let wrong = format!("{template_file}: expected UTF-8, got other bytes");
                vec![(String::new(), text.map_err(|_| wrong)?)]
            }
            (None, Some(Source::One(text))) => vec![(String::new(), text)],
            (None, Some(Source::Several(all))) => {
                let all = all.into_iter();
                all.map(|named| (named.name, named.template)).collect()
            }
            (None, None) => Vec::new(),
        };
        let names = ["", "default", "tool_use"];
        let usual = sources.into_iter();
        let usual: Vec<_> = usual.filter(|(name, _)| names.contains(&&**name)).collect();
        let template = match usual.is_empty() {
            true => None,
            false => Some(Template::of(usual, &special)?),
        };
        Ok(ChatFormat { template, special })
    }
}

/// A text without marks, and the ranges between them.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Marked {
    pub(crate) text: String,
    pub(crate) ranges: Vec<std::ops::Range<usize>>,
}

#[cfg(feature = "tokenizers")]
pub(crate) use built::{Chat, Template};
#[cfg(not(feature = "tokenizers"))]
pub(crate) use not_built::{Chat, Template};

#[cfg(feature = "tokenizers")]
mod built {
    use std::collections::BTreeMap;

    use minijinja::syntax::SyntaxConfig;
    use minijinja::value::{Kwargs, Serde, Value as Cell};
    use minijinja::{Environment, Error, ErrorKind};
    use serde::Serialize;
    use serde_json::ser::{Formatter, PrettyFormatter, Serializer};
    use serde_json::{Map, Value};

    use super::Marked;

    /// Begins and ends what a template marks by `{% generation %}`: no text has these characters.
    const MARKS: [char; 2] = ['\u{fdd0}', '\u{fdd1}'];

    /// The template with filters in place of `{% generation %}`, and whether it has that.
    fn with_marks(source: &str) -> (String, bool) {
        let (mut text, mut rest, mut has_marks) = (String::new(), source, false);
        while let Some(start) = rest.find("{%") {
            let Some(length) = rest[start..].find("%}") else {
                break;
            };
            let (before, tag) = (&rest[..start], &rest[start..start + length]);
            let is_edge = |c: char| c.is_whitespace() || "{%-+".contains(c);
            text += before;
            text += &match tag.trim_matches(is_edge) {
                word @ "generation" => tag.replace(word, "filter generation"),
                word @ "endgeneration" => tag.replace(word, "endfilter"),
                _ => tag.into(),
            };
            has_marks |= tag.trim_matches(is_edge) == "generation";
            rest = &rest[start + length..];
        }
        (text + rest, has_marks)
    }

    impl Marked {
        fn of(marked: &str) -> Marked {
            let (mut text, mut ranges) = (String::new(), Vec::new());
            for part in marked.split_inclusive(MARKS) {
                text += part.trim_end_matches(MARKS);
                match part.chars().next_back() {
                    Some(last) if last == MARKS[0] => ranges.push(text.len()..text.len()),
                    Some(last) if last == MARKS[1] => {
                        if let Some(range) = ranges.last_mut() {
                            range.end = text.len();
                        }
                    }
                    _ => {}
                }
            }
            Marked { text, ranges }
        }
    }

    /// The parts of the date that templates are told, by their letters in `strftime`. It is the
    /// same every day, so that the same data give the same tokens: that of Llama 3's templates.
    const DATE: [(char, &str); 12] = [
        ('d', "26"),
        ('m', "07"),
        ('b', "Jul"),
        ('B', "July"),
        ('Y', "2024"),
        ('y', "24"),
        ('a', "Fri"),
        ('A', "Friday"),
        ('H', "00"),
        ('M', "00"),
        ('S', "00"),
        ('%', "%"),
    ];

    /// A compiled template.
    #[derive(Debug)]
    pub(crate) struct Template {
        environment: Environment<'static>,
        /// Variables of every conversation.
        constants: BTreeMap<String, Cell>,
        /// Whether it marks by `{% generation %}` what a model says.
        pub(crate) has_marks: bool,
        /// Whether it writes the date.
        pub(crate) has_date: bool,
        /// The text of the token that ends documents, if the tokenizer names one.
        pub(crate) end: String,
    }

    impl Template {
        /// That with the name "tool_use" is for conversations with tools.
        pub(super) fn of(
            sources: Vec<(String, String)>,
            special: &BTreeMap<String, String>,
        ) -> Result<Template, String> {
            let mut environment = Environment::new();
            let mut syntax = SyntaxConfig::builder();
            let syntax = syntax.trim_blocks(true).lstrip_blocks(true).build();
            environment.set_syntax(syntax.map_err(|error| error.to_string())?);
            environment
                .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
            environment.add_function("raise_exception", raise);
            environment.add_function("strftime_now", date);
            environment.add_filter("tojson", to_json);
            let mark = |text: String| format!("{}{text}{}", MARKS[0], MARKS[1]);
            environment.add_filter("generation", mark);
            let (mut has_marks, mut has_date) = (false, false);
            for (name, source) in sources {
                let (source, marks) = with_marks(&source);
                has_marks |= marks;
                has_date |= source.contains("strftime_now");
                let name = if name == "tool_use" { TOOLS } else { PLAIN };
                let added = environment.add_template_owned(name, source);
                added.map_err(|error| shown(&error))?;
            }
            let constants = special.iter();
            let constants = constants.map(|(name, text)| (name.clone(), text.into()));
            Ok(Template {
                environment,
                constants: constants.collect(),
                end: special.get("eos_token").cloned().unwrap_or_default(),
                has_marks,
                has_date,
            })
        }
    }

    const PLAIN: &str = "chat";
    const TOOLS: &str = "chat with tools";

    fn raise(message: String) -> Result<Cell, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    }

    fn date(format: String) -> String {
        let (mut text, mut letters) = (String::new(), format.chars());
        while let Some(letter) = letters.next() {
            match (letter, DATE.iter()) {
                ('%', mut parts) => {
                    let kind = letters.next();
                    let part = parts.find(|(known, _)| Some(*known) == kind);
                    text += part.map_or("", |(_, part)| part);
                }
                _ => text.push(letter),
            }
        }
        text
    }

    /// JSON as Python's `json.dumps` writes it, with a space after commas and colons.
    #[derive(Default)]
    struct Spaced;

    impl Formatter for Spaced {
        fn begin_array_value<W: ?Sized + std::io::Write>(
            &mut self,
            writer: &mut W,
            is_first: bool,
        ) -> std::io::Result<()> {
            writer.write_all(if is_first { b"" } else { b", " })
        }

        fn begin_object_key<W: ?Sized + std::io::Write>(
            &mut self,
            writer: &mut W,
            is_first: bool,
        ) -> std::io::Result<()> {
            self.begin_array_value(writer, is_first)
        }

        fn begin_object_value<W: ?Sized + std::io::Write>(
            &mut self,
            writer: &mut W,
        ) -> std::io::Result<()> {
            writer.write_all(b": ")
        }
    }

    fn to_json(value: Cell, options: Kwargs) -> Result<String, Error> {
        let indent: Option<usize> = options.get("indent")?;
        // Of these the defaults are used.
        let _: (Option<bool>, Option<bool>) =
            (options.get("ensure_ascii")?, options.get("sort_keys")?);
        let _: Option<Cell> = options.get("separators")?;
        options.assert_all_used()?;
        let mut bytes = Vec::new();
        let written = match indent {
            None => value.serialize(&mut Serializer::with_formatter(&mut bytes, Spaced)),
            Some(indent) => {
                let spaces = " ".repeat(indent);
                let pretty = PrettyFormatter::with_indent(spaces.as_bytes());
                value.serialize(&mut Serializer::with_formatter(&mut bytes, pretty))
            }
        };
        let failed = |error: String| Error::new(ErrorKind::BadSerialization, error);
        written.map_err(|error| failed(error.to_string()))?;
        String::from_utf8(bytes).map_err(|error| failed(error.to_string()))
    }

    fn shown(error: &Error) -> String {
        let what = error
            .detail()
            .map_or(error.kind().to_string(), String::from);
        let line = error
            .line()
            .map_or(String::new(), |line| format!(", line {line}"));
        format!("the chat template{line}: {what}")
    }

    /// A conversation that a template writes.
    pub(crate) struct Chat<'a> {
        template: &'a Template,
        messages: Vec<Cell>,
        variables: BTreeMap<String, Cell>,
        has_tools: bool,
    }

    impl Chat<'_> {
        /// Of these messages, with `tools` and the variables that the template may ask for.
        pub(crate) fn new<'a>(
            template: &'a Template,
            messages: &[Value],
            tools: Option<&Value>,
            variables: Option<&Map<String, Value>>,
        ) -> Chat<'a> {
            let mut all = template.constants.clone();
            let cell = |value: &Value| Cell::from(Serde(value));
            let given = variables.into_iter().flatten();
            all.extend(given.map(|(name, value)| (name.clone(), cell(value))));
            all.insert("documents".into(), Cell::from(()));
            all.insert("tools".into(), tools.map_or(Cell::from(()), cell));
            Chat {
                template,
                messages: messages.iter().map(cell).collect(),
                variables: all,
                has_tools: tools.is_some(),
            }
        }

        /// The first `count` messages; with the beginning of the model's answer if it `answers`.
        pub(crate) fn text(&self, count: usize, answers: bool) -> Result<Marked, String> {
            let environment = &self.template.environment;
            let with_tools = environment.get_template(TOOLS).ok();
            let with_tools = with_tools.filter(|_| self.has_tools);
            let template = match with_tools {
                Some(template) => Ok(template),
                None => environment.get_template(PLAIN),
            };
            let mut variables = self.variables.clone();
            let messages = Cell::from(self.messages[..count].to_vec());
            variables.insert("messages".into(), messages);
            variables.insert("add_generation_prompt".into(), answers.into());
            let text = template.and_then(|template| template.render(Cell::from(variables)));
            Ok(Marked::of(&text.map_err(|error| shown(&error))?))
        }
    }

    #[cfg(test)]
    mod tests;
}

#[cfg(not(feature = "tokenizers"))]
mod not_built {
    use std::collections::BTreeMap;

    use serde_json::{Map, Value};

    use super::Marked;

    /// What a build without `minijinja` has none of.
    #[derive(Debug)]
    pub(crate) struct Template {
        pub(crate) has_marks: bool,
        pub(crate) has_date: bool,
        pub(crate) end: String,
    }

    const WHY: &str = "this program was built without chat templates; help: build it with `cargo \
         build --release -p ddp --features tokenizers`";

    impl Template {
        pub(super) fn of(
            _: Vec<(String, String)>,
            _: &BTreeMap<String, String>,
        ) -> Result<Template, String> {
            Err(WHY.into())
        }
    }

    pub(crate) struct Chat<'a>(#[expect(dead_code)] &'a Template);

    impl Chat<'_> {
        pub(crate) fn new<'a>(
            template: &'a Template,
            _: &[Value],
            _: Option<&Value>,
            _: Option<&Map<String, Value>>,
        ) -> Chat<'a> {
            Chat(template)
        }

        pub(crate) fn text(&self, _: usize, _: bool) -> Result<Marked, String> {
            Err(WHY.into())
        }
    }
}
