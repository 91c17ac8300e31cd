//! What is found in all rows before training, in one pass that the ranks share: the classes or the
//! range of labels, the moments of features, missing and bad numbers, and a hash of all.

use twox_hash::XxHash3_64;

use crate::error::{Error, Result, ensure};
use crate::feature_plan::{ColumnPlan, Missing};
use crate::file_rows::{fill_in, nonfinite};
use crate::files::{Element, some_of};
use crate::normalize::Normalize;
use crate::open::Source;
use crate::ranks::{Ranks, SameFiles, agree};
use crate::request::{DataRequest, Trained};
use crate::rows::Rows;
use crate::sampler::Split;
use crate::scan::{self, Found, IsTrainedOn, LabelsFound, Moments, RowReader};
use crate::task::Classes;

/// The most bytes of targets that are read only to see how large they are.
const SAMPLED_BYTES_MAX: u64 = 1 << 20;

/// What was found in rows.
pub(crate) struct Facts {
    /// Which rows are held out; `None` if none are.
    pub(crate) split: Option<Split>,
    /// What stands for missing numbers, one for each feature.
    pub(crate) fill: Option<Vec<f32>>,
    pub(crate) labels: LabelsFound,
    /// In features, if their numbers were looked at.
    pub(crate) features: Option<Found>,
    /// Of the numeric targets that are trained on.
    pub(crate) targets: Option<Moments>,
    /// Whether features that may be wrong were not read.
    pub(crate) has_unread_features: bool,
    /// A hash of labels and features, if they were read.
    pub(crate) content: Option<String>,
}

/// Reads all labels and features, and compares their content between ranks with different files.
/// `model` is what was learned from other rows. Of rows for a trained model only labels are read.
pub(crate) fn scan(
    request: &DataRequest,
    source: &Source,
    model: Option<&Trained>,
    ranks: &dyn Ranks,
) -> Result<Facts> {
    let split = match model {
        None => request.split(source.features.rows(), ranks)?,
        Some(_) => None,
    };
    let is_trained_on = |row| split.as_ref().is_none_or(|split| split.is_trained_on(row));
    let scan = Scan {
        request,
        source,
        model,
        is_trained_on: &is_trained_on,
        same: SameFiles::of(ranks, &source.identity())?,
    };
    let mut facts = Facts {
        fill: scan.fill()?,
        labels: scan.labels()?,
        features: None,
        targets: None,
        has_unread_features: source.features.element()?.is_float(),
        content: None,
        split: None,
    };
    if request.trained.is_none() {
        scan.features(&mut facts)?;
    }
    facts.split = split;
    Ok(facts)
}

/// Rows that are read, and the ranks that share the work.
struct Scan<'a> {
    request: &'a DataRequest,
    source: &'a Source,
    model: Option<&'a Trained>,
    is_trained_on: IsTrainedOn<'a>,
    same: SameFiles<'a>,
}

