//! The request for data, and the data that it returns.

use std::path::PathBuf;
use std::sync::Arc;

use crate::dataset::Dataset;
use crate::error::{Result, bail, ensure};
use crate::features::{COMMON, FeaturePlan, Missing, Normalization, Scaling, TableSettings};
use crate::guess;
use crate::ranks::Ranks;
use crate::setting::{
    CATEGORICAL, DATA, DROP, LABELS, MISSING, NORMALIZE, STRATIFY, TASK, VAL_DATA, VAL_LABELS,
    VAL_SPLIT,
};
use crate::spec::DataSpec;
use crate::task::{LabelName, LossOn, TaskKind, TaskSpec};
use crate::text::Vocabulary;

/// What a run trains and evaluates on.
#[derive(Clone, Debug)]
pub struct Data {
    /// The rows to train on.
    pub train: Arc<dyn Dataset>,
    /// Other rows, for evaluation. May have none.
    pub held_out: Arc<dyn Dataset>,
    /// For people: what this is, how much, and what was taken as label and features.
    pub description: String,
    /// How features were normalized.
    pub normalization: Option<Normalization>,
    /// How numeric targets were normalized.
    pub target_normalization: Option<Normalization>,
    /// How cells became features.
    pub plan: FeaturePlan,
    /// Of tables, the request with what they chose.
    pub of_table: Option<Arc<DataRequest>>,
    /// The names of features, if their columns have names.
    pub columns: Option<Vec<String>>,
    /// The name of the labels, if they have one.
    pub label: Option<LabelName>,
    /// The tokenizer of the tokens to train on, if it is beside them.
    pub tokenizer: Option<Arc<Vocabulary>>,
}

impl Data {
    /// Datasets of a program itself: `held_out` for evaluation, which may have no rows.
    pub fn own(train: impl Dataset + 'static, held_out: impl Dataset + 'static) -> Data {
        let (rows, others) = (train.rows(), held_out.rows());
        let description = format!("{rows} rows of the program itself, {others} held out");
        Data::new(Arc::new(train), Arc::new(held_out), description)
    }

    /// The ranges of numeric labels, in the units of training; none if predictions are not clipped.
    pub fn target_ranges(&self) -> Vec<[f32; 2]> {
        let normalization = self.target_normalization.as_ref();
        normalization.map_or_else(Vec::new, Normalization::applied_range)
    }
}

/// Which data are wanted. Fields are named after the settings.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DataRequest {
    /// The rows to train on, or to use a model on.
    pub data: DataSpec,
    /// Where their labels are.
    pub labels: Option<String>,
    /// Rows to evaluate on.
    pub val_data: Option<DataSpec>,
    /// Where their labels are.
    pub val_labels: Option<String>,
    /// The fraction of the rows that is held out for evaluation, chosen by `seed`.
    pub val_split: f64,
    /// Whether the rows that are held out keep the shares of the classes.
    pub stratify: bool,
    /// Whether the rows that are held out come in their order in the data.
    pub sorted: bool,
    /// The seed of the split.
    pub seed: u64,
    /// What labels are, if not what their type says.
    pub task: Option<TaskKind>,
    /// How many tokens the model sees at once, if it says so.
    pub context: Option<usize>,
    /// The size of the model's vocabulary, if it states one: data that state none have the same.
    pub vocabulary: Option<usize>,
    /// The folder or file of the tokenizer that makes tokens of conversations.
    pub tokenizer: Option<PathBuf>,
    /// Which tokens of conversations are trained.
    pub loss_on: LossOn,
    /// Whether several conversations share a row.
    pub packed: bool,
    /// Whether a batch of padded rows may end where its longest does: in a model whose tokens see
    /// only those before them.
    pub shortens: bool,
    /// How the columns of tables are read.
    pub table: TableSettings,
    /// How features are normalized.
    pub normalize: Scaling,
    /// Whether `Scaling::Standard` also normalizes numeric targets, as since version 0.7.
    pub normalizes_targets: bool,
    /// Whether predictions of numeric targets are clipped, as since version 0.9.
    pub clips_targets: bool,
    /// The settings without a value, which tables choose.
    pub left_open: LeftOpen,
    /// Where converted files are kept.
    pub cache_dir: Option<PathBuf>,
    /// The model that the rows are for, if it is trained already.
    pub trained: Option<Trained>,
}

/// Which settings have no value. Fields are named after them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct LeftOpen {
    pub categorical: bool,
    pub missing: bool,
    pub normalize: bool,
    pub val_split: bool,
    pub stratify: bool,
    pub task: bool,
}

/// What a trained model expects of rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Trained {
    /// What it learned, with the names of classes.
    pub task: TaskSpec,
    /// The shape of one row's features.
    pub row_shape: Vec<usize>,
    /// How features are normalized.
    pub normalization: Option<Normalization>,
    /// How cells become features.
    pub plan: FeaturePlan,
    /// The names of features in their order, if their columns had names.
    pub columns: Option<Vec<String>>,
    /// The name of the labels, if they had one.
    pub label: Option<LabelName>,
    /// Whether rows need labels; without them every target is 0.
    pub needs_labels: bool,
}

impl Data {
    /// Rows as they are: nothing is normalized, and nothing has a name.
    pub(crate) fn new(
        train: Arc<dyn Dataset>,
        held_out: Arc<dyn Dataset>,
        description: String,
    ) -> Data {
        Data {
            train,
            held_out,
            description,
            normalization: None,
            target_normalization: None,
            plan: FeaturePlan::default(),
            of_table: None,
            columns: None,
            label: None,
            tokenizer: None,
        }
    }
}

