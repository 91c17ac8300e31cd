//! PyTorch's own sample inputs (OpInfo) as formulas: tests/peers/op_info.py made
//! golden/op_info.json, and says how to check all samples.

use std::collections::HashMap;
use std::panic::catch_unwind;

use ddp::models::Model;
use ddp::nn::{Convolution, Init, Module, Scope, Var};
use ddp::params::ParamId;
use ddp_kernels::{DType, Device, Tensor};
use serde_json::Value;

use crate::support::pass::in_pass;

const CPU: Device = Device::Cpu;

/// A sample: operations on tensors, one after the other.
#[derive(Debug)]
struct Program {
    sample: Value,
    /// Whether each row of the batch has the tensors, as in `torch.vmap`; else all rows share them.
    by_row: bool,
}

fn sizes(it: &Value) -> Vec<usize> {
    let numbers = it.as_array().expect("a list").iter();
    numbers.map(|it| it.as_u64().unwrap() as usize).collect()
}

fn number(it: &Value) -> f64 {
    let parsed = it.as_f64().or_else(|| it.as_str()?.parse().ok());
    parsed.expect("a number")
}

fn numbers(it: &Value) -> Vec<f64> {
    it.as_array().expect("a list").iter().map(number).collect()
}

/// The number of elements.
fn count(shape: &[usize]) -> usize {
    shape.iter().product()
}

impl Program {
    fn tensors(&self) -> &Vec<Value> {
        self.sample["tensors"].as_array().unwrap()
    }

    fn trains(&self, at: usize) -> bool {
        let of = &self.tensors()[at];
        of["trains"].as_bool().unwrap() && !of["values"].as_array().unwrap().is_empty()
    }

    fn leaf(&self, m: &mut Scope<'_>, x: &Var, at: usize) -> Var {
        let of = &self.tensors()[at];
        let (shape, values) = (sizes(&of["shape"]), numbers(&of["values"]));
        let leaf = if self.trains(at) {
            let flat = m.parameter(&format!("{at}"), &[values.len()], Init::Constant(0.0));
            flat.reshape(&shape)
        } else {
            m.numbers(&values, &shape)
        };
        if !self.by_row {
            return leaf;
        }
        // What is trained, times the row's number.
        let (leaf, of_row) = (
            leaf.reshape(&[&[1], &shape[..]].concat()),
            x.reshape(&vec![1; shape.len()]),
        );
        if self.trains(at) {
            leaf * of_row
        } else {
            leaf + of_row * 0.0
        }
    }

    /// Values with as many axes, which broadcasting would add in front of a row's.
    fn aligned(values: Vec<&Var>) -> Vec<Var> {
        let rank = values
            .iter()
            .map(|it| it.row_shape().len())
            .max()
            .unwrap_or(0);
        let aligned = |it: &Var| {
            let row = it.row_shape();
            if !it.has_rows() {
                return it.clone();
            }
            it.reshape(&[&vec![1; rank - row.len()], &row[..]].concat())
        };
        values.into_iter().map(aligned).collect()
    }

    fn expanded(x: &Var, shape: &[usize]) -> Var {
        let row = x.row_shape();
        let missing = shape.len().saturating_sub(row.len());
        if !x.has_rows() {
            return x.expand(shape);
        }
        let row = [&vec![1; missing], &row[..]].concat();
        x.reshape(&row).expand(shape)
    }

