//! The transformer of examples/nanogpt.rs against PyTorch in f64: tests/peers/nanogpt.py made
//! golden/nanogpt.json.

use ddp::models::Model;
use ddp::models::family::{DataShape, Family};
use ddp_kernels::{DType, Device, Tensor};
use serde_json::Value;

use crate::golden_layers::assert_trains;

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
    let [x, targets] = [0, 3].map(|stream| {
        let tokens = (0..ROWS * TOKENS).map(|at| ((at * at + stream) % VOCABULARY) as i64);
        let tokens: Vec<i64> = tokens.collect();
        Tensor::from_slice(&tokens, &[ROWS, TOKENS], CPU).unwrap()
    });
    assert_trains(&model, [&x, &targets], RATE, &golden);
}
