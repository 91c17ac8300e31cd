//! Registries on one device; tests/registry.rs has the moves between several.

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
fn tensors_are_found_by_the_name_they_were_registered_under() {
    let registry = model();
    assert_eq!(registry.get("weight").unwrap().name(), Some("model.weight"));
    let entries = registry.iter();
    let listed: Vec<_> = entries.map(|entry| (entry.name(), entry.role())).collect();
    let expected = [
        ("model.weight", Role::Parameter),
        ("model.bias", Role::Parameter),
        ("model.mask", Role::Buffer),
    ];
    assert_eq!(listed, expected);
}

#[test]
fn wrong_names_are_errors_with_the_line() {
    let mut registry = model();
    let error = registry.get("wieght").unwrap_err().to_string();
    let expected = "expected one of [model.weight, model.bias, model.mask], got model.wieght";
    assert!(error.contains(expected), "{error}");
    assert!(error.contains(file!()), "{error}");
    for taken in ["bias", ""] {
        let error = registry.buffer(taken, zeros(&[1])).unwrap_err().to_string();
        let expected = format!("expected a new name, got {taken:?}");
        assert!(
            error.contains(&expected) && error.contains(file!()),
            "{error}"
        );
    }
    assert_eq!(registry.iter().count(), 3);
}

#[test]
fn a_failed_move_changes_nothing_and_a_move_to_the_same_device_counts_nothing() {
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
    registry
        .parameter("head", registry.get("weight").unwrap().t().unwrap())
        .unwrap();
    let expected = "\
role       name          dtype  shape   device        bytes
parameter  model.weight  f32    [8, 8]  cpu           256 B
parameter  model.bias    f32    [8]     cpu            32 B
buffer     model.mask    f32    []      cpu             4 B
parameter  model.head    f32    [8, 8]  cpu           256 B
on cpu: 4 tensors, 292 B
";
    assert_eq!(registry.to_string(), expected);
}
