//! Whether an operation by hand writes its outputs.

use ddp_kernels::transfer::announced;
use ddp_kernels::{DType, Device, Tensor, ops};

use super::trace::{Op, TraceNode};
use crate::error::{Error, Result};

/// How many elements the host looks at in one go.
const CHECKED_AT_ONCE: usize = 1 << 20;

/// What outputs hold before their first run: exact in each dtype, and very unlikely as a result.
const UNWRITTEN: f64 = -175.0 * (1u128 << 120) as f64;

/// Runs `write`, which is refused if it leaves elements of `outputs` as they were.
pub(super) fn must_write(
    node: &TraceNode,
    outputs: &[&Tensor],
    write: impl FnOnce() -> Result<()>,
) -> Result<()> {
    if outputs.iter().any(|it| it.device().is_planned()) {
        return write();
    }
    for output in outputs {
        ops::fill_into(output, UNWRITTEN)?;
    }
    write()?;
    for (at, output) in outputs.iter().enumerate() {
        let (all, count) = (output.flatten()?, output.count());
        let mut left = 0;
        for start in (0..count).step_by(CHECKED_AT_ONCE) {
            let part = all.slice(start..(start + CHECKED_AT_ONCE).min(count))?;
            let values: Vec<f64> = announced("first outputs of an own operation", || {
                part.to(Device::Cpu)?.to_dtype(DType::F64)?.to_vec()
            })?;
            left += values.iter().filter(|it| **it == UNWRITTEN).count();
        }
        if left > 0 {
            let (what, op) = match &node.op {
                Op::CustomBackward(op) => (format!("backward: gradient {at}"), op),
                Op::Custom(op) => ("forward: out".to_string(), op),
                _ => continue,
            };
            return Err(Error::model(
                format!("{op:?}: {what}"),
                format!("all {count} elements to be written"),
                format!("{left} unwritten"),
                "write zeros, too: outputs are not cleared before",
            ));
        }
    }
    Ok(())
}
