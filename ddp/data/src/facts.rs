//! What one pass over all rows finds before training, shared by the ranks: the classes or the range
//! of labels, the moments of features, missing and bad numbers, and a hash of everything.

use twox_hash::XxHash3_64;

use crate::error::{Error, Result, ensure};
use crate::features::{Missing, Moments, Scaling};
use crate::files::NumberType;
use crate::files::array::fill_in;
use crate::open::OpenFiles;
use crate::ranks::{Ranks, SameFiles, agree, must_be_alike};
use crate::request::{DataRequest, Trained};
use crate::sampler::Split;
use crate::scan::{self, Found, IsTrainedOn, LabelsFound};
use crate::setting::{DROP, MISSING, STRATIFY};
use crate::words::pasted;

/// The most bytes of targets that are read only to see how large they are.
const SAMPLED_BYTES_MAX: u64 = 1 << 20;

/// What was found in rows.
#[derive(Debug, Default)]
pub(crate) struct Facts {
    /// Which rows are held out; `None` if none are.
    pub(crate) split: Option<Split>,
    /// What replaces missing numbers, one for each feature.
    pub(crate) fill: Option<Vec<f32>>,
    pub(crate) labels: LabelsFound,
    /// In features, if their numbers were read.
    pub(crate) features: Option<Found>,
    /// Of the numeric targets that are trained on.
    pub(crate) targets: Option<Moments>,
    /// Whether features that may be wrong were not read.
    pub(crate) has_unread_features: bool,
    /// A hash of labels and features, if they were read.
    pub(crate) content: Option<String>,
    /// The BLAKE3 of the same.
    pub(crate) blake3: String,
}

/// Reads all labels and features, and compares their content between ranks with different files.
/// `model` is what was learned from other rows. Of rows for a trained model only labels are
/// read, unless they are split as in training.
pub(crate) fn scan(
    request: &DataRequest,
    source: &OpenFiles,
    model: Option<&Trained>,
    ranks: &dyn Ranks,
) -> Result<Facts> {
    let (rows, fraction) = (source.features.rows(), request.val_split);
    // Only the training files are split, not val-data.
    let is_own = model.is_none() || request.trained.is_some();
    let split = if !is_own || fraction <= 0.0 {
        None
    } else if request.stratify {
        let classes = agree(ranks, classes(source))?;
        Some(Split::stratified(&classes, fraction, request.seed)?)
    } else {
        Some(Split::new(rows, fraction, request.seed)?)
    };
    let split = split.map(|it| if request.sorted { it.sorted() } else { it });
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
        has_unread_features: source.features.element()?.is_float(),
        ..Facts::default()
    };
    // For `--held-out` features are hashed, to check that these are the training rows.
    if request.trained.is_none() || split.is_some() {
        scan.features(&mut facts)?;
    }
    facts.split = split;
    Ok(facts)
}

/// The class of each row; below 0 if it is not a class, which is refused later.
fn classes(source: &OpenFiles) -> Result<Vec<i64>> {
    let labels = source.labels.as_ref().filter(|labels| labels.are_classes());
    let why = format!("{STRATIFY}: expected classes as labels, got numbers; help: leave it out");
    let labels = labels.ok_or(Error::Usage(why))?;
    let mut classes = vec![0; labels.rows.rows() as usize];
    labels.classes(0, &mut classes)?;
    Ok(classes)
}

/// Rows that are read, and the ranks that share the work.
struct Scan<'a> {
    request: &'a DataRequest,
    source: &'a OpenFiles,
    model: Option<&'a Trained>,
    is_trained_on: IsTrainedOn<'a>,
    same: SameFiles<'a>,
}

