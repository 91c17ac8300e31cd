//! From files of tokens to windows of them.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use twox_hash::XxHash3_64;

use crate::dataset::{Dataset, NoRows};
use crate::error::{Error, Result};
use crate::feature_plan::FeaturePlan;
use crate::file_rows::{ChangeWatch, read_in_any_order};
use crate::files::tokens::Coding;
use crate::files::{self, Array};
use crate::open::identity_of;
use crate::ranks::{Alone, Ranks, SameFiles, agree, in_turn};
use crate::request::{Data, DataRequest};
use crate::resolve;
use crate::scan::{self, TokensFound};
use crate::spec::{DataSpec, TOKENS_MAX, TokensSpec};
use crate::task::{TaskSpec, TokenizerId};
use crate::text::TOKENIZER_FILE;
use crate::tokens::{TokenFiles, Windows};

/// What is known of tokens without a model.
#[derive(Clone, Debug)]
pub struct TokenSummary {
    /// The format and the type of the tokens, and what the files say of them.
    pub coding: String,
    /// The files, and how many tokens each has.
    pub files: Vec<(String, u64)>,
    /// The largest token.
    pub largest: u64,
    /// Tokens are below this: what was asked for, else what the files say, else one more than the
    /// largest.
    pub vocabulary: usize,
    /// Whether it follows from the largest token.
    pub is_vocabulary_guessed: bool,
    /// A hash of all tokens.
    pub content: u64,
    /// How many tokens a window has, if it is known.
    pub context: Option<usize>,
    /// How many windows there are.
    pub windows: u64,
    /// How many tokens at the ends of files are in no window.
    pub dropped: u64,
}

const SAME_FILES: &str = "compare the files on the hosts: all ranks need the same data";

/// Files of tokens as a user names them.
pub(super) struct Named<'a> {
    /// The setting that names them, for messages.
    setting: &'static str,
    path: &'a str,
    /// What the user says of them: that they hold tokens.
    spec: Option<&'a TokensSpec>,
}

impl Named<'_> {
    fn context(&self) -> Option<usize> {
        self.spec.and_then(|spec| spec.context)
    }
}

/// A model of so many tokens, more than the 256 bytes with padding, most likely has a tokenizer.
const TOKENIZED_MIN: usize = 512;

/// The files of tokens that `spec` names; None if it names rows of features.
pub(super) fn named<'a>(
    spec: &'a DataSpec,
    setting: &'static str,
    ranks: &dyn Ranks,
) -> Result<Option<Named<'a>>> {
    let named = |path, spec| Named {
        setting,
        path,
        spec,
    };
    let spec = match spec {
        DataSpec::Tokens(spec) => return Ok(Some(named(&spec.path, Some(spec)))),
        DataSpec::Files(spec) if spec.part.is_none() => spec,
        _ => return Ok(None),
    };
    // Files that cannot be read are refused where rows are opened.
    let says_tokens = |paths: Vec<PathBuf>| files::tokens::says_tokens(&paths[0]);
    let are_tokens = resolve::files(&spec.path, setting).is_ok_and(says_tokens);
    // Ranks with other files would wait for each other in different places.
    let kind = if are_tokens {
        "tokens"
    } else {
        "rows of features"
    };
    let what = (
        format!("what the files of `{setting}` hold"),
        kind.to_string(),
    );
    ranks.must_match(&[what], SAME_FILES)?;
    Ok(are_tokens.then(|| named(&spec.path, None)))
}

/// Looks at the tokens of a request, in one process; None if its data are not tokens.
pub fn summarize(request: &DataRequest) -> Result<Option<TokenSummary>> {
    request.check()?;
    let Some(named) = named(&request.data, "data", &Alone)? else {
        return Ok(None);
    };
    request.check_tokens()?;
    let context = named.context().or(request.context);
    let read = ReadTokens::open(&named, context, None, request, &Alone)?;
    Ok(Some(read.summary(context)))
}

