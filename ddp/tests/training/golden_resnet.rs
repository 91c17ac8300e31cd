//! The ResNet of examples/resnet.rs against PyTorch in f64: tests/peers/resnet.py made
//! golden/resnet.json.

use ddp::models::Model;
use ddp::models::family::{DataShape, Family};
use ddp::nn::{CrossEntropy, Loss};
use ddp_kernels::{DType, Device, Tensor, ops};
use serde_json::Value;

use crate::golden_layers::numbers;

use crate::support::pass::in_pass;

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
    let params = &model.params;
    let mut by_id: Vec<_> = params.list().iter().collect();
    by_id.sort_by_key(|one| one.id);
    for (stream, one) in by_id.iter().enumerate() {
        let values = numbers(1.0, stream, one.range.len());
        let values = Tensor::from_slice(&values, &one.shape, CPU).unwrap();
        params.value(one.id).copy_from(&values).unwrap();
    }
    let x = Tensor::from_slice(&numbers(2.0, 99, ROWS * 72), &[ROWS, 72], CPU).unwrap();
    let targets = Tensor::from_slice(&[0i64, 1, 2, 0], &[ROWS], CPU).unwrap();
    for expected in golden["losses"].as_array().unwrap() {
        let stats = Tensor::zeros(&[4], DType::F64, CPU).unwrap();
        in_pass(&model, true, |mut pass| {
            let y = model.forward(&mut pass, &x).unwrap();
            let dy = CrossEntropy::default().gradient(&mut pass, [&y, &targets, &stats]);
            model.backward(&mut pass, &dy.unwrap()).unwrap();
        });
        let loss = stats.index(0).unwrap().item().unwrap() / ROWS as f64;
        let expected = expected.as_f64().unwrap();
        assert!((loss - expected).abs() < 1e-11, "{loss} {expected}");
        ops::axpy(params.values(), -RATE / ROWS as f64, params.gradients()).unwrap();
    }
}
