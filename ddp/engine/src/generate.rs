//! Generating text: a prompt is continued token by token, on the CPU.

use std::fmt;
use std::time::{Duration, Instant};

use ddp_data::TaskSpec;
use ddp_data::text::{Encoder, TextStream, Vocabulary};
use ddp_kernels::heartbeat::{self, Work};
use ddp_kernels::{DType, Device, Random, Tensor};
use ddp_nn::models::Model;
use ddp_nn::{Decoder, Sampling};

use crate::error::{Error, Result};

/// How a text is generated.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateOptions {
    /// The most tokens, at least 1.
    pub tokens_max: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Seed of the random numbers that choose tokens.
    pub seed: u64,
    /// The text ends before this one; empty for none.
    pub stop: String,
}

/// What turns texts into a model's tokens and back.
#[derive(Clone, Debug)]
pub struct Codec {
    encoder: Encoder,
    /// The token that ends a text, with which one can begin, too.
    end: Option<u32>,
    /// The others that end one.
    ends: Vec<u32>,
    /// The size of the vocabulary: every token is smaller.
    size: usize,
}

impl Codec {
    /// That of `tokenizer`. Texts end with the token `end`, by default a usual one.
    pub fn of_tokenizer(tokenizer: &Vocabulary, end: Option<usize>) -> Result<Codec> {
        let encoder = if tokenizer.hash == Vocabulary::bytes().hash {
            Encoder::Bytes
        } else {
            Encoder::of(tokenizer).map_err(Error::Data)?
        };
        let end = end.and_then(|end| u32::try_from(end).ok());
        let end = end.or_else(|| tokenizer.end_of_text(None).ok());
        Ok(Codec {
            encoder,
            end,
            ends: tokenizer.ends(),
            size: tokenizer.size,
        })
    }

    /// The one in which each byte is a token.
    pub fn of_bytes() -> Codec {
        Codec {
            encoder: Encoder::Bytes,
            end: Some(256),
            ends: Vec::new(),
            size: 257,
        }
    }

    /// That of a model that was trained for `task`, with its tokenizer if it has one; None if
    /// nothing says what its tokens mean.
    pub fn of_task(task: &TaskSpec, tokenizer: Option<&Vocabulary>) -> Result<Option<Codec>> {
        match (task, tokenizer) {
            (TaskSpec::NextToken { tokenizer: id, .. }, Some(tokenizer)) => {
                let end = id.as_ref().and_then(|id| id.end_of_text);
                Codec::of_tokenizer(tokenizer, end).map(Some)
            }
            (TaskSpec::NextToken { are_bytes, .. }, None) => Ok(are_bytes.then(Codec::of_bytes)),
            _ => Ok(None),
        }
    }

    /// The text of tokens, without special ones.
    pub(crate) fn text(&self, tokens: &[u32]) -> Result<String> {
        self.encoder.decode(tokens).map_err(Error::Data)
    }

    /// The tokens of a prompt, as many as `model` takes.
    pub(crate) fn prompt(&self, prompt: &str, model: &Model) -> Result<Vec<u32>> {
        let mut tokens = self.encoder.encode(prompt).map_err(Error::Data)?;
        let vocabulary = model.output_shape.last().copied().unwrap_or(0);
        if tokens.is_empty() {
            tokens.extend(self.end.filter(|end| (*end as usize) < vocabulary));
        }
        check_prompt(&tokens, model).map(|()| tokens)
    }
}

/// Refuses a prompt that `model` cannot read.
fn check_prompt(tokens: &[u32], model: &Model) -> Result<()> {
    let context = model.input_shape.first().copied().unwrap_or(0);
    let vocabulary = model.output_shape.last().copied().unwrap_or(0);
    let unknown = tokens.iter().find(|token| **token as usize >= vocabulary);
    let refused = match (unknown, tokens.len()) {
        (Some(token), _) => format!(
            "expected tokens below {vocabulary}, as the model has, got {token}; help: give the \
             tokenizer that the model was trained with"
        ),
        (None, 0) => "expected text, got none, and the model has no token that ends documents, \
                      with which a text could begin; help: give some text"
            .into(),
        (None, count) if count > context => format!(
            "expected at most {context} tokens, the model's context, got {count}; help: give a \
             shorter one"
        ),
        _ => return Ok(()),
    };
    Err(Error::Usage(format!("prompt: {refused}")))
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It has as many tokens as were asked for.
    Length,
    /// The model ended it.
    EndToken,
    /// The text to stop at came.
    Stop,
    /// The model's context is full.
    Context(usize),
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ended::Length => f.write_str("the limit of tokens is reached"),
            Ended::EndToken => f.write_str("the model's end of a text"),
            Ended::Stop => f.write_str("the text to stop at"),
            Ended::Context(tokens) => write!(f, "the model's context, {tokens} tokens, is full"),
        }
    }
}