/// Windows to train on or to use a model on, and windows to evaluate on.
pub(super) fn prepare(request: &DataRequest, named: &Named<'_>, ranks: &dyn Ranks) -> Result<Data> {
    request.check_tokens()?;
    let bound = bound_of_model(request)?;
    let context = context(request, named)?;
    let read = ReadTokens::open(named, Some(context), bound.as_ref(), request, ranks)?;
    let mut summary = read.summary(Some(context));
    if let (true, Some(of_model)) = (summary.is_vocabulary_guessed, request.vocabulary)
        && of_model >= summary.vocabulary
    {
        (summary.vocabulary, summary.is_vocabulary_guessed) = (of_model, false);
    }
    let coding = &read.files.coding;
    let (task, tokenizer) = match &request.trained {
        Some(trained) => (trained.task.clone(), None),
        None => {
            let task = TaskSpec::NextToken {
                vocabulary: summary.vocabulary,
                are_bytes: coding.are_bytes,
                tokenizer: coding.tokenizer.clone().map(|hash| TokenizerId {
                    hash,
                    end_of_text: coding.end_of_text,
                }),
            };
            (task, in_turn(ranks, || read.files.tokenizer())?)
        }
    };
    if request.trained.is_none() && ranks.rank() == 0 {
        warn_of_tokenizer(request, coding, tokenizer.is_some());
    }
    let training = training_windows(request, summary.windows)?;
    request.check_rows(training.end, ranks)?;
    let held_out = training.end..summary.windows;
    let val = match &request.val_data {
        Some(spec) => Some(open_val(request, spec, context, (&task, &read), ranks)?),
        None => None,
    };
    let train = read.windows(context, training, &task)?;
    let held_out: Arc<dyn Dataset> = match val {
        Some(val) => Arc::new(val),
        None if held_out.is_empty() => Arc::new(NoRows(train.spec().clone())),
        None => Arc::new(Windows {
            range: held_out,
            ..train.clone()
        }),
    };
    let understood = format!("{task}, {}", summary.text());
    let description = match &request.trained {
        Some(_) => format!("{}: {} rows, {understood}", request.data, train.rows()),
        None => Data::describe(&request.data.to_string(), &train, &*held_out, &understood),
    };
    Ok(Data {
        train: Arc::new(train),
        held_out,
        description,
        normalization: None,
        target_normalization: None,
        plan: FeaturePlan::default(),
        columns: None,
        label: None,
        tokenizer: tokenizer.map(Arc::new),
    })
}

/// Warns if the tokens' tokenizer is missing, or if a model of bytes has a vocabulary as large as a
/// tokenizer's.
fn warn_of_tokenizer(request: &DataRequest, coding: &Coding, is_here: bool) {
    let data = &request.data;
    if coding.tokenizer.is_some() && !is_here {
        tracing::warn!(
            "`data` {data}: no {TOKENIZER_FILE} beside the tokens, so the run will have none"
        );
    }
    if let (true, Some(model @ TOKENIZED_MIN..)) = (coding.are_bytes, request.vocabulary) {
        tracing::warn!(
            "`data` {data}: each byte is a token, but the model has {model} tokens: if it has a \
             tokenizer, make the tokens with that"
        );
    }
}

/// The tokens that the model of a request takes, if it is trained already.
fn bound_of_model(request: &DataRequest) -> Result<Option<Bound>> {
    match request.trained.as_ref().map(|trained| &trained.task) {
        None => Ok(None),
        Some(TaskSpec::NextToken {
            vocabulary,
            are_bytes,
            tokenizer,
        }) => Ok(Some(Bound {
            vocabulary: *vocabulary,
            are_bytes: *are_bytes,
            tokenizer: tokenizer.as_ref().map(|tokenizer| tokenizer.hash.clone()),
            owner: "the model",
        })),
        Some(task) => Err(Error::Data(format!(
            "`data` {}: expected rows of features for a model of {task}, got tokens; help: give data like those it was \
             trained on",
            request.data
        ))),
    }
}

