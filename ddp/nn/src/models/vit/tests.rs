use ddp_kernels::{Device, Tensor};

use super::*;
use crate::CrossEntropy;
use crate::check::{DerivativeCheck, Objective};
use crate::models::{Model, ModelSpec};

fn tiny() -> VitSpec {
    VitSpec {
        layers: 1,
        heads: 2,
        width: 8,
        mlp_width: 6,
        patch: 2,
        ..VitSpec::default()
    }
}

fn shape<'a>(row_shape: &'a [usize], image: &'a [usize]) -> DataShape<'a> {
    DataShape {
        row_shape,
        image,
        dtype: DType::F32,
        outputs: 3,
        documents: false,
    }
}

#[test]
fn derivatives_are_those_of_the_loss_in_every_variant() {
    let worst = |spec: &VitSpec, row: &[usize], frozen: &dyn Fn(&str) -> bool| {
        let layers = spec.layers(&shape(row, &[])).unwrap();
        let targets = Tensor::from_slice(&[2i64, 0], &[2], Device::Cpu).unwrap();
        let loss = CrossEntropy::default();
        let check = DerivativeCheck {
            rows: 2,
            seed: 3,
            objective: Objective::Loss(&loss, &targets),
            frozen,
            ..DerivativeCheck::new(row)
        };
        let worst = check.worst(layers).unwrap();
        println!("{worst:?}");
        worst.error()
    };
    let all = |_: &str| false;
    assert!(worst(&tiny(), &[4, 6], &all) < 1e-7);
    let class = VitSpec {
        pool: Pool::Class,
        dropout: 0.2,
        ..tiny()
    };
    assert!(worst(&class, &[3, 2, 4], &all) < 1e-7);
    let flat = VitSpec {
        image: "4x2x3".into(),
        ..class
    };
    assert!(worst(&flat, &[24], &all) < 1e-7);
    assert!(worst(&flat, &[24], &|name| !name.contains("positions")) < 1e-7);
    assert!(worst(&flat, &[24], &|name| !name.contains("head")) < 1e-7);
}

#[test]
fn parameters_have_the_names_of_the_other_transformer() {
    let spec = ModelSpec::from(tiny());
    let data = shape(&[72], &[3, 4, 6]);
    let block = 2 * 16 + (8 * 24 + 24) + (8 * 8 + 8) + (8 * 6 + 6) + (6 * 8 + 8);
    let count = 8 * 12 + 8 + 6 * 8 + block + 16 + 3 * 8 + 3;
    assert_eq!(spec.parameter_count(&data).unwrap(), count);
    let hidden = 8 * 24 + 8 * 8 + 8 * 6 + 6 * 8;
    // Of 6 tokens: their matrices and attention to 6, and patches, which give back no gradient.
    let flop = 6 * (6 * (hidden + 2 * 8 * 6) + 4 * 12 * 8) + 6 * 8 * 3;
    assert_eq!(spec.flop_of_a_row(&data), Some(flop as f64));
    let layers = Box::new(spec.layers(&data).unwrap());
    let model = Model::new(layers, &[72], DType::F32, Device::Cpu, 1, &|_| false).unwrap();
    let in_order = model.params.in_order();
    let names: Vec<_> = in_order.iter().map(|one| &one.name[..]).collect();
    assert_eq!(
        names[..5],
        [
            "embedding.patches.weight",
            "embedding.patches.bias",
            "embedding.positions.weight",
            "blocks.0.attention.norm.weight",
            "blocks.0.attention.norm.bias",
        ]
    );
    assert_eq!(names[names.len() - 2..], ["head.weight", "head.bias"]);
    assert_eq!(model.output_shape, [3]);
}

#[test]
fn images_and_settings_that_do_not_fit_are_refused_by_name() {
    let refused = |spec: VitSpec, row: &[usize], image: &[usize], parts: &[&str]| {
        let layers = spec.check().and_then(|()| spec.layers(&shape(row, image)));
        let error = layers.unwrap_err().to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    };
    let patch = |patch: usize| VitSpec { patch, ..tiny() };
    refused(patch(0), &[784], &[28, 28], &["`patch` 0"]);
    let nearest = ["`patch` 5: ", "28x28", "next to it: 4 and 7"];
    refused(patch(5), &[784], &[28, 28], &nearest);
    refused(patch(30), &[784], &[28, 28], &["next to it: 28"]);
    refused(patch(3), &[32], &[4, 8], &["next to it: 2 and 4"]);
    refused(tiny(), &[784], &[], &["`image` 784", "give `image` 28x28"]);
    refused(tiny(), &[15], &[], &["`image` 15", "HEIGHTxWIDTH"]);
    refused(
        tiny(),
        &[32],
        &[2, 4, 4],
        &["`image` 2x4x4 (from the data)"],
    );
    let image = |image: &str| VitSpec {
        image: image.into(),
        ..tiny()
    };
    refused(
        image("28"),
        &[784],
        &[],
        &["`image` 28: expected the shape of the 784"],
    );
    refused(
        image("28x-2"),
        &[784],
        &[],
        &["`image` 28x-2: expected lengths"],
    );
    let huge = "16777216x16777216x16777216";
    refused(
        image(huge),
        &[784],
        &[],
        &["expected the shape of the 784 numbers"],
    );
    let heads = VitSpec { heads: 3, ..tiny() };
    refused(heads, &[784], &[28, 28], &["`heads` 3"]);
    refused(image("2x14x28"), &[784], &[], &["`image` 2x14x28: "]);
    // A shape that is given must not contradict the images of the data.
    let other = ["`image` 14x56", "that the data have, [28, 28]"];
    refused(image("14x56"), &[784], &[28, 28], &other);
    let planes = ["`image` 3x4x4", "[4, 4, 3]"];
    refused(image("3x4x4"), &[48], &[4, 4, 3], &planes);
    refused(tiny(), &[36], &[3, 4, 3], &["`image` 3x4x3", "crop or pad"]);
    for (given, image_of_data) in [("1x28x28", vec![28, 28]), ("28x28", vec![1, 1, 28, 28])] {
        let data = shape(&[784], &image_of_data);
        let layers = image(given).layers(&data).unwrap();
        assert!(format!("{layers:?}").contains("height: 28, width: 28"));
    }
}