impl Trained {
    /// An error if plan or normalization do not fit the rows.
    fn check_features(&self) -> Result<()> {
        let width = self.row_shape.iter().product();
        if let Err(why) = self.plan.check(width) {
            bail!("the model has {why}: the checkpoint is damaged");
        }
        if let Some(normalization) = &self.normalization {
            ensure!(
                normalization.fits(width),
                "the model's normalization: expected one number or {width}, got {} and {}: the checkpoint is damaged; \
                 help: use another checkpoint",
                normalization.shift.len(),
                normalization.scale.len()
            );
        }
        Ok(())
    }
}

impl DataRequest {
    /// The data of `spec`, as they are.
    pub fn new(spec: DataSpec) -> DataRequest {
        DataRequest {
            data: spec,
            normalizes_targets: true,
            clips_targets: true,
            ..DataRequest::default()
        }
    }

    /// Refuses requests that differ between ranks, which would wait for each other in different
    /// places, and settings that contradict each other.
    pub(crate) fn check(&self, ranks: &dyn Ranks) -> Result<()> {
        let same = DataRequest {
            cache_dir: None,
            trained: None,
            ..self.clone()
        };
        let asked = [("the configuration".to_string(), format!("{same:#?}"))];
        ranks.must_match(&asked, "start every rank with the same settings")?;
        ensure!(
            !self.stratify || self.val_split > 0.0 || self.left_open.val_split,
            Usage,
            "{STRATIFY}: expected {VAL_SPLIT}, the rows that it chooses; help: give both or none"
        );
        if let Some(data) = &self.val_data {
            ensure!(
                self.val_split <= 0.0,
                Usage,
                "{VAL_SPLIT} {} and {VAL_DATA} {data} exclude each other; help: give one of them",
                self.val_split
            );
            ensure!(
                matches!(data, DataSpec::Files(_) | DataSpec::Tokens(_)),
                Usage,
                "{VAL_DATA} {}: expected files; help: built-in data have held-out rows: set held-out=N in {DATA}",
                data.name()
            );
        } else if let Some(labels) = &self.val_labels {
            bail!(
                Usage,
                "{VAL_LABELS} {labels}: expected {VAL_DATA}, the rows that these labels are for; help: give both or none"
            );
        }
        Ok(())
    }

    /// The same request of a table, with what is chosen before it is read.
    pub(crate) fn of_table(&self) -> DataRequest {
        let (mut request, open) = (self.clone(), self.left_open);
        if open.categorical {
            request.table.categorical = vec![COMMON.to_string()];
        }
        if open.missing {
            request.table.missing = Missing::Indicator;
        }
        if open.normalize {
            request.normalize = Scaling::Standard;
        }
        request
    }

    /// Chooses how many of these rows are held out, of classes the same part of each.
    pub(crate) fn choose_split(&mut self, rows: u64, are_classes: bool) {
        let open = self.left_open;
        if !open.val_split || self.val_data.is_some() {
            return;
        }
        self.val_split = guess::held_out(rows);
        let can_be = self.val_split > 0.0 && are_classes && rows <= guess::STRATIFIED_MAX;
        self.stratify |= open.stratify && can_be;
    }

    /// Refuses settings, a model and `val-data` that are for data of another kind.
    pub(crate) fn check_kind(&self, are_tokens: bool) -> Result<()> {
        let data = &self.data;
        let is_built_in = matches!(data, DataSpec::Glyphs(_) | DataSpec::Synthetic(_));
        let only_for_rows_of_files = [
            (LABELS, self.labels.is_some()),
            (NORMALIZE, self.normalize != Scaling::None),
            (DROP, !self.table.drop.is_empty()),
            (CATEGORICAL, !self.table.categorical.is_empty()),
            (MISSING, self.table.missing != Missing::Error),
            // A trained model brings its task.
            (TASK, self.task.is_some() && self.trained.is_none()),
            (VAL_LABELS, self.val_labels.is_some()),
            (VAL_DATA, self.val_data.is_some() && is_built_in),
            (VAL_SPLIT, self.val_split > 0.0 && is_built_in),
            (STRATIFY, self.stratify),
        ];
        let mut settings = only_for_rows_of_files.iter();
        match settings.find(|(_, is_given)| *is_given) {
            Some((setting, _)) if are_tokens => bail!(
                Usage,
                "{setting}: expected rows with features as {DATA}, got tokens: {data}; help: leave out {setting}, \
                 since the target of each token is the next one; if it is a table, rename it to .csv"
            ),
            Some((setting, _)) if is_built_in => bail!(
                Usage,
                "{setting}: expected files as {DATA}, got {}; help: leave out {setting}: built-in data have labels \
                 and held-out rows, and are normalized",
                data.name()
            ),
            _ if are_tokens => return Ok(()),
            _ => {}
        }
        if let Some(trained) = &self.trained {
            ensure!(
                !matches!(trained.task, TaskSpec::NextToken { .. }),
                "{DATA} {data}: expected tokens, as the model was trained on, got rows of features; help: give tokens:FILE if \
                 its numbers are u16 tokens without a header"
            );
            trained.check_features()?;
        }
        if let Some(val @ DataSpec::Tokens(_)) = &self.val_data {
            bail!(
                Usage,
                "{VAL_DATA} {val}: expected rows of features, as {DATA} {data} has, got tokens; help: give files of one kind"
            );
        }
        Ok(())
    }
}