/// How many tokens the model sees at once.
fn context(request: &DataRequest, named: &Named<'_>) -> Result<usize> {
    let data = &request.data;
    let trained = request.trained.as_ref();
    let of_model = match trained.map(|trained| &trained.row_shape[..]) {
        Some([context]) if *context > 0 => Some(*context),
        Some(shape) => {
            return Err(Error::Data(format!(
                "the model has rows of the shape {shape:?}: expected a number of tokens: the checkpoint is damaged"
            )));
        }
        None => request.context,
    };
    match (named.context(), of_model) {
        (Some(given), Some(context)) if given != context => Err(Error::Usage(format!(
            "`data` {data}: expected a context of {context}, which the model has, got {given}; help: leave out context="
        ))),
        (given, of_model) => given.or(of_model).ok_or_else(|| {
            let path = named.path;
            Error::Usage(format!(
                "`data` {data}: expected a context, the number of tokens that a model sees at once, got none; help: \
                 choose a `model` of tokens, such as gpt, or give tokens:{path},context=N; if it is a table, rename it to .csv"
            ))
        }),
    }
}

/// The windows that are trained on: without the last ones, if some are held out. Windows chosen at
/// random would be parts of the texts that are trained on.
fn training_windows(request: &DataRequest, windows: u64) -> Result<Range<u64>> {
    let fraction = request.val_split;
    if fraction == 0.0 {
        return Ok(0..windows);
    }
    if windows < 2 {
        return Err(Error::Data(format!(
            "`val-split` {fraction}: expected at least 2 windows of tokens to split, got {windows}; help: give more data, a \
             smaller context, or leave out `val-split`"
        )));
    }
    let held_out = ((windows as f64 * fraction).round() as u64).clamp(1, windows - 1);
    Ok(0..windows - held_out)
}

/// Opens the windows of `val-data`, which must be of the same tokens as those that are trained on.
fn open_val(
    request: &DataRequest,
    spec: &DataSpec,
    context: usize,
    (task, train): (&TaskSpec, &ReadTokens),
    ranks: &dyn Ranks,
) -> Result<Windows> {
    let Some(named) = named(spec, "val-data", ranks)? else {
        // Whatever is wrong with the files is a better reason than what they lack.
        if let DataSpec::Files(files) = spec {
            TokenFiles::open(&files.path, None, "val-data", request.cache_dir.as_deref())?;
        }
        return Err(Error::Data(format!(
            "`val-data` {spec}: expected tokens, as `data` has, got another file; help: give tokens:{spec} if its numbers are \
             u16 tokens without a header"
        )));
    };
    if named.context().is_some_and(|given| given != context) {
        return Err(Error::Usage(format!(
            "`val-data` {spec}: expected a context of {context}, as `data` has; help: leave out context="
        )));
    }
    let bound = Bound {
        vocabulary: task.outputs(),
        are_bytes: train.files.coding.are_bytes,
        tokenizer: train.files.coding.tokenizer.clone(),
        owner: "`data`",
    };
    let val = ReadTokens::open(&named, Some(context), Some(&bound), request, ranks)?;
    let mut arrays = val.files.arrays.iter();
    let is_trained_on = |array: &&Array| train.files.arrays.iter().any(|own| own.is_same(array));
    if let (Some(array), 0) = (arrays.find(is_trained_on), ranks.rank()) {
        let name = array.name();
        tracing::warn!(
            "`val-data` {spec}: {name} is trained on too: it says nothing about new text"
        );
    }
    let all = 0..val.summary(Some(context)).windows;
    val.windows(context, all, task)
}

/// What tokens are for, if that is known before they are read.
pub(super) struct Bound {
    vocabulary: usize,
    are_bytes: bool,
    /// The hash of a tokenizer's vocabulary.
    tokenizer: Option<String>,
    /// What has this vocabulary, for messages.
    owner: &'static str,
}

/// Files of tokens that were read.
pub(super) struct ReadTokens {
    files: Arc<TokenFiles>,
    found: TokensFound,
    /// If it is known without the largest token.
    vocabulary: Option<usize>,
}

