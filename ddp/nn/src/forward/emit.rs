//! The runs of a plan: chains of the operations that share a pass over memory, copies where a value
//! must lie in order, and operations one by one.

use std::cell::Cell;
use std::collections::HashMap;

use ddp_kernels::ops::{Chain, ChainStep, ChainView, Function};

use super::plan::{Action, FusedGroup, PlanPart, PlannedRun, Planner};
use super::trace::{Kind, Op};
use crate::error::Result;

/// Strides of a whole tensor.
fn whole(shape: &[usize]) -> Vec<usize> {
    ChainView::whole(shape).strides
}

/// `strides` of a value of this shape within an index space of more axes, or longer ones.
fn within(shape: &[usize], strides: &[usize], dims: &[usize]) -> Vec<usize> {
    let missing = dims.len() - shape.len();
    let mut all = vec![0; dims.len()];
    for (at, (&length, &stride)) in shape.iter().zip(strides).enumerate() {
        all[missing + at] = if length == 1 { 0 } else { stride };
    }
    all
}

impl Planner {
    pub(super) fn emit(&mut self, parts: Vec<PlanPart>) -> Result<()> {
        for part in parts {
            match part {
                PlanPart::Group(group) => self.emit_group(&group)?,
                PlanPart::Single(id) => self.emit_single(id)?,
            }
        }
        Ok(())
    }

    pub(super) fn run(
        &mut self,
        action: Action,
        of: usize,
        outputs: Vec<usize>,
        inputs: Vec<usize>,
    ) {
        outputs.iter().for_each(|&id| self.made[id] = true);
        self.runs.push(PlannedRun {
            action,
            of,
            outputs,
            inputs,
            last: Vec::new(),
            is_for_input: false,
            sums: None,
            has_run: Cell::new(false),
        });
    }

    /// Puts a value that is made on demand into memory.
    pub(super) fn ensure(&mut self, id: usize) -> Result<()> {
        if self.made[id] || !self.is_on_demand(id) {
            return Ok(());
        }
        let input = self.node(id).inputs[0];
        if self.is_view(id) {
            let shape = self.shape(id).to_vec();
            let (root, view) = self.read(id, true)?;
            let chain = copy(&shape, view, ChainView::whole(&shape))?;
            self.run(Action::Chain(chain), id, vec![id], vec![root]);
        } else {
            self.ensure(input)?;
            let action = if self.is_columns(id) {
                Action::Columns
            } else {
                Action::Reshape
            };
            self.run(action, id, vec![id], vec![input]);
        }
        Ok(())
    }

    /// The value in memory from which a chain reads `id`, and how, over the value's own shape.
    fn read(&mut self, id: usize, through: bool) -> Result<(usize, ChainView)> {
        if !self.is_view(id) || self.stored[id] && !through {
            self.ensure(id)?;
            return Ok((id, ChainView::whole(self.shape(id))));
        }
        let node = self.node(id).clone();
        let input = node.inputs[0];
        let (root, mut view) = self.read(input, false)?;
        match node.op {
            Op::Permute(axes) => {
                view.strides = axes.iter().map(|&axis| view.strides[axis]).collect()
            }
            Op::Slice(axis, start, step) => {
                view.offset += start * view.strides[axis];
                view.strides[axis] *= step;
            }
            Op::Window(axis, step) => {
                view.strides.push(view.strides[axis]);
                view.strides[axis] *= step;
            }
            _ => view.strides = within(self.shape(input), &view.strides, &node.shape),
        }
        Ok((root, view))
    }

