use ddp_kernels::{DType, Device};

use super::*;

fn digits() -> DataShape<'static> {
    DataShape {
        row_shape: &[784],
        image: &[28, 28],
        dtype: DType::F32,
        outputs: 10,
    }
}

#[test]
fn the_first_family_with_its_defaults_is_the_default() {
    let expected = mlp::MlpSpec {
        hidden: vec![256, 128],
        activation: mlp::Activation::Relu,
        dropout: 0.0,
    };
    assert_eq!(ModelSpec::default(), ModelSpec::Mlp(expected));
    assert_eq!(ModelSpec::default().name(), "mlp");
}

#[test]
fn every_family_accepts_its_defaults_and_names_its_settings_once() {
    for family in ModelSpec::families() {
        assert_eq!(family.default.name(), family.name);
        family.default.check().unwrap();
        let mut names: Vec<_> = family.settings.iter().map(|one| one.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), family.settings.len(), "{names:?}");
    }
}

#[test]
fn text_sets_each_setting_of_the_family() {
    let mut spec = ModelSpec::default();
    let [family, ..] = &ModelSpec::families()[..] else {
        panic!("no family")
    };
    let mut set = |name: &str, text: &str| {
        let setting = family.settings.iter().find(|one| one.name == name);
        (setting.unwrap().set)(&mut spec, text)
    };
    set("hidden", "5,6").unwrap();
    set("activation", "gelu").unwrap();
    set("dropout", "0.25").unwrap();
    let refused = set("dropout", "much").unwrap_err();
    assert!(refused.contains("a number"), "{refused}");
    let expected = mlp::MlpSpec {
        hidden: vec![5, 6],
        activation: mlp::Activation::Gelu,
        dropout: 0.25,
    };
    assert_eq!(spec, ModelSpec::Mlp(expected));
}

#[test]
fn wrong_settings_are_refused_by_name() {
    let refusal = |spec: mlp::MlpSpec| ModelSpec::Mlp(spec).check().unwrap_err().to_string();
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
