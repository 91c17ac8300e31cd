//! `ddp-train show-tokens`: what a model would be trained on, token by token.

use std::io::{IsTerminal, stdout};

use clap::Args;
use ddp_comm::World;
use ddp_kernels::setting::SettingValue;
use serde_json::json;

use crate::config::{Config, Packing};
use crate::data::chat::token_and_start;
use crate::data::text::Encoder;
use crate::data::{self, Alone, Data, DataSpec, IGNORED, TaskSpec, read_rows};
use crate::error::{Error, Result};
use crate::flags::{Taken, check_alone, whole};
use crate::initial_weights::InitialWeights;
use crate::shown::shown;
use crate::tables::READER;
use ddp_tools::output::Say;

/// Printed after the help of `show-tokens`.
pub(crate) const EXAMPLES: &str = "\
Examples:
  ddp-train show-tokens chats.jsonl --init-from Qwen3-0.6B
  ddp-train show-tokens chats.jsonl --tokenizer Qwen3-0.6B --context 2048 --packing off --rows 3
  ddp-train show-tokens chats.jsonl --init-from Qwen3-0.6B --json | jq 'select(.trained)'

Tokens that are trained are green; without colours they are between ‹ and ›. A bar stands between two tokens, and ×N after a token \
that comes N times. With --json, a line for each token: row, document (null of padding), index in the row, position in the \
document, token, text, and whether it is trained.";

/// The flags of `show-tokens`.
#[derive(Args, Clone, Debug, PartialEq)]
pub(crate) struct ShowTokensFlags {
    /// Conversations or tokens, as --data takes them
    #[arg(value_name = "DATA", value_parser = DataSpec::read)]
    pub data: DataSpec,
    /// Tokens of a row [default: the model's context]
    #[arg(long, value_name = "N", value_parser = whole(1..=data::TOKENS_MAX as usize))]
    pub context: Option<usize>,
    /// Rows to show
    #[arg(long, value_name = "N", default_value = "1", value_parser = whole(1..=usize::MAX))]
    pub rows: usize,
    /// Print a line of JSON for each token
    #[arg(long)]
    pub json: bool,
    /// How tokens are made, as in training.
    #[command(flatten)]
    pub settings: Taken,
}

/// A token of a row.
struct ShownToken {
    /// None if it pads the row.
    document: Option<usize>,
    /// In the row.
    index: usize,
    /// In its document.
    position: usize,
    token: u32,
    text: String,
    is_trained: bool,
}

/// Prints the first rows.
pub(crate) fn show_tokens(flags: &ShowTokensFlags, world: &World, say: Say<'_>) -> Result<()> {
    check_alone("show-tokens", world)?;
    let mut config = Config {
        data: flags.data.clone(),
        ..flags.settings.0.clone()
    };
    let mut context = flags.context;
    if let Some(path) = &config.init_from
        && let Some(initial) = InitialWeights::of(path)?
    {
        (config.model, config.init_from) = (initial.model, Some(initial.folder));
        context = context.or(config.model.context());
    }
    let mut request = config.data_request();
    request.context = context;
    // Most models have rotary positions.
    request.packed |= config.init_from.is_none() && config.packing == Packing::Auto;
    let data = data::prepare(&request, Some(READER), &Alone)?;
    let encoder = encoder(&data, &flags.data)?;
    if !flags.json {
        say(&shown(&data.description))?;
    }
    let is_coloured = stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    for row in 0..data.train.rows().min(flags.rows as u64) {
        let tokens = tokens(&data, row, &encoder)?;
        if flags.json {
            for one in tokens {
                say(&json!({
                    "row": row, "document": one.document, "index": one.index, "position": one.position,
                    "token": one.token, "text": one.text, "trained": one.is_trained,
                }))?;
            }
            continue;
        }
        for of_document in tokens.chunk_by(|one, next| one.document == next.document) {
            let trained = of_document.iter().filter(|one| one.is_trained).count();
            let all = of_document.len();
            let Some(document) = of_document[0].document else {
                say(&format!("row {row}: {all} tokens of padding"))?;
                continue;
            };
            say(&format!(
                "row {row}, document {document}: {all} tokens, {trained} trained"
            ))?;
            lines(of_document, is_coloured)
                .iter()
                .try_for_each(|line| say(line))?;
        }
    }
    Ok(())
}

/// What turns the tokens of `data`, called `name`, into text.
fn encoder(data: &Data, name: &DataSpec) -> Result<Encoder> {
    match (&data.tokenizer, data.train.task()) {
        (Some(tokenizer), _) => Encoder::of(tokenizer).map_err(Error::Data),
        (
            None,
            TaskSpec::NextToken {
                are_bytes: true, ..
            },
        ) => Ok(Encoder::Bytes),
        _ => Err(Error::Usage(format!(
            "show-tokens {name}: expected tokens with a tokenizer, got data without; help: give .jsonl or .txt, or a folder \
             that ddp-train tokenize wrote"
        ))),
    }
}

/// The tokens of a row. The target of each is the next, where that is trained.
fn tokens(data: &Data, row: u64, encoder: &Encoder) -> Result<Vec<ShownToken>> {
    let [inputs, targets] = read_rows(&*data.train, &[row])?;
    let (inputs, targets) = (inputs.to_vec::<i64>()?, targets.to_vec::<i64>()?);
    let used = data.train.used(row);
    let (mut document, mut before) = (0, 0);
    let one = |(index, input): (usize, &i64)| {
        let (token, start) = token_and_start(*input);
        document += usize::from(start != before);
        before = start;
        Ok(ShownToken {
            document: (index < used).then_some(document),
            index,
            position: index - start,
            token,
            text: encoder.text_of(token).map_err(Error::Data)?,
            is_trained: index > start && targets[index - 1] != IGNORED,
        })
    };
    inputs.iter().enumerate().map(one).collect()
}

/// The fewest equal tokens that are counted instead of shown.
const SAME_MIN: usize = 4;

/// Tokens as lines, each with the index of its first token in the row. A line ends after a token
/// with a line break.
fn lines(tokens: &[ShownToken], is_coloured: bool) -> Vec<String> {
    let [on, off] = if is_coloured {
        ["\x1b[32m", "\x1b[0m"]
    } else {
        ["‹", "›"]
    };
    let texts = |run: &[ShownToken]| match run.len() {
        SAME_MIN.. => format!("{}×{}", shown(&run[0].text), run.len()),
        count => vec![shown(&run[0].text); count].join("|"),
    };
    let part = |part: &[ShownToken]| {
        let runs = part.chunk_by(|one, next| one.token == next.token);
        let text = runs.map(texts).collect::<Vec<_>>().join("|");
        if part[0].is_trained {
            format!("{on}{text}{off}")
        } else {
            text
        }
    };
    let line = |line: &[ShownToken]| {
        let parts = line.chunk_by(|one, next| one.is_trained == next.is_trained);
        let text = parts.map(part).collect::<Vec<_>>().join("|");
        format!("{:>6}  {text}", line[0].index)
    };
    tokens
        .split_inclusive(|one| one.text.contains('\n'))
        .map(line)
        .collect()
}
