use std::iter::once;
use std::sync::Arc;

use ddp_kernels::{DType, Device, Random, Tensor};

use super::*;
use crate::check::DerivativeCheck;
use crate::models::Model;
use crate::pass::tests::in_pass;
use crate::{Activate, Linear, Module, Sequential};

/// Layers whose B's do not start at 0, so that all derivatives matter.
#[derive(Debug)]
struct Started(Sequential);

impl Module for Started {
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
        let y = self.0.forward(m, x);
        m.start_all(LORA_B, Init::Uniform { bound: 1.0 });
        y
    }
}

fn hidden() -> Sequential {
    Sequential::new()
        .then(Linear::new(8).in_parts(&[4, 2, 2]))
        .then(Activate::gelu())
        .then(Linear::new(3))
}

fn layers() -> Sequential {
    hidden().then(Linear::new(2).outer())
}

/// Adapters of the first and the last part of the first layer, and of all of the one above it.
fn lora(dropout: f64) -> Lora {
    Lora {
        rank: 2,
        scale: 1.5,
        dropout,
        adapted: Arc::new(|layer, parts| match (layer, parts) {
            ("0", [4, 2, 2]) => vec![0..4, 6..8],
            ("2", [3]) => once(0..3).collect(),
            other => panic!("{other:?}"),
        }),
    }
}

#[test]
fn derivatives_of_adapters_are_those_of_differences() {
    for dropout in [0.0, 0.4] {
        let layers = Started(hidden().adapted(lora(dropout)));
        let worst = DerivativeCheck::new(&[5]).worst(layers).unwrap();
        assert!(worst.error() < 1e-8, "{worst:?}");
        assert_ne!(worst.backward, 0.0, "{worst:?}");
    }
}

/// The output is that of the layers whose weights have the adapters' products added, by blocks.
#[test]
fn a_block_of_b_adds_to_its_own_outputs() {
    let model = |layers: Box<dyn Module>| {
        Model::new(layers, &[5], DType::F64, Device::Cpu, 7, &|_| false).unwrap()
    };
    let adapted = model(Box::new(Started(layers().adapted(lora(0.0)))));
    let merged = model(Box::new(layers()));
    let values = |model: &Model, name: &str| -> Vec<f64> {
        let id = model.params.find(name).unwrap().id;
        model.params.value(id).to_vec().unwrap()
    };
    for parameter in merged.params.list() {
        let target = adapted.params.find(&parameter.name).unwrap().id;
        let weight = merged.params.master(parameter.id);
        adapted.params.master(target).copy_from(weight).unwrap();
    }
    for (layer, inputs, blocks) in [("0", 5, vec![0..4, 6..8]), ("2", 8, once(0..3).collect())] {
        let (a, b) = (
            values(&adapted, &format!("{layer}.lora_a")),
            values(&adapted, &format!("{layer}.lora_b")),
        );
        let name = format!("{layer}.weight");
        let mut weight = values(&merged, &name);
        let mut packed = 0;
        for (block, rows) in blocks.into_iter().enumerate() {
            for row in rows {
                for column in 0..inputs {
                    for k in 0..2 {
                        let a = a[(block * 2 + k) * inputs + column];
                        weight[row * inputs + column] += 1.5 * b[packed * 2 + k] * a;
                    }
                }
                packed += 1;
            }
        }
        let master = merged.params.master(merged.params.find(&name).unwrap().id);
        let weight = Tensor::from_slice(&weight, master.shape(), Device::Cpu).unwrap();
        master.copy_from(&weight).unwrap();
    }
    let mut random = Random::new(3);
    let x = Tensor::randn(&[4, 5], DType::F64, Device::Cpu, &mut random).unwrap();
    let [got, expected] = [&adapted, &merged].map(|model| {
        let y = in_pass(model, false, |mut pass| model.forward(&mut pass, &x));
        y.unwrap().to_vec::<f64>().unwrap()
    });
    for (got, expected) in got.iter().zip(&expected) {
        assert!((got - expected).abs() < 1e-13, "{got} {expected}");
    }
}

/// Base weights in bf16 take two bytes, and have neither masters nor gradients.
#[test]
fn only_adapters_have_masters_and_gradients() {
    let layers = Box::new(layers().adapted(lora(0.0)));
    let model = Model::new(layers, &[5], DType::BF16, Device::Cpu, 7, &|_| false).unwrap();
    let params = &model.params;
    let adapters: usize = params
        .list()
        .iter()
        .filter(|p| is_adapter(&p.name))
        .map(|p| p.range.len())
        .sum();
    assert_eq!(adapters, 2 * (2 * 5) + 6 * 2 + 2 * 8 + 3 * 2);
    assert_eq!(params.trained_count(), adapters);
    assert_eq!(params.values().dtype(), DType::F32);
    assert_eq!(params.base().dtype(), DType::BF16);
    for parameter in params.list() {
        assert_eq!(parameter.is_base, !is_adapter(&parameter.name));
        if parameter.is_base {
            let (value, master) = (params.value(parameter.id), params.master(parameter.id));
            assert!(
                value.shares_memory_with(params.base()),
                "{}",
                parameter.name
            );
            assert!(master.shares_memory_with(value), "{}", parameter.name);
            assert!(params.gradient(parameter.id).is_none());
        }
    }
}