    fn emit_group(&mut self, group: &FusedGroup) -> Result<()> {
        // Only what leads to a value in memory.
        let mut needed: Vec<usize> = group
            .nodes
            .iter()
            .copied()
            .filter(|&id| self.stored[id])
            .collect();
        let mut at = 0;
        while let Some(&id) = needed.get(at) {
            for &input in &self.nodes[id].inputs {
                if group.nodes.contains(&input) && !needed.contains(&input) {
                    needed.push(input);
                }
            }
            at += 1;
        }
        needed.sort_unstable_by_key(|id| group.nodes.iter().position(|it| it == id));
        let Some(&of) = needed.last() else {
            return Ok(());
        };
        // The axes of rows last.
        let axes = 0..group.dims.len();
        let order: Vec<usize> = axes
            .clone()
            .filter(|it| !group.axes.contains(it))
            .chain(axes.filter(|it| group.axes.contains(it)))
            .collect();
        let turned = |strides: Vec<usize>| -> Vec<usize> {
            order.iter().map(|&axis| strides[axis]).collect()
        };
        let dims = turned(group.dims.clone());
        let (mut steps, mut values) = (Vec::new(), HashMap::<usize, usize>::new());
        let (mut loads, mut stores, mut inputs, mut outputs) = (vec![], vec![], vec![], vec![]);
        for &id in &needed {
            let node = self.node(id).clone();
            for &input in &node.inputs {
                if values.contains_key(&input) {
                    continue;
                }
                steps.push(match self.node(input).op {
                    Op::Constant(value) => ChainStep::Constant(value),
                    _ => {
                        let (root, view) = self.read(input, false)?;
                        let strides = turned(within(self.shape(input), &view.strides, &group.dims));
                        let view = ChainView {
                            offset: view.offset,
                            strides,
                        };
                        loads.push(view);
                        inputs.push(root);
                        ChainStep::Load(loads.len() - 1)
                    }
                });
                values.insert(input, steps.len() - 1);
            }
            let value = |at: usize| node.inputs.get(at).map_or(0, |input| values[input]);
            match node.op {
                Op::Apply(function) => steps.push(ChainStep::Apply(function, [0, 1, 2].map(value))),
                Op::Sum(_) => steps.push(ChainStep::Sum(value(0))),
                Op::Largest(_) => steps.push(ChainStep::Max(value(0))),
                _ => {}
            }
            let mut made = if matches!(node.op, Op::Expand) {
                value(0)
            } else {
                steps.len() - 1
            };
            // The others see what is in memory.
            let is_read = || needed.iter().any(|it| self.node(*it).inputs.contains(&id));
            let is_rounded = self.how.is_bf16 && self.kinds[id] == Kind::Layers;
            if is_rounded && self.stored[id] && is_read() {
                steps.push(ChainStep::Apply(Function::Round, [made, 0, 0]));
                made = steps.len() - 1;
            }
            values.insert(id, made);
            if self.stored[id] {
                let strides = turned(within(&node.shape, &whole(&node.shape), &group.dims));
                stores.push(ChainView { offset: 0, strides });
                outputs.push(id);
                steps.push(ChainStep::Store(stores.len() - 1, made));
            }
        }
        let name = if group.axes.is_empty() {
            "chain"
        } else {
            "row_chain"
        };
        let operands = [loads, stores];
        let chain = match Chain::new(name, &dims, group.axes.len(), steps, operands) {
            Ok(chain) => chain,
            // Too many values for one: two, which pass values through memory.
            Err(_) if needed.len() > 1 => {
                let (first, second) = needed.split_at(needed.len() / 2);
                for id in second {
                    for &input in &self.nodes[*id].inputs {
                        let passes = first.contains(&input) && !self.stored[input];
                        if passes && self.kinds[input] == Kind::Layers {
                            self.kinds[input] = Kind::Exact;
                        }
                        self.stored[input] |= passes;
                    }
                }
                for nodes in [first, second] {
                    let nodes = nodes.to_vec();
                    let (dims, axes) = (group.dims.clone(), group.axes.clone());
                    self.emit_group(&FusedGroup { nodes, dims, axes })?;
                }
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        };
        self.run(Action::Chain(chain), of, outputs, inputs);
        Ok(())
    }

    fn emit_single(&mut self, id: usize) -> Result<()> {
        let node = self.node(id).clone();
        if let (Some(x), Op::Gradient(parameter)) = (self.columns_of(id), &node.op) {
            self.ensure(x)?;
            self.run(Action::GradientColumns(*parameter), id, vec![], vec![x]);
            return Ok(());
        }
        if let Op::Join(axis, starts, step) = &node.op {
            let mut strides = whole(&node.shape);
            let along = strides[*axis];
            strides[*axis] *= step;
            let (mut chains, mut inputs, mut covered) = (Vec::new(), Vec::new(), 0);
            for (&input, start) in node.inputs.iter().zip(starts) {
                let (root, view) = self.read(input, false)?;
                let to = ChainView {
                    offset: start * along,
                    strides: strides.clone(),
                };
                chains.push(copy(self.shape(input), view, to)?);
                covered += self.shape(input)[*axis];
                inputs.push(root);
            }
            let is_partial = covered < node.shape[*axis];
            self.run(Action::Join(is_partial, chains), id, vec![id], inputs);
            return Ok(());
        }
        let reads = self.reads(id);
        for &input in &reads {
            self.ensure(input)?;
        }
        if self.emit_kernel(id, reads) {
            return Ok(());
        }
        let (action, outputs) = match node.op {
            Op::MatMul(turned) => (Action::MatMul(turned), vec![id]),
            Op::Unfold(of) => (Action::Unfold(of, false), vec![id]),
            Op::Fold(of) => (Action::Unfold(of, true), vec![id]),
            Op::Custom(_) => (Action::Custom, vec![id]),
            Op::CustomBackward(_) => {
                let inputs = node.inputs.len() - 2;
                let parts = (1..inputs).filter_map(|at| self.known_part(id, at));
                (
                    Action::CustomBackward,
                    [id].into_iter().chain(parts).collect(),
                )
            }
            Op::Gradient(parameter) => (Action::Gradient(parameter), vec![]),
            Op::Finished(parameter) => (Action::Finished(parameter), vec![]),
            _ => return Ok(()),
        };
        self.run(action, id, outputs, node.inputs);
        Ok(())
    }
}

/// A chain that copies.
fn copy(dims: &[usize], from: ChainView, to: ChainView) -> Result<Chain> {
    let steps = vec![ChainStep::Load(0), ChainStep::Store(0, 0)];
    Ok(Chain::new("copy", dims, 0, steps, [vec![from], vec![to]])?)
}
