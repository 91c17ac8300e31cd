//! A line of data as text, and which parts of it are trained: what the assistant says, or what
//! completes a prompt.
//!
//! A template with `{% generation %}` marks it. Otherwise a message is what the template adds when
//! it is given that message, too: the text up to it, with the beginning of an answer, and the text
//! up to its end must both be beginnings of the whole conversation's text.

use std::ops::Range;

use serde_json::{Map, Value};

use super::template::marks::{MARKS, Marked};
use super::template::{Conversation, Template};
use crate::error::bail;
use crate::setting::{LOSS_ON, TOKENIZER};
use crate::task::LossOn;
use crate::text::documents::object;

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
        let fields = ["messages", "prompt", "completion", "text"]
            .map(|name| object.get(name).filter(|value| !value.is_null()));
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
                let help = if object.contains_key("chosen") {
                    "preferences are for TRL; to learn what was chosen, name it completion"
                } else {
                    "rename the fields; of a table: pandas.read_json(path, lines=True).to_csv(other, index=False)"
                };
                bail!(
                    "expected messages (a list of objects with role and content), prompt and completion (two texts or two \
                     such lists), or text, got the fields [{}]; help: {help}",
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
    let plain = |text: String, start: usize, why_none| Written {
        trained: rest_of(&text, if loss_on == LossOn::All { 0 } else { start }),
        text,
        is_plain: true,
        why_none,
    };
    let (messages, prompt) = match Record::of(&object)? {
        Record::Text(text) => return Ok(plain(text.into(), 0, "the text is empty")),
        Record::Completion(prompt, completion) => {
            let text = [prompt, completion].concat();
            return Ok(plain(text, prompt.len(), "the completion is empty"));
        }
        Record::Messages(messages) => (messages.to_vec(), None),
        Record::Turns(prompt, completion) => ([prompt, completion].concat(), Some(prompt.len())),
    };
    let mut messages = messages;
    messages.iter_mut().for_each(normalize);
    let template = template.ok_or(
        "expected text, or a tokenizer with a chat template, got messages and a tokenizer without; help: give the \
         folder of a model that is made for chats, or put a chat_template.jinja beside tokenizer.json",
    )?;
    // Templates would write a message without any as an empty one.
    let contents = ["content", "tool_calls", "reasoning_content"];
    for (message, number) in messages.iter().zip(1..) {
        if !message["role"].is_string() {
            bail!("message {number}: expected an object with a role, got {message}");
        }
        let is_missing = |it: &Value| it.is_null() || it.as_array().is_some_and(Vec::is_empty);
        if contents.iter().all(|name| is_missing(&message[name])) {
            bail!(
                "message {number}: expected content, tool_calls or reasoning_content, got {message}; help: write \
                 \"content\": \"\" for an empty message, or leave the message out"
            );
        }
    }
    let mut variables = match object.get("chat_template_kwargs") {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(all)) => all.clone(),
        Some(other) => bail!("chat_template_kwargs: expected an object, got {other}"),
    };
    // Some files hold tools as JSON in a text.
    let tools = match object.get("tools") {
        Some(Value::String(text)) => serde_json::from_str(text)
            .map_err(|error| format!("tools: expected JSON, got {text:?}: {error}"))?,
        other => other.cloned().unwrap_or_default(),
    };
    match tools.as_array() {
        Some(all) if all.is_empty() => {}
        Some(_) => drop(variables.insert("tools".into(), tools)),
        None if tools.is_null() => {}
        None => bail!("tools: expected a list, got {tools}"),
    }
    let has_mark = |value: &Value| value.to_string().contains(MARKS);
    if template.has_marks && messages.iter().chain(variables.values()).any(has_mark) {
        bail!(
            "expected a text without U+FDD0 and U+FDD1, which are no characters; help: remove them"
        );
    }
    let conversation = Turns {
        template,
        messages: &messages,
        conversation: template.conversation(&messages, &variables),
    };
    conversation.write(prompt, loss_on)
}

/// As transformers does: without what is null, and with thoughts under the names that templates
/// read.
fn normalize(message: &mut Value) {
    let Some(message) = message.as_object_mut() else {
        return;
    };
    message.retain(|_, value| !value.is_null());
    let mut names = ["reasoning_content", "thinking", "reasoning"].into_iter();
    if let Some(thoughts) = names.find_map(|name| message.get(name).cloned()) {
        let own = message.shift_remove("thinking");
        message.shift_insert(0, "thinking".into(), own.unwrap_or(thoughts.clone()));
        message.insert("reasoning_content".into(), thoughts);
    }
}

/// The messages of a conversation.
struct Turns<'a> {
    template: &'a Template,
    messages: &'a [Value],
    conversation: Conversation<'a>,
}

/// The most messages of a conversation whose template marks no answers.
const MESSAGES_MAX: usize = 10_000;
/// Messages before an answer with which it is written, and the first answer: so the time for a
/// conversation grows with its length. Where that is not found in the whole, all are written.
const NEAR: usize = 64;
/// Messages that are left out when an answer is written, and their bytes in the whole: from the
/// first to the second.
type LeftOut = [[usize; 2]; 2];
const ALL: LeftOut = [[0; 2]; 2];
/// What models think is between these. Templates may begin it for them, and leave out that of
/// earlier answers.
const THOUGHTS: [&str; 2] = ["<think>", "</think>"];