impl Scan<'_> {
    /// What replaces missing numbers: from the model, or computed from the training rows. Logs how
    /// many are missing in arrays; `log_table` does that for tables.
    fn fill(&self) -> Result<Option<Vec<f32>>> {
        let (source, how) = (self.source, self.request.table.missing);
        let (rows, width) = (&source.features, source.features.width);
        let zeros = Some(vec![0.0; width]);
        let (given, of_rows) = match (self.model, how) {
            (Some(model), _) => (Some(model.plan.fill.clone()), ""),
            (None, Missing::Error) => return Ok(None),
            (None, Missing::Zero) => (Some(zeros.clone()), " in the rows that are trained on"),
            (None, Missing::Mean | Missing::Indicator) => {
                (None, " in the rows that are trained on")
            }
        };
        if let Some(given) = given
            .as_ref()
            .filter(|fill| fill.is_none() || source.is_table)
        {
            return Ok(given.clone());
        }
        // Of F features 2F numbers: each, 0 where it is missing, then 1 where it is there.
        let read = |first: u64, into: &mut [f32]| {
            for (row, into) in (first..).zip(into.chunks_exact_mut(2 * width)) {
                let (x, is_there) = into.split_at_mut(width);
                rows.read_f32(row, x)?;
                for (x, is_there) in x.iter_mut().zip(is_there) {
                    *is_there = f32::from(u8::from(!x.is_nan()));
                    *x = if x.is_nan() { 0.0 } else { *x };
                }
            }
            Ok(())
        };
        let (shape, most) = ((rows.rows(), 2 * width), scan::BYTES_MAX);
        let found = scan::features(shape, &read, self.is_trained_on, &self.same, most)?;
        // The scan that follows names an infinite number.
        if found.bad.is_some() {
            return Ok(given.unwrap_or(zeros));
        }
        let (sums, parts) = found.moments.mean.split_at(width);
        let missing = found.moments.count as f64 * parts.iter().map(|part| 1.0 - part).sum::<f64>();
        if missing > 0.5 && !source.is_table && self.same.all.rank() == 0 {
            tracing::info!(
                "{} {}: {}{missing:.0} missing numbers{of_rows}, which are filled in",
                source.setting,
                source.path,
                if found.is_complete { "" } else { "at least " }
            );
        }
        if let Some(given) = given {
            return Ok(given);
        }
        let empty = parts.iter().position(|part| *part == 0.0);
        ensure!(
            empty.is_none() || how == Missing::Indicator,
            "{}: column \"{}\": {MISSING} mean: expected a number in some row that is trained on, got none; help: leave the \
             column out: {DROP} {}",
            source.place(),
            source.feature(empty.unwrap_or(0)),
            pasted([&*source.feature(empty.unwrap_or(0))])
        );
        let mean = |(sum, part): (&f64, &f64)| match *part {
            0.0 => 0.0,
            part => (sum / part) as f32,
        };
        Ok(Some(sums.iter().zip(parts).map(mean).collect()))
    }

    /// Reads all labels, if they are needed.
    fn labels(&self) -> Result<LabelsFound> {
        let Some(labels) = &self.source.labels else {
            return Ok(LabelsFound::default());
        };
        let classes = self.model.and_then(|model| model.task.classes());
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
            Scaling::None => false,
            Scaling::Unit => element != NumberType::U8,
            Scaling::Standard => true,
        };
        let may_be_wrong = element.is_float() || element == NumberType::Bool;
        let is_own = self.model.is_none() || self.request.trained.is_some();
        let needs_moments = is_own && is_normalized || may_be_wrong;
        let mut labels = self.source.labels.iter();
        let numbers = labels.find(|labels| !labels.are_classes());
        if let (Some(labels), None) = (numbers, self.model) {
            let bytes_max = match normalize {
                Scaling::Standard => scan::BYTES_MAX,
                Scaling::None | Scaling::Unit => SAMPLED_BYTES_MAX,
            };
            let read = |first, into: &mut [f32]| labels.rows.read_f32(first, into);
            let shape = (labels.rows.rows(), labels.rows.width);
            let found = scan::features(shape, &read, self.is_trained_on, &self.same, bytes_max)?;
            facts.targets = Some(found.moments);
        }
        // Without rows to train on only the content is hashed.
        let is_trained_on = |row| needs_moments && (self.is_trained_on)(row);
        let bytes_max = if needs_moments {
            scan::BYTES_MAX
        } else {
            scan::HASHED_BYTES_MAX
        };
        let rows = &self.source.features;
        let read = |first, into: &mut [f32]| {
            rows.read_f32(first, into)?;
            if let Some(fill) = &facts.fill {
                fill_in(fill, into);
            }
            Ok(())
        };
        let shape = (rows.rows(), rows.width);
        let found = scan::features(shape, &read, &is_trained_on, &self.same, bytes_max)?;
        // From a rank that sees it, should files differ between hosts.
        let columns = self.source.columns.as_deref();
        let has_model = self.model.is_some() || self.request.trained.is_some();
        let nonfinite = |(row, at)| rows.nonfinite((row, at as usize), columns, has_model);
        agree(&self.same, found.bad.map(nonfinite).map_or(Ok(()), Err))?;
        self.must_match("features", found.hash)?;
        let part = if found.is_complete {
            ""
        } else {
            " (features in part)"
        };
        let hashes = [facts.labels.hash, found.hash].map(u64::to_le_bytes);
        let hash = XxHash3_64::oneshot(hashes.as_flattened());
        facts.content = Some(format!("{hash:016x}{part}"));
        let contents = format!("{} {}", facts.labels.blake3, found.blake3);
        facts.blake3 = blake3::hash(contents.as_bytes()).to_hex().to_string();
        facts.has_unread_features = needs_moments && !found.is_complete;
        facts.features = needs_moments.then_some(found);
        Ok(())
    }

    /// An error on all ranks unless this hash is the same on all of them.
    fn must_match(&self, what: &str, hash: u64) -> Result<()> {
        let (setting, file) = (self.source.setting, self.source.place());
        let (what, value) = (format!("the content of the {what}"), format!("{hash:016x}"));
        must_be_alike(
            &self.same,
            &format!("{setting} ({file})"),
            &[(&what, value)],
        )
    }
}
