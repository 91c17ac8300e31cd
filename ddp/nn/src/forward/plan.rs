//! From a trace to what runs: which operations share a pass over memory, and which values backward
//! computes again.
//!
//! Elementwise operations of one shape and sums of its last axes become a chain. Values within a
//! chain are not in memory: where backward needs one, it is computed again from what is. Values of
//! matmuls, sums and operations with kernels of their own are kept. Permuted, sliced and repeated
//! values are read where they lie.

use std::cell::Cell;
use std::collections::HashMap;

use ddp_kernels::Tensor;

use super::kinds::kinds;
use super::op::{Activate, Cast, Op, Role, Sum};
use super::trace::{NumberKind, TraceNode};
use crate::error::Result;
use crate::scratch::ScratchPool;

#[derive(Debug)]
pub(super) struct PlannedRun {
    pub(super) op: Op,
    /// The operation for which it runs.
    pub(super) of: usize,
    pub(super) outputs: Vec<usize>,
    pub(super) inputs: Vec<usize>,
    /// Whether its first output is in the memory of its first input.
    pub(super) is_in_place: bool,
    /// Values that nothing reads after it.
    pub(super) last: Vec<usize>,
    /// Whether it serves the gradient of the input alone.
    pub(super) is_for_input: bool,
    /// The sums of blocks of rows of its first output, or those that it reads.
    pub(super) sums: Option<usize>,
    /// Whether it has run: the first run of a `CustomOp` is checked.
    pub(super) has_run: Cell<bool>,
}

/// A forward, and in training its backward.
#[derive(Debug)]
pub(super) struct PassPlan {
    pub(super) nodes: Vec<TraceNode>,
    pub(super) forward: Vec<PlannedRun>,
    pub(super) backward: Vec<PlannedRun>,
    /// What forward keeps for backward.
    pub(super) kept: Vec<usize>,
    pub(super) ends: Ends,
    /// What the numbers of each value are, and which memory they are in.
    pub(super) kinds: Vec<NumberKind>,
    pub(super) pools: Vec<ScratchPool>,
    /// Numbers of the forward, on the model's device, in order of values.
    pub(super) numbers: Vec<(usize, Tensor)>,
    /// Which buffer of its pool each value had last.
    pub(super) buffers: Vec<Cell<Option<usize>>>,
    /// How many nodes were traced; those after them are computed again, or parts.
    pub(super) traced: usize,
}

/// The values at the ends of a forward and its backward.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ends {
    /// The input.
    pub(super) x: usize,
    /// The output.
    pub(super) y: usize,
    /// The gradient of the output.
    pub(super) dy: Option<usize>,
    /// That of the input.
    pub(super) dx: Option<usize>,
}

impl Ends {
    /// Replaces values that are the same as their input by that.
    fn skip(&mut self, nodes: &mut [TraceNode], is_same: impl Fn(&TraceNode) -> bool) {
        let mut real: Vec<usize> = (0..nodes.len()).collect();
        for (id, node) in nodes.iter_mut().enumerate() {
            node.inputs.iter_mut().for_each(|it| *it = real[*it]);
            if is_same(node) {
                real[id] = node.inputs[0];
            }
        }
        let Ends { x, y, dy, dx } = self;
        let all = [x, y].into_iter().chain(dy).chain(dx);
        all.for_each(|it| *it = real[*it]);
    }
}

/// Operations in one pass over memory.
#[derive(Debug)]
pub(super) struct FusedGroup {
    pub(super) nodes: Vec<usize>,
    pub(super) dims: Vec<usize>,
    /// The axes that its sums and maxima are over.
    pub(super) axes: Vec<usize>,
}

pub(super) enum PlanPart {
    Group(FusedGroup),
    Single(usize),
}

pub(super) struct Planner {
    pub(super) nodes: Vec<TraceNode>,
    pub(super) kinds: Vec<NumberKind>,
    /// Which values something needs.
    pub(super) live: Vec<bool>,
    /// Within which other operation each runs.
    pub(super) into: Vec<Option<usize>>,
    /// Which values will be in memory.
    pub(super) stored: Vec<bool>,
    /// Which values are in memory after the runs so far.
    pub(super) made: Vec<bool>,
    pub(super) runs: Vec<PlannedRun>,
    pub(super) how: PlanFor,
}

/// What is planned for.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlanFor {
    pub(super) is_training: bool,
    pub(super) is_cpu: bool,
    /// Whether layers compute in bf16.
    pub(super) is_bf16: bool,
    /// Of a loss all but the gradient of the output is in the dtype of sums.
    pub(super) is_loss: bool,
}

