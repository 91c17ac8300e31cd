//! The ResNet of examples/resnet.rs against PyTorch in f64: tests/peers/resnet.py made
//! golden/resnet.json.

use ddp::models::Model;
use ddp::models::family::{DataShape, Family};
use ddp_kernels::{DType, Device, Tensor};
use serde_json::Value;

use crate::golden_layers::{assert_trains, numbers};

#[allow(dead_code)]
#[path = "../../../examples/resnet.rs"]
mod resnet;

const CPU: Device = Device::Cpu;
const ROWS: usize = 4;
const RATE: f64 = 0.05;
const IMAGE: [usize; 3] = [2, 6, 6];

#[test]
fn a_resnet_trains_as_in_pytorch() {
    let golden: Value = serde_json::from_str(include_str!("../golden/resnet.json")).unwrap();
    let of = resnet::ResNet {
        blocks: 1,
        channels: 4,
        groups: 2,
    };
    let layers = of.layers(&DataShape {
        row_shape: &[72],
        image: &IMAGE,
        dtype: DType::F32,
        outputs: 3,
        documents: false,
    });
    let layers = Box::new(layers.unwrap());
    let model = Model::new(layers, &[72], DType::F64, CPU, 1, &|_| false).unwrap();
    let x = Tensor::from_slice(&numbers(2.0, 99, ROWS * 72), &[ROWS, 72], CPU).unwrap();
    let targets = Tensor::from_slice(&[0i64, 1, 2, 0], &[ROWS], CPU).unwrap();
    assert_trains(&model, [&x, &targets], RATE, &golden);
}
