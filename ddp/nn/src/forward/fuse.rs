//! Which operations run within another one: what the kernels do besides.
//!
//! A linear layer applies the activation above it, and its backward multiplies the derivative of
//! the one below it in. A norm adds the two values that it is of, its backward the gradient that
//! goes past it. Gradients of weight and bias are made at once, where the optimizer finds them. It
//! changes no bit.

use std::collections::HashMap;

use ddp_kernels::ops::Function;

use super::plan::{Action, Planner};
use super::trace::{Kind, Op, TraceNode};

impl Planner {
    /// Decides for operations in their order. The values at `ends` leave the plan.
    pub(super) fn fuse(&mut self, order: &[usize], ends: &[Option<usize>]) {
        let place: HashMap<usize, usize> =
            order.iter().enumerate().map(|(at, &id)| (id, at)).collect();
        let mut readers = HashMap::<usize, Vec<usize>>::new();
        for &id in order.iter().filter(|&&id| !self.is_part(id)) {
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
            match &node.op {
                // Others may read the activation's input, too.
                Op::Activate(_)
                    if matches!(self.node(first).op, Op::Linear)
                        && is_free(self, first)
                        && !ends.contains(&Some(first))
                        && readers[&first]
                            .iter()
                            .all(|reader| place[reader] >= place[&id]) =>
                {
                    self.into[first] = Some(id);
                    self.stored[first] |= readers[&first].len() > 1;
                }
                Op::ActivateBackward(_)
                    if matches!(self.node(first).op, Op::LinearInput) && is_alone(self, first) =>
                {
                    self.into[first] = Some(id);
                }
                Op::Norm(..)
                    if self.is_whole_sum(first)
                        && is_free(self, first)
                        && !self.has_within(first)
                        && readers[&first]
                            .iter()
                            .all(|reader| place[reader] >= place[&id]) =>
                {
                    self.into[first] = Some(id);
                    self.stored[first] = true;
                }
                Op::Apply(Function::Add) if self.is_whole_sum(id) => {
                    let [a, b] = [node.inputs[0], node.inputs[1]];
                    for (value, other) in [(b, a), (a, b)] {
                        let is_matmul = match self.node(value).op {
                            Op::Linear => self.node(value).inputs.len() == 2,
                            Op::LinearInput => true,
                            _ => false,
                        };
                        // A matmul is added in place to what nothing else reads.
                        let is_own = match self.node(other).op {
                            Op::Linear | Op::LinearInput => true,
                            Op::Apply(_) => self.has_within(other),
                            _ => false,
                        };
                        let fits = matches!(self.node(value).op, Op::NormBackward(..))
                            || is_matmul && is_own && is_alone(self, other);
                        if fits && place.get(&other) < place.get(&value) && is_alone(self, value) {
                            self.into[value] = Some(id);
                            break;
                        }
                    }
                }
                Op::Gradient(_) => {
                    let is_made = matches!(
                        self.node(first).op,
                        Op::LinearWeight | Op::EmbeddingBackward(_) | Op::PositionsBackward
                    );
                    if is_made && is_alone(self, first) {
                        self.into[first] = Some(id);
                        let d = self.node(first).inputs[0];
                        if let (Op::LinearWeight, Some(bias)) = (&self.node(first).op, before)
                            && self.columns_of(bias) == Some(d)
                        {
                            self.into[bias] = Some(id);
                        }
                    }
                    before = Some(id);
                }
                _ => {}
            }
        }
    }

    pub(super) fn is_part(&self, id: usize) -> bool {
        matches!(self.node(id).op, Op::Part(..))
    }

