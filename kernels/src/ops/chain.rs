//! Chains of elementwise steps in one pass over memory, with sums and maxima of rows in between.
//!
//! A chain is made of steps over an index space: load an element, compute, sum a row, store. Each
//! operand has a view, an offset and strides over the index space, so that broadcasting, slices
//! and permutations are read where they lie. With `row` last dimensions as rows, `ChainStep::Sum`
//! and `ChainStep::Max` reduce a row to a number that later steps use: softmax and layer norm are
//! one read and one write.
//!
//! On the CPU (`cpu.rs`) a chain runs over blocks that stay in the first cache; on x86-64 with AVX2
//! light steps run as machine code that is made from them (`machine_code.rs`). On a GPU it is a
//! kernel whose text `cuda.rs` makes from the steps. Both compute in f32 with the same bits (f64 on
//! the CPU for checks). A row is summed in 32 lanes, element i in lane i % 32, and the lanes as a
//! tree. Operands may also be bf16, which is read exactly and rounded once when stored.

mod cpu;
mod cuda;
mod functions;
mod loops;
mod machine_code;
mod steps;

pub use steps::{Chain, ChainStep, ChainView, Function};

use crate::error::Result;
use crate::launch::Grid;
use crate::ops::call::{OpCall, Versions, with_float};
use crate::{DType, Tensor};
use steps::OPERANDS_MAX;

/// f32 and bf16; f64 on the CPU.
const DTYPES: Versions = Versions {
    cpu: &[DType::F32, DType::BF16, DType::F64],
    cuda: &[DType::F32, DType::BF16],
};

/// Runs the chain: reads `inputs`, writes `outputs`, none of which may share memory with another
/// operand. Elements that no store reaches stay as they are.
///
/// Backward: none; nn's modules make the chain of the derivative.
#[track_caller]
pub fn chain_into(chain: &Chain, outputs: &[&Tensor], inputs: &[&Tensor]) -> Result<()> {
    let mut call = OpCall::new(chain.name);
    if [inputs.len(), outputs.len()] != chain.operands() {
        let got = format!("{} and {}", inputs.len(), outputs.len());
        let [loads, stores] = chain.operands();
        return Err(call.value("inputs and outputs", format!("{loads} and {stores}"), got));
    }
    let mut slots = [None; OPERANDS_MAX];
    let is_empty = chain.dims.contains(&0);
    let views = chain.stores.iter().chain(&chain.loads);
    for (at, (view, tensor)) in views.zip(outputs.iter().chain(inputs)).enumerate() {
        let slot = if at < outputs.len() {
            call.writes("out", tensor)
        } else {
            call.reads("x", tensor)
        };
        slots[at] = Some(slot);
        call.row_major(slot)?;
        if !is_empty && view.end(&chain.dims).is_none_or(|end| end > tensor.count()) {
            let expected = format!("room for the elements of {:?}", chain.dims);
            return Err(call.operand_error(slot, expected, "give a tensor of the traced shape"));
        }
    }
    let slots_in_use = &slots[..outputs.len() + inputs.len()];
    let Some(first) = slots_in_use.iter().flatten().next().copied() else {
        return Ok(());
    };
    let is_wide = call.tensor(first).dtype() == DType::F64;
    for &slot in slots_in_use.iter().flatten() {
        let dtypes: &[DType] = if is_wide {
            &[DType::F64]
        } else {
            &[DType::F32, DType::BF16]
        };
        call.has_dtype(slot, dtypes)?;
    }
    call.run(first, &DTYPES, |placed| {
        let mut buffers = [const { None }; OPERANDS_MAX];
        for (buffer, slot) in buffers.iter_mut().zip(slots) {
            *buffer = placed.enter_some(slot)?;
        }
        if is_empty {
            return Ok(());
        }
        let (out, x) = buffers.split_at_mut(outputs.len());
        if let Some(gpu) = placed.gpu() {
            let count: usize = chain.dims.iter().product();
            let (grid, units) = match chain.row {
                0 => (Grid::elements(count), count),
                _ => {
                    let rows = count / chain.row_length();
                    (
                        Grid::blocks(rows.div_ceil(8), 256, chain.row_length().div_ceil(32)),
                        rows,
                    )
                }
            };
            let mut dtypes = [DType::F32; OPERANDS_MAX];
            for (dtype, &slot) in dtypes.iter_mut().zip(slots_in_use.iter().flatten()) {
                *dtype = placed.tensor(slot).dtype();
            }
            let mut args = [0; OPERANDS_MAX + 1];
            let operands = out.iter().chain(x.iter()).flatten();
            let views = chain.stores.iter().chain(&chain.loads).zip(&dtypes);
            for (arg, (buffer, (view, dtype))) in args.iter_mut().zip(operands.zip(views)) {
                *arg = buffer.address() + (view.offset * dtype.bytes()) as u64;
            }
            let used = slots_in_use.len();
            args[used] = units as u64;
            let source = chain.source(dtypes);
            return gpu.launch(source, source.name(), grid, &args[..=used]);
        }
        with_float!(placed.dtype, T => cpu::run::<T>(chain, out, x));
        Ok(())
    })
}

#[cfg(test)]
mod tests;
