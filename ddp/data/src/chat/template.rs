//! The chat template of a tokenizer: a Jinja template that turns the messages of a conversation
//! into text. It is rendered as transformers does, by the crate `minijinja`.

use std::collections::BTreeMap;
use std::ops::Range;

use serde_json::{Map, Value};

use crate::text::{CHAT_FILES, Vocabulary};

/// The name of the template of a conversation without tools, and with tools if there is another.
const PLAIN: &str = "default";
const TOOL_USE: &str = "tool_use";

/// How a tokenizer writes conversations.
#[derive(Debug)]
pub(crate) struct ChatFormat {
    /// Its template, if it has one.
    pub(crate) template: Option<Template>,
    /// The text of the token that ends documents, if it is named.
    pub(crate) end: Option<String>,
}

impl ChatFormat {
    /// That of a tokenizer's files. As in transformers, the template in a file of its own counts.
    pub(crate) fn of(vocabulary: &Vocabulary) -> Result<ChatFormat, String> {
        let [config_file, template_file, _] = CHAT_FILES;
        let read = |bytes: &Vec<u8>| {
            let read = serde_json::from_slice::<Map<String, Value>>(bytes);
            read.map_err(|error| format!("{config_file}: {error}; help: download it again"))
        };
        let config = vocabulary.chat_files.get(config_file).map(read);
        let config = config.transpose()?.unwrap_or_default();
        let named = config.iter().filter(|(name, _)| name.ends_with("_token"));
        let text = |value: &Value| Some(value.as_str().or(value["content"].as_str())?.to_string());
        let texts = named.filter_map(|(name, value)| Some((name.clone(), text(value)?)));
        let special: BTreeMap<String, String> = texts.collect();
        let own = vocabulary.chat_files.get(template_file);
        let own = own.map(|bytes| String::from_utf8_lossy(bytes).into());
        let sources = match own.as_ref().or(config.get("chat_template")) {
            Some(Value::String(source)) => vec![(PLAIN.into(), source.clone())],
            Some(Value::Array(all)) => {
                let named = |name: &str| {
                    let found = all.iter().find(|one| one["name"] == name)?;
                    Some((name.to_string(), text(&found["template"])?))
                };
                [PLAIN, TOOL_USE].into_iter().filter_map(named).collect()
            }
            _ => Vec::new(),
        };
        Ok(ChatFormat {
            end: special.get("eos_token").cloned(),
            template: match sources.is_empty() {
                true => None,
                false => Some(Template::of(sources, special)?),
            },
        })
    }
}

/// Begins and ends what a template marks by `{% generation %}`: texts with these are refused.
pub(super) const MARKS: [char; 2] = ['\u{fdd0}', '\u{fdd1}'];

/// The template with filters in place of `{% generation %}`.
#[cfg_attr(not(feature = "tokenizers"), expect(dead_code))]
fn with_marks(source: &str) -> String {
    let (mut text, mut rest) = (String::new(), source);
    while let Some((start, length)) = rest
        .find("{%")
        .and_then(|start| Some((start, rest[start..].find("%}")?)))
    {
        let (before, tag) = (&rest[..start], &rest[start..start + length]);
        text += before;
        text += &match tag.trim_matches(|c: char| c.is_whitespace() || "{%-+".contains(c)) {
            word @ "generation" => tag.replace(word, "filter generation"),
            word @ "endgeneration" => tag.replace(word, "endfilter"),
            _ => tag.into(),
        };
        rest = &rest[start + length..];
    }
    text + rest
}

/// A text without marks, and the ranges between them.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Marked {
    pub(crate) text: String,
    pub(crate) ranges: Vec<Range<usize>>,
}

impl Marked {
    fn of(marked: &str) -> Marked {
        let (mut text, mut ranges) = (String::new(), Vec::<Range<usize>>::new());
        for part in marked.split_inclusive(MARKS) {
            text += part.trim_end_matches(MARKS);
            if part.ends_with(MARKS[0]) {
                ranges.push(text.len()..text.len());
            } else if let (true, Some(range)) = (part.ends_with(MARKS[1]), ranges.last_mut()) {
                range.end = text.len();
            }
        }
        Marked { text, ranges }
    }
}