/// Plans a trace of which the first `forward` nodes are the forward.
pub(super) fn plan(
    mut nodes: Vec<TraceNode>,
    forward: usize,
    mut ends: Ends,
    how: PlanFor,
) -> Result<PassPlan> {
    // What stops gradients is nothing else.
    ends.skip(&mut nodes, |node| node.op.role() == Role::Same);
    // What leaves a part that is computed again is kept.
    for id in 0..forward {
        for input in nodes[id].inputs.clone() {
            if nodes[input].again != nodes[id].again {
                nodes[input].again = None;
            }
        }
    }
    nodes[ends.y].again = None;
    for id in 0..forward {
        if nodes[id].op.role() == Role::Output {
            nodes[id].again = nodes[nodes[id].inputs[0]].again.and(nodes[id].again);
        }
    }
    let mut planner = Planner {
        kinds: kinds(&nodes),
        live: Vec::new(),
        into: vec![None; nodes.len()],
        stored: vec![false; nodes.len()],
        made: vec![false; nodes.len()],
        nodes,
        runs: Vec::new(),
        how,
    };
    // Casts to the layers' dtype of values that have it.
    ends.skip(&mut planner.nodes, |node| {
        let is_rounded =
            |id: usize| how.is_bf16 && planner.kinds[id] == NumberKind::SumDtypeReadRounded;
        matches!(node.op, Op::Cast(Cast(NumberKind::LayerDtype))) && !is_rounded(node.inputs[0])
    });
    let Ends { y, dx, .. } = ends;
    if how.is_loss {
        let layers = planner.kinds.iter_mut().enumerate();
        let is_wide = |kind: NumberKind| {
            matches!(
                kind,
                NumberKind::LayerDtype | NumberKind::SumDtypeReadRounded
            )
        };
        let sums = layers.filter(|(id, kind)| is_wide(**kind) && Some(*id) != dx);
        sums.for_each(|(_, kind)| *kind = NumberKind::SumDtype);
    }
    planner.live = planner.find_live([Some(y), dx]);
    let is_live = |planner: &Planner, id: &usize| planner.live[*id];
    let end = planner.nodes.len();
    let order: Vec<usize> = (0..forward).filter(|id| is_live(&planner, id)).collect();
    planner.fuse(&order, &[Some(y)]);
    let parts = planner.parts(&order);
    planner.demand_inputs(&parts);
    planner.demand(y);
    let order: Vec<usize> = (forward..end).filter(|id| is_live(&planner, id)).collect();
    let (order, moved) = planner.with_forward(&order, forward);
    let dx = dx.map(|dx| moved.get(&dx).copied().unwrap_or(dx));
    ends.dx = dx;
    planner.fuse(&order, &[dx]);
    let backward_parts = planner.parts(&order);
    planner.demand_inputs(&backward_parts);
    dx.into_iter().for_each(|dx| planner.demand(dx));
    planner.emit(parts)?;
    planner.ensure(y)?;
    let forward_runs = std::mem::take(&mut planner.runs);
    planner.emit(backward_parts)?;
    dx.map_or(Ok(()), |dx| planner.ensure(dx))?;
    if !how.is_cpu {
        planner.leave_sums();
    }
    let mut plan = PassPlan {
        forward: forward_runs,
        backward: planner.runs,
        kept: Vec::new(),
        nodes: planner.nodes,
        ends,
        kinds: planner.kinds,
        pools: Vec::new(),
        numbers: Vec::new(),
        buffers: Vec::new(),
        traced: end,
    };
    plan.buffers.resize_with(plan.nodes.len(), Cell::default);
    plan.free();
    plan.choose_pools(how);
    Ok(plan)
}

impl Planner {
    pub(super) fn node(&self, id: usize) -> &TraceNode {
        &self.nodes[id]
    }

    pub(super) fn role(&self, id: usize) -> Role {
        self.node(id).op.role()
    }

    pub(super) fn shape(&self, id: usize) -> &[usize] {
        &self.nodes[id].shape
    }

    pub(super) fn count(&self, id: usize) -> usize {
        self.shape(id).iter().product()
    }

    /// What is needed for the ends and the gradients.
    fn find_live(&self, ends: [Option<usize>; 2]) -> Vec<bool> {
        let mut live = vec![false; self.nodes.len()];
        ends.into_iter().flatten().for_each(|id| live[id] = true);
        for id in (0..self.nodes.len()).rev() {
            let node = self.node(id);
            live[id] |= node.op.role() == Role::End;
            if live[id] {
                node.inputs.iter().for_each(|&input| live[input] = true);
            }
        }
        live
    }

