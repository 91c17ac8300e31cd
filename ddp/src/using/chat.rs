//! `ddp-train chat`: talks with a saved model, by the chat template of its tokenizer.

use std::io::{self, BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use ddp_comm::World;
use ddp_kernels::threads;
use ddp_kernels::transfer::{Phase, in_phase};
use serde_json::{Value, json};

use super::generate::{SamplingFlags, TextModel, describe, open};
use crate::data::ChatWriter;
use crate::error::{Error, Result, refuse};
use crate::flags::check_alone;
use crate::generate::{Ended, TextWriter};
use ddp_tools::output::{print, print_text};

/// Printed after the help of `chat`.
pub(crate) const EXAMPLES: &str = "\
Examples:
  ddp-train chat out
  ddp-train chat Qwen3-0.6B --system 'Answer in one sentence.' --dtype bf16
  printf 'Hi\\nWhat is 2 + 2?\\n' | ddp-train chat out --temperature 0

Each line of standard input is a message; an empty one begins a new conversation. Answers go to standard output as they are \
made, on the CPU. The model reads each part of a conversation only once.";

/// The flags of `chat`.
#[derive(Args, Clone, Debug, PartialEq)]
pub(crate) struct ChatFlags {
    /// Folder of a run (its best checkpoint by validation, else its newest), of a checkpoint, of
    /// Hugging Face, or of an adapter that names the folder of its base model
    #[arg(value_name = "PATH")]
    pub(crate) checkpoint: PathBuf,
    /// System message of each conversation
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    #[command(flatten)]
    pub(crate) how: SamplingFlags,
}

/// Answers the lines of standard input until it ends.
pub(crate) fn chat(flags: &ChatFlags, world: &World) -> Result<()> {
    check_alone("chat", world)?;
    threads::set_count(flags.how.settings.thread_count(world))?;
    let begin: Vec<Value> = flags
        .system
        .iter()
        .map(|text| message("system", text))
        .collect();
    let template = |folder: Option<&Path>| {
        let folder = folder.ok_or_else(|| {
            refuse(
                "chat",
                flags.checkpoint.display(),
                "a model with a tokenizer and a chat template",
                "for a model without there is generate",
            )
        })?;
        let template = ChatWriter::open(folder)?;
        // Refuses a tokenizer without a template before weights are read and anyone has written.
        template.prompt(&[&begin[..], &[message("user", "")]].concat())?;
        Ok(template)
    };
    let (opened, template) = in_phase(Phase::Setup, || {
        open(&flags.checkpoint, None, &flags.how, template)
    })?;
    let TextModel { model, coding } = opened;
    let options = flags.how.options("");
    let mut writer = TextWriter::new(&model, &coding, &options, usize::MAX)?;
    let (mut messages, mut line) = (begin.clone(), String::new());
    let is_watched = io::stdin().is_terminal();
    loop {
        if is_watched {
            // A prompt that cannot be shown is no reason to end.
            let _ = write!(io::stderr(), "> ").and_then(|()| io::stderr().flush());
        }
        line.clear();
        let read = io::stdin().lock().read_line(&mut line);
        let help = "write messages in UTF-8";
        if read.map_err(Error::io("read", "standard input", help))? == 0 {
            return Ok(());
        }
        let text = line.trim_end_matches(['\n', '\r']);
        if text.is_empty() {
            messages.clone_from(&begin);
            continue;
        }
        messages.push(message("user", text));
        let mut tokens = template.prompt(&messages)?;
        let context = model.input_shape[0];
        if tokens.len() > context {
            tracing::warn!(
                "the conversation has {} tokens, more than the model's context, {context}: a new one begins",
                tokens.len()
            );
            messages.drain(begin.len()..messages.len() - 1);
            tokens = template.prompt(&messages)?;
        }
        if tokens.len() > context {
            tracing::warn!("the message is longer than the model's context: it is left out");
            messages.clone_from(&begin);
            continue;
        }
        let mut answer = String::new();
        let generated = in_phase(Phase::Evaluation, || {
            writer.after(&tokens, Some(template.end()), &mut |part| {
                answer += part;
                print_text(part)
            })
        })?;
        print(&"\n")?;
        if generated.ended != Ended::EndToken {
            describe(&generated);
        }
        messages.push(message("assistant", &answer));
    }
}

fn message(role: &str, content: &str) -> Value {
    json!({ "role": role, "content": content })
}
