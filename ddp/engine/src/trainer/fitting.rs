//! `memory`: how many blocks or parts compute again in backward what would not fit, so that a rank
//! needs no more than the setting allows.

use std::borrow::Cow;

use ddp_comm::World;
use ddp_data::Data;
use ddp_kernels::Device;

use super::planned;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::model::data_shape;
use crate::setting::{MEMORY, MICRO_BATCH, RECOMPUTE, RECOMPUTE_PARTS, ZERO};
use crate::units::{MemorySize, megabytes};

/// The most choices that are planned of each kind of recomputing: a plan takes milliseconds.
const CHOICES: usize = 64;

/// What computes again in models of blocks; what saves most for its time comes first.
const KINDS: [&str; 2] = ["attention", "block"];
/// What computes again in other models.
const PARTS: [&str; 1] = ["parts"];

/// The settings with the model that takes least time of those that fit in `memory`.
pub(super) fn fitted<'a>(
    options: &'a Config,
    data: &Data,
    world: &World,
    devices: &[Device],
) -> Result<Cow<'a, Config>> {
    let Some(memory @ MemorySize(allowed)) = options.memory else {
        return Ok(Cow::Borrowed(options));
    };
    let blocks = options.model.value("layers").as_u64().unwrap_or(0) as usize;
    let is_set = |name: &str| !options.model.value(name).is_null();
    let has_blocks = blocks > 0 && is_set("recompute") && is_set("recompute-blocks");
    let (kinds, all) = if has_blocks {
        (&KINDS[..], blocks)
    } else {
        let shape = data_shape(data.train.spec());
        (&PARTS[..], options.model.part_count(&shape)?)
    };
    let step = all.div_ceil(CHOICES).max(1);
    let counts = || (step..all).step_by(step).chain([all]);
    let choices = kinds
        .iter()
        .flat_map(|kind| counts().map(move |n| (*kind, n)));
    let mut least: Option<(u64, String, Config)> = None;
    for (kind, count) in [("none", 0)].into_iter().chain(choices) {
        let mut fitting = options.clone();
        let text = count.to_string();
        let of_blocks = [("recompute", kind), ("recompute-blocks", &text)];
        for (name, value) in of_blocks.into_iter().filter(|_| has_blocks) {
            let setting = fitting.model.setting(name).expect("it has a value");
            setting.field.set(value).map_err(Error::Internal)?;
        }
        if !has_blocks {
            fitting.recompute_parts = count;
        }
        let (model, step) = planned::plan(&fitting, data, world, devices)?;
        let of_model = if devices[0].is_accelerator() {
            model.on_device()
        } else {
            model.total()
        };
        let needed = of_model + step.total();
        let what = match kind {
            "none" => "nothing is computed again".to_string(),
            "parts" => format!("{RECOMPUTE_PARTS} {count} of {all}"),
            _ => format!("{RECOMPUTE} {kind} in {count} of {all} blocks"),
        };
        if least.as_ref().is_none_or(|(least, ..)| needed < *least) {
            least = Some((needed, what, fitting));
        }
        if needed <= allowed {
            break;
        }
    }
    let (needed, what, fitting) = least.expect("one was planned");
    // Rounded up as `megabytes` shows it: the number must be accepted as the limit.
    let unit = if needed < 1_000_000_000 {
        100_000
    } else {
        10_000_000
    };
    let shown = megabytes(needed.next_multiple_of(unit) as f64 / 1e6);
    if needed > allowed && world.generation() < 2 {
        return Err(Error::Usage(format!(
            "{MEMORY} {memory}: expected at least {shown}, which a rank needs at best ({what}); \
             help: give a smaller {MICRO_BATCH}, or {ZERO} 1 or 2 with several ranks"
        )));
    }
    if needed > allowed {
        tracing::warn!("{what}: this rank needs {shown}, more than {MEMORY} {memory} allows");
    } else if world.rank() == 0 {
        let shown = megabytes(needed as f64 / 1e6);
        tracing::info!("{what}: a rank needs {shown}; {MEMORY} allows {memory}");
    }
    Ok(Cow::Owned(fitting))
}