/// A compiled template.
#[derive(Debug)]
pub(crate) struct Template {
    engine: Engine,
    /// Variables of every conversation: the texts of special tokens by name.
    special: BTreeMap<String, String>,
    has_tool_use: bool,
    /// Whether it marks by `{% generation %}` what a model says.
    pub(crate) has_marks: bool,
    /// Whether it writes the date.
    pub(crate) has_date: bool,
}

impl Template {
    /// Of these sources by name; that called "tool_use" is for conversations with tools.
    fn of(
        sources: Vec<(String, String)>,
        special: BTreeMap<String, String>,
    ) -> Result<Template, String> {
        let has = |word: &str| sources.iter().any(|(_, source)| source.contains(word));
        let (has_date, has_marks) = (has("strftime_now"), has("endgeneration"));
        let sources: BTreeMap<String, String> = sources.into_iter().collect();
        Ok(Template {
            has_tool_use: sources.contains_key(TOOL_USE),
            engine: engine(sources)?,
            special,
            has_marks,
            has_date,
        })
    }

    /// The text of the token that ends documents; empty if the tokenizer names none.
    pub(crate) fn end(&self) -> &str {
        self.special.get("eos_token").map_or("", String::as_str)
    }

    /// Writes a conversation with these variables; with the beginning of an answer if it `answers`.
    pub(crate) fn text(
        &self,
        messages: &[Value],
        variables: &Map<String, Value>,
        answers: bool,
    ) -> Result<Marked, String> {
        let special = self.special.iter();
        let mut all: Map<String, Value> = special
            .map(|(name, text)| (name.clone(), text.as_str().into()))
            .collect();
        for name in ["tools", "documents"] {
            all.insert(name.into(), Value::Null);
        }
        all.extend(variables.clone());
        all.insert("messages".into(), messages.into());
        all.insert("add_generation_prompt".into(), answers.into());
        let is_with_tools = self.has_tool_use && !all["tools"].is_null();
        let name = if is_with_tools { TOOL_USE } else { PLAIN };
        let text = render(&self.engine, name, all)?;
        Ok(match self.has_marks {
            true => Marked::of(&text),
            false => Marked {
                text,
                ranges: Vec::new(),
            },
        })
    }
}

#[cfg(feature = "tokenizers")]
use built::{Engine, engine, render};
#[cfg(not(feature = "tokenizers"))]
use not_built::{Engine, engine, render};

#[cfg(feature = "tokenizers")]
mod built {
    use std::collections::BTreeMap;
    use std::{io, thread};

    use minijinja::syntax::SyntaxConfig;
    use minijinja::value::{Kwargs, Serde, Value as Cell};
    use minijinja::{Environment, Error, ErrorKind};
    use serde::Serialize;
    use serde_json::ser::{Formatter, PrettyFormatter, Serializer};
    use serde_json::{Map, Value};

    use super::{MARKS, with_marks};

    pub(super) type Engine = Environment<'static>;

    /// The longest template, and memory for the parser, which calls itself for each part of a part.
    const SOURCE_MAX: usize = 256 << 10;
    const STACK_BYTES: usize = 1 << 30;
    /// Steps of a template for one conversation. Usual ones take some hundreds for each message.
    const STEPS_MAX: u64 = 20_000_000;

    /// Compiles templates by name.
    pub(super) fn engine(sources: BTreeMap<String, String>) -> Result<Engine, String> {
        if sources.values().any(|source| source.len() > SOURCE_MAX) {
            return Err(format!(
                "the chat template: expected at most {SOURCE_MAX} bytes, got more; help: give a shorter one"
            ));
        }
        let thread = thread::Builder::new().stack_size(STACK_BYTES);
        let compiled = thread.spawn(move || compile(sources));
        let compiled =
            compiled.map_err(|error| format!("a thread for the chat template: {error}"))?;
        let failed =
            "the chat template: expected one that can be compiled, got another; help: shorten it";
        compiled.join().map_err(|_| failed)?
    }