/// What was generated.
#[derive(Clone, Copy, Debug)]
pub struct Generated {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// The time in which all of them passed through the model.
    pub prompt_time: Duration,
    /// Tokens that were made, with the end token.
    pub tokens: usize,
    /// The time for all of them but the first, which comes with the prompt.
    pub time: Duration,
    /// Why there are no more.
    pub ended: Ended,
}

/// Continues `prompt`, and calls `each` with parts of the text as soon as they are known. `model`
/// is on the CPU and takes rows of tokens.
pub fn generate(
    model: &Model,
    coding: &Codec,
    prompt: &str,
    options: &GenerateOptions,
    each: &mut dyn FnMut(&str) -> Result<()>,
) -> Result<Generated> {
    let tokens = coding.prompt(prompt, model)?;
    let room = (tokens.len() - 1).saturating_add(options.tokens_max);
    TextWriter::new(model, coding, options, room)?.after(&tokens, None, each)
}

/// Continues texts, and remembers what the model has read of the last one.
pub struct TextWriter<'a> {
    model: &'a Model,
    coding: &'a Codec,
    options: &'a GenerateOptions,
    room: usize,
    decoder: Decoder<'a>,
    /// The tokens that the decoder has read.
    read: Vec<u32>,
    random: Random,
}

impl<'a> TextWriter<'a> {
    /// For texts of at most `room` tokens.
    pub fn new(
        model: &'a Model,
        coding: &'a Codec,
        options: &'a GenerateOptions,
        room: usize,
    ) -> Result<TextWriter<'a>> {
        let room = room.min(model.input_shape.first().copied().unwrap_or(0));
        Ok(TextWriter {
            model,
            coding,
            options,
            room,
            decoder: Decoder::new(model, room)?,
            read: Vec::new(),
            random: Random::new(options.seed),
        })
    }

    /// Continues `prompt` up to the text's end or the token `end`. What it begins with
    /// and the model has read is not read again.
    pub fn after(
        &mut self,
        prompt: &[u32],
        end: Option<u32>,
        each: &mut dyn FnMut(&str) -> Result<()>,
    ) -> Result<Generated> {
        let (coding, options) = (self.coding, self.options);
        check_prompt(prompt, self.model)?;
        // The last token is read again for what follows it.
        if !prompt[..prompt.len() - 1].starts_with(&self.read) {
            self.decoder.restart();
            self.read.clear();
        }
        let mut new = prompt[self.read.len()..].to_vec();
        let mut stream = TextStream::after(&coding.encoder, prompt);
        let mut output = TextOutput {
            stop: &options.stop,
            held: String::new(),
            each,
        };
        let (mut tokens, mut times) = (0, [Duration::ZERO; 2]);
        let mut ended = loop {
            heartbeat::beat(Work::Computes);
            let began = Instant::now();
            let ids: Vec<i64> = new.iter().map(|token| i64::from(*token)).collect();
            let logits = self.decoder.next(&ids)?;
            self.read.append(&mut new);
            let uniform = Tensor::rand(&[1], DType::F64, Device::Cpu, &mut self.random)?.item()?;
            let size = coding.size.min(logits.len());
            let chosen = options.sampling.choose(&logits[..size], uniform);
            let Some(token) = chosen.and_then(|token| u32::try_from(token).ok()) else {
                let what = "the model gives a number that is not finite";
                let text =
                    format!("token {tokens} of the text: {what}; help: use an earlier checkpoint");
                return Err(Error::NonFinite(text));
            };
            times[tokens.min(1)] += began.elapsed();
            tokens += 1;
            if [coding.end, end].contains(&Some(token)) || coding.ends.contains(&token) {
                break Ended::EndToken;
            }
            if output.push(&stream.push(token).map_err(Error::Data)?)? {
                break Ended::Stop;
            }
            if tokens == options.tokens_max {
                break Ended::Length;
            }
            if self.decoder.room() == 0 {
                break Ended::Context(self.room);
            }
            new.push(token);
        };
        if ended != Ended::Stop && output.finish(&stream.finish().map_err(Error::Data)?)? {
            ended = Ended::Stop;
        }
        Ok(Generated {
            prompt_tokens: prompt.len(),
            prompt_time: times[0],
            tokens,
            time: times[1],
            ended,
        })
    }
}

