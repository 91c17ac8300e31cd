//! A transformer over patches against PyTorch's values in f64: tests/peers/vit.py made
//! golden/vit.json.

use ddp::models::vit::{Pool, VitSpec};
use ddp::models::{DataShape, Model, ModelSpec};
use ddp::nn::{CrossEntropy, Loss};
use ddp_kernels::{DType, Device, Tensor};
use serde_json::Value;

use crate::golden_layers::{numbers, tensor};
use crate::support::pass::in_pass;

const CPU: Device = Device::Cpu;
const IMAGES: usize = 3;
/// Channels, height, width.
const SHAPE: [usize; 3] = [3, 4, 6];
const PIXELS: usize = 72;
const CLASSES: usize = 3;

/// The script's images, of which the channels of a pixel are adjacent if `channels_last`.
fn images(channels_last: bool) -> Vec<f64> {
    let planes = numbers(4.0, 100, IMAGES * PIXELS);
    let [channels, height, width] = SHAPE;
    let at = |index: usize| {
        let (pixel, channel) = (index / channels % (height * width), index % channels);
        planes[index / PIXELS * PIXELS + channel * height * width + pixel]
    };
    if channels_last {
        (0..planes.len()).map(at).collect()
    } else {
        planes
    }
}

/// Loss, output and gradients of a model, as the script has them.
fn run(pool: Pool, channels_last: bool, dtype: DType) -> Vec<(String, Vec<f64>)> {
    let [channels, height, width] = SHAPE;
    let image = if channels_last {
        format!("{height}x{width}x{channels}")
    } else {
        format!("{channels}x{height}x{width}")
    };
    let spec = ModelSpec::from(VitSpec {
        layers: 2,
        heads: 2,
        width: 4,
        mlp_width: 6,
        patch: 2,
        pool,
        image,
        ..VitSpec::default()
    });
    let layers = spec.layers(&DataShape {
        row_shape: &[PIXELS],
        image: &[],
        dtype: DType::F32,
        outputs: CLASSES,
        documents: false,
    });
    let layers = Box::new(layers.unwrap());
    let model = Model::new(layers, &[PIXELS], dtype, CPU, 1, &|_| false).unwrap();
    let params = &model.params;
    let mut by_id: Vec<_> = params.list().iter().collect();
    by_id.sort_by_key(|one| one.id);
    for (stream, one) in by_id.iter().enumerate() {
        let values = tensor(&numbers(2.0, stream, one.range.len()), &one.shape, dtype);
        params.value(one.id).copy_from(&values).unwrap();
    }
    let x = tensor(&images(channels_last), &[IMAGES, PIXELS], dtype);
    let targets = Tensor::from_slice(&[0i64, 2, 1], &[IMAGES], CPU).unwrap();
    let stats = Tensor::zeros(&[4], dtype, CPU).unwrap();
    let output = in_pass(&model, true, |mut pass| {
        let y = model.forward(&mut pass, &x).unwrap();
        let dy = CrossEntropy::default().gradient(&mut pass, [&y, &targets, &stats]);
        let output = wide(&y);
        model.backward(&mut pass, &dy.unwrap()).unwrap();
        output
    });
    let total = wide(&stats);
    let mean = |of: f64| of / total[1];
    let gradients = by_id.iter().map(|one| {
        let gradient = wide(params.gradient(one.id).unwrap());
        (one.name.clone(), gradient.into_iter().map(mean).collect())
    });
    let figures = [
        ("loss".to_string(), vec![mean(total[0])]),
        ("output".to_string(), output),
    ];
    figures.into_iter().chain(gradients).collect()
}

fn wide(x: &Tensor) -> Vec<f64> {
    x.to_dtype(DType::F64).unwrap().to_vec().unwrap()
}

/// Loss, output and gradients are below 2. They pass through about 50 sums and functions in each
/// direction, which are allowed a unit each, here and in PyTorch; one was seen at most.
const UNITS: f64 = 2.0 * 2.0 * 50.0;

#[test]
fn pytorch_makes_the_same_of_patches() {
    let golden: Value = serde_json::from_str(include_str!("../golden/vit.json")).unwrap();
    for (dtype, unit) in [
        (DType::F64, f64::EPSILON / 2.0),
        (DType::F32, f64::from(f32::EPSILON) / 2.0),
    ] {
        for (pool, channels_last) in [
            (Pool::Mean, false),
            (Pool::Class, false),
            (Pool::Class, true),
        ] {
            let golden = match pool {
                Pool::Mean => &golden["mean"],
                Pool::Class => &golden["class"],
            };
            let mut worst = 0.0f64;
            let results = run(pool, channels_last, dtype);
            assert_eq!(
                results.len(),
                2 + golden["gradients"].as_object().unwrap().len()
            );
            for (name, got) in results {
                let expected = match name.as_str() {
                    "loss" => vec![golden["loss"].as_f64().unwrap()],
                    "output" => list(&golden["output"]),
                    name => list(&golden["gradients"][name]),
                };
                assert_eq!(got.len(), expected.len(), "{name}");
                for (got, expected) in got.iter().zip(&expected) {
                    let error = (got - expected).abs() / unit;
                    worst = worst.max(error);
                    assert!(
                        error <= UNITS,
                        "{pool:?} {dtype} {name}: got {got:e}, PyTorch {expected:e}, {error} units"
                    );
                }
            }
            println!("{pool:?} {dtype}: worst {worst} units of at most {UNITS}");
        }
    }
}

fn list(value: &Value) -> Vec<f64> {
    let numbers = value.as_array().unwrap().iter();
    numbers.map(|number| number.as_f64().unwrap()).collect()
}