    /// Whether it is the sum of two values that both have its shape.
    fn is_whole_sum(&self, id: usize) -> bool {
        let node = self.node(id);
        matches!(node.op, Op::Apply(Function::Add))
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
    fn part(&mut self, of: usize, number: usize, kind: Kind, shape: &[usize]) -> usize {
        self.known_part(of, number).unwrap_or_else(|| {
            let part = TraceNode {
                op: Op::Part(number, kind),
                inputs: vec![of],
                shape: shape.to_vec(),
                has_rows: false,
                again: self.node(of).again,
                place: self.node(of).place.clone(),
                line: self.node(of).line,
            };
            self.add(part, kind)
        })
    }

    pub(super) fn known_part(&self, of: usize, number: usize) -> Option<usize> {
        let is_it =
            |at: &TraceNode| matches!(at.op, Op::Part(it, _) if it == number) && at.inputs == [of];
        self.nodes.iter().position(is_it)
    }

    /// Adds the run of an operation that has its own kernel. Returns false for any other operation.
    pub(super) fn emit_kernel(&mut self, id: usize, reads: Vec<usize>) -> bool {
        let node = self.node(id).clone();
        let first = node.inputs.first().copied().unwrap_or(id);
        let is_within = |of: &Planner, it: usize| of.into[it] == Some(id);
        let has_bias = |of: &Planner, it: usize| of.node(it).inputs.len() == 3;
        let rows = |shape: &[usize]| {
            let columns = shape.last().copied().unwrap_or(1).max(1);
            shape.iter().product::<usize>() / columns
        };
        let (action, outputs) = match node.op {
            Op::Linear => {
                let (activation, has_bias) = (None, has_bias(self, id));
                let linear = Action::Linear {
                    activation,
                    has_bias,
                };
                (linear, vec![id])
            }
            Op::Activate(activation) if is_within(self, first) => {
                let (activation, has_bias) = (Some(activation), has_bias(self, first));
                let kept = Some(first).filter(|&z| self.stored[z]);
                let linear = Action::Linear {
                    activation,
                    has_bias,
                };
                (linear, [id].into_iter().chain(kept).collect())
            }
            Op::ActivateBackward(activation) if is_within(self, first) => {
                let below = Some(activation);
                (Action::LinearInput { below }, vec![id])
            }
            Op::LinearInput => (Action::LinearInput { below: None }, vec![id]),
            Op::LinearWeight => (Action::LinearWeight, vec![id]),
            Op::Apply(_) if self.has_within(id) => {
                let [a, b] = [node.inputs[0], node.inputs[1]];
                let (within, other) = if is_within(self, b) { (b, a) } else { (a, b) };
                let reads = [&[other], &self.node(within).inputs[..]].concat();
                if matches!(self.node(within).op, Op::NormBackward(..)) {
                    let (action, outputs) = self.norm_backward(within, id);
                    self.run(action, within, outputs, reads);
                } else {
                    let is_turned = matches!(self.node(within).op, Op::Linear);
                    self.run(Action::AddMatMul { is_turned }, id, vec![id], reads);
                }
                return true;
            }
            Op::NormBackward(..) => self.norm_backward(id, id),
            Op::Norm(norm, _) => {
                let is_sum = is_within(self, first);
                let sum = Some(first).filter(|_| is_sum);
                let kept = [rows(&node.shape), norm.statistics()];
                let statistics = self.part(id, 0, Kind::Sums, &kept);
                let has_bias = has_bias(self, id);
                let outputs = sum.into_iter().chain([id, statistics]).collect();
                (Action::Norm { is_sum, has_bias }, outputs)
            }
            Op::Gradient(parameter) => match self.node(first).op.clone() {
                Op::LinearWeight if is_within(self, first) => {
                    let bias =
                        self.nodes
                            .iter()
                            .zip(&self.into)
                            .find_map(|(it, &into)| match it.op {
                                Op::Gradient(bias) if into == Some(id) => Some(bias),
                                _ => None,
                            });
                    let weight = parameter;
                    (Action::LinearGradients { weight, bias }, vec![])
                }
                Op::EmbeddingBackward(untrained) if is_within(self, first) => {
                    (Action::EmbeddingGradient(parameter, untrained), vec![])
                }
                Op::PositionsBackward if is_within(self, first) => {
                    (Action::PositionsGradient(parameter), vec![])
                }
                Op::Part(_, Kind::Sums) => (Action::GradientSums(parameter), vec![]),
                _ => return false,
            },
            Op::Rope(..) => {
                let all = self.nodes.iter().zip(&self.live);
                let readers = all.filter(|(it, live)| **live && it.inputs.contains(&first));
                let has_memory = match self.node(first).op {
                    Op::Linear | Op::AttentionBackward(_) | Op::Join(..) => true,
                    _ => self.has_within(first),
                };
                let is_in_place = has_memory && readers.count() == 1;
                (Action::Rope { is_in_place }, vec![id])
            }
            Op::Documents => {
                let count = node.shape.iter().product();
                let begins = self.part(id, 0, Kind::Places, &[count]);
                (Action::Kernel, vec![id, begins])
            }
            Op::Attention(of) => {
                let sums = [node.shape[0] * of.heads, node.shape[1]];
                let sums = self.part(id, 0, Kind::Sums, &sums);
                (Action::Kernel, vec![id, sums])
            }
            Op::Activate(_)
            | Op::ActivateBackward(_)
            | Op::Dropout(..)
            | Op::Gated(_)
            | Op::GatedBackward(_)
            | Op::Embedding(_)
            | Op::EmbeddingBackward(_)
            | Op::Gather(_)
            | Op::GatherBackward
            | Op::Cast(_)
            | Op::PositionsBackward
            | Op::AttentionBackward(_) => (Action::Kernel, vec![id]),
            _ => return false,
        };
        self.run(action, id, outputs, reads);
        true
    }

    /// The backward of a norm, whose first output is `out`.
    fn norm_backward(&self, id: usize, out: usize) -> (Action, Vec<usize>) {
        let parts = [0, 1].map(|at| self.known_part(id, at).filter(|&part| self.live[part]));
        let action = Action::NormBackward {
            parts: parts.map(|part| part.is_some()),
            is_sum: id != out,
        };
        (
            action,
            [out]
                .into_iter()
                .chain(parts.into_iter().flatten())
                .collect(),
        )
    }

    /// On a GPU a kernel that writes a gradient can leave the sums of its rows for the gradient of
    /// the bias below.
    pub(super) fn leave_sums(&mut self) {
        for at in 0..self.runs.len() {
            let leaves = match self.runs[at].action {
                Action::LinearInput { below } => below.is_some(),
                Action::NormBackward { parts, .. } => parts[1],
                _ => false,
            };
            if !leaves {
                continue;
            }
            let value = self.runs[at].outputs[0];
            let reads = self.runs.iter().position(|run| {
                let is_bias = match run.action {
                    Action::LinearGradients { bias, .. } => bias.is_some(),
                    Action::GradientColumns(_) => true,
                    _ => false,
                };
                is_bias && run.inputs[0] == value
            });
            if let Some(reads) = reads {
                let sums = self.part(value, usize::MAX, Kind::Sums, &[]);
                self.runs[at].sums = Some(sums);
                self.runs[reads].sums = Some(sums);
            }
        }
    }
}