    /// A sum of all rows of its input, which has an operation of its own.
    pub(super) fn is_columns(&self, id: usize) -> bool {
        let Op::Sum(Sum(axes)) = &self.node(id).op else {
            return false;
        };
        let shape = self.shape(self.node(id).inputs[0]);
        let kept: Vec<usize> = (0..shape.len())
            .filter(|at| !axes.contains(at) && shape[*at] != 1)
            .collect();
        (!kept.is_empty() || !axes.contains(&(shape.len() - 1)))
            && axes
                .iter()
                .all(|&axis| shape[axis] == 1 || kept.iter().all(|&at| at > axis))
    }

    pub(super) fn is_fusable(&self, id: usize) -> bool {
        matches!(self.role(id), Role::Elementwise | Role::Reduction)
            && !self.is_columns(id)
            && !self.has_within(id)
    }

    /// Made only when something asks for it.
    pub(super) fn is_on_demand(&self, id: usize) -> bool {
        matches!(self.role(id), Role::View | Role::Reshape) || self.is_columns(id)
    }

    /// What an operation that is made on demand comes from.
    pub(super) fn base(&self, mut id: usize) -> usize {
        while self.is_on_demand(id) || self.role(id) == Role::Output {
            id = self.node(id).inputs[0];
        }
        id
    }

    /// The matrix whose column sum this gradient is, if it is one.
    pub(super) fn columns_of(&self, id: usize) -> Option<usize> {
        let (Op::Gradient(_), [input]) = (&self.node(id).op, &self.node(id).inputs[..]) else {
            return None;
        };
        let mut sum = *input;
        while self.role(sum) == Role::Reshape {
            sum = self.node(sum).inputs[0];
        }
        self.is_columns(sum).then(|| self.node(sum).inputs[0])
    }

    /// The order of a backward with what it needs of the forward and is not in memory, computed
    /// again; and where copies are.
    fn with_forward(
        &mut self,
        order: &[usize],
        forward: usize,
    ) -> (Vec<usize>, HashMap<usize, usize>) {
        let (mut all, mut copies) = (Vec::new(), HashMap::new());
        for &id in order {
            for at in 0..self.node(id).inputs.len() {
                let input = self.node(id).inputs[at];
                self.nodes[id].inputs[at] = self.brought(input, forward, &mut all, &mut copies);
            }
            all.push(id);
        }
        (all, copies)
    }

    fn brought(
        &mut self,
        id: usize,
        forward: usize,
        all: &mut Vec<usize>,
        copies: &mut HashMap<usize, usize>,
    ) -> usize {
        if id >= forward || self.role(id) == Role::Leaf {
            return id;
        }
        if let Some(&copy) = copies.get(&id) {
            return copy;
        }
        let role = self.role(id);
        let is_kept = if let Op::Activate(Activate(activation)) = self.node(id).op {
            // The derivative needs its input anyway. In bf16 that is rounded, so that the value
            // would be another one: near enough for a matmul, not for a comparison.
            !activation.keeps_input()
                || !self.how.is_cpu
                || self.how.is_bf16 && !self.feeds_matmuls(id)
        } else {
            let is_cheap = matches!(role, Role::Elementwise | Role::Reshape | Role::View);
            self.stored[id] || !is_cheap
        };
        if is_kept && self.node(id).again.is_none() {
            self.demand(id);
            return id;
        }
        let mut node = self.node(id).clone();
        for input in &mut node.inputs {
            *input = self.brought(*input, forward, all, copies);
        }
        // What was rounded to memory is again, and what was not is not.
        let is_rounded = self.stored[id];
        let kind = match (role, self.kinds[id]) {
            (Role::Elementwise, NumberKind::LayerDtype) if !is_rounded => {
                NumberKind::SumDtypeReadRounded
            }
            (Role::Reshape | Role::View, NumberKind::LayerDtype) if !is_rounded => {
                self.kinds[node.inputs[0]]
            }
            (_, kind) => kind,
        };
        let copy = self.add(node, kind);
        self.stored[copy] = is_rounded;
        all.push(copy);
        copies.insert(id, copy);
        copy
    }

    /// Whether only matmuls read this value.
    fn feeds_matmuls(&self, id: usize) -> bool {
        let mut readers = self.nodes.iter().filter(|it| it.inputs.contains(&id));
        readers.all(|it| matches!(it.op, Op::Linear(_) | Op::LinearWeight(_)))
    }

    /// One more node.
    pub(super) fn add(&mut self, node: TraceNode, kind: NumberKind) -> usize {
        self.nodes.push(node);
        self.kinds.push(kind);
        self.live.push(true);
        self.into.push(None);
        self.stored.push(false);
        self.made.push(false);
        self.nodes.len() - 1
    }
}