impl Scan<'_> {
    /// What stands for missing numbers, as the model says or as the training rows show. How many
    /// are missing in arrays is logged; in tables it is when they are converted.
    fn fill(&self) -> Result<Option<Vec<f32>>> {
        let (how, is_table) = (self.request.table.missing, self.source.is_table());
        let (is_searched, of_rows) = match self.model {
            Some(model) => (model.plan.fill.is_some() && !is_table, ""),
            None => (
                how == Missing::Mean || how == Missing::Zero && !is_table,
                " in the rows that are trained on",
            ),
        };
        let present = match is_searched {
            true => Present::find(&self.source.features, self.is_trained_on, &self.same)?,
            false => None,
        };
        if let (Some(present), 0, false) = (&present, self.same.all.rank(), is_table) {
            log_missing(self.source, present, of_rows);
        }
        match self.model {
            Some(model) => Ok(model.plan.fill.clone()),
            None => fit_fill(how, self.source, present.as_ref()),
        }
    }

    /// Reads all labels, if they are needed.
    fn labels(&self) -> Result<LabelsFound> {
        let Some(labels) = &self.source.labels else {
            return Ok(LabelsFound::default());
        };
        let classes = self.model.and_then(|model| model.task.classes());
        let classes = classes.map(Classes::count);
        let mut found = scan::labels(labels, classes, self.is_trained_on, &self.same)?;
        let bad = found.bad.take().map(Error::Data);
        agree(&self.same, bad.map_or(Ok(()), Err))?;
        self.must_match("labels", found.hash)?;
        Ok(found)
    }

    /// Reads all features, and numeric targets that are to be learned.
    fn features(&self, facts: &mut Facts) -> Result<()> {
        let (element, normalize) = (self.source.features.element()?, self.request.normalize);
        let is_normalized = match normalize {
            Normalize::None => false,
            Normalize::Unit => element != Element::U8,
            Normalize::Standard => true,
        };
        let may_be_wrong = element.is_float() || element == Element::Bool;
        let needs_moments = self.model.is_none() && is_normalized || may_be_wrong;
        let numbers = self
            .source
            .labels
            .iter()
            .find(|labels| !labels.are_classes());
        if let (Some(labels), None) = (numbers, self.model) {
            let bytes_max = match normalize {
                Normalize::Standard => scan::BYTES_MAX,
                _ => SAMPLED_BYTES_MAX,
            };
            let found = scan::features(&labels.rows, self.is_trained_on, &self.same, bytes_max)?;
            facts.targets = Some(found.moments);
        }
        // Without rows to train on only the content is hashed.
        let is_trained_on = |row| needs_moments && (self.is_trained_on)(row);
        let bytes_max = match needs_moments {
            true => scan::BYTES_MAX,
            false => scan::HASHED_BYTES_MAX,
        };
        let rows = &self.source.features;
        let fill = facts.fill.as_deref();
        let filled = Filled { rows, fill };
        let rows: &dyn RowReader = if fill.is_some() { &filled } else { rows };
        let found = scan::features(rows, &is_trained_on, &self.same, bytes_max)?;
        // From a rank that sees it, should files differ between hosts.
        let bad = found.bad.map(|place| bad_feature(self.source, place));
        agree(&self.same, bad.map_or(Ok(()), Err))?;
        self.must_match("features", found.hash)?;
        let part = if found.is_complete {
            ""
        } else {
            " (features in part)"
        };
        let hashes = [facts.labels.hash, found.hash].map(u64::to_le_bytes);
        let hash = XxHash3_64::oneshot(hashes.as_flattened());
        facts.content = Some(format!("{hash:016x}{part}"));
        facts.has_unread_features = needs_moments && !found.is_complete;
        facts.features = needs_moments.then_some(found);
        Ok(())
    }

    /// An error on all ranks unless this hash is the same on all of them.
    fn must_match(&self, what: &str, hash: u64) -> Result<()> {
        let (setting, file) = (self.source.setting, self.source.place());
        let field = format!("the content of the {what} of `{setting}` ({file})");
        let help = "give every rank the same data: compare the files on the hosts";
        self.same
            .must_match(&[(field, format!("{hash:016x}"))], help)
    }
}

/// Logs how many numbers of each feature are missing in rows that are called `of_rows`.
fn log_missing(source: &Source, present: &Present, of_rows: &str) {
    let missing = present.missing();
    let name = |index: usize| match &source.columns {
        Some(names) => format!("\"{}\"", names[index]),
        None => index.to_string(),
    };
    let some = missing.iter().enumerate().filter(|(_, count)| **count > 0);
    let some = some.map(|(index, count)| format!("{} {count}", name(index)));
    let at_least = if present.is_complete { "" } else { "at least " };
    if let Some(some) = some_of(20, some) {
        tracing::info!(
            "`{}` {}: {at_least}{} missing numbers{of_rows}, which are filled in, by feature: {some}",
            source.setting,
            source.path,
            missing.iter().sum::<u64>()
        );
    }
}

/// The error of a non-finite feature.
fn bad_feature(source: &Source, (row, column): (u64, u64)) -> Error {
    let (features, column) = (&source.features, column as usize);
    match features.number(row, column) {
        Ok(number) if (number as f32).is_finite() => Error::Data(format!(
            "{}: it changed while it was read; help: start again",
            features.place(row)
        )),
        Ok(_) => nonfinite(features, row, column, source.columns.as_deref()),
        Err(error) => error,
    }
}

