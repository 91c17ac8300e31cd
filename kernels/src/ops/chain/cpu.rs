//! A chain on the CPU: each step is a loop over a block of values, which the first cache holds;
//! runs of light steps are one loop of machine code (`machine_code.rs`).
//!
//! A row that is longer than a block is run through once for each sum or maximum of it and once to
//! store, each time from its inputs.

use std::ptr::null_mut;

use super::functions::{Math, StepInput, apply, reduce, reduced};
use super::loops::{self, Loop, LoopOperand, Loops, WIDTH};
use super::machine_code::{NUMBERS, StepNumbers, compile};
use super::steps::{
    Chain, ChainStep, ChainView, DIMENSIONS_MAX, LIVE_MAX, OPERANDS_MAX, OperandsInOrder,
    STEPS_MAX, is_whole,
};
use crate::DType;
use crate::dtype::bf16;
use crate::ops::call::Buffer;
use crate::ops::float::LANES;
use crate::simd::{Level, level};
use crate::threads::{self, Shares};

/// Values of a block.
const BLOCK: usize = 1024;

/// A block of values, at the start of a cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct BlockSlot<T>([T; BLOCK]);

/// The elements of an input.
enum Input<'a, T> {
    Own(&'a [T]),
    Half(&'a [bf16]),
}

/// The elements of an output.
enum ChainOutput<'a, T> {
    Own(Shares<'a, T>),
    Half(Shares<'a, bf16>),
}

/// Calls `body(offset in the block, first element, stride, length)` for each stretch of elements
/// of `view` from index `start` on.
#[inline(always)]
fn stretches(
    dims: &[usize],
    view: &ChainView,
    start: usize,
    len: usize,
    mut body: impl FnMut(usize, usize, usize, usize),
) {
    let Some((&last, outer)) = dims.split_last() else {
        return body(0, view.offset, 0, len);
    };
    let (strides, stride) = (&view.strides[..outer.len()], view.strides[outer.len()]);
    let mut index = [0; DIMENSIONS_MAX];
    let (mut rest, mut column) = (start / last, start % last);
    let mut base = view.offset;
    for (at, &length) in outer.iter().enumerate().rev() {
        index[at] = rest % length;
        rest /= length;
        base += index[at] * strides[at];
    }
    let mut done = 0;
    while done < len {
        let length = (last - column).min(len - done);
        body(done, base + column * stride, stride, length);
        done += length;
        column = 0;
        for (at, &length) in outer.iter().enumerate().rev() {
            index[at] += 1;
            base += strides[at];
            if index[at] < length {
                break;
            }
            base -= index[at] * strides[at];
            index[at] = 0;
        }
    }
}

/// Fills `out` with the elements of `view` from index `start` on.
fn load<T: Math>(x: &Input<'_, T>, dims: &[usize], view: &ChainView, start: usize, out: &mut [T]) {
    stretches(dims, view, start, out.len(), |at, first, stride, length| {
        let out = &mut out[at..at + length];
        match (x, stride) {
            (Input::Own(x), 1) => out.copy_from_slice(&x[first..first + length]),
            (Input::Own(x), 0) => out.fill(x[first]),
            (Input::Own(x), _) => {
                for (at, out) in out.iter_mut().enumerate() {
                    *out = x[first + at * stride];
                }
            }
            (Input::Half(x), _) => {
                for (at, out) in out.iter_mut().enumerate() {
                    *out = T::from_bf16(x[first + at * stride]);
                }
            }
        }
    });
}

/// Writes a block of values to the elements of `view` from index `start` on.
fn store<T: Math>(
    out: &ChainOutput<'_, T>,
    dims: &[usize],
    view: &ChainView,
    start: usize,
    (x, len): (StepInput<'_, T>, usize),
) {
    fn write<T: Copy, U>(
        out: &Shares<'_, U>,
        x: StepInput<'_, T>,
        to: impl Fn(T) -> U,
        [at, first, stride, length]: [usize; 4],
    ) {
        for step in 0..length {
            let place = first + step * stride;
            let x = match x {
                StepInput::Many(x) => x[at + step],
                StepInput::One(x) => x,
            };
            // SAFETY: `Chain::new` found that no two indices have the same place, and each index
            // is in one block of one thread.
            let out = unsafe { out.part(place..place + 1) };
            out[0] = to(x);
        }
    }
    stretches(dims, view, start, len, |at, first, stride, length| {
        match (out, x) {
            (ChainOutput::Own(out), StepInput::Many(x)) if stride == 1 => {
                // SAFETY: as in `write`.
                unsafe { out.part(first..first + length) }.copy_from_slice(&x[at..at + length]);
            }
            (ChainOutput::Own(out), x) => write(out, x, |x| x, [at, first, stride, length]),
            (ChainOutput::Half(out), x) => write(out, x, T::to_bf16, [at, first, stride, length]),
        }
    });
}

/// The values of a thread: of the index space by slot, and those that are one for a row by step.
struct Machine<'a, T, const SLOTS: usize> {
    chain: &'a Chain,
    inputs: &'a [Option<Input<'a, T>>; OPERANDS_MAX],
    outputs: &'a [Option<ChainOutput<'a, T>>; OPERANDS_MAX],
    in_order: OperandsInOrder,
    loops: Option<&'a Loops>,
    slots: [&'a mut [T]; SLOTS],
    wide: StepNumbers<T>,
}

impl<T: Math, const SLOTS: usize> Machine<'_, T, SLOTS> {
    /// The value of a step in the block.
    fn values(&self, step: usize, start: usize, len: usize) -> StepInput<'_, T> {
        if self.chain.is_row_wide[step] {
            return StepInput::One(self.wide[step][0]);
        }
        if let ChainStep::Load(load) = self.chain.steps[step]
            && let Some(x) = self.direct(load, start, len)
        {
            return StepInput::Many(x);
        }
        StepInput::Many(&self.slots[self.chain.slots[step]][..len])
    }

    /// The elements themselves of an input that is read in order.
    fn direct(&self, load: usize, start: usize, len: usize) -> Option<&[T]> {
        match &self.inputs[load] {
            Some(Input::Own(x)) if self.in_order[load] => {
                Some(&x[self.chain.loads[load].offset + start..][..len])
            }
            _ => None,
        }
    }

    /// Runs a loop of machine code over the block of `len` elements from `start` on.
    fn run_loop(&mut self, loops: &Loops, of: &Loop, start: usize, len: usize) {
        let mut operands = [null_mut(); loops::OPERANDS_MAX];
        for (to, operand) in operands.iter_mut().zip(&of.operands) {
            let elements = match *operand {
                LoopOperand::Slot(slot) => self.slots[slot][..len].as_mut_ptr(),
                LoopOperand::Load(load) => match self.direct(load, start, len) {
                    Some(x) => x.as_ptr().cast_mut(),
                    None => unreachable!("the input is in order"),
                },
                LoopOperand::Store(store) => match &self.outputs[store] {
                    Some(ChainOutput::Own(out)) => {
                        let first = self.chain.stores[store].offset + start;
                        // SAFETY: as in `write`.
                        unsafe { out.part(first..first + len) }.as_mut_ptr()
                    }
                    _ => unreachable!("the output is in order"),
                },
            };
            *to = elements.cast::<f32>();
        }
        // SAFETY: `run_with` has loops for these operands only where `T` is f32 and the processor
        // has AVX2, and `blocks` runs one of them for lengths that fit. Each operand has `len`
        // elements, as sliced above.
        unsafe { loops.run(of, &operands, self.wide.as_ptr().cast(), len) };
    }

    /// Runs a step over the block of `len` elements from `start` on.
    fn step(&mut self, step: usize, start: usize, len: usize) {
        let chain = self.chain;
        let is_wide = chain.is_row_wide[step];
        let slot = chain.slots[step];
        match chain.steps[step] {
            ChainStep::Constant(value) => self.wide[step] = [T::from_f64(value); WIDTH],
            ChainStep::Load(number) => {
                let Some(x) = &self.inputs[number] else {
                    return;
                };
                let view = &chain.loads[number];
                if is_wide {
                    let mut out = [T::ZERO];
                    load(x, &chain.dims, view, start, &mut out);
                    self.wide[step] = [out[0]; WIDTH];
                } else if self.direct(number, start, len).is_none() {
                    load(x, &chain.dims, view, start, &mut self.slots[slot][..len]);
                }
            }
            ChainStep::Apply(function, [a, b, c]) => {
                let arguments = function.arguments();
                let [b, c] = [(b, 1), (c, 2)].map(|(it, at)| if at < arguments { it } else { a });
                if is_wide {
                    let mut out = [T::ZERO];
                    let [a, b, c] = [a, b, c].map(|it| StepInput::One(self.wide[it][0]));
                    apply(function, &mut out, a, b, c);
                    self.wide[step] = [out[0]; WIDTH];
                } else {
                    // No argument has the slot of the result.
                    let out = std::mem::take(&mut self.slots[slot]);
                    let [a, b, c] = [a, b, c].map(|it| self.values(it, start, len));
                    apply(function, &mut out[..len], a, b, c);
                    self.slots[slot] = out;
                }
            }
            ChainStep::Sum(_) | ChainStep::Max(_) => {}
            ChainStep::Store(number, value) => {
                let (view, x) = (&chain.stores[number], self.values(value, start, len));
                if let Some(out) = &self.outputs[number] {
                    let len = if is_wide { 1 } else { len };
                    store(out, &chain.dims, view, start, (x, len));
                }
            }
        }
    }

    /// Runs the chain over a row.
    fn row(&mut self, start: usize, length: usize) {
        let chain = self.chain;
        let mut from = 0;
        for (at, step) in chain.steps.iter().enumerate() {
            let (ChainStep::Sum(value) | ChainStep::Max(value)) = *step else {
                continue;
            };
            let adds = matches!(step, ChainStep::Sum(_));
            let first = if adds { T::ZERO } else { T::NEG_INFINITY };
            let mut lanes = [first; LANES];
            self.blocks(start, length, from, at, |machine, start, len| {
                reduce(&mut lanes, machine.values(value, start, len), len, adds);
            });
            self.wide[at] = [reduced(lanes, adds); WIDTH];
            from = at + 1;
        }
        self.blocks(start, length, from, chain.steps.len(), |_, _, _| {});
    }

    /// Runs the steps in `from..to` over a row's blocks, and those before `from` again where the
    /// row has several.
    fn blocks(
        &mut self,
        start: usize,
        length: usize,
        from: usize,
        to: usize,
        mut body: impl FnMut(&Self, usize, usize),
    ) {
        let chain = self.chain;
        let is_last = to == chain.steps.len();
        for first in (0..length).step_by(BLOCK) {
            let (start, len) = (start + first, (length - first).min(BLOCK));
            if first == 0 {
                for step in (from..to).filter(|it| chain.is_row_wide[*it]) {
                    self.step(step, start, len);
                }
            }
            // Those before `from` again where the row has several blocks.
            let mut step = if length > BLOCK { 0 } else { from };
            while step < to {
                if let Some(loops) = self.loops
                    && let Some(of) = loops.at(step)
                    && len.is_multiple_of(WIDTH)
                {
                    self.run_loop(loops, of, start, len);
                    step = of.steps.end;
                    continue;
                }
                let is_store = matches!(chain.steps[step], ChainStep::Store(..));
                let waits = is_store && length > BLOCK && !is_last;
                if !chain.is_row_wide[step] && !waits {
                    self.step(step, start, len);
                }
                step += 1;
            }
            body(self, start, len);
        }
    }
}

