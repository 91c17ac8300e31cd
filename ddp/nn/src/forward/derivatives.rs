//! The table of derivatives, and the backward that follows from it: the operations that compute the
//! gradients of all parameters, from the last operation to the first.

use std::ops::Range;

use ddp_kernels::ops::{self, Function};

use super::trace::{INPUTS_MAX, Kind, Op, Var};
use crate::build::ParamId;

/// What each operation makes of the gradient `d` of its value `y`: the gradients of its values `x`.
/// None where no gradient flows. `y`'s own parts are the values after it.
fn gradients(op: &Op, x: &[Var], y: &Var, d: &Var) -> Vec<Option<Var>> {
    let like = |op: Op, inputs: &[&Var], like: &Var| Some(d.push(op, inputs, like.shape()));
    let all = |gradients: Vec<Var>| gradients.into_iter().map(Some).collect();
    match op {
        Op::Apply(function) => apply_gradients(*function, x, y, d)
            .into_iter()
            .zip(x)
            .map(|(gradient, x)| Some(gradient?.reduced_to(&x.shape())))
            .collect(),
        Op::Sum(_) => all(vec![d.expand(&x[0].shape())]),
        Op::Largest(axes) => {
            let is_largest = x[0].equal(y);
            let ties = axes
                .iter()
                .fold(is_largest.clone(), |sum, &axis| sum.sum(axis as isize));
            all(vec![is_largest * (d / ties)])
        }
        Op::Expand => all(vec![d.reduced_to(&x[0].shape())]),
        Op::Reshape => all(vec![d.reshape(&x[0].shape())]),
        Op::Permute(axes) => {
            let mut back = vec![0; axes.len()];
            axes.iter()
                .enumerate()
                .for_each(|(at, &axis)| back[axis] = at);
            all(vec![d.permute(&back)])
        }
        Op::Slice(axis, start, step) => {
            let op = Op::Join(*axis, vec![*start], *step);
            all(vec![d.push(op, &[d], x[0].shape())])
        }
        Op::Join(axis, starts, step) => all(starts
            .iter()
            .zip(x)
            .map(|(&start, x)| d.push(Op::Slice(*axis, start, *step), &[d], x.shape()))
            .collect()),
        &Op::Window(axis, step) => {
            let shape = y.shape();
            let (size, windows) = shape.split_last().unwrap_or((&1, &[]));
            // Windows overlap: each place within them gives its part to the sum.
            let of_place = |place: usize| {
                let d = d.slice(-1, place..place + 1).reshape(windows);
                d.push(Op::Join(axis, vec![place], step), &[&d], x[0].shape())
            };
            let sum = (1..*size).fold(of_place(0), |sum, place| sum + of_place(place));
            all(vec![sum])
        }
        Op::Unfold(of) => all(vec![d.push(Op::Fold(*of), &[d], x[0].shape())]),
        &Op::MatMul([left, right]) => {
            let (a, b) = (&x[0], &x[1]);
            let product = |turned: [bool; 2], factors: [&Var; 2], like: &Var| {
                d.push(Op::MatMul(turned), &factors, like.shape())
            };
            let da = if left {
                product([right, true], [b, d], a)
            } else {
                product([false, !right], [d, b], a)
            };
            let db = if right {
                product([true, left], [d, a], b)
            } else {
                product([!left, false], [a, d], b)
            };
            all(vec![da, db])
        }
        Op::Custom(op) => {
            let inputs: Vec<&Var> = x.iter().chain([y, d]).collect();
            let first = d.push(Op::CustomBackward(op.clone()), &inputs, x[0].shape());
            let parts = 1..x.len();
            let others = parts.map(|at| first.part(at, Kind::Layers, x[at].shape()));
            let others: Vec<Var> = others.collect();
            all([first].into_iter().chain(others).collect())
        }
        Op::Linear => {
            // That of x comes later, in `backward`.
            let bias = x.get(2).map(|bias| d.reduced_to(&bias.shape()));
            let weight = like(Op::LinearWeight, &[d, &x[0]], &x[1]);
            vec![None, weight, bias]
        }
        Op::Activate(activation) => {
            let kept = if activation.keeps_input() { &x[0] } else { y };
            vec![like(Op::ActivateBackward(*activation), &[d, kept], &x[0])]
        }
        &Op::Norm(norm, epsilon) => {
            let statistics = y.at(y.id + 1);
            let op = Op::NormBackward(norm, epsilon);
            let dx = d.push(op, &[d, &x[0], &statistics, &x[1]], x[0].shape());
            let columns = x[0].size(-1);
            let rows = x[0].shape().iter().product::<usize>() / columns.max(1);
            let sums = [ops::norm_blocks_of(rows), columns];
            let of = |at: usize| dx.part(at, Kind::Sums, sums.to_vec());
            let parts: Vec<Var> = (0..x.len() - 1).map(of).collect();
            all([dx.clone()].into_iter().chain(parts).collect())
        }
        Op::Dropout(..) => vec![like(op.clone(), &[d], &x[0])],
        Op::Gated(gate) => vec![like(Op::GatedBackward(*gate), &[d, &x[0]], &x[0])],
        Op::Embedding(untrained) => {
            let op = Op::EmbeddingBackward(untrained.clone());
            let table = like(op, &[d, &x[0]], &x[1]);
            let positions = x
                .get(2)
                .map(|it| d.push(Op::PositionsBackward, &[d], it.shape()));
            vec![None, table, positions]
        }
        Op::Gather(_) => vec![None, like(Op::GatherBackward, &[d, &x[0]], &x[1])],
        Op::Rope(rope, heads, back) => {
            vec![like(Op::Rope(rope.clone(), *heads, !back), &[d], &x[0])]
        }
        Op::Attention(attention) => {
            let sums = y.at(y.id + 1);
            let inputs: Vec<&Var> = [d, y, &sums].into_iter().chain(x).collect();
            let dqkv = like(Op::AttentionBackward(*attention), &inputs, &x[0]);
            [dqkv]
                .into_iter()
                .chain(x[1..].iter().map(|_| None))
                .collect()
        }
        Op::Input
        | Op::Parameter(_)
        | Op::Numbers(_)
        | Op::Tensor(_)
        | Op::Constant(_)
        | Op::Steps(_) => vec![],
        Op::Slope => (0..x.len())
            .map(|at| (at % 2 == 1).then(|| d * &x[at + 1]))
            .collect(),
        Op::Cast(Kind::Layers) => vec![Some(d.clone())],
        Op::Stop | Op::Part(..) | Op::Documents | Op::Cast(_) => vec![None; x.len()],
        // No forward has these.
        Op::Fold(_)
        | Op::CustomBackward(_)
        | Op::LinearInput
        | Op::LinearWeight
        | Op::ActivateBackward(_)
        | Op::NormBackward(..)
        | Op::GatedBackward(_)
        | Op::EmbeddingBackward(_)
        | Op::GatherBackward
        | Op::PositionsBackward
        | Op::AttentionBackward(_)
        | Op::Gradient(_)
        | Op::Finished(_) => vec![None; x.len()],
    }
}