impl Turns<'_> {
    /// `prompt` messages are a prompt, if it is given, and the others its completion.
    fn write(&self, prompt: Option<usize>, loss_on: LossOn) -> Result<Written, String> {
        let count = self.messages.len();
        let Marked { text, ranges } = self.conversation.text(0..0, count, false)?;
        let (trained, why_none) = match (loss_on, prompt) {
            (LossOn::All, _) => (rest_of(&text, 0), "the template writes nothing"),
            (LossOn::Assistant, Some(prompt)) => {
                let start = self.start(prompt, ALL, &text)?;
                (rest_of(&text, start), "the completion is empty")
            }
            (LossOn::Assistant, None) if self.template.has_marks => (
                ranges,
                "the template's {% generation %} marks nothing in it",
            ),
            (LossOn::Assistant, None) => {
                if count > MESSAGES_MAX {
                    bail!(
                        "expected at most {MESSAGES_MAX} messages, got {count}, which may be written once more for each \
                         answer; help: mark the answers in the template by {{% generation %}}, or split the conversation"
                    );
                }
                let mut ends: Vec<[usize; 2]> = Vec::new();
                let is_answer = |index: &usize| self.messages[*index]["role"] == "assistant";
                let mut ranges = Vec::new();
                for index in (0..count).filter(is_answer) {
                    let near = ends.partition_point(|end| end[0] + NEAR < index);
                    let near = ends.get(near).filter(|_| near > 0);
                    let near = near.map(|near| self.answer(index, [ends[0], *near], &text));
                    let range = match near {
                        Some(Ok(range)) => range,
                        _ => self.answer(index, ALL, &text)?,
                    };
                    ends.push([index + 1, range.end]);
                    ranges.push(range);
                }
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

    /// Writes the first `count` messages, from the bytes that are left out on.
    fn part(
        &self,
        count: usize,
        answers: bool,
        [from, to]: LeftOut,
        whole: &str,
    ) -> Result<String, String> {
        let text = self.conversation.text(from[0]..to[0], count, answers)?.text;
        match text.strip_prefix(&whole[..from[1]]) {
            Some(part) => Ok(part.into()),
            None => Err(self.differs(count, &text, whole)),
        }
    }

    /// What is trained of an answer.
    fn answer(&self, message: usize, out: LeftOut, whole: &str) -> Result<Range<usize>, String> {
        let start = self.start(message, out, whole)?;
        Ok(start..self.end(message, start, out, whole)?)
    }

    /// Where the message begins in the text of all: after what opens an answer.
    fn start(&self, message: usize, out: LeftOut, whole: &str) -> Result<usize, String> {
        let (first, rest) = (out[1][1], &whole[out[1][1]..]);
        let before = self.part(message, true, out, whole)?;
        if rest.starts_with(&before) {
            return Ok(first + before.len());
        }
        // What opens an answer may begin a thought that the whole leaves out.
        let earlier = self.part(message, false, out, whole)?;
        let opened = before
            .strip_prefix(&earlier)
            .and_then(|opening| opening.find(THOUGHTS[0]));
        let opened = opened.map(|at| earlier.len() + at);
        let found = opened.filter(|end| rest.starts_with(&before[..*end]));
        let found = found.ok_or_else(|| self.differs(message, &before, rest))?;
        Ok(first + found)
    }

    /// Where the message that begins at `start` ends.
    fn end(
        &self,
        message: usize,
        start: usize,
        out: LeftOut,
        whole: &str,
    ) -> Result<usize, String> {
        if message + 1 == self.messages.len() && start < whole.len() {
            return Ok(whole.len());
        }
        let alone = self.part(message + 1, false, out, whole)?;
        let Some(turn) = alone.strip_prefix(&whole[out[1][1]..start]) else {
            return Err(self.differs(message, &alone, &whole[out[1][1]..]));
        };
        let rest = &whole[start..];
        let ended = turn.strip_suffix(self.template.end()).unwrap_or(turn);
        // Without a thought, and without some of the space after it.
        let answers = [turn, ended].into_iter().flat_map(|turn| {
            let answer = turn.rsplit_once(THOUGHTS[1]);
            let answer = answer.map_or("", |(_, answer)| answer);
            let spaces = answer.len() - answer.trim_start().len();
            (0..=spaces).filter_map(|at| answer.get(at..))
        });
        let mut known = [turn, ended].into_iter().chain(answers);
        let found = known.find(|turn| !turn.is_empty() && rest.starts_with(turn));
        let found = found.ok_or_else(|| self.differs(message, &alone, whole))?;
        Ok(start + found.len())
    }

    fn differs(&self, message: usize, part: &str, whole: &str) -> String {
        let same = part.bytes().zip(whole.bytes());
        let same = same.take_while(|(one, other)| one == other).count();
        if same == whole.len() {
            return format!(
                "message {}: expected the chat template to write it, got a text that ends before it; help: see whether the \
                 template writes messages of this role, or give another as {TOKENIZER} FOLDER",
                message + 1
            );
        }
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
