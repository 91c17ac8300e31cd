//! `OUT/report.html`: one file that shows a run, made from its record (`metrics.jsonl`) and the samples beside it (`samples.json`).
//!
//! The page stands alone: it asks the network for nothing, and reads without scripts. Nothing that it is made from is trusted: every text
//! is escaped, every number is checked to be one. The same record makes the same bytes, so that it can be made again at any time.
//!
//! `read.rs` reads the record, `points.rs` thins what charts show, `charts.rs` and `scale.rs` draw, `tables.rs` and `classes.rs` show the
//! rest, `page.rs` puts it together; `evidence.rs` is what a run keeps for it after its last evaluation.

mod charts;
mod classes;
pub(crate) mod evidence;
mod page;
mod picture;
mod points;
mod read;
mod scale;
mod sha256;
mod tables;
mod text;

use std::fmt::Display;
use std::io::Write;
use std::path::{Path, PathBuf};

use ddp_comm::World;

use crate::error::Result;
use crate::files;

/// The file that is made.
pub const REPORT_FILE: &str = "report.html";
/// The samples that a run keeps for it.
pub const SAMPLES_FILE: &str = "samples.json";

/// Makes the report of the run in `folder`, from what its record says. Returns the file.
pub fn make(folder: &Path) -> Result<PathBuf> {
    let run = read::Run::read(folder)?;
    let page = page::of(&run);
    let path = folder.join(REPORT_FILE);
    files::replace_file(&path, |file| file.write_all(page.as_bytes()).map_err(files::failed("write", &path)))?;
    Ok(path)
}

/// `ddp-train report DIR`: on the first rank, if there are several.
pub fn again(folder: &Path, world: &World, say: &mut dyn FnMut(&dyn Display) -> Result<()>) -> Result<()> {
    if world.rank() > 0 {
        return Ok(());
    }
    let path = make(folder)?;
    say(&format!("report {}", path.display()))
}

#[cfg(test)]
mod tests;
