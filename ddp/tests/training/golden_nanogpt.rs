//! The transformer of examples/nanogpt.rs against PyTorch in f64: tests/peers/nanogpt.py made
//! golden/nanogpt.json.

use ddp::models::Model;
use ddp::models::family::{DataShape, Family};
use ddp::nn::{CrossEntropy, Loss};
use ddp_kernels::{DType, Device, Tensor, ops};
use serde_json::Value;

use crate::golden_layers::numbers;

use crate::support::pass::in_pass;

#[allow(dead_code)]
#[path = "../../../examples/nanogpt.rs"]
mod nanogpt;

const CPU: Device = Device::Cpu;
const ROWS: usize = 4;
const TOKENS: usize = 6;
const VOCABULARY: usize = 11;
const RATE: f64 = 0.2;

#[test]
fn nanogpt_trains_as_in_pytorch() {
    let golden: Value = serde_json::from_str(include_str!("../golden/nanogpt.json")).unwrap();
    let of = nanogpt::NanoGpt {
        blocks: 2,
        heads: 2,
        width: 8,
        context: TOKENS,
        dropout: 0.0,
    };
    let layers = of.layers(&DataShape {
        row_shape: &[TOKENS],
        image: &[],
        dtype: DType::I64,
        outputs: VOCABULARY,
        documents: false,
    });
    let layers = Box::new(layers.unwrap());
    let model = Model::new(layers, &[TOKENS], DType::F64, CPU, 1, &|_| false).unwrap();
    let params = &model.params;
    let mut by_id: Vec<_> = params.list().iter().collect();
    by_id.sort_by_key(|one| one.id);
    for (stream, one) in by_id.iter().enumerate() {
        let values = numbers(1.0, stream, one.range.len());
        let values = Tensor::from_slice(&values, &one.shape, CPU).unwrap();
        params.value(one.id).copy_from(&values).unwrap();
    }
    let [x, targets] = [0, 3].map(|stream| {
        let tokens = (0..ROWS * TOKENS).map(|at| ((at * at + stream) % VOCABULARY) as i64);
        let tokens: Vec<i64> = tokens.collect();
        Tensor::from_slice(&tokens, &[ROWS, TOKENS], CPU).unwrap()
    });
    let count = (ROWS * TOKENS) as f64;
    for expected in golden["losses"].as_array().unwrap() {
        let stats = Tensor::zeros(&[4], DType::F64, CPU).unwrap();
        in_pass(&model, true, |mut pass| {
            let y = model.forward(&mut pass, &x).unwrap();
            let dy = CrossEntropy::default().gradient(&mut pass, [&y, &targets, &stats]);
            model.backward(&mut pass, &dy.unwrap()).unwrap();
        });
        let loss = stats.index(0).unwrap().item().unwrap() / count;
        let expected = expected.as_f64().unwrap();
        assert!((loss - expected).abs() < 1e-11, "{loss} {expected}");
        ops::axpy(params.values(), -RATE / count, params.gradients()).unwrap();
    }
}
