//! The layout holds for any model; initial weights depend on names and the seed alone.

use std::collections::BTreeSet;

use ddp_kernels::{DType, Device};
use proptest::prelude::*;

use super::*;
use crate::build::Init;
use crate::forward::{Module, Traced};
use crate::{Activate, Dropout, Linear, Residual, Sequential, Tie};

/// The kind of a parameter of a made-up model.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Trained,
    Frozen,
    Buffer,
    Borrowed,
}

fn any_model() -> impl Strategy<Value = Vec<(Kind, Vec<usize>)>> {
    let kind = prop_oneof![
        Just(Kind::Trained),
        Just(Kind::Trained),
        Just(Kind::Frozen),
        Just(Kind::Buffer),
        Just(Kind::Borrowed)
    ];
    prop::collection::vec((kind, prop::collection::vec(1usize..40, 0..4)), 0..12)
}

fn declared(model: &[(Kind, Vec<usize>)]) -> Vec<Declaration> {
    let declare = |(index, (kind, shape)): (usize, &(Kind, Vec<usize>))| Declaration {
        matrices: Vec::new(),
        name: format!(
            "{}{index}",
            if *kind == Kind::Frozen {
                "frozen"
            } else {
                "other"
            }
        ),
        shape: shape.clone(),
        init: Init::Constant(0.0),
        is_buffer: *kind == Kind::Buffer,
        is_tied: *kind == Kind::Borrowed,
        is_borrowed: *kind == Kind::Borrowed,
    };
    model.iter().enumerate().map(declare).collect()
}

proptest! {
    #[test]
    fn the_layout_covers_every_element_once_aligned_in_completion_order(
        model in any_model(), dtype in prop_oneof![Just(DType::F32), Just(DType::F64), Just(DType::BF16)],
        shares in 1usize..6,
    ) {
        let (list, borrowed, trained) = lay_out(&declared(&model), dtype, [&|name: &str| name.starts_with("frozen"), &|_: &str| false], &shares.into());
        let last_trained = list.iter().filter(|p| p.is_trained()).map(|p| p.range.end).max().unwrap_or(0);
        // Equal slices of whole quanta if several ranks share them, also fewer ones.
        for ranks in 2..=shares {
            prop_assert!(trained >= last_trained.next_multiple_of(ranks * QUANTUM));
        }
        let padding = if shares > 1 { shares * QUANTUM } else { 1 };
        prop_assert!(trained - last_trained < padding);
        prop_assert!(borrowed.iter().all(|p| model[p.id.0].0 == Kind::Borrowed));
        prop_assert_eq!(list.len() + borrowed.len(), model.len());
        let ids: BTreeSet<ParamId> = list.iter().chain(&borrowed).map(|p| p.id).collect();
        prop_assert_eq!(ids.len(), model.len());
        let mut end = 0;
        for p in &list {
            let (kind, shape) = &model[p.id.0];
            prop_assert_eq!(p.range.len(), shape.iter().product::<usize>());
            prop_assert_eq!(p.range.start * dtype.bytes() % ALIGNMENT_BYTES, 0);
            // In order, without overlap, and with no more padding than the alignment requires.
            let multiple = if shares > 1 && p.is_trained() { QUANTUM } else { ALIGNMENT_BYTES / dtype.bytes() };
            end = if p.is_trained() { end } else { end.max(trained) };
            prop_assert_eq!(p.range.start, end.next_multiple_of(multiple));
            end = p.range.end;
            prop_assert_eq!((p.is_trained(), p.frozen, p.is_buffer), match kind {
                Kind::Trained => (true, false, false),
                Kind::Frozen => (false, true, false),
                Kind::Buffer => (false, false, true),
                Kind::Borrowed => unreachable!("borrowed parameters have memory apart"),
            });
            prop_assert_eq!(p.decays, shape.len() >= 2 && *kind != Kind::Buffer);
        }
        // Trained ones in reverse order of declaration, as in backward; then frozen, then buffers.
        let order: Vec<_> = list.iter().map(|p| (p.is_buffer, p.frozen, std::cmp::Reverse(p.id))).collect();
        prop_assert!(order.is_sorted(), "{:?}", order);
    }
}

fn layers() -> Sequential {
    let tie = Tie::new();
    let inner = Sequential::new()
        .then(Linear::new(3).without_bias().tied(&tie))
        .then(Activate::relu());
    Sequential::new()
        .then(Linear::new(3).tied(&tie))
        .then(Dropout::new(0.5))
        .then(Residual::new(inner))
        .then(Linear::new(2))
}

