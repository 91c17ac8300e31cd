//! From a request to data. First the start of the first file says what it holds (`kind`): tokens,
//! conversations, or rows of features. Rows of features take four steps; each knows only those
//! before it: files are found (`resolve`, which opens none) and opened (`open`), all rows are read
//! once (`scan`), and they become a dataset. All ranks do it together, so that whatever is wrong is
//! one error for all, before training begins.

mod chats;
mod kind;
mod tokens;

use self::kind::{DataKind, kind};
use crate::built_in::BuiltIn;
use crate::error::{Error, Result, ensure};
use crate::facts::scan;
use crate::file_rows::{FileData, dataset};
use crate::files::is_table;
use crate::labels::Labels;
use crate::learn::{self, learn};
use crate::open::{OpenFiles, open_files};
use crate::ranks::{Alone, Ranks, in_turn};
use crate::request::{Data, DataRequest};
use crate::resolve::{FoundFiles, files, resolve};
use crate::setting::{DATA, LABELS, VAL_DATA, VAL_LABELS};
use crate::spec::{DataSpec, FilesSpec};
use crate::tables::Tables;

/// Opens the data of a request on all ranks together, `tables` those that are tables. An error is
/// the same on all ranks.
pub fn prepare(
    request: &DataRequest,
    tables: Option<&'static dyn Tables>,
    ranks: &dyn Ranks,
) -> Result<Data> {
    request.check(ranks)?;
    let kind = kind(request, &request.data, DATA, ranks)?;
    request.check_kind(kind.is_of_tokens())?;
    let is_built_in = matches!(request.data, DataSpec::Glyphs(_) | DataSpec::Synthetic(_));
    let mut data = match (&kind, &request.data) {
        (DataKind::Features, DataSpec::Files(spec)) => of_files(request, spec, tables, ranks),
        (DataKind::Features, _) => built_in(request),
        (DataKind::Tokens(spec), _) => tokens::prepare(request, spec, ranks),
        (DataKind::Conversations(path), _) => chats::prepare(request, path, tables, ranks),
    }?;
    let (rows, others) = (data.train.rows(), data.held_out.rows());
    let (all, name) = (ranks.size() as u64, &request.data);
    ensure!(
        rows >= all || is_built_in || request.trained.is_some(),
        "{DATA} {name}: expected a row to train on for each of {all} ranks, got {rows}; help: start fewer ranks, or \
         give more data"
    );
    let what = data.description;
    let counts = format!("{rows} rows to train on, {others} held out");
    data.description = match (is_built_in, &request.trained) {
        (true, _) => format!("{}: {counts}, {what}", name.name()),
        (_, None) => format!("{name}: {counts}, {what}"),
        (_, Some(_)) if others > 0 => format!("{name}: {others} rows that were held out, {what}"),
        (_, Some(_)) => format!("{name}: {rows} rows, {what}"),
    };
    Ok(data)
}

/// Opens the data of `spec`, which must not be tables, unchanged, in one process.
pub fn open(spec: &DataSpec) -> Result<Data> {
    prepare(&DataRequest::new(spec.clone()), None, &Alone)
}

/// Opens the files that `found` finds, the same ones on all ranks, and logs what they are.
fn open_alike<'a>(
    found: impl Fn() -> Result<FoundFiles<'a>>,
    tables: Option<&'static dyn Tables>,
    ranks: &dyn Ranks,
) -> Result<OpenFiles> {
    // One rank of a host first, which converts files.
    let source = in_turn(ranks, || open_files(found()?, tables))?;
    source.check_alike(ranks)?;
    if ranks.rank() == 0 {
        learn::log_table(&source);
    }
    Ok(source)
}

/// Rows of files, to train on or to use a model on.
fn of_files(
    request: &DataRequest,
    spec: &FilesSpec,
    tables: Option<&'static dyn Tables>,
    ranks: &dyn Ranks,
) -> Result<Data> {
    let first = in_turn(ranks, || Ok(files(&spec.path, DATA)?.swap_remove(0)))?;
    let mut request = request.clone();
    if is_table(&first) {
        request = request.of_table();
    }
    let found = |request| resolve(request, DATA, spec, request.trained.as_ref());
    let source = open_alike(|| found(&request), tables, ranks)?;
    if source.is_table {
        let labels = source.labels.as_ref();
        let are_classes = labels.is_some_and(Labels::are_classes);
        request.choose_split(source.features.rows(), are_classes);
    }
    let (request, trained) = (&request, request.trained.as_ref());
    let facts = scan(request, &source, trained, ranks)?;
    let model = match trained {
        Some(trained) => trained.clone(),
        None => learn(request, &source, &facts)?,
    };
    if trained.is_none() && ranks.rank() == 0 {
        // One rank alone must not fail: what cannot be read is found by all of them later.
        _ = learn::warn(request, &source, &facts, &model.task);
    }
    let val = match &request.val_data {
        Some(DataSpec::Files(spec)) if trained.is_none() => {
            ensure!(
                request.val_labels.is_some() || !source.has_label_files,
                Usage,
                "{VAL_DATA} {}: expected {VAL_LABELS}, since {LABELS} names files; help: give the labels of these rows",
                spec.path
            );
            let found = || resolve(request, VAL_DATA, spec, Some(&model));
            let val = open_alike(found, tables, ranks)?;
            let facts = scan(request, &val, Some(&model), ranks)?;
            val.check_shape(&source)?;
            if ranks.rank() == 0 {
                learn::warn_of_shared(&val, &source);
            }
            Some(FileData::new(val, facts, model.clone()))
        }
        _ => None,
    };
    Ok(dataset(request, source, facts, model, val))
}

/// Built-in data, which are normalized already.
fn built_in(request: &DataRequest) -> Result<Data> {
    let pair = BuiltIn::pair(&request.data);
    let [train, held_out] = pair.ok_or_else(|| Error::Internal("files are not built in".into()))?;
    let mut data = Data::own(train, held_out);
    let (task, width) = (data.train.task(), data.train.spec().inputs.elements());
    if let Some(trained) = &request.trained {
        let (spec, expected) = (&request.data, trained.row_shape.iter().product::<usize>());
        ensure!(
            expected == width && *task == trained.task,
            "{DATA} {spec}: expected {expected} features a row and {}, as the model was trained on, got {width} and {task}; \
             help: give other data",
            trained.task
        );
        ensure!(
            trained.normalization.is_none(),
            "{DATA} {spec}: expected files, since the model was trained on normalized features"
        );
    }
    data.description = format!("{task}, {width} features a row");
    Ok(data)
}

#[cfg(test)]
mod tests;
