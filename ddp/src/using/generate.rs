//! `ddp-train generate`: continues texts with a saved transformer.

use std::fs;
use std::path::Path;
use std::time::Duration;

use ddp_comm::World;
use ddp_kernels::threads;
use ddp_kernels::transfer::{Phase, in_phase};
use ddp_kernels::{DType, Device};
use serde_json::json;

use super::{load, on_cpu};
use crate::cli::GenerateFlags;
use crate::config::Config;
use crate::data::text::{TOKENIZER_FILE, Vocabulary};
use crate::error::{Error, Result};
use crate::generate::{self, Coding, GenerateOptions, Generated};
use crate::hugging_face;
use crate::models::{DataShape, Model};
use crate::nn::Sampling;
use crate::output::print;
use crate::shown::{shown, significant};
use crate::units::plural;

/// Writes the texts to standard output, and how fast that was to the log.
pub fn generate(flags: &GenerateFlags, world: &World) -> Result<()> {
    if world.size() > 1 {
        return Err(Error::Usage(format!(
            "generate: expected one process, which uses all cores, got {} ranks; help: start it \
             without mpirun",
            world.size()
        )));
    }
    threads::set_count(flags.settings.thread_count(world))?;
    let prompts = flags.prompts.as_deref().map(prompts).transpose()?;
    let (model, coding) = in_phase(Phase::Setup, || model_and_coding(flags))?;
    let options = GenerateOptions {
        tokens_max: flags.max_tokens,
        sampling: Sampling {
            temperature: flags.temperature,
            top_k: flags.top_k,
            top_p: flags.top_p,
        },
        seed: flags.seed,
        stop: flags.stop.clone(),
    };
    let run = |prompt: &str, each: &mut dyn FnMut(&str) -> Result<()>| {
        in_phase(Phase::Evaluation, || {
            generate::generate(&model, &coding, prompt, &options, each)
        })
    };
    let Some(prompts) = prompts else {
        let prompt = flags.prompt.as_deref().unwrap_or_default();
        let generated = run(prompt, &mut |text| print(&text))?;
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
    let prompts = lines.map(|(number, line)| (number, line.to_string()));
    let prompts: Vec<_> = prompts.collect();
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

/// The model, and what its tokens mean.
fn model_and_coding(flags: &GenerateFlags) -> Result<(Model, Coding)> {
    let path = &flags.checkpoint;
    let given = flags.tokenizer.as_deref().map(given_coding).transpose()?;
    if hugging_face::is_folder(path) {
        let model = of_hugging_face(path)?;
        let file = path.join(TOKENIZER_FILE);
        let coding = match (given, file.exists()) {
            (Some(given), _) => given,
            (None, true) => Coding::of_tokenizer(&Vocabulary::read(&file)?, None)?,
            (None, false) => return Err(no_tokenizer(path)),
        };
        return Ok((model, coding));
    }
    let loaded = on_cpu::load(path)?;
    let folder = shown(&loaded.opened.folder.to_string_lossy());
    let (why, step) = (&loaded.why, loaded.opened.state.step);
    tracing::info!("{folder} ({why}), after step {step}");
    let coding = match given {
        Some(given) => Some(given),
        None => {
            let tokenizer = loaded.opened.tokenizer()?;
            Coding::of_task(&loaded.opened.state.task, tokenizer.as_ref())?
        }
    };
    Ok((loaded.model, coding.ok_or_else(|| no_tokenizer(path))?))
}

/// The coding of --tokenizer.
fn given_coding(path: &Path) -> Result<Coding> {
    match path.to_str() {
        Some("bytes") => Ok(Coding::of_bytes()),
        _ => Coding::of_tokenizer(&Vocabulary::read(path)?, None),
    }
}

fn no_tokenizer(path: &Path) -> Error {
    Error::Usage(format!(
        "--checkpoint {}: expected a model with a tokenizer, got one without; help: give the \
         tokenizer.json that made its tokens as --tokenizer, or bytes",
        path.display()
    ))
}

/// The model of a folder of Hugging Face.
fn of_hugging_face(path: &Path) -> Result<Model> {
    let spec = hugging_face::describe(path)?.spec;
    let shape = DataShape {
        row_shape: &[spec.context],
        image: &[],
        dtype: DType::I64,
        outputs: spec.vocab,
    };
    let config = Config {
        model: spec.clone().into(),
        ..Config::default()
    };
    let model = load::empty(&config, &shape, Device::Cpu)?;
    hugging_face::load(path, &[&model.params])?;
    Ok(model)
}

/// Logs how fast a text was made, and why it ended.
fn describe(generated: &Generated) {
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
