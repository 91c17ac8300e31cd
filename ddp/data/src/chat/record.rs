//! A line of data as text, and which parts of it are trained: what the assistant says, or what
//! completes a prompt.
//!
//! A template with `{% generation %}` marks it. Otherwise a message is what the template adds when
//! it is given that message, too: the text up to it, with the beginning of an answer, and the text
//! up to its end must both be beginnings of the whole conversation's text.

use std::ops::Range;

use serde_json::{Map, Value};

use super::template::{Chat, Template};
use crate::error::bail;
use crate::setting::LOSS_ON;
use crate::text::documents::object;

ddp_kernels::choices! {
    /// Which tokens of conversations are trained.
    #[derive(Default)]
    pub enum LossOn {
        /// What the assistant says, or what completes a prompt
        #[default]
        Assistant = "assistant",
        /// All of them
        All = "all",
    }
}

/// A record as text.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Written {
    pub(super) text: String,
    /// The bytes that are trained.
    pub(super) trained: Vec<Range<usize>>,
    /// Whether it is a text, which a tokenizer begins and ends as it does with every text;
    /// templates write these tokens themselves.
    pub(super) is_plain: bool,
    /// Why nothing would be trained, for messages.
    pub(super) why_none: &'static str,
}

/// What a line of data holds.
enum Record<'a> {
    Messages(&'a [Value]),
    /// Messages of a prompt and of its completion.
    Turns(&'a [Value], &'a [Value]),
    Completion(&'a str, &'a str),
    Text(&'a str),
}

impl Record<'_> {
    fn of(object: &Map<String, Value>) -> Result<Record<'_>, String> {
        let fields = ["messages", "prompt", "completion", "text"].map(|name| object.get(name));
        Ok(match fields {
            [Some(Value::Array(messages)), ..] => Record::Messages(messages),
            [
                None,
                Some(Value::Array(prompt)),
                Some(Value::Array(completion)),
                _,
            ] => Record::Turns(prompt, completion),
            [
                None,
                Some(Value::String(prompt)),
                Some(Value::String(completion)),
                _,
            ] => Record::Completion(prompt, completion),
            [None, None, None, Some(Value::String(text))] => Record::Text(text),
            _ => {
                let names: Vec<_> = object.keys().take(20).map(String::as_str).collect();
                bail!(
                    "expected messages (a list of objects with role and content), prompt and completion (two texts or two \
                     such lists), or text, got the fields [{}]; help: rename the fields",
                    names.join(", ")
                )
            }
        })
    }
}

/// The part of a text from `start` on.
fn rest_of(text: &str, start: usize) -> Vec<Range<usize>> {
    std::iter::once(start..text.len()).collect()
}

/// Writes a record, a line of JSON, as text.
pub(super) fn write(
    line: &str,
    template: Option<&Template>,
    loss_on: LossOn,
) -> Result<Written, String> {
    let object = object(line)?;
    let (messages, prompt) = match Record::of(&object)? {
        Record::Text(text) => {
            return Ok(Written {
                trained: rest_of(text, 0),
                text: text.into(),
                is_plain: true,
                why_none: "the text is empty, or one token",
            });
        }
        Record::Completion(prompt, completion) => {
            let text = [prompt, completion].concat();
            let start = match loss_on {
                LossOn::Assistant => prompt.len(),
                LossOn::All => 0,
            };
            return Ok(Written {
                trained: rest_of(&text, start),
                text,
                is_plain: true,
                why_none: "the completion is empty",
            });
        }
        Record::Messages(messages) => (messages.to_vec(), None),
        Record::Turns(prompt, completion) => ([prompt, completion].concat(), Some(prompt.len())),
    };
    let template = template.ok_or(
        "expected text, or a tokenizer with a chat template, got messages and a tokenizer without; help: give the \
         folder of a model that is made for chats, or put a chat_template.jinja beside tokenizer.json",
    )?;
    let is_message = |message: &Value| message["role"].is_string();
    if let Some(bad) = messages.iter().position(|message| !is_message(message)) {
        bail!(
            "message {}: expected an object with a role, got {}",
            bad + 1,
            messages[bad]
        );
    }
    // Some files hold tools as JSON in a text.
    let tools = match object.get("tools") {
        Some(Value::String(text)) if !text.is_empty() => {
            let read = serde_json::from_str(text);
            Some(read.map_err(|error| format!("tools: expected JSON, got {text:?}: {error}"))?)
        }
        Some(list @ Value::Array(tools)) if !tools.is_empty() => Some(list.clone()),
        _ => None,
    };
    let variables = object
        .get("chat_template_kwargs")
        .and_then(Value::as_object);
    let chat = Conversation {
        chat: Chat::new(template, &messages, tools.as_ref(), variables),
        end: &template.end,
        messages: &messages,
    };
    chat.write(prompt, template.has_marks, loss_on)
}