/// The parameters of `model` for rows of 3 inputs.
fn params_of(
    model: impl Module,
    dtype: DType,
    seed: u64,
    frozen: &dyn Fn(&str) -> bool,
) -> Result<Params> {
    let mut declarations = Declarations::new();
    Traced::build(std::sync::Arc::new(model), &mut declarations, &[3])?;
    Params::new(
        &declarations,
        dtype.into(),
        Device::Cpu,
        seed,
        frozen,
        &1.into(),
    )
}

fn params(dtype: DType, seed: u64, frozen: &dyn Fn(&str) -> bool) -> Params {
    params_of(layers(), dtype, seed, frozen).unwrap()
}

#[test]
fn names_shapes_uses_and_views_are_those_declared() {
    let params = params(DType::F32, 1, &|name| name == "3.weight");
    let names: Vec<_> = params.list().iter().map(|p| p.name.as_str()).collect();
    assert_eq!(names, ["3.bias", "0.bias", "0.weight", "3.weight"]);
    let [weight, bias, frozen] =
        ["0.weight", "0.bias", "3.weight"].map(|name| params.find(name).unwrap().id);
    assert_eq!([weight, bias, frozen].map(|id| params.uses(id)), [2, 1, 1]);
    assert_eq!(params.value(weight).shape().dims(), [3, 3]);
    assert_eq!(
        params.gradient(weight).unwrap().name(),
        Some("0.weight.grad")
    );
    assert!(
        params.gradient(frozen).is_none()
            && params.value(frozen).shares_memory_with(params.values())
    );
    assert!(
        !params
            .value(frozen)
            .shares_memory_with(params.trained_values())
    );
    assert_eq!(params.trained_values().shape(), params.gradients().shape());
    assert_eq!(
        (params.count(), params.trained_count()),
        (9 + 3 + 6 + 2, 9 + 3 + 2)
    );
    let chunks = params.chunks().unwrap();
    assert_eq!(chunks.elements(), 14);
    assert_eq!(
        chunks
            .chunks()
            .iter()
            .map(|chunk| chunk.decay)
            .collect::<Vec<_>>(),
        [false, false, true]
    );
    let error = params.find("1.weight").unwrap_err().to_string();
    assert!(
        error.contains("expected one of: 3.bias, 0.bias, 0.weight, 3.weight, got 1.weight"),
        "{error}"
    );
}

#[test]
fn writing_a_view_writes_the_arena_and_padding_stays_zero() {
    let params = params(DType::F32, 1, &|_| false);
    for p in params.list() {
        ddp_kernels::ops::fill_into(params.value(p.id), 1.0 + p.id.0 as f64).unwrap();
    }
    let values = params.values().to_vec::<f32>().unwrap();
    for (index, value) in values.into_iter().enumerate() {
        let owner = params.list().iter().find(|p| p.range.contains(&index));
        assert_eq!(
            value,
            owner.map_or(0.0, |p| 1.0 + p.id.0 as f32),
            "element {index}"
        );
    }
}

#[test]
fn first_values_depend_on_name_and_seed_and_not_on_dtype_layout_or_the_rest_of_the_model() {
    let value = |params: &Params, name: &str| {
        let value = params
            .value(params.find(name).unwrap().id)
            .to_dtype(DType::F64)
            .unwrap();
        value.to_vec::<f64>().unwrap()
    };
    let usual = params(DType::F32, 5, &|_| false);
    let others = [
        params(DType::F64, 5, &|_| false),
        params(DType::F32, 5, &|name| name.starts_with("0.")),
    ];
    for other in &others {
        for p in usual.list() {
            assert_eq!(value(&usual, &p.name), value(other, &p.name), "{}", p.name);
        }
    }
    let alone = Sequential::new().then(Linear::new(3));
    let alone = params_of(alone, DType::F32, 5, &|_| false).unwrap();
    assert_eq!(value(&alone, "0.weight"), value(&usual, "0.weight"));
    assert_ne!(
        value(&params(DType::F32, 6, &|_| false), "0.weight"),
        value(&usual, "0.weight")
    );
    assert_ne!(
        value(&usual, "0.weight")[..2],
        value(&usual, "3.weight")[..2]
    );
}

