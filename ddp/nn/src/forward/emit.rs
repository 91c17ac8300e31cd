//! The runs of a plan: chains of the operations that share a pass over memory, copies where a value
//! must lie in order, and operations one by one.

use std::cell::Cell;
use std::collections::HashMap;

use ddp_kernels::ops::{self, ChainStep, ChainView, Function};

use super::operation::*;
use super::plan::{FusedGroup, PlanPart, PlannedRun, Planner};

/// Strides of a whole tensor.
fn whole(shape: &[usize]) -> Vec<usize> {
    ChainView::whole(shape).strides
}

/// `strides` of a value of this shape within an index space of more axes, or longer ones.
pub(super) fn within(shape: &[usize], strides: &[usize], dims: &[usize]) -> Vec<usize> {
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
        op: impl Into<Op>,
        of: usize,
        outputs: Vec<usize>,
        inputs: Vec<usize>,
    ) {
        outputs.iter().for_each(|&id| self.made[id] = true);
        self.runs.push(PlannedRun {
            op: op.into(),
            of,
            outputs,
            inputs,
            is_in_place: false,
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
        if self.role(id) == Role::View {
            let shape = self.shape(id).to_vec();
            let (root, view) = self.read(id, true)?;
            let chain = copy(&shape, view, ChainView::whole(&shape))?;
            self.run(Chain(chain.into()), id, vec![id], vec![root]);
        } else {
            self.ensure(input)?;
            self.run(self.node(id).op.clone(), id, vec![id], vec![input]);
        }
        Ok(())
    }

    /// The value in memory from which a chain reads `id`, and how, over the value's own shape.
    fn read(&mut self, id: usize, through: bool) -> Result<(usize, ChainView)> {
        if self.role(id) != Role::View || self.stored[id] && !through {
            self.ensure(id)?;
            return Ok((id, ChainView::whole(self.shape(id))));
        }
        let node = self.node(id).clone();
        let input = node.inputs[0];
        let (root, mut view) = self.read(input, false)?;
        node.op.look(&mut view, [self.shape(input), &node.shape]);
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
                steps.push(if let Op::Constant(Constant(value)) = self.node(input).op {
                    ChainStep::Constant(value)
                } else {
                    let (root, mut view) = self.read(input, false)?;
                    view.strides = turned(within(self.shape(input), &view.strides, &group.dims));
                    loads.push(view);
                    inputs.push(root);
                    ChainStep::Load(loads.len() - 1)
                });
                values.insert(input, steps.len() - 1);
            }
            let value = |at: usize| node.inputs.get(at).map_or(0, |input| values[input]);
            steps.extend(node.op.step([0, 1, 2].map(value)));
            let mut made = if node.op.role() == Role::View {
                value(0)
            } else {
                steps.len() - 1
            };
            // The others see what is in memory.
            let is_read = || needed.iter().any(|it| self.node(*it).inputs.contains(&id));
            let is_rounded = self.how.is_bf16 && self.kinds[id] == NumberKind::LayerDtype;
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
        let chain = match ops::Chain::new(name, &dims, group.axes.len(), steps, operands) {
            Ok(chain) => chain,
            // Too many values for one: two, which pass values through memory.
            Err(_) if needed.len() > 1 => {
                let (first, second) = needed.split_at(needed.len() / 2);
                for id in second {
                    for &input in &self.nodes[*id].inputs {
                        let passes = first.contains(&input) && !self.stored[input];
                        if passes && self.kinds[input] == NumberKind::LayerDtype {
                            self.kinds[input] = NumberKind::SumDtypeReadRounded;
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
        self.run(Chain(chain.into()), of, outputs, inputs);
        Ok(())
    }

    fn emit_single(&mut self, id: usize) -> Result<()> {
        let node = self.node(id).clone();
        if let (Some(x), Op::Gradient(Gradient(parameter))) = (self.columns_of(id), &node.op) {
            self.ensure(x)?;
            let by = GradientBy(*parameter, Box::new(Sum(vec![]).into()));
            self.run(by, id, vec![], vec![x]);
            return Ok(());
        }
        if let Op::Join(Join(axis, starts, step)) = &node.op {
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
            self.run(Copies(is_partial, chains.into()), id, vec![id], inputs);
            return Ok(());
        }
        let reads = self.reads(id);
        for &input in &reads {
            self.ensure(input)?;
        }
        self.emit_whole(id, reads);
        Ok(())
    }
}

/// A chain that copies.
fn copy(dims: &[usize], from: ChainView, to: ChainView) -> Result<ops::Chain> {
    let steps = vec![ChainStep::Load(0), ChainStep::Store(0, 0)];
    let views = [vec![from], vec![to]];
    Ok(ops::Chain::new("copy", dims, 0, steps, views)?)
}

impl Operation for Chain {
    fn run(&self, r: &mut Run<'_, '_>) -> Result<()> {
        r.write_all(|r, outputs| Ok(ops::chain_into(&self.0, outputs, r.x)?))
    }
}

impl Operation for Copies {
    fn run(&self, r: &mut Run<'_, '_>) -> Result<()> {
        let out = r.take(0)?;
        if self.0 {
            ops::zero(&out)?;
        }
        let mut copies = self.1.iter().zip(r.x);
        copies.try_for_each(|(chain, x)| Ok(ops::chain_into(chain, &[&out], &[x])?))
    }
}