/// Runs a chain whose index space is not empty.
pub(super) fn run<T: Math>(
    chain: &Chain,
    outputs: &mut [Option<Buffer<'_>>],
    inputs: &[Option<Buffer<'_>>],
) {
    let mut reads = [const { None }; OPERANDS_MAX];
    for (to, buffer) in reads.iter_mut().zip(inputs.iter().flatten()) {
        *to = Some(match buffer.dtype {
            DType::BF16 => Input::Half(buffer.elements()),
            _ => Input::Own(buffer.elements()),
        });
    }
    let mut writes = [const { None }; OPERANDS_MAX];
    for (to, buffer) in writes.iter_mut().zip(outputs.iter_mut().flatten()) {
        *to = Some(match buffer.dtype {
            DType::BF16 => ChainOutput::Half(Shares::new(buffer.elements_mut())),
            _ => ChainOutput::Own(Shares::new(buffer.elements_mut())),
        });
    }
    match chain.live {
        0..=4 => run_with::<T, 4>(chain, &reads, &writes),
        5..=8 => run_with::<T, 8>(chain, &reads, &writes),
        _ => run_with::<T, { LIVE_MAX }>(chain, &reads, &writes),
    }
}

fn run_with<T: Math, const SLOTS: usize>(
    chain: &Chain,
    inputs: &[Option<Input<'_, T>>; OPERANDS_MAX],
    outputs: &[Option<ChainOutput<'_, T>>; OPERANDS_MAX],
) {
    let count: usize = chain.dims.iter().product();
    let row = if chain.row > 0 {
        chain.row_length()
    } else {
        BLOCK
    };
    let is_own = |at: usize| match at.checked_sub(chain.loads.len()) {
        None => matches!(inputs[at], Some(Input::Own(_))),
        Some(store) => matches!(outputs[store], Some(ChainOutput::Own(_))),
    };
    let mut in_order = [false; OPERANDS_MAX];
    let views = chain.loads.iter().chain(&chain.stores);
    for (at, (to, view)) in in_order.iter_mut().zip(views).enumerate() {
        let is_line = chain.dims.len() == 1 && view.strides[0] == 1;
        *to = is_own(at) && (is_line || is_whole(view, &chain.dims));
    }
    // Those of other operands do not fit.
    let loops = (T::DTYPE == DType::F32 && level() >= Level::Avx2)
        .then(|| {
            chain
                .loops
                .get_or_init(|| Box::new((in_order, compile(chain, &in_order))))
        })
        .and_then(|it| (it.0 == in_order).then_some(&it.1));
    let mut wide = [[T::ZERO; WIDTH]; STEPS_MAX + NUMBERS.len()];
    for (to, number) in wide[STEPS_MAX..].iter_mut().zip(NUMBERS) {
        *to = [T::from_f64(number); WIDTH];
    }
    threads::split(count, row, |range| {
        let mut blocks = [BlockSlot([T::ZERO; BLOCK]); SLOTS];
        let mut machine = Machine::<T, SLOTS> {
            chain,
            inputs,
            outputs,
            in_order,
            loops,
            slots: blocks.each_mut().map(|block| &mut block.0[..]),
            wide,
        };
        for start in range.clone().step_by(row) {
            machine.row(start, (range.end - start).min(row));
        }
    });
}
