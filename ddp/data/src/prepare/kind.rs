//! What the rows of a request are, and what the model says of tokens.

use ddp_kernels::setting::SettingName;

use crate::error::{Result, bail};
use crate::files::{RowKind, row_kind};
use crate::ranks::{Ranks, SAME_FILES, in_turn};
use crate::request::DataRequest;
use crate::resolve::files;
use crate::setting::{DATA, MODEL};
use crate::spec::{DataSpec, FilesSpec, TokensSpec};
use crate::task::TaskSpec;
use crate::tokens::Known;

/// What rows are made of.
#[derive(Debug)]
pub(super) enum DataKind {
    /// Features of files, or of built-in data.
    Features,
    Tokens(TokensSpec),
    /// The files of these names.
    Conversations(String),
}

impl DataKind {
    /// Whether rows are of tokens.
    pub(super) fn is_of_tokens(&self) -> bool {
        !matches!(self, DataKind::Features)
    }
}

/// What the rows are that `spec`, which was given as `setting`, names.
pub(super) fn kind(
    request: &DataRequest,
    spec: &DataSpec,
    setting: SettingName<'static>,
    ranks: &dyn Ranks,
) -> Result<DataKind> {
    let path = match spec {
        DataSpec::Tokens(spec) => return Ok(DataKind::Tokens(spec.clone())),
        DataSpec::Files(FilesSpec { path, part: None }) => path,
        DataSpec::Glyphs(_) | DataSpec::Synthetic(_) | DataSpec::Files(_) => {
            return Ok(DataKind::Features);
        }
    };
    let has_tokenizer = request.tokenizer.is_some();
    let rows = in_turn(ranks, || row_kind(&files(path, setting)?[0], has_tokenizer))?;
    let (text, kind) = match rows {
        RowKind::Features => ("rows of features", DataKind::Features),
        RowKind::Conversations => ("conversations", DataKind::Conversations(path.clone())),
        RowKind::Tokens => {
            let spec = TokensSpec {
                path: path.clone(),
                ..TokensSpec::default()
            };
            ("tokens", DataKind::Tokens(spec))
        }
    };
    // Ranks with other files would wait for each other in different places.
    let what = format!("what the files of {setting} hold");
    ranks.must_match(&[(what, text.to_string())], SAME_FILES)?;
    Ok(kind)
}

/// The task of the model of a request, if it is trained already.
pub(super) fn task_of_model(request: &DataRequest) -> Result<Known<'_>> {
    match request.trained.as_ref().map(|trained| &trained.task) {
        None => Ok(None),
        Some(task @ TaskSpec::NextToken { .. }) => Ok(Some((task, "the model"))),
        Some(task) => bail!(
            "{DATA} {}: expected rows of features for a model of {task}, got tokens; help: give data like those it was \
             trained on",
            request.data
        ),
    }
}

/// How many tokens the model sees at once. `or` is what helps besides another model.
pub(super) fn context(request: &DataRequest, given: Option<usize>, or: &str) -> Result<usize> {
    let data = &request.data;
    let trained = request.trained.as_ref();
    let of_model = match trained.map(|trained| &trained.row_shape[..]) {
        Some(&[context]) if context > 0 => Some(context),
        Some(shape) => bail!(
            "the model has rows of the shape {shape:?}: expected a number of tokens: the checkpoint is damaged"
        ),
        None => request.context,
    };
    match (given, of_model) {
        (Some(given), Some(context)) if given != context => bail!(
            Usage,
            "{DATA} {data}: expected a context of {context}, which the model has, got {given}; help: leave out context="
        ),
        (Some(context), _) | (None, Some(context)) => Ok(context),
        (None, None) => bail!(
            Usage,
            "{DATA} {data}: expected a context, the number of tokens that a model sees at once, got none; help: \
             choose a {MODEL} of tokens, such as gpt{or}"
        ),
    }
}