/// Passes text on, except for what may be the beginning of the text to stop at.
struct TextOutput<'a> {
    stop: &'a str,
    held: String,
    each: &'a mut dyn FnMut(&str) -> Result<()>,
}

impl TextOutput<'_> {
    /// Returns whether the text ends here.
    fn push(&mut self, text: &str) -> Result<bool> {
        self.held += text;
        if let (false, Some(end)) = (self.stop.is_empty(), self.held.find(self.stop)) {
            self.give(end)?;
            return Ok(true);
        }
        let beginnings = self.stop.char_indices().map(|(end, _)| &self.stop[..end]);
        let held = beginnings.filter(|part| self.held.ends_with(part));
        let held = held.map(str::len).max().unwrap_or(0);
        self.give(self.held.len() - held)?;
        Ok(false)
    }

    /// Passes the rest on. Returns whether the text to stop at came after all.
    fn finish(&mut self, text: &str) -> Result<bool> {
        let ended = self.push(text)?;
        if !ended {
            self.give(self.held.len())?;
        }
        Ok(ended)
    }

    fn give(&mut self, end: usize) -> Result<()> {
        if end > 0 {
            (self.each)(&self.held[..end])?;
            self.held.drain(..end);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use ddp_nn::models::gpt::GptSpec;
    use ddp_nn::models::{DataShape, Family};

    use super::*;

    /// Feeds `parts` to `TextOutput`, the last one as its end. Returns the texts that it passed on,
    /// and whether it found `stop`.
    fn given(stop: &str, parts: &[&str]) -> (Vec<String>, bool) {
        let mut given = Vec::new();
        let mut each = |text: &str| {
            given.push(text.to_string());
            Ok(())
        };
        let mut output = TextOutput {
            stop,
            held: String::new(),
            each: &mut each,
        };
        let (last, parts) = parts.split_last().unwrap();
        let ended = parts.iter().any(|part| output.push(part).unwrap());
        let ended = ended || output.finish(last).unwrap();
        (given, ended)
    }

    #[test]
    fn an_empty_prompt_needs_a_token_that_ends_documents() {
        let model = |outputs| {
            let spec = GptSpec {
                layers: 1,
                context: 4,
                ..GptSpec::default()
            };
            let shape = DataShape {
                row_shape: &[4],
                image: &[],
                dtype: DType::I64,
                outputs,
                documents: false,
            };
            let layers = Box::new(spec.layers(&shape).unwrap());
            Model::new(layers, &[4], DType::F32, Device::Cpu, 0, &|_| true).unwrap()
        };
        let bytes = Codec::of_bytes();
        assert_eq!(bytes.prompt("", &model(257)).unwrap(), [256]);
        let without = Codec {
            end: None,
            ..bytes.clone()
        };
        // A model of a .txt file has no token above its bytes.
        for (coding, outputs) in [(without, 257), (bytes, 256)] {
            let error = coding.prompt("", &model(outputs)).unwrap_err().to_string();
            assert!(error.contains("prompt: expected text, got none"), "{error}");
        }
    }

    #[test]
    fn nothing_of_the_text_to_stop_at_is_given_out() {
        assert_eq!(
            given("END", &["aE", "N", "Db", "c"]),
            (vec!["a".into()], true)
        );
        let parts = ["a", "ENx", "E", "E"].map(String::from).to_vec();
        assert_eq!(given("END", &["aEN", "x", "EE", ""]), (parts, false));
        assert_eq!(given("END", &["aE", "ND"]), (vec!["a".into()], true));
        assert_eq!(given("ßß", &["aß", "ß"]), (vec!["a".into()], true));
        assert_eq!(
            given("", &["a", "", "b"]),
            (vec!["a".into(), "b".into()], false)
        );
    }
}