    fn step(&self, m: &mut Scope<'_>, x: &Var, step: &[Value], made: &[Var]) -> Var {
        let at = |place: usize| step[place].as_u64().unwrap() as usize;
        let value = |place: usize| &made[at(place)];
        let name = step[0].as_str().unwrap();
        match name {
            "tensor" => return self.leaf(m, x, at(1)),
            "number" => return x.number(number(&step[1])),
            _ => {}
        }
        let count = match name {
            "select" => 3,
            "add" | "sub" | "mul" | "div" | "less" | "less_equal" | "equal" | "maximum"
            | "minimum" | "matmul" => 2,
            _ => 1,
        };
        let operands = Program::aligned((1..=count).map(value).collect());
        let x = &operands[0];
        let axis_of = |x: &Var, place: usize| {
            let axis = step[place].as_i64().unwrap() as isize;
            let has_rows = axis >= 0 && x.has_rows();
            axis + isize::from(has_rows)
        };
        let axis = |place: usize| axis_of(x, place);
        let value = |place: usize| operands.get(place - 1).unwrap_or_else(|| value(place));
        match name {
            "add" => x + value(2),
            "sub" => x - value(2),
            "mul" => x * value(2),
            "div" => x / value(2),
            "less" => x.less(value(2)),
            "less_equal" => x.less_equal(value(2)),
            "equal" => x.equal(value(2)),
            "maximum" => x.maximum(value(2)),
            "minimum" => x.minimum(value(2)),
            "select" => x.select(value(2), value(3)),
            "neg" => -x,
            "abs" => x.abs(),
            "exp" => x.exp(),
            "log" => x.log(),
            "sqrt" => x.sqrt(),
            "rsqrt" => x.rsqrt(),
            "tanh" => x.tanh(),
            "sigmoid" => x.sigmoid(),
            "silu" => x.silu(),
            "relu" => x.relu(),
            "gelu" => x.gelu(),
            "gelu_tanh" => x.gelu_tanh(),
            "without_gradient" => x.without_gradient(),
            "pow" => x.pow(step[2].as_f64().unwrap()),
            "sum" => x.sum(axis(2)),
            "mean" => x.mean(axis(2)),
            "largest" => x.largest(axis(2)),
            "smallest" => x.smallest(axis(2)),
            "softmax" => x.softmax(axis(2)),
            "log_softmax" => x.log_softmax(axis(2)),
            "expand" => Program::expanded(x, &sizes(&step[2])),
            "reshape" => x.reshape(&sizes(&step[2])),
            "permute" if x.has_rows() => {
                let axes = sizes(&step[2]).into_iter().map(|axis| axis + 1);
                x.permute(&[0].into_iter().chain(axes).collect::<Vec<_>>())
            }
            "permute" => x.permute(&sizes(&step[2])),
            "transpose" => x.transpose(axis(2), axis(3)),
            "slice" => x.slice(axis(2), at(3)..at(4)),
            "every" => x.every(axis(2), at(3)),
            "windows" => x.windows(axis(2), at(3), at(4)),
            "pad" => x.pad(axis(2), at(3), at(4)),
            "concatenate" => {
                let all: Vec<&Var> = [1].into_iter().chain(3..step.len()).map(value).collect();
                let of_rows = all.iter().find(|it| it.has_rows());
                let joined = all.iter().map(|it| match of_rows {
                    Some(_) if !it.has_rows() => it.reshape(&[&[1], &it.row_shape()[..]].concat()),
                    _ => (*it).clone(),
                });
                let joined: Vec<Var> = joined.collect();
                let axis = axis_of(of_rows.unwrap_or(&all[0]), 2);
                Var::concatenate(&joined.iter().collect::<Vec<_>>(), axis)
            }
            "matmul" => x.matmul(value(2)),
            "gather" => x.gather(axis(2), value(3)),
            "rows" => x.rows(value(2)),
            "max_pool2d" => x.max_pool2d(at(2), at(3), at(4)),
            "avg_pool2d" => x.avg_pool2d(at(2), at(3)),
            "convolve" => {
                let [size, stride, padding, dilation] =
                    [3, 4, 5, 6].map(|place| <[usize; 2]>::try_from(sizes(&step[place])).unwrap());
                let of = Convolution::new(value(2).size(0), size).stride(stride);
                let of = of.padding(padding).dilation(dilation).groups(at(7));
                x.convolve(value(2), of)
            }
            _ => panic!("{name} is not an operation of Var"),
        }
    }
}

impl Module for Program {
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
        let mut made: Vec<Var> = Vec::new();
        for step in self.sample["steps"].as_array().unwrap() {
            let value = self.step(m, x, step.as_array().unwrap(), &made);
            made.push(value);
        }
        let outputs = sizes(&self.sample["outputs"]);
        let shapes = self.sample["shapes"].as_array().unwrap().iter().map(sizes);
        let flat: Vec<Var> = outputs
            .into_iter()
            .zip(shapes)
            .map(|(at, shape)| {
                let expanded = Program::expanded(&made[at], &shape);
                let elements = [1, count(&shape)];
                expanded.reshape(&elements[usize::from(expanded.has_rows())..])
            })
            .collect();
        // Also where it is the same for each row of the batch.
        Var::concatenate(&flat.iter().collect::<Vec<_>>(), 1) + x * 0.0
    }
}

/// The output of a pass, and the gradients of tensors by their number.
type Passed = (Vec<f64>, HashMap<usize, Vec<f64>>);

