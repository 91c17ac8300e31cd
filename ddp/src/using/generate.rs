//! `ddp-train generate`: continues texts with a saved transformer.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{ArgGroup, Args};
use ddp_comm::World;
use ddp_kernels::threads;
use ddp_kernels::transfer::{Phase, in_phase};
use serde_json::json;

use super::choose::described;
use super::load;
use crate::checkpoint::Opened;
use crate::config::FloatType;
use crate::data::text::{self, Vocabulary};
use crate::error::{Error, Result};
use crate::flags::{Taken, check_alone, choice, number, parsed, whole};
use crate::generate::{self, Codec, GenerateOptions, Generated};
use crate::models::Model;
use crate::nn::Sampling;
use crate::shown::{shown, significant};
use crate::units::plural;
use ddp_tools::output::{print, print_text};

/// Printed after the help of `generate`.
pub(crate) const EXAMPLES: &str = "\
Examples:
  ddp-train generate --checkpoint out --prompt 'Once upon a time'
  ddp-train generate --checkpoint gpt2 --prompt 'The answer is' --temperature 0 --max-tokens 20
  ddp-train generate --checkpoint out --prompts prompts.txt --seed 7 >answers.jsonl

The text goes to standard output as it is made, without the prompt. With --prompts, a line of JSON for each prompt: prompt, text, \
tokens, and why the text ended. It is made on the CPU. The same seed gives the same text, for any number of threads.";

/// The flags of `generate`.
#[derive(Args, Clone, Debug, PartialEq)]
#[command(group = ArgGroup::new("text").required(true))]
pub(crate) struct GenerateFlags {
    /// Folder of a checkpoint, of a run (its best checkpoint by validation, else its newest), of
    /// Hugging Face, or of an adapter that names the folder of its base model
    #[arg(long, value_name = "PATH")]
    pub checkpoint: PathBuf,
    /// The text to continue; if it is empty, the model begins a document
    #[arg(long, value_name = "TEXT", group = "text")]
    pub prompt: Option<String>,
    /// A file with a prompt a line
    #[arg(long, value_name = "FILE", group = "text")]
    pub prompts: Option<PathBuf>,
    /// End the text before this one
    #[arg(long, value_name = "TEXT", default_value = "")]
    #[arg(hide_default_value = true)]
    pub stop: String,
    /// Hugging Face tokenizer.json, or bytes, for a model that has none
    #[arg(long, value_name = "TOKENIZER")]
    pub tokenizer: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) how: SamplingFlags,
}

/// How texts are made.
#[derive(Args, Clone, Debug, PartialEq)]
pub(crate) struct SamplingFlags {
    /// The most tokens to make
    #[arg(long, value_name = "N", default_value = "200", value_parser = whole(1..=usize::MAX), allow_negative_numbers = true)]
    pub(crate) max_tokens: usize,
    /// What logits are divided by: less than 1 prefers probable tokens, 0 takes the most probable
    /// one
    #[arg(long, value_name = "T", default_value = "0.8", value_parser = number(0.0..=1e6), allow_negative_numbers = true)]
    pub temperature: f64,
    /// Choose among the K most probable tokens [default: all]
    #[arg(long, value_name = "K", value_parser = whole(1..=usize::MAX), allow_negative_numbers = true)]
    pub top_k: Option<usize>,
    /// Choose among the most probable tokens whose probabilities add up to P
    #[arg(long, value_name = "P", default_value = "1", value_parser = share, allow_negative_numbers = true)]
    pub top_p: f64,
    /// Seed of the random numbers that choose tokens
    #[arg(long, value_name = "N", default_value = "1")]
    pub seed: u64,
    /// Precision of the model's computation: f32 or bf16 [default: that of the checkpoint]
    #[arg(long, value_name = "TYPE", value_parser = choice::<FloatType>())]
    pub dtype: Option<FloatType>,
    /// Its CPU threads.
    #[command(flatten)]
    pub settings: Taken,
}

fn share(text: &str) -> Result<f64, String> {
    let is_share = |share: &f64| *share > 0.0 && *share <= 1.0;
    parsed(text, is_share, || {
        "expected a number above 0, up to 1".into()
    })
}

/// Writes the texts to standard output, and how fast that was to the log.
pub(crate) fn generate(flags: &GenerateFlags, world: &World) -> Result<()> {
    check_alone("generate", world)?;
    threads::set_count(flags.how.settings.thread_count(world))?;
    let prompts = flags.prompts.as_deref().map(prompts).transpose()?;
    let (path, tokenizer) = (&flags.checkpoint, flags.tokenizer.as_deref());
    let (opened, ()) = in_phase(Phase::Setup, || {
        open(path, tokenizer, &flags.how, |_| Ok(()))
    })?;
    let TextModel { model, coding, .. } = opened;
    let options = flags.how.options(&flags.stop);
    let run = |prompt: &str, each: &mut dyn FnMut(&str) -> Result<()>| {
        in_phase(Phase::Evaluation, || {
            generate::generate(&model, &coding, prompt, &options, each)
        })
    };
    let Some(prompts) = prompts else {
        let prompt = flags.prompt.as_deref().unwrap_or_default();
        let generated = run(prompt, &mut print_text)?;
        print(&"\n")?;
        describe(&generated);
        return Ok(());
    };
    for (line, prompt) in prompts {
        let mut text = String::new();
        let generated = run(&prompt, &mut |part| {
            text += part;
            Ok(())
        });
        let generated = generated.map_err(|error| of_line(error, flags, line))?;
        let (tokens, ended) = (generated.tokens, generated.ended.to_string());
        let json = json!({ "prompt": prompt, "text": text, "tokens": tokens, "ended": ended });
        print(&format_args!("{json}\n"))?;
        describe(&generated);
    }
    Ok(())
}