impl Facts {
    /// The columns without the categories that only held-out rows have, whose weights would stay
    /// random; `None` if there are none.
    pub(crate) fn trained_categories(&self, source: &Source) -> Option<Vec<ColumnPlan>> {
        let found = self.features.as_ref().filter(|found| found.is_complete)?;
        let plan = source.plan.as_ref()?;
        let mut greatest = found.moments.greatest.iter();
        let seen = |column: &ColumnPlan| {
            let mine = greatest.by_ref().take(column.width());
            let mine: Vec<bool> = mine.map(|greatest| *greatest > 0.0).collect();
            let mut column = column.clone();
            if let Some(values) = &mut column.values {
                let mut is_seen = mine.into_iter();
                values.retain(|_| is_seen.next() == Some(true));
            }
            column
        };
        let seen: Vec<ColumnPlan> = plan.iter().map(seen).collect();
        (seen != *plan).then_some(seen)
    }
}

/// Rows of F features whose missing numbers are filled in. Without a fill they are rows of 2F
/// numbers: each number, 0 where it is missing, then 1 where it is there.
struct Filled<'a> {
    rows: &'a Rows,
    /// One for each feature.
    fill: Option<&'a [f32]>,
}

impl RowReader for Filled<'_> {
    fn rows(&self) -> u64 {
        self.rows.rows()
    }

    fn width(&self) -> usize {
        self.rows.width() * if self.fill.is_some() { 1 } else { 2 }
    }

    fn read(&self, first: u64, into: &mut [f32]) -> Result<()> {
        let width = self.rows.width();
        if let Some(fill) = self.fill {
            self.rows.read_f32(first, into)?;
            fill_in(fill, into);
            return Ok(());
        }
        for (row, into) in (first..).zip(into.chunks_exact_mut(2 * width)) {
            let (x, is_there) = into.split_at_mut(width);
            self.rows.read_f32(row, x)?;
            for (x, is_there) in x.iter_mut().zip(is_there) {
                *is_there = f32::from(u8::from(!x.is_nan()));
                *x = if x.is_nan() { 0.0 } else { *x };
            }
        }
        Ok(())
    }
}

/// Where numbers are there, in some rows of F features.
struct Present {
    /// Of the numbers of each feature, 0 where one is missing, then of 1 where one is there (2F).
    mean: Vec<f64>,
    rows: u64,
    /// Whether all rows were read, and not a sample.
    is_complete: bool,
}

impl Present {
    /// All ranks share the work. An infinite number ends it early: `None`.
    fn find(
        features: &Rows,
        is_wanted: IsTrainedOn<'_>,
        ranks: &dyn Ranks,
    ) -> Result<Option<Present>> {
        let rows = Filled {
            rows: features,
            fill: None,
        };
        let found = scan::features(&rows, is_wanted, ranks, scan::BYTES_MAX)?;
        Ok(found.bad.is_none().then_some(Present {
            mean: found.moments.mean,
            rows: found.moments.count,
            is_complete: found.is_complete,
        }))
    }

    /// How many numbers of each feature are missing.
    fn missing(&self) -> Vec<u64> {
        let parts = self.mean[self.mean.len() / 2..].iter();
        let missing = parts.map(|part| (self.rows as f64 * (1.0 - part)).round() as u64);
        missing.collect()
    }
}

/// What stands for missing numbers, `None` if none may be missing. `present` is of the rows that
/// are trained on.
fn fit_fill(how: Missing, source: &Source, present: Option<&Present>) -> Result<Option<Vec<f32>>> {
    let features = &source.features;
    let present = match (how, present) {
        (Missing::Error, _) => return Ok(None),
        (Missing::Mean, Some(present)) => present,
        // The scan that follows names an infinite number.
        _ => return Ok(Some(vec![0.0; features.width()])),
    };
    let (sums, parts) = present.mean.split_at(features.width());
    let empty = parts.iter().position(|part| *part == 0.0);
    ensure!(
        empty.is_none(),
        Data,
        "{}: column \"{}\": `missing` mean: expected a number in some row that is trained on, got none; help: leave the \
         column out with `drop`",
        source.place(),
        source.feature(empty.unwrap_or(0))
    );
    let mean = |(sum, part): (&f64, &f64)| (sum / part) as f32;
    Ok(Some(sums.iter().zip(parts).map(mean).collect()))
}
