//! From files of tokens to windows of tokens.

use std::ops::Range;
use std::sync::Arc;

use ddp_kernels::setting::SettingName;
use twox_hash::XxHash3_64;

use crate::dataset::{Dataset, NoRows};
use crate::error::{Error, Result, bail, ensure};
use crate::file_rows::read_in_any_order;
use crate::files::{Array, Coding};
use crate::open::identity_of;
use crate::prepare::kind::{DataKind, context, kind, task_of_model};
use crate::ranks::{Ranks, SameFiles, agree, in_turn, must_be_alike};
use crate::request::{Data, DataRequest};
use crate::scan;
use crate::setting::{DATA, VAL_DATA, VAL_SPLIT};
use crate::spec::{DataSpec, TokensSpec};
use crate::task::{TOKENS_MAX, TaskSpec, TokenizerId};
use crate::text::{TOKENIZER_FILE, Vocabulary};
use crate::tokens::{Known, TokenFiles, TokenWindows};

/// What is known of tokens without a model.
#[derive(Clone, Debug)]
pub(super) struct TokenSummary {
    /// The format and the type of the tokens, and what the files say of them.
    pub(super) coding: String,
    /// How many files there are.
    pub(super) files: usize,
    /// The tokens of all files.
    pub(super) tokens: u64,
    /// The largest token.
    pub(super) largest: u64,
    /// How many different tokens there are: what was asked for, else what the files say, else one
    /// more than the largest.
    pub(super) vocabulary: usize,
    /// Whether it follows from the largest token.
    pub(super) is_vocabulary_guessed: bool,
    /// A hash of all tokens, and of where files are cut; and the BLAKE3 of the same.
    pub(super) content: (u64, String),
    /// How many tokens a window has.
    pub(super) context: usize,
    /// How many windows there are.
    pub(super) windows: u64,
    /// How many tokens at the ends of files are in no window.
    pub(super) dropped: u64,
}

/// A model of this many tokens, more than the 256 bytes with padding, most likely has a tokenizer.
const TOKENIZED_MIN: usize = 512;

/// Windows to train on or to use a model on, and windows to evaluate on.
pub(super) fn prepare(request: &DataRequest, spec: &TokensSpec, ranks: &dyn Ranks) -> Result<Data> {
    let known = task_of_model(request)?;
    let or = format!(
        ", or give tokens:{},context=N; if it is a table, rename it to .csv",
        spec.path
    );
    let context = context(request, spec.context, &or)?;
    let (files, summary, tokenizer) = open(request, (DATA, spec), context, known, ranks)?;
    let task = known.map_or_else(|| task(&files, &summary), |(task, _)| task.clone());
    if known.is_none() && ranks.rank() == 0 {
        warn_of_tokenizer(request, &files.coding, tokenizer.is_some());
    }
    let training = training_windows(request, summary.windows)?;
    let rest = training.end..summary.windows;
    let train = TokenWindows::new(files, summary.content.clone(), context, training, task)?;
    let held_out: Arc<dyn Dataset> = match &request.val_data {
        Some(spec) => Arc::new(open_val(request, spec, &train, ranks)?),
        None if rest.is_empty() => Arc::new(NoRows(train.spec().clone())),
        None => {
            let mut held_out = train.clone();
            held_out.range = rest;
            Arc::new(held_out)
        }
    };
    let understood = format!("{}, {}", train.task(), summary.text());
    Ok(Data {
        tokenizer: tokenizer.map(Arc::new),
        ..Data::new(Arc::new(train), held_out, understood)
    })
}

/// What is to be learned from these tokens.
fn task(files: &TokenFiles, summary: &TokenSummary) -> TaskSpec {
    let coding = &files.coding;
    let tokenizer = coding.tokenizer.clone().map(|hash| TokenizerId {
        hash,
        end_of_text: coding.end_of_text,
    });
    TaskSpec::NextToken {
        vocabulary: summary.vocabulary,
        are_bytes: coding.are_bytes,
        tokenizer,
        packed: false,
    }
}

