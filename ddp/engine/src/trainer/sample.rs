//! The texts that a transformer in training writes at evaluations, on rank 0.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use ddp_data::chat::token_and_start;
use ddp_data::text::Vocabulary;
use ddp_data::{ChatWriter, Data, IGNORED, TaskSpec, read_rows};
use ddp_kernels::Device;
use ddp_kernels::transfer::announced;
use ddp_nn::Sampling;
use ddp_nn::models::{Model, ModelSpec};
use ddp_nn::params::Precision;
use serde_json::json;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::generate::{Codec, GenerateOptions, TextWriter, generate};
use crate::metrics_log::SampleText;
use crate::model::data_shape;
use crate::setting::{SAMPLE, SAMPLE_HELD_OUT};
use crate::step::Step;
use ddp_data::setting::{LOSS_ON, VAL_DATA};

/// The most tokens of a sample.
const TOKENS_MAX: usize = 64;
/// What logits are divided by: the default of `ddp-train generate`.
const TEMPERATURE: f64 = 0.8;

/// A text to continue.
#[derive(Debug)]
struct Prompt {
    text: String,
    /// Its tokens and the token that ends an answer, if the run learns conversations.
    question: Option<(Vec<u32>, Option<u32>)>,
    /// What the data have after it.
    expected: Option<String>,
}

/// Continues prompts with the model as it is.
#[derive(Debug)]
pub(super) struct Sample {
    /// At least one.
    prompts: Vec<Prompt>,
    coding: Codec,
    options: GenerateOptions,
    /// The whole model on the CPU, into which values are copied: in bf16 if the run is.
    copy: Model,
    /// Whether it has the frozen weights that adapters are added to: they are copied once.
    has_base: AtomicBool,
}

impl Sample {
    /// That of a run, if it writes one. Refuses models and data that make no text.
    pub(super) fn of(options: &Config, data: &Data) -> Result<Option<Sample>> {
        let setting = match (&options.sample, options.sample_held_out) {
            (None, 0) => return Ok(None),
            (Some(_), _) => SAMPLE,
            (None, _) => SAMPLE_HELD_OUT,
        };
        let refused = |text: &str| Err(Error::Usage(format!("{setting}: {text}")));
        let name = options.model.name();
        if !options.model.generates() {
            let expected = ModelSpec::that_generate();
            return refused(&format!(
                "expected a model of the family {expected}, got {name}; help: leave it out"
            ));
        }
        let Some(coding) = Codec::of_task(data.train.task(), data.tokenizer.as_deref())? else {
            return refused(
                "expected tokens of bytes or with a tokenizer, got others; help: leave it out, or \
                 put the tokenizer.json that made them beside the data",
            );
        };
        let mut model = options.model_options();
        if model.precision == Precision::Tf32 {
            model.precision = Precision::F32;
        }
        let shape = data_shape(data.train.spec());
        let mut models = model.models(&shape, &[Device::Cpu], &|_| true, 1)?;
        let copy = models.pop().expect("a model for one device");
        let mut prompts = Vec::new();
        if let Some(text) = options.sample.clone() {
            match coding.prompt(&text, &copy) {
                Err(Error::Usage(text)) => return refused(&text),
                other => other?,
            };
            let is_chat = |tokenizer: &Arc<Vocabulary>| !tokenizer.chat_files.is_empty();
            let is_chat = data.tokenizer.as_ref().is_some_and(is_chat);
            let tokenizer = options.data_request().tokenizer.filter(|_| is_chat);
            let chat = tokenizer.map(|path| ChatWriter::open(&path)).transpose()?;
            let message = json!({ "role": "user", "content": text });
            // A tokenizer of texts alone has no template.
            let question =
                chat.and_then(|chat| Some((chat.prompt(&[message]).ok()?, Some(chat.end()))));
            prompts.push(Prompt {
                text,
                question,
                expected: None,
            });
        }
        prompts.extend(held_out(options.sample_held_out, data, &coding)?);
        let sampling = Sampling {
            temperature: TEMPERATURE,
            top_k: None,
            top_p: 1.0,
        };
        Ok(Some(Sample {
            prompts,
            coding,
            options: GenerateOptions {
                tokens_max: TOKENS_MAX,
                sampling,
                seed: options.seed,
                stop: String::new(),
            },
            copy,
            has_base: AtomicBool::new(false),
        }))
    }

