//! The plan of a table's features, from the settings and from what is in all files.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use super::ask::{Ask, LabelPlace};
use super::labels;
use crate::choose;
use crate::error::{Error, Result};
use crate::files::{listed, table};
use crate::plan::{AUTO, ColumnPlan};

/// The plan that the settings ask for; `None` if they leave columns as they are.
pub(super) fn of_settings(
    ask: &Ask<'_>,
    paths: &[PathBuf],
    source: &LabelPlace,
) -> Result<Option<Vec<ColumnPlan>>> {
    let settings = ask.table;
    let asked = [
        ("drop", &settings.drop),
        ("categorical", &settings.categorical),
    ];
    let Some((setting, names)) = asked.into_iter().find(|(_, names)| !names.is_empty()) else {
        return Ok(None);
    };
    if !paths.iter().all(|path| choose::is_table(path)) {
        return Err(Error::Usage(format!(
            "`{setting}` {}: expected tables (.csv, .tsv, .parquet) as `{}`, got {}; help: leave out `{setting}`",
            names.join(","),
            ask.setting,
            ask.spec.path
        )));
    }
    let features = features(ask, &paths[0], source)?;
    if settings.categorical.is_empty() {
        return Ok(Some(features));
    }
    let names: Vec<String> = features.iter().map(|plan| plan.name.clone()).collect();
    let known: HashSet<&String> = names.iter().collect();
    let is_known = |name: &&String| *name == AUTO || known.contains(name);
    if let Some(name) = settings.categorical.iter().find(|name| !is_known(name)) {
        return Err(not_a_column(
            "categorical",
            name,
            &paths[0],
            "feature",
            &names,
        ));
    }
    let survey_of =
        |path: &PathBuf| table::survey(path, &features, &settings.categorical, ask.cache_dir);
    let mut all = survey_of(&paths[0])?;
    for path in &paths[1..] {
        all.merge(survey_of(path)?);
    }
    table::plan(&all, &settings.categorical, &ask.spec.path).map(Some)
}

/// The columns of the first table that are features, as numbers.
fn features(ask: &Ask<'_>, path: &Path, source: &LabelPlace) -> Result<Vec<ColumnPlan>> {
    let columns = table::columns(path)?;
    let drop: HashSet<&String> = ask.table.drop.iter().collect();
    let known: HashSet<&String> = columns.iter().collect();
    if let Some(name) = ask.table.drop.iter().find(|name| !known.contains(name)) {
        return Err(not_a_column("drop", name, path, "column", &columns));
    }
    let named = ask.named_columns();
    let label = match source {
        LabelPlace::Named(name) => Some(name.clone()),
        LabelPlace::Default => Some(labels::default_column(ask, path, named.as_deref())?),
        _ => None,
    };
    let labels = label
        .as_ref()
        .map(|label| table::label_names(&columns, label));
    let is_label = |name: &String| {
        labels
            .as_ref()
            .is_some_and(|labels| labels.contains(&name.as_str()))
    };
    if let Some(label) = ask.table.drop.iter().find(|name| is_label(name)) {
        return Err(Error::Usage(format!(
            "`drop` {label}: expected columns of features, got the label; help: leave it out of `drop`"
        )));
    }
    let is_kept = |name: &&String| !drop.contains(name) && !is_label(name);
    let features: Vec<_> = named
        .as_ref()
        .unwrap_or(&columns)
        .iter()
        .filter(is_kept)
        .collect();
    Ok(features
        .into_iter()
        .map(|name| ColumnPlan::number(name))
        .collect())
}

fn not_a_column(setting: &str, name: &str, path: &Path, what: &str, columns: &[String]) -> Error {
    let help = match columns.iter().any(|column| column.contains(',')) {
        true => {
            "give one of these; commas separate names, so a column with a comma in its name has to be renamed"
        }
        false => "give one of these",
    };
    Error::Usage(format!(
        "`{setting}` {name}: no such {what}: {} has {}; help: {help}",
        path.display(),
        listed(columns)
    ))
}
