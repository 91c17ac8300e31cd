//! `OUT/report.html`: one page that shows a run, made from its metrics log
//! (`metrics.jsonl`) and `samples.json`.
//!
//! The page needs no network, and its tables no scripts. Its inputs are not trusted: every text is
//! escaped. The same log makes the same bytes.
//!
//! `charts.rs` has the curves, which `script.js` draws, `tables.rs` and `classes.rs` the other
//! sections; `page.rs` puts them together. `compare.rs` makes a page of several runs, and `csv.rs`
//! exports metrics.

pub(crate) mod charts;
mod classes;
mod compare;
mod csv;
mod html;
mod page;
pub(crate) mod results;
mod tables;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use clap::Args;

use crate::error::{Error, Result};
use crate::files;
use crate::metrics::Run;
use crate::metrics_log::{EVENTS_FILE, REPORT_FILE};
use crate::output::{self, Say};
use crate::samples::Samples;

/// Printed after the help of `report`.
pub(crate) const EXAMPLES: &str = "\
Examples:
  ddp-train report out                            make out/report.html again
  ddp-train report one two three --out page.html  one page with the curves of three runs
  ddp-train report out --csv metrics.csv          a row for each logged step and each evaluation
  ddp-train report out --csv -                    the same on standard output";

/// The flags of `report`.
#[derive(Args, Clone, Debug, PartialEq)]
pub struct ReportFlags {
    /// Folders of runs: what --out was
    #[arg(value_name = "DIR", required = true)]
    pub folders: Vec<PathBuf>,
    /// File for the page; of several runs it shows the curves over one another
    /// [default: report.html in the folder of the run]
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Write the metrics of a run to this CSV file instead; - for standard output
    #[arg(long, value_name = "FILE", conflicts_with = "out")]
    pub csv: Option<PathBuf>,
}

/// Makes the report of the run in `folder` and returns its path.
pub fn make(folder: &Path) -> Result<PathBuf> {
    let path = folder.join(REPORT_FILE);
    files::replace_with(&path, page_of(folder)?.as_bytes())?;
    Ok(path)
}

fn page_of(folder: &Path) -> Result<String> {
    Ok(page::of(&Run::read(folder)?, Samples::read(folder)))
}

/// `ddp-train report`, on rank 0.
pub(crate) fn report(flags: &ReportFlags, say: Say<'_>) -> Result<()> {
    let ReportFlags { folders, out, csv } = flags;
    let count = folders.len();
    if let Some(csv) = csv {
        let [folder] = &folders[..] else {
            let csv = csv.display();
            let text = format!("--csv {csv}: expected one run, got {count}");
            return Err(Error::Usage(text + "; help: export one at a time"));
        };
        return export(folder, csv, say);
    }
    let (path, page) = match (&folders[..], out) {
        ([folder], None) => (folder.join(REPORT_FILE), page_of(folder)?),
        ([folder], Some(out)) => (out.clone(), page_of(folder)?),
        (_, Some(out)) => (out.clone(), compare::of(&several(folders)?)),
        (_, None) => {
            return Err(Error::Usage(format!(
                "a report of {count} runs: expected --out with a file, got none; help: add --out \
                 runs.html"
            )));
        }
    };
    files::replace_with(&path, page.as_bytes())?;
    output::warn_unprinted(say(&format!("report {}", path.display())));
    Ok(())
}

/// The runs in these folders, under the names of the folders: with their paths if names are equal.
fn several(folders: &[PathBuf]) -> Result<Vec<(String, Run)>> {
    let (got, most) = (folders.len(), compare::RUNS_MAX);
    if got > most {
        return Err(Error::Usage(format!(
            "a report of {got} runs: expected at most {most}; help: leave some out"
        )));
    }
    let names = folders
        .iter()
        .map(|folder| folder.file_name().unwrap_or_default());
    let is_unique = BTreeSet::from_iter(names).len() == got;
    let read = |folder: &PathBuf| {
        let name = folder.file_name().filter(|_| is_unique);
        let name = name.unwrap_or(folder.as_os_str()).to_string_lossy();
        Ok((name.into_owned(), Run::read(folder)?))
    };
    folders.iter().map(read).collect()
}

/// Writes the metrics of the run in `folder` as CSV; `-` is standard output.
fn export(folder: &Path, csv: &Path, say: Say<'_>) -> Result<()> {
    // Refuses what is not a metrics log, and says how to fix it.
    Run::read(folder)?;
    let log = folder.join(EVENTS_FILE);
    if csv == Path::new("-") {
        let written = csv::write(&log, &mut std::io::stdout().lock());
        return output::unless_reader_left(written.map_err(output::unprinted));
    }
    files::replace_file(csv, |file| {
        csv::write(&log, file).map_err(files::failed("write", csv))
    })?;
    output::warn_unprinted(say(&format!("metrics {}", csv.display())));
    Ok(())
}

#[cfg(test)]
mod tests;
