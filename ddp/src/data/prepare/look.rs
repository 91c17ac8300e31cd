//! What `prepare` looks at before training, and keeps for the next start.

use std::path::PathBuf;

use ddp_comm::World;
use xxhash_rust::xxh3::xxh3_128;

use super::Source;
use crate::config::Normalize;
use crate::data::agree;
use crate::data::dataset::nonfinite;
use crate::data::files::{Element, cache};
use crate::data::scan::{self, Kept};
use crate::data::split::Split;
use crate::data::{DataRequest, Task};
use crate::error::{Error, Result};

/// Looks at all labels, and at features as far as something can be wrong with them or is wanted of them. On all ranks together; what was found
/// before is taken from the cache.
pub(super) fn look(
    source: &Source,
    known: Option<&Task>,
    split: Option<&Split>,
    request: &DataRequest,
    world: &World,
) -> Result<Kept> {
    let labels = source.labels.as_ref().ok_or_else(|| Error::Internal("nothing to learn".into()))?;
    let element = source.features().element()?;
    let is_trained_on = known.is_none();
    let wants_moments = is_trained_on
        && match request.normalize {
            Normalize::None => false,
            Normalize::Unit => element != Element::U8,
            Normalize::Standard => true,
        };
    // Of these some bytes are no numbers that can be trained on.
    let looks_at_features = wants_moments || element.is_float() || element == Element::Bool;
    let file = kept_file(source, known, split, looks_at_features, request);
    if let Some(kept) = agreed(file.as_deref().and_then(Kept::read), world)? {
        return Ok(kept);
    }
    let classes = match known {
        Some(Task::Classification { classes, .. }) => Some(*classes),
        _ => None,
    };
    let counts = bad_label(scan::labels(labels, classes, world)?)?;
    let mut found = None;
    if looks_at_features {
        let features = source.features();
        let side = |row| split.is_none_or(|split| split.is_trained_on(row));
        let result = scan::features(features, &side, world, scan::BYTES_MAX)?;
        if let Some((row, column)) = result.bad {
            return Err(bad_feature(source, row, column as usize, world));
        }
        found = Some(result);
    }
    let kept = Kept { counts, found };
    if let (Some(file), 0) = (file, world.local_rank()) {
        // Without it the next start reads everything again, and that is all.
        if let Err(error) = kept.write(&file) {
            tracing::debug!("{}: what was found in it is not kept: {error}", source.flag);
        }
    }
    Ok(kept)
}

/// The error of a feature that is no finite number, on all ranks: as a rank says it that has one there, should files differ.
fn bad_feature(source: &Source, row: u64, column: usize, world: &World) -> Error {
    let mine = source.features().number(row, column);
    let mine = match mine.map(|number| number as f32) {
        Ok(number) if number.is_finite() => Ok(()),
        Ok(_) => Err(nonfinite(source.features(), row, column, source.opened.columns.as_deref())),
        Err(error) => Err(error),
    };
    let changed =
        || Error::Data(format!("{}: it has changed while it was read. Start again", source.features().place(row)));
    agree::all(world, mine).err().unwrap_or_else(changed)
}

/// What is less than this is looked at again each time.
const KEPT_BYTES_MIN: u64 = 32 << 20;

/// Where what is found is kept: none where there is little to read, or nowhere to keep it.
fn kept_file(
    source: &Source,
    known: Option<&Task>,
    split: Option<&Split>,
    looks_at_features: bool,
    request: &DataRequest,
) -> Option<PathBuf> {
    let labels = source.labels.as_ref()?;
    let arrays = || source.features().arrays().iter().chain(labels.stack().arrays());
    let bytes: u64 = arrays().map(|array| array.mapped().len()).sum();
    if bytes < KEPT_BYTES_MIN {
        return None;
    }
    let mut key = format!(
        "{}\n{:?}\n{:?}\n{looks_at_features} {} {}\n",
        labels.coding_text(),
        known.map(Task::outputs),
        split.map(|_| (request.val_split.to_bits(), request.seed)),
        scan::BYTES_MAX,
        source.features().rows()
    );
    for array in arrays() {
        key.push_str(&format!("{} {:?} {:?}\n", array.key(), array.element(), array.mapped().identity()));
    }
    let folder = cache::folder(&source.opened.first, request.cache_dir()).ok()?;
    Some(folder.join(format!("looked-at-{:032x}", xxh3_128(key.as_bytes()))))
}

/// What all ranks have found kept, if it is the same.
fn agreed(kept: Option<Kept>, world: &World) -> Result<Option<Kept>> {
    let mine = kept.as_ref().map(|kept| xxh3_128(&kept.to_bytes()).to_le_bytes().to_vec()).unwrap_or_default();
    let all = world.all_gather_bytes(&mine)?;
    Ok(kept.filter(|_| all.iter().all(|hash| *hash == mine)))
}

/// The counts, unless a label cannot be.
pub(super) fn bad_label(summary: scan::LabelSummary) -> Result<Vec<u64>> {
    match summary.bad {
        None => Ok(summary.counts),
        Some((_, why)) => Err(Error::Data(why)),
    }
}
