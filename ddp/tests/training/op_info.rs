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
struct Program(Value);

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
        self.0["tensors"].as_array().unwrap()
    }

    fn trains(&self, at: usize) -> bool {
        let of = &self.tensors()[at];
        of["trains"].as_bool().unwrap() && !of["values"].as_array().unwrap().is_empty()
    }

    fn leaf(&self, m: &mut Scope<'_>, at: usize) -> Var {
        let of = &self.tensors()[at];
        let (shape, values) = (sizes(&of["shape"]), numbers(&of["values"]));
        if self.trains(at) {
            let flat = m.parameter(&format!("{at}"), &[values.len()], Init::Constant(0.0));
            flat.reshape(&shape)
        } else {
            m.numbers(&values, &shape)
        }
    }

    fn step(&self, m: &mut Scope<'_>, x: &Var, step: &[Value], made: &[Var]) -> Var {
        let at = |place: usize| step[place].as_u64().unwrap() as usize;
        let axis = |place: usize| step[place].as_i64().unwrap() as isize;
        let value = |place: usize| &made[at(place)];
        let name = step[0].as_str().unwrap();
        match name {
            "tensor" => return self.leaf(m, at(1)),
            "number" => return x.number(number(&step[1])),
            _ => {}
        }
        let x = value(1);
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
            "expand" => x.expand(&sizes(&step[2])),
            "reshape" => x.reshape(&sizes(&step[2])),
            "permute" => x.permute(&sizes(&step[2])),
            "transpose" => x.transpose(axis(2), axis(3)),
            "slice" => x.slice(axis(2), at(3)..at(4)),
            "every" => x.every(axis(2), at(3)),
            "windows" => x.windows(axis(2), at(3), at(4)),
            "pad" => x.pad(axis(2), at(3), at(4)),
            "concatenate" => {
                let others = (3..step.len()).map(value);
                Var::concatenate(&[x].into_iter().chain(others).collect::<Vec<_>>(), axis(2))
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
        for step in self.0["steps"].as_array().unwrap() {
            let value = self.step(m, x, step.as_array().unwrap(), &made);
            made.push(value);
        }
        let outputs = sizes(&self.0["outputs"]);
        let shapes = self.0["shapes"].as_array().unwrap().iter().map(sizes);
        let flat: Vec<Var> = outputs
            .into_iter()
            .zip(shapes)
            .map(|(at, shape)| made[at].expand(&shape).reshape(&[1, count(&shape)]))
            .collect();
        // The same for each row of the batch, of which there are two when a model is built.
        let all = Var::concatenate(&flat.iter().collect::<Vec<_>>(), 1);
        all.expand(&[x.size(0), all.size(1)])
    }
}

/// The output of a pass, and the gradients of tensors by their number.
type Passed = (Vec<f64>, HashMap<usize, Vec<f64>>);

fn passed(program: &Value, dtype: DType) -> ddp::nn::Result<Passed> {
    let program = Program(program.clone());
    let dy = numbers(&program.0["dy"]);
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
        let y = model.forward(&mut pass, &tensor(&[0.0], &[1, 1])?)?;
        model.backward(&mut pass, &tensor(&dy, y.shape())?)?;
        Ok(y)
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
        for (dtype, bound) in [(DType::F64, 1e-11), (DType::F32, 3e-5)] {
            let found = match catch_unwind(|| passed(sample, dtype)) {
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
                let name = sample["name"].as_str().unwrap();
                wrong.push(format!("sample {number}, {name} in {dtype}: {found}"));
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
