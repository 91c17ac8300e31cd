//! Fusion: operations that run inside the kernel of another one.
//!
//! A linear layer applies the activation above it, and its backward multiplies the derivative of
//! the one below it in. A norm adds the two values that it is of, its backward the gradient that
//! goes past it. Gradients of weight and bias are made at once, where the optimizer finds them. It
//! changes no bit.

use std::collections::HashMap;

use ddp_kernels::ops::Function;

use super::op::{
    Activate, ActivateBackward, AddMatMul, Apply, Gradient, GradientBy, Linear, LinearGradients,
    LinearInput, Op, Output, Role,
};
use super::plan::{PlannedRun, Planner};
use super::trace::{NumberKind, TraceNode};

impl Planner {
    /// Decides for operations in their order. The values at `ends` leave the plan.
    pub(super) fn fuse(&mut self, order: &[usize], ends: &[Option<usize>]) {
        let place: HashMap<usize, usize> =
            order.iter().enumerate().map(|(at, &id)| (id, at)).collect();
        let mut readers = HashMap::<usize, Vec<usize>>::new();
        for &id in order.iter().filter(|&&id| self.role(id) != Role::Output) {
            for &input in &self.node(id).inputs {
                readers.entry(input).or_default().push(id);
            }
        }
        let mut before = None;
        for &id in order {
            let node = self.node(id).clone();
            let is_free =
                |of: &Planner, value: usize| place.contains_key(&value) && of.into[value].is_none();
            let is_alone = |of: &Planner, value: usize| {
                let is_end = ends.contains(&Some(value));
                is_free(of, value) && !is_end && readers[&value] == [id]
            };
            let first = node.inputs.first().copied().unwrap_or(id);
            let is_read_after = || readers[&first].iter().all(|it| place[it] >= place[&id]);
            let of_first = &self.node(first).op;
            // Others may read the activation's input, too.
            if let (Op::Activate(_), Op::Linear(_)) = (&node.op, of_first)
                && is_free(self, first)
                && !ends.contains(&Some(first))
                && is_read_after()
            {
                self.into[first] = Some(id);
                self.stored[first] |= readers[&first].len() > 1;
            } else if let (Op::ActivateBackward(_), Op::LinearInput(_)) = (&node.op, of_first)
                && is_alone(self, first)
            {
                self.into[first] = Some(id);
            } else if let Op::Norm(_) = node.op
                && self.is_whole_sum(first)
                && is_free(self, first)
                && !self.has_within(first)
                && is_read_after()
            {
                self.into[first] = Some(id);
                self.stored[first] = true;
            } else if self.is_whole_sum(id) {
                let [a, b] = [node.inputs[0], node.inputs[1]];
                for (value, other) in [(b, a), (a, b)] {
                    let TraceNode { op, inputs, .. } = self.node(value);
                    let is_matmul = matches!(op, Op::LinearInput(_))
                        || matches!(op, Op::Linear(_)) && inputs.len() == 2;
                    // A matmul is added in place to what nothing else reads.
                    let is_own = matches!(self.node(other).op, Op::Linear(_) | Op::LinearInput(_))
                        || self.role(other) == Role::Elementwise && self.has_within(other);
                    let fits = matches!(op, Op::NormBackward(_))
                        || is_matmul && is_own && is_alone(self, other);
                    if fits && place.get(&other) < place.get(&value) && is_alone(self, value) {
                        self.into[value] = Some(id);
                        break;
                    }
                }
            } else if let Op::Gradient(_) = node.op {
                use Op::{EmbeddingBackward, LinearWeight, PositionsBackward};
                let is_weight = matches!(of_first, LinearWeight(_));
                let is_made = matches!(of_first, EmbeddingBackward(_) | PositionsBackward(_));
                if (is_weight || is_made) && is_alone(self, first) {
                    self.into[first] = Some(id);
                    let d = self.node(first).inputs[0];
                    let bias = before.filter(|&it| is_weight && self.columns_of(it) == Some(d));
                    bias.into_iter().for_each(|it| self.into[it] = Some(id));
                }
                before = Some(id);
            }
        }
    }

    /// Whether it is the sum of two values that both have its shape.
    fn is_whole_sum(&self, id: usize) -> bool {
        let node = self.node(id);
        matches!(node.op, Op::Apply(Apply(Function::Add)))
            && node.inputs.iter().all(|&it| self.shape(it) == node.shape)
            && node.inputs[0] != node.inputs[1]
    }

    /// What an operation reads, with those that run within it.
    pub(super) fn reads(&self, id: usize) -> Vec<usize> {
        let of = |&input: &usize| {
            if self.into[input] == Some(id) {
                self.reads(input)
            } else {
                vec![input]
            }
        };
        self.node(id).inputs.iter().flat_map(of).collect()
    }