#[test]
fn hashes_tell_values_apart() {
    let usual = params(DType::F32, 5, &|_| false);
    let same = params(DType::F32, 5, &|_| false);
    assert_eq!(usual.values_hash().unwrap(), same.values_hash().unwrap());
    let last = same
        .value(same.find("0.weight").unwrap().id)
        .flatten()
        .unwrap()
        .slice(8..9)
        .unwrap();
    let before = last.to_vec::<f32>().unwrap()[0];
    last.copy_from(
        &Tensor::from_slice(&[f32::from_bits(before.to_bits() ^ 1)], &[1], Device::Cpu).unwrap(),
    )
    .unwrap();
    assert_ne!(
        usual.values_hash().unwrap(),
        same.values_hash().unwrap(),
        "one bit of the last element"
    );
}

#[test]
fn a_model_without_trained_parameters_has_no_gradients() {
    let frozen = params(DType::F32, 1, &|_| true);
    assert_eq!(
        (
            frozen.gradients().count(),
            frozen.chunks().unwrap().elements()
        ),
        (0, 0)
    );
    let none = params_of(Sequential::new(), DType::F32, 1, &|_| false).unwrap();
    assert_eq!(none.count(), 0);
}

#[test]
fn what_no_model_computes_in_is_refused() {
    for (dtype, help) in [
        (DType::I32, "use f32"),
        (DType::F16, "use bf16, which has the range of f32"),
    ] {
        let error = params_of(layers(), dtype, 1, &|_| false).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        let error = error.to_string();
        assert!(
            error.contains(&format!(
                "expected f32, bf16 or (for checks) f64, got {dtype}; help: {help}"
            )),
            "{error}"
        );
    }
}

/// The bits of all elements, as f32.
fn bits(tensor: &Tensor) -> Vec<u32> {
    tensor
        .to_dtype(DType::F32)
        .unwrap()
        .to_vec::<f32>()
        .unwrap()
        .iter()
        .map(|value| value.to_bits())
        .collect()
}

#[test]
fn layers_in_bf16_read_copies_that_are_one_rounding_from_the_masters_and_know_of_no_change_before_refresh()
 {
    // With a frozen parameter.
    let params = params(DType::BF16, 5, &|name| name == "3.bias");
    assert_eq!(
        (params.dtype(), params.master_dtype()),
        (DType::BF16, DType::F32)
    );
    assert_eq!(
        [params.values(), params.gradients(), params.trained_values()].map(Tensor::dtype),
        [DType::F32; 3]
    );
    assert_eq!(params.read_arena().bytes(), params.values().count() * 2);
    let rounded = || bits(&params.values().to_dtype(DType::BF16).unwrap());
    assert_eq!(bits(params.read_arena()), rounded(), "as they were filled");
    assert_ne!(
        bits(params.read_arena()),
        bits(params.values()),
        "f32 has more bits"
    );
    for p in params.list() {
        let (value, master) = (params.value(p.id), params.master(p.id));
        assert!(
            value.shares_memory_with(params.read_arena())
                && master.shares_memory_with(params.values())
        );
        assert_eq!(
            (value.shape(), value.dtype(), master.dtype()),
            (master.shape(), DType::BF16, DType::F32)
        );
        assert_eq!(
            bits(value),
            bits(&master.to_dtype(DType::BF16).unwrap()),
            "{}",
            p.name
        );
    }
    let before = bits(params.read_arena());
    let hash = params.values_hash().unwrap();
    ops::fill_into(params.values(), 1.0 + 1.0 / 1024.0).unwrap();
    assert_ne!(params.values_hash().unwrap(), hash);
    assert_eq!(bits(params.read_arena()), before);
    let part = params.find("0.weight").unwrap().range.clone();
    params.refresh(part.clone()).unwrap();
    for (index, (now, before)) in bits(params.read_arena())
        .into_iter()
        .zip(before)
        .enumerate()
    {
        assert_eq!(
            now,
            if part.contains(&index) {
                1f32.to_bits()
            } else {
                before
            },
            "element {index}"
        );
    }
    params.refresh(0..params.values().count()).unwrap();
    assert_eq!(bits(params.read_arena()), rounded());
}

#[test]
fn the_values_of_a_model_in_bf16_are_those_of_one_in_f32() {
    let [narrow, wide] = [DType::BF16, DType::F32].map(|dtype| params(dtype, 5, &|_| false));
    for p in wide.list() {
        assert_eq!(
            bits(narrow.master(narrow.find(&p.name).unwrap().id)),
            bits(wide.value(p.id)),
            "{}",
            p.name
        );
        assert!(
            wide.master(p.id).shares_memory_with(wide.value(p.id)),
            "there is one arena in f32"
        );
    }
    assert!(wide.read_arena().shares_memory_with(wide.values()));
    wide.refresh(0..wide.values().count()).unwrap();
}
