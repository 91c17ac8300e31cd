//! `OUT/report.html`: one page that shows a run, made from its metrics log
//! (`metrics.jsonl`).
//!
//! The page needs no network, and its tables need no scripts. Its inputs are not trusted: every
//! text is escaped. The same log gives the same bytes.
//!
//! `charts.rs` has the curves, which `script.js` draws, `tables.rs` and `classes.rs` the other
//! sections; `page.rs` puts them together. `compare.rs` makes a page of several runs.

pub(crate) mod charts;
mod classes;
mod compare;
mod html;
mod page;
pub(crate) mod results;
mod svg;
mod tables;

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::files;
use crate::metrics::Run;
use crate::metrics_log::REPORT_FILE;
use crate::output::{self, Say};
use crate::setting::OUT;
use crate::shown::shown;

/// How every page begins.
const HEAD: &[u8] = b"<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
                     <meta http-equiv=\"Content-Security-Policy\"";

/// Makes the report of the run in `folder` and returns its path.
pub fn make(folder: &Path) -> Result<PathBuf> {
    let path = folder.join(REPORT_FILE);
    files::replace_with(&path, page_of(folder)?.as_bytes())?;
    Ok(path)
}

fn page_of(folder: &Path) -> Result<String> {
    Ok(page::of(&Run::read(folder)?))
}

/// The most charts of a picture.
const PICTURED: usize = 2;

/// Makes a page of the runs in `folders`, and a picture of their first curves in `svg`.
pub fn report(
    folders: &[PathBuf],
    out: Option<&Path>,
    svg: Option<&Path>,
    say: Say<'_>,
) -> Result<()> {
    if let Some(svg) = svg {
        let runs = several(folders)?;
        let charts = match &runs[..] {
            [(_, run)] => charts::of_run(run),
            runs => charts::of_runs(runs),
        };
        let picture = svg::picture(&charts[..charts.len().min(PICTURED)]);
        files::replace_with(svg, picture.as_bytes())?;
        output::warn_unprinted(say(&shown(&format!("picture {}", svg.display()))));
        if out.is_none() {
            return Ok(());
        }
    }
    let count = folders.len();
    let (path, page) = match (folders, out) {
        ([folder], None) => (folder.join(REPORT_FILE), page_of(folder)?),
        ([folder], Some(out)) => (out.to_path_buf(), page_of(folder)?),
        (_, Some(out)) => (out.to_path_buf(), compare::of(&several(folders)?)),
        (_, None) => {
            return Err(Error::Usage(format!(
                "a report of {count} runs: expected {OUT} with a file, got none; help: add {OUT} \
                 runs.html"
            )));
        }
    };
    if path.is_file() && !is_page(&path) {
        return Err(Error::Usage(format!(
            "{OUT} {}: expected a new file or a page of this command, got another file; help: give another name",
            path.display()
        )));
    }
    files::replace_with(&path, page.as_bytes())?;
    output::warn_unprinted(say(&shown(&format!("report {}", path.display()))));
    Ok(())
}

fn is_page(path: &Path) -> bool {
    let mut start = [0; HEAD.len()];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut start));
    read.is_ok() && start == HEAD
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

#[cfg(test)]
mod tests;