/// Of one row, or `by_row` of the last of three, of which the second one has other numbers.
fn passed(sample: &Value, dtype: DType, by_row: bool) -> ddp::nn::Result<Passed> {
    let program = Program {
        sample: sample.clone(),
        by_row,
    };
    let dy = numbers(&program.sample["dy"]);
    let tensors: Vec<(usize, Vec<f64>)> = (0..program.tensors().len())
        .filter(|&at| program.trains(at))
        .map(|at| (at, numbers(&program.tensors()[at]["values"])))
        .collect();
    let model = Model::new(Box::new(program), &[1], dtype, CPU, 1, &|_| false)?;
    let tensor =
        |values: &[f64], shape: &[usize]| Tensor::from_slice(values, shape, CPU)?.to_dtype(dtype);
    let mut ids: HashMap<usize, ParamId> = HashMap::new();
    for param in model.params.list() {
        let name = param.name.rsplit('.').next().unwrap();
        ids.insert(name.parse().unwrap(), param.id);
    }
    for (at, values) in &tensors {
        let to = model.params.value(ids[at]);
        to.copy_from(&tensor(values, to.shape())?)?;
    }
    let y = in_pass(&model, true, |mut pass| -> ddp::nn::Result<Tensor> {
        let rows: &[f64] = if by_row { &[1.0, 2.0, 1.0] } else { &[1.0] };
        let y = model.forward(&mut pass, &tensor(rows, &[rows.len(), 1])?)?;
        let of_last = (rows.len() - 1) * dy.len();
        let dy = [vec![0.0; of_last], dy].concat();
        model.backward(&mut pass, &tensor(&dy, y.shape())?)?;
        Ok(y.flatten()?.slice(of_last..dy.len())?)
    })?;
    let wide = |it: &Tensor| it.to_dtype(DType::F64)?.to_vec::<f64>();
    let mut gradients = HashMap::new();
    for (at, _) in &tensors {
        if let Some(gradient) = model.params.gradient(ids[at]) {
            gradients.insert(*at, wide(gradient)?);
        }
    }
    Ok((wide(&y)?, gradients))
}

/// What differs, if something does by more than `bound` of the largest number.
fn difference(what: &str, got: &[f64], expected: &[f64], bound: f64) -> Option<String> {
    if got.len() != expected.len() {
        return Some(format!(
            "{what} has {} numbers, in PyTorch {}",
            got.len(),
            expected.len()
        ));
    }
    let finite = expected.iter().filter(|it| it.is_finite());
    let size = finite.fold(1.0, |a: f64, b| a.max(b.abs()));
    let pairs = got.iter().zip(expected).enumerate();
    pairs.into_iter().find_map(|(at, (got, expected))| {
        let is_same = got == expected || got.is_nan() && expected.is_nan();
        let is_near = is_same || (got - expected).abs() <= bound * size;
        (!is_near).then(|| format!("{what}[{at}] is {got}, in PyTorch {expected}"))
    })
}

#[test]
fn pytorch_s_own_samples_have_its_values_and_gradients() {
    let of_file = std::env::var("DDP_OP_INFO").map(|path| std::fs::read_to_string(path).unwrap());
    let text = of_file.unwrap_or_else(|_| include_str!("../golden/op_info.json").into());
    let samples: Vec<Value> = serde_json::from_str(&text).unwrap();
    let mut wrong = Vec::new();
    for (number, sample) in samples.iter().enumerate() {
        // Rounding of f64, and of f32 in sums of up to a few hundred numbers.
        let name = sample["name"].as_str().unwrap();
        for (dtype, bound, by_row) in [
            (DType::F64, 1e-11, false),
            (DType::F32, 3e-5, false),
            (DType::F64, 1e-11, true),
        ] {
            // A table, and the weight of a convolution, are the same for all rows.
            let steps = sample["steps"].as_array().unwrap();
            if by_row
                && steps
                    .iter()
                    .any(|it| it[0] == "rows" || it[0] == "convolve")
            {
                continue;
            }
            let found = match catch_unwind(|| passed(sample, dtype, by_row)) {
                Err(_) => Some("a panic".into()),
                Ok(Err(error)) => Some(error.to_string()),
                Ok(Ok((y, gradients))) => {
                    let expected = sample["gradients"].as_object().unwrap();
                    let of_gradients = gradients.iter().find_map(|(at, got)| {
                        let expected = numbers(&expected[&at.to_string()]);
                        difference(&format!("the gradient of {at}"), got, &expected, bound)
                    });
                    difference("y", &y, &numbers(&sample["y"]), bound).or(of_gradients)
                }
            };
            if let Some(found) = found {
                let how = if by_row { ", by row" } else { "" };
                wrong.push(format!("sample {number}, {name} in {dtype}{how}: {found}"));
                break;
            }
        }
    }
    let right = samples.len() - wrong.len();
    println!("{right} of {} samples are right", samples.len());
    assert!(
        wrong.is_empty(),
        "{right} of {} are right; {}",
        samples.len(),
        wrong.join("\n")
    );
}