    fn compile(sources: BTreeMap<String, String>) -> Result<Engine, String> {
        let mut engine = Environment::new();
        engine.set_fuel(Some(STEPS_MAX));
        let mut syntax = SyntaxConfig::builder();
        let syntax = syntax.trim_blocks(true).lstrip_blocks(true).build();
        engine.set_syntax(syntax.map_err(|error| error.to_string())?);
        engine.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        engine.add_function("raise_exception", |message: String| {
            Err::<Cell, _>(Error::new(ErrorKind::InvalidOperation, message))
        });
        engine.add_function("strftime_now", date);
        engine.add_filter("tojson", to_json);
        engine.add_filter("generation", |text: String| {
            format!("{}{text}{}", MARKS[0], MARKS[1])
        });
        for (name, source) in sources {
            let added = engine.add_template_owned(name, with_marks(&source));
            added.map_err(|error| shown(&error))?;
        }
        Ok(engine)
    }

    pub(super) fn render(
        engine: &Engine,
        name: &str,
        variables: Map<String, Value>,
    ) -> Result<String, String> {
        let template = engine.get_template(name);
        let text = template.and_then(|it| it.render(Cell::from(Serde(variables))));
        text.map_err(|error| shown(&error))
    }

    /// The same on every day, so that the same data give the same tokens: that of Llama 3's
    /// templates.
    fn date(format: String) -> String {
        let parts = [
            ("%d", "26"),
            ("%m", "07"),
            ("%b", "Jul"),
            ("%B", "July"),
            ("%Y", "2024"),
        ];
        parts
            .iter()
            .fold(format, |text, (part, value)| text.replace(part, value))
    }

    /// JSON as Python's `json.dumps` writes it, with a space after commas and colons.
    struct Spaced;

    impl Formatter for Spaced {
        fn begin_array_value<W>(&mut self, writer: &mut W, is_first: bool) -> io::Result<()>
        where
            W: ?Sized + io::Write,
        {
            writer.write_all(if is_first { b"" } else { b", " })
        }

        fn begin_object_key<W>(&mut self, writer: &mut W, is_first: bool) -> io::Result<()>
        where
            W: ?Sized + io::Write,
        {
            self.begin_array_value(writer, is_first)
        }

        fn begin_object_value<W>(&mut self, writer: &mut W) -> io::Result<()>
        where
            W: ?Sized + io::Write,
        {
            writer.write_all(b": ")
        }
    }

    fn to_json(value: Cell, options: Kwargs) -> Result<String, Error> {
        let indent: Option<usize> = options.get("indent")?;
        let spaces = " ".repeat(indent.unwrap_or(0));
        let mut bytes = Vec::new();
        let written = if indent.is_some() {
            let pretty = PrettyFormatter::with_indent(spaces.as_bytes());
            value.serialize(&mut Serializer::with_formatter(&mut bytes, pretty))
        } else {
            value.serialize(&mut Serializer::with_formatter(&mut bytes, Spaced))
        };
        let failed =
            |error: serde_json::Error| Error::new(ErrorKind::BadSerialization, error.to_string());
        written.map_err(failed)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
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
}

#[cfg(not(feature = "tokenizers"))]
mod not_built {
    use std::collections::BTreeMap;

    use serde_json::{Map, Value};

    pub(super) type Engine = ();

    pub(super) fn engine(_: BTreeMap<String, String>) -> Result<Engine, String> {
        Err("this program was built without chat templates; help: build it with `cargo build --release -p ddp --features \
             tokenizers`"
            .into())
    }

    pub(super) fn render(_: &Engine, _: &str, _: Map<String, Value>) -> Result<String, String> {
        engine(BTreeMap::new()).map(|()| String::new())
    }
}

#[cfg(all(test, feature = "tokenizers"))]
mod tests;