    /// Whether another operation runs within this one.
    pub(super) fn has_within(&self, id: usize) -> bool {
        let mut inputs = self.node(id).inputs.iter();
        inputs.any(|&input| self.into[input] == Some(id))
    }

    /// Another value of an operation.
    pub(super) fn part(
        &mut self,
        of: usize,
        number: usize,
        kind: NumberKind,
        shape: &[usize],
    ) -> usize {
        self.known_part(of, number).unwrap_or_else(|| {
            let part = TraceNode {
                op: Output(number, kind).into(),
                inputs: vec![of],
                shape: shape.to_vec(),
                has_rows: false,
                ..self.node(of).clone()
            };
            self.add(part, kind)
        })
    }

    pub(super) fn known_part(&self, of: usize, number: usize) -> Option<usize> {
        let is_it = |at: &TraceNode| {
            matches!(at.op, Op::Output(Output(it, _)) if it == number) && at.inputs == [of]
        };
        self.nodes.iter().position(is_it)
    }

    /// Adds the run of a single operation, with what runs within it.
    pub(super) fn emit_whole(&mut self, id: usize, mut reads: Vec<usize>) {
        let node = self.node(id).clone();
        let (mut op, mut of) = (node.op.clone(), id);
        let mut outputs = op.outputs(self, id);
        let mut is_in_place = false;
        let first = node.inputs.first().copied().unwrap_or(id);
        let is_within = |it: usize| self.into[it] == Some(id);
        let of_first = &self.node(first).op;
        if let Op::Activate(Activate(activation)) = op
            && is_within(first)
        {
            outputs.extend(Some(first).filter(|&z| self.stored[z]));
            op = Linear(Some(activation)).into();
        } else if let Op::ActivateBackward(ActivateBackward(activation)) = op
            && is_within(first)
        {
            op = LinearInput(Some(activation)).into();
        } else if let Op::Norm(_) = op
            && is_within(first)
        {
            outputs.insert(0, first);
        } else if let Op::Apply(_) = op {
            let [a, b] = [node.inputs[0], node.inputs[1]];
            let (within, other) = if is_within(b) { (b, a) } else { (a, b) };
            reads = [&[other], &self.node(within).inputs[..]].concat();
            op = self.node(within).op.clone();
            if let Op::NormBackward(_) = op {
                of = within;
                outputs.extend(op.outputs(self, within).into_iter().skip(1));
            } else {
                op = AddMatMul(matches!(op, Op::Linear(_))).into();
                is_in_place = true;
            }
        } else if let Op::Gradient(Gradient(parameter)) = op {
            if let Op::LinearWeight(_) = of_first
                && is_within(first)
            {
                let mut within = (0..self.nodes.len()).filter(|&it| is_within(it));
                let bias = within.find_map(|it| {
                    let Op::Gradient(Gradient(bias)) = self.node(it).op else {
                        return None;
                    };
                    Some(bias)
                });
                op = LinearGradients(parameter, bias).into();
            } else if is_within(first)
                || matches!(of_first, Op::Output(Output(_, NumberKind::SumDtype)))
            {
                op = GradientBy(parameter, Box::new(of_first.clone())).into();
            }
        } else if let Op::Turn(_) = op {
            let all = self.nodes.iter().zip(&self.live);
            let readers = all.filter(|(it, live)| **live && it.inputs.contains(&first));
            use Op::{AttentionBackward, Join, Linear};
            let has_memory = matches!(of_first, Linear(_) | AttentionBackward(_) | Join(_));
            is_in_place = (has_memory || self.has_within(first)) && readers.count() == 1;
        }
        self.run(op, of, outputs, reads);
        self.runs.last_mut().expect("it was just added").is_in_place = is_in_place;
    }

    /// On a GPU a kernel that writes a gradient can leave the sums of its rows for the gradient of
    /// the bias below.
    pub(super) fn leave_sums(&mut self) {
        for at in 0..self.runs.len() {
            let PlannedRun { op, outputs, .. } = &self.runs[at];
            let is_of_bias = |id: &usize| matches!(self.node(*id).op, Op::Output(Output(1, _)));
            let leaves = matches!(op, Op::LinearInput(LinearInput(Some(_))))
                || matches!(op, Op::NormBackward(_)) && outputs.iter().any(is_of_bias);
            if !leaves {
                continue;
            }
            let value = self.runs[at].outputs[0];
            let reads = self.runs.iter().position(|run| {
                let is_bias = matches!(run.op, Op::LinearGradients(LinearGradients(_, Some(_))))
                    || matches!(&run.op, Op::GradientBy(it) if matches!(*it.1, Op::Sum(_)));
                is_bias && run.inputs[0] == value
            });
            if let Some(reads) = reads {
                let sums = self.part(value, usize::MAX, NumberKind::SumDtype, &[]);
                self.runs[at].sums = Some(sums);
                self.runs[reads].sums = Some(sums);
            }
        }
    }
}
