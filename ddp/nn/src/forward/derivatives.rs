//! The table of derivatives, and the backward that follows from it: the operations that compute the
//! gradients of all parameters, from the last operation to the first.

use ddp_kernels::ops::Function;

use super::trace::{Op, Var};
use crate::build::ParamId;

/// What each operation makes of the gradient `d` of its value `y`: the gradients of its values `x`.
/// None where no gradient flows.
fn gradients(op: &Op, x: &[Var], y: &Var, d: &Var) -> Vec<Option<Var>> {
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
            let da = match left {
                false => product([false, !right], [d, b], a),
                true => product([right, true], [b, d], a),
            };
            let db = match right {
                false => product([!left, false], [a, d], b),
                true => product([true, left], [d, a], b),
            };
            all(vec![da, db])
        }
        Op::Layer(layer) => all(vec![d.push(Op::LayerBackward(*layer), &[d], x[0].shape())]),
        Op::Custom(op) => {
            let inputs: Vec<&Var> = x.iter().chain([y, d]).collect();
            let first = d.push(Op::CustomBackward(op.clone()), &inputs, x[0].shape());
            let others = x[1..]
                .iter()
                .map(|x| d.push(Op::CustomPart, &[&first], x.shape()));
            let others: Vec<Var> = others.collect();
            all([first].into_iter().chain(others).collect())
        }
        _ => vec![None; x.len()],
    }
}

/// As `gradients`, before what was broadcast is summed.
fn apply_gradients(function: Function, x: &[Var], y: &Var, d: &Var) -> Vec<Option<Var>> {
    use Function::*;
    // Of equal ones each gets half, as in PyTorch.
    let share =
        |greater: &Var, less: &Var| Some(d * (less.less(greater) + less.equal(greater) * 0.5));
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
            Some(zero.less(y).select(d, &zero))
        }
        Silu => slope(SiluSlope),
        Gelu => slope(GeluSlope),
        GeluTanh => slope(GeluTanhSlope),
        // No gradient flows through comparisons, and forwards have no slopes.
        Less | LessEqual | Equal | SiluSlope | GeluSlope | GeluTanhSlope => None,
    };
    let mut all = vec![None; x.len()];
    all[0] = one;
    all
}

/// Appends the backward of `y` to its trace: the gradients of trained parameters, each complete
/// as early as it can be, and that of the input if `x` has one. `trains` tells of a leaf or a layer
/// whether something in it is trained. Returns the gradient of `y`, and that of `x`.
pub(super) fn backward(
    y: &Var,
    x: Option<&Var>,
    trains: &dyn Fn(&Op) -> bool,
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
    // A layer's parameters wait for its backward, even where its output is not used.
    let is_layer = |id: usize| matches!(nodes[id].op, Op::Layer(_)) && needs[id];
    for id in (0..nodes.len()).rev() {
        if is_layer(id) && of[id].is_none() {
            of[id] = Some(y.constant(0.0).expand(&nodes[id].shape));
        }
        if is_parameter(id) && (!reaches[id] || id == y.id) {
            complete(id, &of);
        }
        let node = &nodes[id];
        if !(reaches[id] && needs[id] || is_layer(id))
            || node.inputs.is_empty()
            || matches!(node.op, Op::Stop)
        {
            continue;
        }
        let inputs: Vec<Var> = node.inputs.iter().map(|&id| y.at(id)).collect();
        let gradients = match &of[id] {
            Some(d) => gradients(&node.op, &inputs, &y.at(id), &d.clone()),
            None => vec![None; inputs.len()],
        };
        for (input, gradient) in inputs.iter().zip(gradients) {
            let id = input.id;
            if let (true, Some(gradient)) = (needs[id], gradient) {
                of[id] = Some(match of[id].take() {
                    Some(sum) => &sum + &gradient,
                    None => gradient,
                });
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

/// The gradient of a parameter is complete.
fn finish(y: &Var, parameter: ParamId, gradient: Option<&Var>) {
    let inputs: Vec<&Var> = gradient.into_iter().collect();
    let shape = gradient.map_or(vec![], Var::shape);
    y.push(Op::Gradient(parameter), &inputs, shape);
}