impl ReadTokens {
    /// Opens files on one rank of a host first, and reads all of their tokens.
    fn open(
        named: &Named<'_>,
        context: Option<usize>,
        bound: Option<&Bound>,
        request: &DataRequest,
        ranks: &dyn Ranks,
    ) -> Result<ReadTokens> {
        let Named {
            setting,
            path,
            spec,
        } = *named;
        let files = in_turn(ranks, || {
            let files = TokenFiles::open(path, spec, setting, request.cache_dir.as_deref())?;
            context.map_or(Ok(Vec::new()), |context| files.windows(context))?;
            bound.map_or(Ok(()), |bound| check_coding(&files, bound))?;
            Ok(files)
        })?;
        let lengths: Vec<u64> = files.arrays.iter().map(Array::rows).collect();
        let names: Vec<&str> = files.arrays.iter().map(Array::name).collect();
        let values = [
            ("the number of files", names.len().to_string()),
            ("the files", names.join("\n")),
            ("the kind of tokens", files.describe()),
            ("the number of tokens in each file", format!("{lengths:?}")),
        ];
        let of_files = |what: &str| format!("{what} of `{setting}` {path}");
        let values = values.map(|(what, value)| (of_files(what), value));
        ranks.must_match(&values, SAME_FILES)?;
        let given = spec.and_then(|spec| spec.vocabulary);
        let untrained = request.untrained_token.filter(|_| setting == "data");
        let read = ReadTokens::read(Arc::new(files), setting, (given, untrained), bound, ranks)?;
        read_in_any_order(&read.files.arrays);
        Ok(read)
    }

    /// Reads all tokens, and compares them between ranks with different files. They must be below
    /// the vocabulary of `bound`, else below the one that was `given`, else the files' own, and not
    /// `untrained`.
    pub(super) fn read(
        files: Arc<TokenFiles>,
        setting: &str,
        (given, untrained): (Option<usize>, Option<u64>),
        bound: Option<&Bound>,
        ranks: &dyn Ranks,
    ) -> Result<ReadTokens> {
        let ranks = SameFiles::of(ranks, &identity_of(files.arrays.iter()))?;
        let below = bound.map(|bound| bound.vocabulary).or(given);
        let below = below.or(files.coding.vocabulary);
        let why = match (bound, given) {
            (Some(bound), _) => format!("the vocabulary of {}", bound.owner),
            (None, Some(_)) => "the option vocabulary".into(),
            (None, None) if below.is_none() => "the largest vocabulary".into(),
            (None, None) => "the vocabulary of its format".into(),
        };
        let most = below.map_or(TOKENS_MAX, |below| below as u64);
        let found = scan::tokens(&files.arrays, (most, untrained), &ranks)?;
        // From a rank that sees it, should files differ between hosts.
        let bad = found
            .bad
            .map(|place| bad_token(&files, place, (most, &why)));
        agree(&ranks, bad.map_or(Ok(()), Err))?;
        let file = files.arrays[0].name();
        let field = format!("the content of the tokens of `{setting}` ({file})");
        ranks.must_match(&[(field, format!("{:016x}", found.hash))], SAME_FILES)?;
        Ok(ReadTokens {
            vocabulary: below,
            files,
            found,
        })
    }

    fn summary(&self, context: Option<usize>) -> TokenSummary {
        let files = &self.files;
        let arrays = files.arrays.iter();
        let windows = |context: usize| {
            let of_file = |array: &Array| (array.rows() - 1) / context as u64;
            files.arrays.iter().map(of_file).sum()
        };
        TokenSummary {
            coding: files.describe(),
            files: arrays
                .map(|array| (array.name().to_string(), array.rows()))
                .collect(),
            largest: self.found.largest,
            vocabulary: self.vocabulary.unwrap_or(self.found.largest as usize + 1),
            is_vocabulary_guessed: self.vocabulary.is_none(),
            content: self.content(),
            context,
            windows: context.map_or(0, windows),
            dropped: context.map_or(0, |context| files.dropped(context)),
        }
    }