impl SamplingFlags {
    pub(super) fn options(&self, stop: &str) -> GenerateOptions {
        GenerateOptions {
            tokens_max: self.max_tokens,
            sampling: Sampling {
                temperature: self.temperature,
                top_k: self.top_k,
                top_p: self.top_p,
            },
            seed: self.seed,
            stop: stop.into(),
        }
    }
}

/// The prompts of a file, each with the number of its line. Lines without text are left out.
pub fn prompts(path: &Path) -> Result<Vec<(usize, String)>> {
    let name = shown(&path.to_string_lossy()).to_string();
    let help = "give --prompts a file with a prompt a line";
    let bytes = fs::read(path).map_err(Error::io("read", path, help))?;
    let text = str::from_utf8(&bytes).map_err(|error| {
        let before = &bytes[..error.valid_up_to()];
        let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
        let at = error.valid_up_to();
        Error::Data(format!(
            "{name}, line {line}: expected UTF-8, got other bytes at byte {at}; help: convert the \
             file to UTF-8"
        ))
    })?;
    let lines = (1..).zip(text.trim_start_matches('\u{feff}').lines());
    let lines = lines.filter(|(_, line)| !line.trim().is_empty());
    let prompts: Vec<_> = lines.map(|(number, line)| (number, line.into())).collect();
    if prompts.is_empty() {
        return Err(Error::Data(format!(
            "{name}: expected a prompt a line, got none; help: give a file with text"
        )));
    }
    Ok(prompts)
}

/// A prompt's error, with its place.
fn of_line(error: Error, flags: &GenerateFlags, line: usize) -> Error {
    match (error, &flags.prompts) {
        (Error::Usage(text), Some(path)) => {
            Error::Data(format!("{}, line {line}: {text}", path.display()))
        }
        (error, _) => error,
    }
}

/// A model, and what its tokens mean.
pub(super) struct TextModel {
    pub(super) model: Model,
    pub(super) coding: Codec,
}

/// The model in a folder, and what its tokens mean; with the tokenizer that is given, if one is.
/// `first` gets the tokenizer's folder before weights are read.
pub(super) fn open<T>(
    at: &Path,
    tokenizer: Option<&Path>,
    how: &SamplingFlags,
    first: impl FnOnce(Option<&Path>) -> Result<T>,
) -> Result<(TextModel, T)> {
    let of_file = |path: &Path| Codec::of_tokenizer(&Vocabulary::read(path)?, None);
    let given = tokenizer.map(|path| match path.to_str() {
        Some("bytes") => Ok(Codec::of_bytes()),
        _ => of_file(path),
    });
    let given = given.transpose()?;
    let coding = |opened: &Opened| {
        let coding = match given {
            None => Codec::of_task(&opened.state.task, opened.tokenizer()?.as_ref())?,
            given => given,
        };
        let help = || {
            let made = text::help_to_make_tokenizer(&opened.folder);
            made.unwrap_or("put the tokenizer.json that made its tokens into its folder".into())
        };
        let coding = coding.ok_or_else(|| {
            Error::Usage(format!(
                "--checkpoint {}: expected a model with a tokenizer, got one without; help: {}; \
                 generate also takes it as --tokenizer, or bytes",
                at.display(),
                help()
            ))
        })?;
        Ok((coding, first(opened.tokenizer_in.as_deref())?))
    };
    let (chosen, model, (coding, first)) = load::on_cpu(at, &how.settings, how.dtype, coding)?;
    tracing::info!("{}", described(&chosen));
    Ok((TextModel { model, coding }, first))
}

/// Logs how fast a text was made, and why it ended.
pub(super) fn describe(generated: &Generated) {
    let rate = |tokens: usize, time: Duration| {
        let seconds = time.as_secs_f64().max(1e-9);
        format!("{} tokens/s", significant(tokens as f64 / seconds, 3))
    };
    let prompt = generated.prompt_tokens;
    let read = rate(prompt, generated.prompt_time);
    // The first token comes with the prompt.
    let mut made = plural(generated.tokens as u64, "token");
    if generated.tokens > 1 {
        made += &format!(", {}", rate(generated.tokens - 1, generated.time));
    }
    let prompt = plural(prompt as u64, "token");
    let threads = plural(threads::count() as u64, "thread");
    let ended = generated.ended;
    tracing::info!("prompt {prompt}, {read}; text {made}, on {threads} of the CPU; end: {ended}");
}