    /// What follows the prompts, with the gathered values of `step`.
    pub(super) fn texts(&self, step: &Step) -> Result<(SampleText, Vec<SampleText>)> {
        let (copy, has_base) = (&self.copy.params, self.has_base.swap(true, Relaxed));
        announced("the copy of the model that writes a sample", || {
            for params in step.params() {
                let list = params.list().iter();
                for parameter in list.filter(|it| !(it.is_base && has_base)) {
                    let target = copy.value(copy.find(&parameter.name)?.id);
                    target.copy_from(params.value(parameter.id))?;
                }
            }
            Ok::<_, Error>(())
        })?;
        let mut texts = self.prompts.iter().map(|prompt| self.after(prompt));
        let first = texts.next().expect("there is a prompt")?;
        Ok((first, texts.collect::<Result<_>>()?))
    }

    fn after(&self, prompt: &Prompt) -> Result<SampleText> {
        let mut text = String::new();
        let mut add = |part: &str| {
            text += part;
            Ok(())
        };
        let (model, coding, options) = (&self.copy, &self.coding, &self.options);
        match &prompt.question {
            Some((tokens, end)) => {
                let room = tokens.len() + options.tokens_max;
                TextWriter::new(model, coding, options, room)?.after(tokens, *end, &mut add)?
            }
            None => generate(model, coding, &prompt.text, options, &mut add)?,
        };
        Ok(SampleText {
            prompt: prompt.text.clone(),
            text,
            expected: prompt.expected.clone(),
        })
    }
}

/// The prompts of some held-out conversations, with their first answers.
fn held_out(asked: u64, data: &Data, coding: &Codec) -> Result<Vec<Prompt>> {
    let (rows, mut prompts) = (data.held_out.rows(), Vec::new());
    let end = match data.train.task() {
        TaskSpec::NextToken { tokenizer, .. } => tokenizer.as_ref().and_then(|it| it.end_of_text),
        _ => None,
    };
    let count = asked.min(rows);
    for number in 0..count {
        let row = (u128::from(number) * u128::from(rows) / u128::from(count)) as u64;
        let [inputs, targets] = read_rows(&*data.held_out, &[row])?;
        let inputs = inputs.to_vec::<i64>()?.into_iter().map(token_and_start);
        // The first conversation of the row.
        let inputs = inputs.take(data.held_out.used(row));
        let tokens: Vec<u32> = inputs.take_while(|it| it.1 == 0).map(|it| it.0).collect();
        let targets = targets.to_vec::<i64>()?;
        let is_trained = |at: &usize| targets[at - 1] != IGNORED;
        let first = (1..tokens.len()).find(is_trained);
        // In a text, all but its first token is trained.
        let Some(first) = first.filter(|first| *first > 1) else {
            continue;
        };
        let last = (first..tokens.len()).find(|at| !is_trained(at));
        prompts.push(Prompt {
            text: coding.text(&tokens[..first])?,
            expected: Some(coding.text(&tokens[first..last.unwrap_or(tokens.len())])?),
            question: Some((tokens[..first].to_vec(), end.map(|end| end as u32))),
        });
    }
    if asked == 0 || !prompts.is_empty() {
        return Ok(prompts);
    }
    Err(Error::Usage(format!(
        "{SAMPLE_HELD_OUT}: expected held-out conversations with prompts, got none; help: leave it out, or give \
         {VAL_DATA} with some, and no {LOSS_ON} all"
    )))
}
