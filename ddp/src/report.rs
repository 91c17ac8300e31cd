//! `OUT/report.html`: one page that shows a run, made from its record (`metrics.jsonl`) and
//! `samples.json`.
//!
//! The page needs no network and can be read without scripts. Its inputs are not trusted: every
//! text is escaped. The same record makes the same bytes.
//!
//! `read.rs` reads the record, `charts.rs` and `scale.rs` draw curves, `tables.rs` and `classes.rs`
//! make the other sections, `page.rs` puts them together.

mod charts;
mod classes;
mod html;
mod page;
pub(crate) mod read;
mod scale;
mod tables;

use std::fmt::Display;
use std::io::Write;
use std::path::{Path, PathBuf};

use ddp_comm::World;

use crate::error::Result;
use crate::files;
use crate::record::REPORT_FILE;

/// Makes the report of the run in `folder` and returns its path.
pub fn make(folder: &Path) -> Result<PathBuf> {
    let run = read::Run::read(folder)?;
    let page = page::of(&run);
    let path = folder.join(REPORT_FILE);
    files::replace_file(&path, |file| {
        file.write_all(page.as_bytes())
            .map_err(files::failed("write", &path))
    })?;
    Ok(path)
}

/// `ddp-train report DIR`, on rank 0.
pub fn again(
    folder: &Path,
    world: &World,
    say: &mut dyn FnMut(&dyn Display) -> Result<()>,
) -> Result<()> {
    if world.rank() > 0 {
        return Ok(());
    }
    let path = make(folder)?;
    say(&format!("report {}", path.display()))
}

#[cfg(test)]
mod tests;