/// As `gradients`, before what was broadcast is summed.
fn apply_gradients(function: Function, x: &[Var], y: &Var, d: &Var) -> Vec<Option<Var>> {
    use Function::*;
    // Of equal ones each gets half, as in PyTorch. Where one is NaN, both get all.
    let share = |greater: &Var, less: &Var| {
        let half = less.equal(greater).select(&(d * 0.5), d);
        Some(greater.less(less).select(&d.constant(0.0), &half))
    };
    let slope = |function: Function| Some(d * Var::apply(function, &[&x[0]]));
    let one = match function {
        Add => return vec![Some(d.clone()), Some(d.clone())],
        Sub => return vec![Some(d.clone()), Some(-d)],
        Mul => return vec![Some(d * &x[1]), Some(d * &x[0])],
        Div => {
            let of_left = d / &x[1];
            let of_right = -(&of_left * y);
            return vec![Some(of_left), Some(of_right)];
        }
        Min => return vec![share(&x[1], &x[0]), share(&x[0], &x[1])],
        Max => return vec![share(&x[0], &x[1]), share(&x[1], &x[0])],
        Where => {
            let zero = d.constant(0.0);
            let [yes, no] = [x[0].select(d, &zero), x[0].select(&zero, d)];
            return vec![None, Some(yes), Some(no)];
        }
        Neg => Some(-d),
        Abs => {
            let zero = d.constant(0.0);
            Some(d * (zero.less(&x[0]) - x[0].less(&zero)))
        }
        Exp => Some(d * y),
        Log => Some(d / &x[0]),
        Sqrt => Some(d * 0.5 / y),
        Rsqrt => Some(d * -0.5 * (y * y * y)),
        Tanh => Some(d * (1.0 - y * y)),
        Sigmoid => Some(d * (y * (1.0 - y))),
        Relu => {
            let zero = d.constant(0.0);
            Some(y.less_equal(&zero).select(&zero, d))
        }
        Silu => slope(SiluSlope),
        Gelu => slope(GeluSlope),
        GeluTanh => slope(GeluTanhSlope),
        // No gradient flows through comparisons, and forwards have no slopes.
        Less | LessEqual | Equal | SiluSlope | GeluSlope | GeluTanhSlope | Round => None,
    };
    let mut all = vec![None; x.len()];
    all[0] = one;
    all
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
        let inherits = node.inputs.iter().any(|&it| needs[it]) && !matches!(node.op, Op::Stop);
        needs[id] = inherits || trains(&node.op) || x.is_some_and(|x| x.id == id);
    }
    let mut reaches = vec![false; nodes.len()];
    reaches[y.id] = true;
    let mut uses = vec![0; nodes.len()];
    for id in (0..nodes.len()).rev().filter(|&id| needs[id]) {
        if reaches[id] && !matches!(nodes[id].op, Op::Stop) {
            for &input in &nodes[id].inputs {
                reaches[input] = true;
                uses[input] += 1;
            }
        }
    }
    let dy = y.push(Op::Input, &[], y.shape());
    let mut of: Vec<Option<Var>> = vec![None; nodes.len()];
    of[y.id] = Some(dy.clone());
    let complete = |id: usize, of: &[Option<Var>]| {
        if let Op::Parameter(parameter) = nodes[id].op {
            finish(y, parameter, of[id].as_ref());
        }
    };
    let is_parameter = |id: usize| matches!(nodes[id].op, Op::Parameter(_)) && needs[id];
    if let Some(Op::Parameter(parameter)) = left.map(|left| &nodes[left].op) {
        y.push(Op::Finished(*parameter), &[], vec![]);
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
        let flows = reaches[id] && needs[id] && !matches!(node.op, Op::Stop);
        if !flows || node.inputs.is_empty() {
            continue;
        }
        let inputs: Vec<Var> = node.inputs.iter().map(|&id| y.at(id)).collect();
        let node_id = id;
        let mut gradients = match &of[id] {
            Some(d) => gradients(&node.op, &inputs, &y.at(id), &d.clone()),
            None => vec![None; inputs.len()],
        };
        // Gradients of parameters are complete in the order in which they lie in memory. Those of a
        // linear layer come first, so that they are reduced while that of its input is computed.
        let is_linear = matches!(node.op, Op::Linear);
        let all = || (0..inputs.len()).rev();
        let first = all().filter(|&at| !is_linear && !is_parameter(inputs[at].id));
        let others = all().filter(|&at| is_linear || is_parameter(inputs[at].id));
        for at in first.chain(others) {
            let id = inputs[at].id;
            if needs[id] {
                let gradient = match &of[node_id] {
                    Some(d) if is_linear && at == 0 => {
                        Some(d.push(Op::LinearInput, &[d, &inputs[1]], inputs[0].shape()))
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
    if let (Op::Join(axis, starts, step), Op::Join(other, more, other_step)) = (a.op(), b.op())
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
            let op = Op::Join(axis, [starts, more].concat(), step);
            return a.push(op, &inputs, a.shape());
        }
    }
    // A norm's part is sums of rows.
    let whole = |it: &Var| match it.op() {
        Op::Part(_, Kind::Sums) => it.sum(0).reshape(&it.shape()[1..]),
        _ => it.clone(),
    };
    whole(a) + whole(b)
}

/// The gradient of a parameter is complete.
fn finish(y: &Var, parameter: ParamId, gradient: Option<&Var>) {
    let inputs: Vec<&Var> = gradient.into_iter().collect();
    let shape = gradient.map_or(vec![], Var::shape);
    y.push(Op::Gradient(parameter), &inputs, shape);
}