/// Warns of a tokenizer that is missing, or that was not used.
fn warn_of_tokenizer(request: &DataRequest, coding: &Coding, is_found: bool) {
    let (data, model) = (&request.data, request.vocabulary.unwrap_or(0));
    if coding.tokenizer.is_some() && !is_found {
        tracing::warn!(
            "{DATA} {data}: no {TOKENIZER_FILE} beside the tokens, so the run will have none"
        );
    }
    if coding.are_bytes && model >= TOKENIZED_MIN {
        tracing::warn!(
            "{DATA} {data}: each byte is a token, but the model has {model} tokens: if it has a \
             tokenizer, make the tokens with that"
        );
    }
}

/// The windows that are trained on: without the last ones, if some are held out. Windows chosen at
/// random would be parts of the texts that are trained on.
fn training_windows(request: &DataRequest, windows: u64) -> Result<Range<u64>> {
    let fraction = request.val_split;
    if fraction == 0.0 {
        return Ok(0..windows);
    }
    ensure!(
        windows >= 2,
        "{VAL_SPLIT} {fraction}: expected at least 2 windows of tokens to split, got {windows}; help: give more data, a \
         smaller context, or leave out {VAL_SPLIT}"
    );
    let held_out = ((windows as f64 * fraction).round() as u64).clamp(1, windows - 1);
    Ok(0..windows - held_out)
}

/// Opens the windows of `val-data`, which must be of the same tokens as those that are trained on.
fn open_val(
    request: &DataRequest,
    spec: &DataSpec,
    train: &TokenWindows,
    ranks: &dyn Ranks,
) -> Result<TokenWindows> {
    let context = train.row_shape()[0];
    let DataKind::Tokens(named) = kind(request, spec, VAL_DATA, ranks)? else {
        bail!(
            "{VAL_DATA} {spec}: expected tokens, as {DATA} has, got another file; help: give tokens:{spec} if its numbers are \
             u16 tokens without a header"
        );
    };
    ensure!(
        named.context.is_none_or(|given| given == context),
        Usage,
        "{VAL_DATA} {spec}: expected a context of {context}, as {DATA} has; help: leave out context="
    );
    let owner = DATA.to_string();
    let known = Some((train.task(), &*owner));
    let (files, summary, _) = open(request, (VAL_DATA, &named), context, known, ranks)?;
    let trained_on = &train.files.arrays;
    let is_trained_on = |array: &&Array| trained_on.iter().any(|own| own.is_same(array));
    if let (Some(array), 0) = (files.arrays.iter().find(is_trained_on), ranks.rank()) {
        tracing::warn!(
            "{VAL_DATA} {spec}: {} is also trained on: it says nothing about new text",
            array.name()
        );
    }
    let all = 0..summary.windows;
    TokenWindows::new(
        files,
        summary.content.clone(),
        context,
        all,
        train.task().clone(),
    )
}

