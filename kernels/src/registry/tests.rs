//! What registries promise on one device; tests/registry.rs has the moves between several.

use super::*;
use crate::DType;
use crate::transfer::{self, Ledger};

fn zeros(shape: &[usize]) -> Tensor {
    Tensor::zeros(shape, DType::F32, Device::Cpu).unwrap()
}

fn model() -> Registry {
    let mut registry = Registry::new("model");
    registry.parameter("weight", zeros(&[8, 8])).unwrap();
    registry.parameter("bias", zeros(&[8])).unwrap();
    registry.buffer("mask", zeros(&[])).unwrap();
    registry
}

#[test]
fn tensors_are_found_by_short_and_full_name_and_bear_the_full_one() {
    let mut registry = model();
    assert_eq!(registry.get("weight").unwrap().name(), Some("model.weight"));
    assert_eq!(registry.get("model.mask").unwrap().name(), Some("model.mask"));
    let listed: Vec<_> = registry.iter().map(|entry| (entry.name(), entry.role())).collect();
    let expected = [("model.weight", Role::Parameter), ("model.bias", Role::Parameter), ("model.mask", Role::Buffer)];
    assert_eq!(listed, expected);
    // A short name that is another's full one gives way to it.
    registry.parameter("model.bias", zeros(&[3])).unwrap();
    assert_eq!(registry.get("model.bias").unwrap().shape().dims(), [8]);
    assert_eq!(registry.get("model.model.bias").unwrap().shape().dims(), [3]);
    let mut bare = Registry::new("");
    bare.parameter("w", zeros(&[1])).unwrap();
    assert_eq!(bare.get("w").unwrap().name(), Some("w"));
}

#[test]
fn wrong_names_are_errors_with_the_line_and_the_nearest_names() {
    let mut registry = model();
    let error = registry.get("wieght").unwrap_err().to_string();
    assert!(error.contains("a registered one; the nearest: model.weight, "), "{error}");
    assert!(error.contains("got \"wieght\"") && error.contains(file!()), "{error}");
    let error = registry.buffer("bias", zeros(&[1])).unwrap_err().to_string();
    assert!(error.contains("\"model.bias\" f32[8] on cpu is registered as a parameter"), "{error}");
    let error = registry.parameter("", zeros(&[1])).unwrap_err().to_string();
    assert!(error.contains("an empty one"), "{error}");
    let error = Registry::new("x").get("w").unwrap_err().to_string();
    assert!(error.contains("none is yet"), "{error}");
    assert_eq!(registry.len(), 3);
}

#[test]
fn a_replacement_has_to_fit() {
    let mut registry = model();
    registry.replace("bias", Tensor::ones(&[8], DType::F32, Device::Cpu).unwrap()).unwrap();
    assert_eq!(registry.get("bias").unwrap().to_vec::<f32>().unwrap(), [1.0; 8]);
    assert_eq!(registry.get("bias").unwrap().name(), Some("model.bias"));
    let error = registry.replace("bias", zeros(&[7])).unwrap_err().to_string();
    assert!(error.contains("tensor f32[7] on cpu: expected [8], the shape of \"model.bias\" f32[8] on"), "{error}");
    let wide = Tensor::zeros(&[8], DType::F64, Device::Cpu).unwrap();
    let error = registry.replace("bias", wide).unwrap_err().to_string();
    assert!(error.contains("expected f32, the dtype of") && error.contains(file!()), "{error}");
    assert!(registry.replace("bia", zeros(&[8])).is_err());
}

#[test]
fn a_move_that_cannot_be_changes_nothing_and_one_to_where_all_is_counts_nothing() {
    let mut registry = model();
    let before = registry.get("weight").unwrap().clone();
    let error = registry.to(Device::Cuda(99)).unwrap_err();
    assert!(matches!(error, Error::DeviceAbsent { .. }), "{error}");
    assert!(registry.get("weight").unwrap().shares_memory_with(&before));
    assert_eq!(registry.home(), Some(Device::Cpu));
    let ledger = Ledger::new();
    transfer::with_ledger(&ledger, || registry.to(Device::Cpu)).unwrap();
    assert_eq!(ledger.crossed(), (0, 0));
    assert!(registry.get("weight").unwrap().shares_memory_with(&before));
    assert!(registry.left_behind().is_empty());
    assert!(Registry::new("none").left_behind().is_empty());
}

#[test]
fn the_table_counts_shared_memory_once() {
    let mut registry = model();
    registry.parameter("head", registry.get("weight").unwrap().t().unwrap()).unwrap();
    let expected = "\
role       name          dtype  shape   device        bytes
parameter  model.weight  f32    [8, 8]  cpu           256 B
parameter  model.bias    f32    [8]     cpu            32 B
buffer     model.mask    f32    []      cpu             4 B
parameter  model.head    f32    [8, 8]  cpu           256 B  shares memory with model.weight
on cpu: 4 tensors, 292 B
";
    assert_eq!(registry.to_string(), expected);
    assert_eq!(Registry::new("x").to_string(), "nothing registered\n");
}

#[test]
fn edits_are_counted() {
    for (one, other, count) in [("", "", 0), ("abc", "", 3), ("", "ab", 2), ("kitten", "sitting", 3), ("w", "w", 0)] {
        assert_eq!((edits(one, other), edits(other, one)), (count, count), "{one} {other}");
    }
}