    /// Of the tokens, and of where files are cut.
    pub(super) fn content(&self) -> u64 {
        let lengths = self.files.arrays.iter().map(Array::rows);
        let words = [self.found.hash].into_iter().chain(lengths);
        XxHash3_64::oneshot(&words.flat_map(u64::to_le_bytes).collect::<Vec<u8>>())
    }

    fn windows(&self, context: usize, range: Range<u64>, task: &TaskSpec) -> Result<Windows> {
        let watched = self.files.arrays.iter().map(|array| array.mapped().clone());
        Ok(Windows {
            firsts: self.files.windows(context)?.into(),
            spec: Windows::row_spec(context, task.clone()),
            range,
            content: self.content(),
            watch: Arc::new(ChangeWatch::over(watched.collect())),
            files: self.files.clone(),
        })
    }
}

/// An error if these tokens are not those of `bound`.
fn check_coding(files: &TokenFiles, bound: &Bound) -> Result<()> {
    let (coding, file) = (&files.coding, files.arrays[0].name());
    let kind = |are_bytes| {
        if are_bytes {
            "bytes of a text"
        } else {
            "tokens of a tokenizer"
        }
    };
    if coding.are_bytes != bound.are_bytes {
        let help = match bound.are_bytes {
            true => "give the text itself, a .txt file",
            false => "make tokens of the text with the tokenizer.json that the model has",
        };
        return Err(Error::Data(format!(
            "{file}: expected {}, as {} has, got {}; help: {help}",
            kind(bound.are_bytes),
            bound.owner,
            kind(coding.are_bytes)
        )));
    }
    let tokenizers = bound.tokenizer.as_ref().zip(coding.tokenizer.as_ref());
    if tokenizers.is_some_and(|(expected, got)| expected != got) {
        return Err(Error::Data(format!(
            "{file}: expected tokens of the tokenizer of {}, got tokens of another; help: tokenize the texts with its \
             {TOKENIZER_FILE}",
            bound.owner
        )));
    }
    Ok(())
}

/// The error of a token that is not below `most`; `why` says what that is.
fn bad_token(files: &TokenFiles, (file, position): (u64, u64), (most, why): (u64, &str)) -> Error {
    let array = &files.arrays[file as usize];
    let mut token = [0];
    match array.read_i64(position, &mut token) {
        Ok(()) if (0..most as i64).contains(&token[0]) => Error::Data(format!(
            "{}, token {position}: expected no {}, which pad_token_id of config.json names: transformers does not train \
             this token's row of the embedding, and this program does; help: remove pad_token_id from config.json to \
             train the row, or tokenize the texts with another token in its place",
            array.name(),
            token[0]
        )),
        Ok(()) if token[0] < 0 => Error::Data(format!(
            "{}, token {position}: expected a token, a number from 0 on, got {} (tokens are counted \
             from 0); help: give the numbers of a tokenizer's tokens",
            array.name(),
            token[0]
        )),
        Ok(()) => Error::Data(format!(
            "{}, token {position}: expected a token below {most}, {why}, got {} (tokens are counted \
             from 0); help: give tokens of the same tokenizer; option vocabulary=N of tokens:FILE raises the limit",
            array.name(),
            token[0]
        )),
        Err(error) => error,
    }
}

impl TokenSummary {
    /// The tokens of all files.
    pub fn tokens(&self) -> u64 {
        self.files.iter().map(|(_, tokens)| tokens).sum()
    }

    /// One line for people.
    pub fn text(&self) -> String {
        let count = match self.files.len() {
            1 => "1 file".to_string(),
            count => format!("{count} files"),
        };
        let context = self.context.map_or(String::new(), |context| {
            let dropped = self.dropped;
            format!("{context} tokens a row, {dropped} at the end of files dropped, ")
        });
        let guess = match self.is_vocabulary_guessed {
            true => format!(", so the vocabulary is taken as {}", self.vocabulary),
            false => String::new(),
        };
        format!(
            "{context}{} tokens in {count}: {}, the largest {}{guess}",
            self.tokens(),
            self.coding,
            self.largest
        )
    }
}