/// Opens files on one rank of a host first, and reads all of their tokens.
fn open(
    request: &DataRequest,
    (setting, spec): (SettingName<'static>, &TokensSpec),
    context: usize,
    known: Known<'_>,
    ranks: &dyn Ranks,
) -> Result<(Arc<TokenFiles>, TokenSummary, Option<Vocabulary>)> {
    let (files, tokenizer) = in_turn(ranks, || {
        let files = TokenFiles::open(spec, setting, request.cache_dir.as_deref())?;
        files.windows(context)?;
        files.check(known)?;
        let tokenizer = known.map_or_else(|| files.tokenizer(), |_| Ok(None))?;
        Ok((files, tokenizer))
    })?;
    let lengths: Vec<u64> = files.arrays.iter().map(Array::rows).collect();
    let names: Vec<&str> = files.arrays.iter().map(Array::name).collect();
    let values = [
        ("the number of files", names.len().to_string()),
        ("the files", names.join("\n")),
        ("the kind of tokens", files.kind.clone()),
        ("the number of tokens in each file", format!("{lengths:?}")),
    ];
    must_be_alike(ranks, &format!("{setting} {}", spec.path), &values)?;
    let (below, why) = match (known, spec.vocabulary, files.coding.vocabulary) {
        (Some((task, owner)), ..) => (Some(task.outputs()), format!("the vocabulary of {owner}")),
        (None, Some(given), _) => (Some(given), "the option vocabulary".into()),
        (None, None, Some(own)) => (Some(own), "the vocabulary of its format".into()),
        (None, None, None) => (None, "the largest vocabulary".into()),
    };
    let mut summary = read(&files, setting, (below, &why), context, ranks)?;
    read_in_any_order(&files.arrays);
    let of_model = request.vocabulary.unwrap_or(0);
    if summary.is_vocabulary_guessed && of_model >= summary.vocabulary {
        (summary.vocabulary, summary.is_vocabulary_guessed) = (of_model, false);
    }
    Ok((Arc::new(files), summary, tokenizer))
}

/// Reads all tokens, and compares them between ranks with different files. All must be less than
/// `below`, if it is given; `why` says what it is.
pub(super) fn read(
    files: &TokenFiles,
    setting: SettingName<'_>,
    (below, why): (Option<usize>, &str),
    context: usize,
    ranks: &dyn Ranks,
) -> Result<TokenSummary> {
    let arrays = &files.arrays;
    let ranks = SameFiles::of(ranks, &identity_of(arrays.iter()))?;
    let most = below.map_or(TOKENS_MAX, |below| below as u64);
    let found = scan::tokens(arrays, most, &ranks)?;
    // From a rank that sees it, should files differ between hosts.
    let bad = found.bad.map(|place| bad_token(arrays, place, (most, why)));
    agree(&ranks, bad.map_or(Ok(()), Err))?;
    let content = ("the content of the tokens", format!("{:016x}", found.hash));
    must_be_alike(
        &ranks,
        &format!("{setting} ({})", arrays[0].name()),
        &[content],
    )?;
    let lengths = || arrays.iter().map(Array::rows);
    let words = [found.hash].into_iter().chain(lengths());
    let words: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
    let contents = format!("{:?} {}", Vec::from_iter(lengths()), found.blake3);
    let contents = blake3::hash(contents.as_bytes());
    let each = |of: fn(u64, u64) -> u64| lengths().map(|all| of(all - 1, context as u64)).sum();
    Ok(TokenSummary {
        coding: files.kind.clone(),
        files: arrays.len(),
        tokens: lengths().sum(),
        largest: found.largest,
        vocabulary: below.unwrap_or(found.largest as usize + 1),
        is_vocabulary_guessed: below.is_none(),
        content: (XxHash3_64::oneshot(&words), contents.to_hex().to_string()),
        context,
        windows: each(|targets, context| targets / context),
        dropped: each(|targets, context| targets % context),
    })
}

/// The error of a token that is not below `most`; `why` says what that is.
fn bad_token(arrays: &[Array], (file, position): (u64, u64), (most, why): (u64, &str)) -> Error {
    let (array, mut token) = (&arrays[file as usize], [0]);
    if let Err(error) = array.read_i64(position, &mut token) {
        return error;
    }
    let [token] = token;
    let text = match token {
        ..0 => format!(
            "expected a token, a number from 0 on, got {token} (tokens are counted from 0); help: \
             give the numbers of a tokenizer's tokens"
        ),
        _ => format!(
            "expected a token below {most}, {why}, got {token} (tokens are counted from 0); help: \
             give tokens of the same tokenizer; option vocabulary=N of tokens:FILE raises the limit"
        ),
    };
    Error::Data(format!("{}, token {position}: {text}", array.name()))
}

impl TokenSummary {
    /// One line for people.
    fn text(&self) -> String {
        let count = match self.files {
            1 => "1 file".to_string(),
            count => format!("{count} files"),
        };
        let guess = if self.is_vocabulary_guessed {
            format!(", so the vocabulary is taken as {}", self.vocabulary)
        } else {
            String::new()
        };
        format!(
            "{} tokens a row, {} at the end of files dropped, {} tokens in {count}: {}, the largest {}{guess}",
            self.context, self.dropped, self.tokens, self.coding, self.largest
        )
    }
}
