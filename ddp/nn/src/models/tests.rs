use ddp_kernels::{DType, Device, Tensor, ops};

use super::*;
use crate::pass::tests::in_pass;
use crate::{Linear, Sequential, family_settings};

fn digits() -> DataShape<'static> {
    DataShape {
        row_shape: &[784],
        image: &[28, 28],
        dtype: DType::F32,
        outputs: 10,
        documents: false,
    }
}

#[test]
fn the_first_family_with_its_defaults_is_the_default() {
    let expected = mlp::MlpSpec {
        hidden: vec![256, 128],
        activation: ops::Activation::Relu,
        dropout: 0.0,
        linear_path: None,
    };
    assert_eq!(ModelSpec::default(), ModelSpec::from(expected));
    assert_eq!(ModelSpec::default().name(), "mlp");
}

#[test]
fn every_family_accepts_its_defaults_and_names_its_settings_once() {
    for family in ModelSpec::families() {
        assert_eq!(family.default.name(), family.name);
        family.default.check().unwrap();
        let values = family.default.values();
        let mut names: Vec<_> = values.iter().map(|(name, _)| name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), values.len(), "{names:?}");
    }
}

#[test]
fn text_sets_each_setting_of_the_family() {
    let mut spec = ModelSpec::default();
    let mut set = |name: &str, text: &str| spec.setting(name).unwrap().field.set(text);
    set("hidden", "5,6").unwrap();
    set("activation", "gelu").unwrap();
    set("dropout", "0.25").unwrap();
    let refused = set("dropout", "much").unwrap_err();
    assert!(refused.contains("a number"), "{refused}");
    let expected = mlp::MlpSpec {
        hidden: vec![5, 6],
        activation: ops::Activation::Gelu,
        dropout: 0.25,
        linear_path: None,
    };
    assert_eq!(spec, ModelSpec::from(expected));
}

/// Beside it the perceptron sees no extremes, and both begin with 0 as the answer.
#[test]
fn a_linear_path_is_added_to_what_a_perceptron_makes_of_limited_inputs() {
    let spec = mlp::MlpSpec {
        hidden: vec![3],
        linear_path: Some(true),
        ..mlp::MlpSpec::default()
    };
    let shape = DataShape {
        row_shape: &[2],
        outputs: 1,
        ..digits()
    };
    let layers = Box::new(spec.layers(&shape).unwrap());
    let model = Model::new(layers, &[2], DType::F32, Device::Cpu, 1, &|_| false).unwrap();
    let parameters = model.params.in_order();
    let names: Vec<&str> = parameters.iter().map(|it| &*it.name).collect();
    assert_eq!(
        names,
        ["0.weight", "0.bias", "2.weight", "2.bias", "linear.weight"]
    );
    let x = [1.0, -2.0, 300.0, 0.5f32];
    let x = Tensor::from_slice(&x, &[2, 2], Device::Cpu).unwrap();
    let output = || -> Vec<f32> {
        let y = in_pass(&model, false, |mut pass| model.forward(&mut pass, &x));
        y.unwrap().to_vec().unwrap()
    };
    assert_eq!(output(), [0.0, 0.0]);
    let set = |name: &str, values: &[f32]| {
        let one = parameters.iter().find(|it| it.name == name).unwrap();
        let place = model.params.values().slice(one.range.clone()).unwrap();
        let own = |into: &mut [f32]| into[..values.len()].copy_from_slice(values);
        place.with_slice_mut(own).unwrap();
    };
    set("linear.weight", &[2.0, 1.0]);
    assert_eq!(output(), [0.0, 600.5]);
    // The perceptron passes its first input on, where it is above 0: at most 3.
    set("0.weight", &[1.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    set("0.bias", &[0.0; 3]);
    set("2.weight", &[1.0, 0.0, 0.0]);
    let [one, other] = output()[..] else {
        panic!("two rows")
    };
    assert!(
        (one - 1.0 / (1.0f32 + 1.0 / 9.0).sqrt()).abs() < 1e-6,
        "{one}"
    );
    assert!((603.4..603.5).contains(&other), "{other}");
    let torch = spec.torch(&[2], 1).unwrap();
    assert!(torch.ends_with("'2': nn.Linear(3, 1), 'linear': nn.Linear(2, 1, bias=False)}))"));
}

#[test]
fn a_family_of_another_program_is_registered_once() {
    family_settings! {
        /// Settings of a test.
        struct Line {
            /// Whether it has a bias
            bias "BOOL": bool = true;
        }
    }
    impl Family for Line {
        fn name(&self) -> &'static str {
            "line"
        }
        fn help(&self) -> &'static str {
            "A linear model"
        }
        fn check(&self) -> Result<()> {
            Ok(())
        }
        fn layers(&self, data: &DataShape<'_>) -> Result<Sequential> {
            Ok(Sequential::new().then(Linear::new(data.outputs)))
        }
    }
    register::<Line>();
    register::<Line>();
    let families = ModelSpec::families();
    let lines: Vec<_> = families.iter().filter(|one| one.name == "line").collect();
    assert_eq!(lines.len(), 1);
    assert_eq!(lines[0].default.parameter_count(&digits()).unwrap(), 7850);
    assert_eq!(lines[0].default.get(), Some(&Line { bias: true }));
    assert_eq!(lines[0].default.get::<mlp::MlpSpec>(), None);
}

#[test]
fn wrong_settings_are_refused_by_name() {
    let refusal = |spec: mlp::MlpSpec| ModelSpec::from(spec).check().unwrap_err().to_string();
    for hidden in [vec![0], vec![7, mlp::WIDTH_MAX + 1]] {
        let text = refusal(mlp::MlpSpec {
            hidden,
            ..mlp::MlpSpec::default()
        });
        assert!(text.starts_with("`hidden` "), "{text}");
    }
    for dropout in [-0.1, 1.0, f64::NAN] {
        let text = refusal(mlp::MlpSpec {
            dropout,
            ..mlp::MlpSpec::default()
        });
        assert!(text.starts_with("`dropout` "), "{text}");
    }
}

#[test]
fn parameters_are_counted_as_they_are_built() {
    let spec = ModelSpec::default();
    let counted = spec.parameter_count(&digits()).unwrap();
    let layers = Box::new(spec.layers(&digits()).unwrap());
    let model = Model::new(layers, &[784], DType::F32, Device::Cpu, 0, &|_| false).unwrap();
    let built = model.params.list().iter();
    let built: usize = built.map(|one| one.shape.iter().product::<usize>()).sum();
    assert_eq!(counted, built as u128);
    assert_eq!(counted, 784 * 256 + 256 + 256 * 128 + 128 + 128 * 10 + 10);
}

#[test]
fn a_perceptron_refuses_integers() {
    let data = DataShape {
        dtype: DType::I64,
        ..digits()
    };
    let text = ModelSpec::default().layers(&data).unwrap_err().to_string();
    assert!(text.contains("mlp") && text.contains("i64"), "{text}");
}
