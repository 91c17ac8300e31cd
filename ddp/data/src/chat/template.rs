//! The chat template of a tokenizer: a Jinja template that turns the messages of a conversation
//! into text. It is rendered as transformers does, by the crate `minijinja`.

pub(super) mod marks;

use std::collections::BTreeMap;
use std::ops::Range;

use serde_json::{Map, Value};

use self::marks::Marked;
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
        let text_of = |bytes: &Vec<u8>| String::from_utf8(bytes.clone());
        let own = own.map(|bytes| text_of(bytes).map(Value::String));
        let own = own.transpose().map_err(|error| {
            format!("{template_file}: expected UTF-8: {error}; help: download it again")
        })?;
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
            template: if sources.is_empty() {
                None
            } else {
                Some(Template::of(sources, special)?)
            },
        })
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

    /// A conversation with these variables, to be written in parts.
    pub(crate) fn conversation(
        &self,
        messages: &[Value],
        variables: &Map<String, Value>,
    ) -> Conversation<'_> {
        let special = self.special.iter();
        let mut all: Map<String, Value> = special
            .map(|(name, text)| (name.clone(), text.as_str().into()))
            .collect();
        for name in ["tools", "documents"] {
            all.insert(name.into(), Value::Null);
        }
        all.extend(variables.clone());
        let is_with_tools = self.has_tool_use && !all["tools"].is_null();
        Conversation {
            template: self,
            name: if is_with_tools { TOOL_USE } else { PLAIN },
            cells: Cells::of(messages, all),
        }
    }
}

/// A conversation whose messages the engine has.
pub(crate) struct Conversation<'a> {
    template: &'a Template,
    name: &'static str,
    cells: Cells,
}

impl Conversation<'_> {
    /// Writes the first `count` messages without those of `out`; with the beginning of an answer if
    /// it `answers`.
    pub(crate) fn text(
        &self,
        out: Range<usize>,
        count: usize,
        answers: bool,
    ) -> Result<Marked, String> {
        let written = [0..out.start, out.end..count];
        let text = render(
            &self.template.engine,
            self.name,
            &self.cells,
            written,
            answers,
        )?;
        Ok(if self.template.has_marks {
            Marked::of(&text)
        } else {
            Marked {
                text,
                ranges: Vec::new(),
            }
        })
    }
}

#[cfg(feature = "tokenizers")]
use built::{Cells, Engine, engine, render};
#[cfg(not(feature = "tokenizers"))]
use not_built::{Cells, Engine, engine, render};

#[cfg(feature = "tokenizers")]
mod built;

#[cfg(not(feature = "tokenizers"))]
mod not_built {
    use std::collections::BTreeMap;
    use std::ops::Range;

    use serde_json::{Map, Value};

    pub(super) type Engine = ();

    pub(super) struct Cells;

    impl Cells {
        pub(super) fn of(_: &[Value], _: Map<String, Value>) -> Cells {
            Cells
        }
    }

    pub(super) fn engine(_: BTreeMap<String, String>) -> Result<Engine, String> {
        Err("this program was built without chat templates; help: build it with `cargo build --release -p ddp --features \
             tokenizers`"
            .into())
    }

    pub(super) fn render(
        _: &Engine,
        _: &str,
        _: &Cells,
        _: [Range<usize>; 2],
        _: bool,
    ) -> Result<String, String> {
        engine(BTreeMap::new()).map(|()| String::new())
    }
}

#[cfg(all(test, feature = "tokenizers"))]
mod tests;
