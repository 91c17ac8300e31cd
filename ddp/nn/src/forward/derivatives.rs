//! The backward of a trace: the operations that compute the gradients of all parameters, from the
//! last operation to the first.

use std::ops::Range;

use super::op::{Finished, Gradient, Input, Join, LinearInput, Op, Output, Parameter};
use super::trace::{INPUTS_MAX, NumberKind, Var};

/// What an operation's gradients are made from.
pub(super) struct Backward<'a> {
    /// Its inputs.
    pub(super) x: &'a [Var],
    /// Its value. Parts are the values after it.
    pub(super) y: &'a Var,
    /// The gradient of its value.
    pub(super) d: &'a Var,
}

impl Backward<'_> {
    /// A gradient, of the shape of an input.
    pub(super) fn like(&self, input: usize, op: impl Into<Op>, inputs: &[&Var]) -> Option<Var> {
        Some(self.d.push(op, inputs, self.x[input].shape()))
    }
}

/// Appends the backward of `y` to its trace: the gradients of trained parameters, each complete
/// as early as it can be, and that of the input if `x` has one. `trains` tells of a leaf whether it
/// is trained; the gradient of the leaf `left` is already written. Returns the gradient of `y`, and
/// that of `x`.
pub(super) fn backward(
    y: &Var,
    x: Option<&Var>,
    trains: &dyn Fn(&Op) -> bool,
    left: Option<usize>,
) -> (Var, Option<Var>) {
    let nodes = y.trace.borrow().nodes.clone();
    let mut needs = vec![false; nodes.len()];
    for (id, node) in nodes.iter().enumerate() {
        let inherits = node.inputs.iter().any(|&it| needs[it]) && !matches!(node.op, Op::Stop(_));
        needs[id] = inherits || trains(&node.op) || x.is_some_and(|x| x.id == id);
    }
    let mut reaches = vec![false; nodes.len()];
    reaches[y.id] = true;
    let mut uses = vec![0; nodes.len()];
    for id in (0..nodes.len()).rev().filter(|&id| needs[id]) {
        if reaches[id] {
            for &input in &nodes[id].inputs {
                reaches[input] = true;
                uses[input] += 1;
            }
        }
    }
    let dy = y.push(Input, &[], y.shape());
    let mut of: Vec<Option<Var>> = vec![None; nodes.len()];
    of[y.id] = Some(dy.clone());
    let complete = |id: usize, of: &[Option<Var>]| {
        if let Op::Parameter(Parameter(parameter)) = nodes[id].op {
            let inputs: Vec<&Var> = of[id].iter().collect();
            let shape = inputs.first().map_or(vec![], |it| it.shape());
            y.push(Gradient(parameter), &inputs, shape);
        }
    };
    let is_parameter = |id: usize| matches!(nodes[id].op, Op::Parameter(_)) && needs[id];
    if let Some(Op::Parameter(Parameter(parameter))) = left.map(|left| &nodes[left].op) {
        y.push(Finished(*parameter), &[], vec![]);
    }
    for id in (0..nodes.len()).rev().filter(|&id| Some(id) != left) {
        {
            let trace = &mut y.trace.borrow_mut();
            trace.place = nodes[id].place.clone();
            trace.line = Some(nodes[id].line);
        }
        if is_parameter(id) && (!reaches[id] || id == y.id) {
            complete(id, &of);
        }
        let node = &nodes[id];
        if !reaches[id] || !needs[id] || node.inputs.is_empty() {
            continue;
        }
        let inputs: Vec<Var> = node.inputs.iter().map(|&id| y.at(id)).collect();
        let node_id = id;
        let mut gradients = match &of[id] {
            Some(d) => node.op.gradients(&Backward {
                x: &inputs,
                y: &y.at(id),
                d,
            }),
            None => vec![None; inputs.len()],
        };
        // Gradients of parameters are complete in the order in which they lie in memory. Those of a
        // linear layer come first, so that they are reduced while that of its input is computed.
        let is_linear = matches!(node.op, Op::Linear(_));
        let all = || (0..inputs.len()).rev();
        let first = all().filter(|&at| !is_linear && !is_parameter(inputs[at].id));
        let others = all().filter(|&at| is_linear || is_parameter(inputs[at].id));
        for at in first.chain(others) {
            let id = inputs[at].id;
            if needs[id] {
                let gradient = match &of[node_id] {
                    Some(d) if is_linear && at == 0 => {
                        Some(d.push(LinearInput(None), &[d, &inputs[1]], inputs[0].shape()))
                    }
                    _ => gradients[at].take(),
                };
                if let Some(gradient) = gradient {
                    of[id] = Some(match of[id].take() {
                        Some(sum) => added(&sum, &gradient),
                        None => gradient,
                    });
                }
            }
            uses[id] = usize::saturating_sub(uses[id], 1);
            if uses[id] == 0 && is_parameter(id) {
                complete(id, &of);
            }
        }
    }
    let dx = x.and_then(|x| of[x.id].clone());
    (dy, dx)
}

/// The sum of two gradients. Those of different parts of an axis lie side by side.
fn added(a: &Var, b: &Var) -> Var {
    if let (Op::Join(Join(axis, starts, step)), Op::Join(Join(other, more, other_step))) =
        (a.op(), b.op())
        && (axis, step) == (other, other_step)
        && starts.len() + more.len() <= INPUTS_MAX
    {
        let (inputs, others) = (a.inputs(), b.inputs());
        let range = |(start, of): (&usize, &Var)| *start..start + of.shape()[axis] * step;
        let own: Vec<_> = starts.iter().zip(&inputs).map(range).collect();
        let mut ranges = more.iter().zip(&others).map(range);
        let is_apart = |a: &Range<usize>, b: &Range<usize>| {
            a.start % step != b.start % step || a.end <= b.start || b.end <= a.start
        };
        if ranges.all(|it| own.iter().all(|own| is_apart(own, &it))) {
            let inputs: Vec<&Var> = inputs.iter().chain(&others).collect();
            let op = Join(axis, [starts, more].concat(), step);
            return a.push(op, &inputs, a.shape());
        }
    }
    // A norm's part is sums of rows.
    let whole = |it: &Var| {
        if let Op::Output(Output(_, NumberKind::SumDtype)) = it.op() {
            return it.sum(0).reshape(&it.shape()[1..]);
        }
        it.clone()
    };
    whole(a) + whole(b)
}