struct Conversation<'a> {
    chat: Chat<'a>,
    /// The text of the token that ends documents.
    end: &'a str,
    messages: &'a [Value],
}

/// What models think is between these. Templates may begin it for them, and leave out that of
/// earlier answers.
const THOUGHTS: [&str; 2] = ["<think>", "</think>"];

impl Conversation<'_> {
    /// `prompt` messages are a prompt, if it is given, and the others its completion.
    fn write(
        &self,
        prompt: Option<usize>,
        has_marks: bool,
        loss_on: LossOn,
    ) -> Result<Written, String> {
        let whole = self.chat.text(self.messages.len(), false)?;
        let (text, all) = (whole.text, 0..self.messages.len());
        let is_answer = |index: &usize| self.messages[*index]["role"] == "assistant";
        let (trained, why_none) = match (loss_on, prompt) {
            (LossOn::All, _) => (rest_of(&text, 0), "the template writes nothing"),
            (LossOn::Assistant, Some(prompt)) => (
                rest_of(&text, self.start(prompt, &text)?),
                "the completion is empty",
            ),
            (LossOn::Assistant, None) if has_marks => (
                whole.ranges,
                "the template's {% generation %} marks nothing in it",
            ),
            (LossOn::Assistant, None) => {
                let ranges = all.filter(is_answer).map(|index| {
                    let start = self.start(index, &text)?;
                    Ok(start..self.end(index, start, &text)?)
                });
                let ranges = ranges.collect::<Result<_, String>>()?;
                (ranges, "no message is the assistant's")
            }
        };
        Ok(Written {
            text,
            trained,
            is_plain: false,
            why_none,
        })
    }

    /// Where the message begins in the text of all: after what opens an answer.
    fn start(&self, message: usize, whole: &str) -> Result<usize, String> {
        let before = self.chat.text(message, true)?.text;
        let opened = before.rfind(THOUGHTS[0]);
        let mut known = [before.len(), opened.unwrap_or(before.len())].into_iter();
        let found = known.find(|end| whole.starts_with(&before[..*end]));
        found.ok_or_else(|| self.differs(message, &before, whole))
    }

    /// Where the message that begins at `start` ends.
    fn end(&self, message: usize, start: usize, whole: &str) -> Result<usize, String> {
        let alone = self.chat.text(message + 1, false)?.text;
        let Some(turn) = alone.strip_prefix(&whole[..start]) else {
            return Err(self.differs(message, &alone, whole));
        };
        let rest = &whole[start..];
        let ended = turn.strip_suffix(self.end).unwrap_or(turn);
        let answer = ended
            .rsplit_once(THOUGHTS[1])
            .map_or("", |(_, answer)| answer);
        // Some of the space between them is left out, too.
        let spaces = answer.len() - answer.trim_start().len();
        let answers = answer.char_indices().map(|(at, _)| at);
        let answers = answers
            .take_while(|at| *at <= spaces)
            .map(|at| &answer[at..]);
        let mut known = [turn, ended].into_iter().chain(answers);
        let found = known.find(|turn| !turn.is_empty() && rest.starts_with(turn));
        let found = found.ok_or_else(|| self.differs(message, &alone, whole))?;
        Ok(start + found.len())
    }

    fn differs(&self, message: usize, part: &str, whole: &str) -> String {
        let same = part.bytes().zip(whole.bytes());
        let same = same.take_while(|(one, other)| one == other).count();
        let after = |text: &str| -> String {
            let at = text.floor_char_boundary(same);
            text[at..].chars().take(24).collect()
        };
        format!(
            "message {}: expected the chat template to write the same text up to it as for the whole conversation, got \
             {:?} in place of {:?}; help: mark in the template what the assistant says, by {{% generation %}} and \
             {{% endgeneration %}}, or give {LOSS_ON} all",
            message + 1,
            after(part),
            after(whole)
        )
    }
}

#[cfg(all(test, feature = "tokenizers"))]
mod tests;
