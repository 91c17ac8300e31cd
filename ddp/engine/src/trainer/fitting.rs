//! `memory`: how many blocks compute again in backward what would not fit, so that a rank needs no
//! more than the setting allows.

use std::borrow::Cow;

use ddp_comm::World;
use ddp_data::Data;
use ddp_kernels::Device;

use super::planned;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::setting::{MEMORY, MICRO_BATCH, RECOMPUTE, ZERO};
use crate::units::{MemorySize, megabytes};

/// The most choices that are planned of each kind of recomputing: a plan takes milliseconds.
const CHOICES: usize = 64;

/// What computes again, and in how many blocks; what saves most for its time comes first.
const KINDS: [&str; 2] = ["attention", "block"];

/// The settings with the model that takes least time of those that fit in `memory`.
pub(super) fn fitted<'a>(
    options: &'a Config,
    data: &Data,
    world: &World,
    devices: &[Device],
) -> Result<Cow<'a, Config>> {
    let Some(MemorySize(allowed)) = options.memory else {
        return Ok(Cow::Borrowed(options));
    };
    let blocks = options.model.value("layers").as_u64().unwrap_or(0) as usize;
    let step = blocks.div_ceil(CHOICES).max(1);
    let counts = || (step..blocks).step_by(step).chain([blocks]);
    let choices = KINDS
        .iter()
        .flat_map(|kind| counts().map(move |n| (*kind, n)));
    let mut least = u64::MAX;
    for (kind, count) in [("none", 0)].into_iter().chain(choices) {
        let mut fitting = options.clone();
        let values = [
            ("recompute", kind.to_string()),
            ("recompute-blocks", count.to_string()),
        ];
        for (name, value) in values {
            let setting = fitting.model.setting(name).expect("check_memory found it");
            setting.field.set(&value).map_err(Error::Internal)?;
        }
        let (model, step) = planned::plan(&fitting, data, world, devices)?;
        let needed = if devices[0].is_accelerator() {
            model.on_device() + step.total()
        } else {
            model.total() + step.total()
        };
        least = least.min(needed);
        if needed > allowed {
            continue;
        }
        if world.rank() == 0 {
            let what = match count {
                0 => "nothing is computed again".to_string(),
                _ => format!("{RECOMPUTE} {kind} in {count} of {blocks} blocks"),
            };
            let [needed, allowed] = [needed, allowed].map(|bytes| megabytes(bytes as f64 / 1e6));
            tracing::info!("{what}: a rank needs {needed} of the {allowed} of {MEMORY}");
        }
        return Ok(Cow::Owned(fitting));
    }
    let [least, allowed] = [least, allowed].map(|bytes| megabytes(bytes as f64 / 1e6));
    Err(Error::Usage(format!(
        "{MEMORY}: expected at least {least}, which a rank needs if all blocks compute again, got \
         {allowed}; help: give a smaller {MICRO_BATCH}, or {ZERO} 1 or 2 with several ranks"
    )))
}
