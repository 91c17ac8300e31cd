//! The text that a transformer in training writes at evaluations, on rank 0.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use ddp_data::text::Vocabulary;
use ddp_data::{ChatWriter, Data};
use ddp_kernels::Device;
use ddp_kernels::transfer::announced;
use ddp_nn::Sampling;
use ddp_nn::models::{Model, ModelSpec};
use ddp_nn::params::Precision;
use serde_json::json;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::generate::{Coding, GenerateOptions, Writer, generate};
use crate::model::data_shape;
use crate::setting::SAMPLE;
use crate::step::Step;

/// The most tokens of a sample.
const TOKENS_MAX: usize = 64;
/// What logits are divided by: the default of `ddp-train generate`.
const TEMPERATURE: f64 = 0.8;

/// Continues a prompt with the model as it is.
#[derive(Debug)]
pub(super) struct Sample {
    pub(super) prompt: String,
    /// The tokens of the prompt as a question, and the token that ends an answer, if the run learns
    /// conversations.
    question: Option<(Vec<u32>, u32)>,
    coding: Coding,
    options: GenerateOptions,
    /// The whole model on the CPU, into which values are copied: in bf16 if the run is.
    copy: Model,
    /// Whether it has the frozen weights that adapters are added to: they are copied once.
    has_base: AtomicBool,
}

impl Sample {
    /// That of a run, if it writes one. Refuses models and data that make no text.
    pub(super) fn of(options: &Config, data: &Data) -> Result<Option<Sample>> {
        let Some(prompt) = options.sample.clone() else {
            return Ok(None);
        };
        let refused = |text: &str| Err(Error::Usage(format!("{SAMPLE}: {text}")));
        let name = options.model.name();
        if !options.model.generates() {
            let expected = ModelSpec::that_generate();
            return refused(&format!(
                "expected a model of the family {expected}, got {name}; help: leave it out"
            ));
        }
        let Some(coding) = Coding::of_task(data.train.task(), data.tokenizer.as_deref())? else {
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
        match coding.prompt(&prompt, &copy) {
            Err(Error::Usage(text)) => return refused(&text),
            other => other?,
        };
        let is_chat = |tokenizer: &Arc<Vocabulary>| !tokenizer.chat_files.is_empty();
        let is_chat = data.tokenizer.as_ref().is_some_and(is_chat);
        let tokenizer = options.data_request().tokenizer.filter(|_| is_chat);
        let chat = tokenizer.map(|path| ChatWriter::open(&path)).transpose()?;
        let message = json!({ "role": "user", "content": prompt });
        // A tokenizer of texts alone has no template.
        let question = chat.and_then(|chat| Some((chat.prompt(&[message]).ok()?, chat.end())));
        let sampling = Sampling {
            temperature: TEMPERATURE,
            top_k: None,
            top_p: 1.0,
        };
        Ok(Some(Sample {
            prompt,
            question,
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

    /// What follows the prompt, with the gathered values of `step`.
    pub(super) fn text(&self, step: &Step) -> Result<String> {
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
        let mut text = String::new();
        let mut add = |part: &str| {
            text += part;
            Ok(())
        };
        let (model, coding, options) = (&self.copy, &self.coding, &self.options);
        match &self.question {
            Some((tokens, end)) => {
                let room = tokens.len() + options.tokens_max;
                Writer::new(model, coding, options, room)?.after(tokens, Some(*end), &mut add)?
            }
            None => generate(model, coding, &self.prompt, options, &mut add)?,
        };
        Ok(text)
    }
}
