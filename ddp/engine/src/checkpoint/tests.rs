//! Claims about saved models.

mod damage;
mod disk;
mod pruning;
mod states;
mod testing;

use std::fs;
use std::path::{Path, PathBuf};

use ddp_kernels::{DType, Device, ops};

use ddp_data::TaskSpec;

use self::testing::state;
use super::tensors::PIECE;
use super::*;
use crate::error::Result;
use ddp_kernels::files::testing::Scratch;
use ddp_nn::models::{Mlp, Model};
use ddp_nn::params::Params;
use ddp_nn::{Init, Module, Scope, Var};

/// Writes a model file.
fn save_model(out: &Path, step: u64, parts: &[&Params]) -> Result<PathBuf> {
    let folder = folder(out, step);
    fs::create_dir_all(&folder).unwrap();
    write_model(&folder.join(MODEL_FILE), parts)?;
    Ok(folder.join(MODEL_FILE))
}

fn model(hidden: &[usize], seed: u64) -> Model {
    let layers = Mlp {
        hidden: hidden.to_vec(),
        outputs: 3,
        activation: ops::Activation::Relu,
        dropout: 0.0,
    }
    .layers();
    Model::new(
        Box::new(layers),
        &[5],
        DType::F32,
        Device::Cpu,
        seed,
        &|_| false,
    )
    .unwrap()
}

fn values(params: &Params, name: &str) -> Vec<f32> {
    params
        .value(params.find(name).unwrap().id)
        .to_vec()
        .unwrap()
}

#[test]
fn a_saved_model_comes_back_to_the_bit() {
    let scratch = Scratch::new();
    let (saved, other) = (model(&[70, 4], 1), model(&[70, 4], 2));
    let path = save_model(scratch.path(), 12, &[&saved.params]).unwrap();
    assert_eq!(
        path,
        scratch
            .path()
            .join("checkpoints/step-00000012/model.safetensors")
    );
    assert_ne!(
        saved.params.values_hash().unwrap(),
        other.params.values_hash().unwrap()
    );
    load_model(&path, &[&other.params]).unwrap();
    assert_eq!(
        saved.params.values_hash().unwrap(),
        other.params.values_hash().unwrap()
    );
    assert_eq!(scratch.names(), ["checkpoints"]);
}

#[test]
fn values_longer_than_a_piece_come_back_too() {
    let scratch = Scratch::new();
    let (saved, other) = (model(&[PIECE / 4, 9], 1), model(&[PIECE / 4, 9], 2));
    let path = save_model(scratch.path(), 0, &[&saved.params]).unwrap();
    load_model(&path, &[&other.params]).unwrap();
    assert_eq!(
        saved.params.values_hash().unwrap(),
        other.params.values_hash().unwrap()
    );
}

/// Multiplies by one trained number, which is a parameter without axes.
#[derive(Debug)]
struct Scaled(f64);

impl Module for Scaled {
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
        let scale = m.parameter("scale", &[], Init::Constant(self.0));
        m.linear("linear", x, 3) * scale
    }
}

#[test]
fn a_parameter_of_one_number_comes_back() {
    let scratch = Scratch::new();
    let [saved, other] = [2.0, 3.0].map(|scale| {
        let module = Box::new(Scaled(scale));
        Model::new(module, &[5], DType::F32, Device::Cpu, 1, &|_| false).unwrap()
    });
    let path = save_model(scratch.path(), 0, &[&saved.params]).unwrap();
    load_model(&path, &[&other.params]).unwrap();
    assert_eq!(values(&other.params, "scale"), [2.0]);
}

#[test]
fn another_implementation_reads_the_file() {
    let scratch = Scratch::new();
    let saved = model(&[4], 1);
    let bytes = fs::read(save_model(scratch.path(), 3, &[&saved.params]).unwrap()).unwrap();
    let file = ::safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let (_, header) = ::safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(header.metadata().as_ref().unwrap()["format"], "pt");
    let mut names = file.names();
    names.sort_unstable();
    assert_eq!(names, ["0.bias", "0.weight", "2.bias", "2.weight"]);
    for name in names {
        let tensor = file.tensor(name).unwrap();
        assert_eq!(tensor.dtype(), ::safetensors::Dtype::F32);
        assert_eq!(tensor.shape(), saved.params.find(name).unwrap().shape);
        let expected: Vec<u8> = values(&saved.params, name)
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        assert_eq!(tensor.data(), expected);
        assert!((tensor.data().as_ptr() as usize - bytes.as_ptr() as usize).is_multiple_of(4));
    }
}

#[test]
fn a_file_of_another_implementation_is_read() {
    let scratch = Scratch::new();
    let path = scratch.path().join("theirs.safetensors");
    let source = model(&[4], 1);
    let bytes: Vec<(String, Vec<usize>, Vec<u8>)> = ["2.bias", "0.weight", "2.weight", "0.bias"]
        .map(|name| {
            let data = values(&source.params, name)
                .iter()
                .flat_map(|value| value.to_le_bytes())
                .collect();
            (
                name.to_string(),
                source.params.find(name).unwrap().shape.clone(),
                data,
            )
        })
        .into();
    let views = bytes.iter().map(|(name, shape, data)| {
        (
            name,
            ::safetensors::tensor::TensorView::new(::safetensors::Dtype::F32, shape.clone(), data)
                .unwrap(),
        )
    });
    fs::write(&path, ::safetensors::serialize(views, None).unwrap()).unwrap();
    let target = model(&[4], 2);
    load_model(&path, &[&target.params]).unwrap();
    assert_eq!(
        source.params.values_hash().unwrap(),
        target.params.values_hash().unwrap()
    );
}

#[test]
fn a_model_of_other_names_or_shapes_is_refused_and_nothing_is_changed() {
    let scratch = Scratch::new();
    let path = save_model(scratch.path(), 3, &[&model(&[4], 1).params]).unwrap();
    for (other, parts) in [
        (
            model(&[6], 2),
            &["0.weight", "[4, 5]", "[6, 5]", "`model`"][..],
        ),
        (
            model(&[4, 4], 2),
            &["another model", "lacks 4.weight, 4.bias"],
        ),
        (
            model(&[], 2),
            &[
                "another model",
                "it has 2.weight, 2.bias, which the model does not",
            ],
        ),
    ] {
        let before = other.params.values_hash().unwrap();
        let error = load_model(&path, &[&other.params]).unwrap_err();
        assert_eq!(error.exit_code(), 65);
        let text = error.to_string();
        assert!(text.contains(path.to_str().unwrap()), "{text}");
        parts
            .iter()
            .for_each(|part| assert!(text.contains(part), "{text} lacks {part}"));
        assert_eq!(other.params.values_hash().unwrap(), before);
    }
    let error = load_model(&scratch.path().join("nowhere"), &[&model(&[4], 1).params]).unwrap_err();
    assert_eq!(error.exit_code(), 74);
}

/// Loads `bytes` into a model of hidden width 4. Returns what was said; none if it was loaded.
fn load_bytes(scratch: &Scratch, bytes: &[u8], target: &Model) -> Option<String> {
    let path = scratch.path().join("file");
    fs::write(&path, bytes).unwrap();
    let before = target.params.values_hash().unwrap();
    let error = load_model(&path, &[&target.params]).err()?;
    assert_eq!(error.exit_code(), 65, "{error}");
    assert_eq!(target.params.values_hash().unwrap(), before);
    Some(error.to_string())
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let scratch = Scratch::new();
    let bytes =
        fs::read(save_model(scratch.path(), 3, &[&model(&[4], 1).params]).unwrap()).unwrap();
    let target = model(&[4], 2);
    for length in 0..bytes.len() {
        assert!(
            load_bytes(&scratch, &bytes[..length], &target).is_some(),
            "cut to {length} of {}",
            bytes.len()
        );
    }
    let longer = [&bytes[..], &[0]].concat();
    assert!(
        load_bytes(&scratch, &longer, &target)
            .unwrap()
            .contains("cut short or damaged")
    );
}

#[test]
fn a_header_with_a_flipped_byte_is_refused_or_means_the_same() {
    let scratch = Scratch::new();
    let source = model(&[4], 1);
    let mut bytes = fs::read(save_model(scratch.path(), 3, &[&source.params]).unwrap()).unwrap();
    let header = 8 + u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    let mut loaded = 0;
    for index in 0..header {
        for flip in [0x01, 0x80] {
            bytes[index] ^= flip;
            let target = model(&[4], 2);
            if load_bytes(&scratch, &bytes, &target).is_none() {
                // In the metadata, which are free text, or in the padding of the header.
                loaded += 1;
                assert_eq!(
                    target.params.values_hash().unwrap(),
                    source.params.values_hash().unwrap(),
                    "byte {index}"
                );
            }
            bytes[index] ^= flip;
        }
    }
    assert!(loaded < 20, "{loaded} flips were not noticed");
}

#[test]
fn wrong_safetensors_headers_are_refused() {
    let scratch = Scratch::new();
    let target = model(&[4], 2);
    let refuse = |json: &str, data: usize, parts: &[&str]| {
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend(json.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        let text = load_bytes(&scratch, &bytes, &target).expect(json);
        parts
            .iter()
            .for_each(|part| assert!(text.contains(part), "{json}\n{text}\nlacks {part}"));
    };
    let huge =
        r#"{"0.weight":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}}"#;
    refuse(huge, 0, &["its header is damaged", "overflow"]);
    refuse(
        r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#,
        4,
        &["take 8 bytes", "it has 4"],
    );
    refuse(
        r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}"#,
        8,
        &["its header is damaged", "offset"],
    );
    refuse(
        r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#,
        12,
        &["its header is damaged", "offset"],
    );
    refuse(
        r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#,
        8,
        &["its header is damaged", "offset"],
    );
    refuse(
        r#"{"a":{"dtype":"P32","shape":[2],"data_offsets":[0,8]}}"#,
        8,
        &["its header is damaged", "P32"],
    );
    refuse(
        r#"{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}"#,
        8,
        &["its header is damaged"],
    );
    refuse(&"[".repeat(100_000), 0, &["its header is damaged"]);
    refuse("{}", 0, &["lacks 0.weight, 0.bias, 2.weight, 2.bias"]);
    let text = load_bytes(&scratch, &u64::MAX.to_le_bytes(), &target).unwrap();
    assert!(text.contains("got 18446744073709551615"), "{text}");
    let text = load_bytes(&scratch, b"PK\x03\x04 and so on", &target).unwrap();
    assert!(
        text.contains("torch.save") && text.contains("safetensors.torch"),
        "{text}"
    );
}

#[test]
fn other_dtypes_are_refused_by_name() {
    let scratch = Scratch::new();
    let bytes =
        fs::read(save_model(scratch.path(), 3, &[&model(&[4], 1).params]).unwrap()).unwrap();
    let header = 8 + u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    let json = String::from_utf8(bytes[8..header].to_vec())
        .unwrap()
        .replace("\"F32\"", "\"I32\"");
    let changed = [&bytes[..8], json.as_bytes(), &bytes[header..]].concat();
    let text = load_bytes(&scratch, &changed, &model(&[4], 2)).unwrap();
    assert!(
        text.contains("0.weight is I32: expected F32, BF16 or F16"),
        "{text}"
    );
}

#[test]
fn narrower_floats_are_read_without_being_rounded() {
    let scratch = Scratch::new();
    let target = model(&[4], 2);
    // Subnormals, zeros of both signs, infinities and NaN among them.
    let patterns: Vec<u16> = vec![
        0, 0x8000, 1, 0x03ff, 0x0400, 0x3c00, 0x7bff, 0xfc00, 0x3f80, 0xff7f, 0x0080, 0x7f80,
    ];
    let number = |dtype: &str, bits: u16| match dtype {
        "BF16" => f32::from_bits(u32::from(bits) << 16),
        _ => half(bits),
    };
    for dtype in ["BF16", "F16"] {
        let mut at = 0;
        let mut json = serde_json::Map::new();
        let mut data = Vec::new();
        for p in target.params.in_order() {
            let count: usize = p.shape.iter().product();
            json.insert(
                p.name.clone(),
                serde_json::json!({"dtype": dtype, "shape": p.shape, "data_offsets": [at, at + 2 * count]}),
            );
            at += 2 * count;
            data.extend(
                (0..count).flat_map(|index| patterns[index % patterns.len()].to_le_bytes()),
            );
        }
        let json = serde_json::Value::Object(json).to_string();
        let bytes = [
            &(json.len() as u64).to_le_bytes()[..],
            json.as_bytes(),
            &data,
        ]
        .concat();
        fs::write(scratch.path().join("file"), bytes).unwrap();
        load_model(&scratch.path().join("file"), &[&target.params]).unwrap();
        for p in target.params.in_order() {
            for (index, value) in values(&target.params, &p.name).into_iter().enumerate() {
                let expected = number(dtype, patterns[index % patterns.len()]);
                let same =
                    value.to_bits() == expected.to_bits() || (value.is_nan() && expected.is_nan());
                assert!(
                    same,
                    "{dtype} {:04x}: {value} for {expected}",
                    patterns[index % patterns.len()]
                );
            }
        }
    }
}

/// IEEE 754's binary16, by its definition.
fn half(bits: u16) -> f32 {
    let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f32::from(bits & 1023));
    sign * match exponent {
        0 => fraction * 2f32.powi(-24),
        31 if fraction == 0.0 => f32::INFINITY,
        31 => f32::NAN,
        _ => (1024.0 + fraction) * 2f32.powi(exponent - 25),
    }
}

/// A run of one rank: a model of 5 inputs in training, and its state after step `step`.
fn run(seed: u64) -> (ddp_comm::World, crate::step::Step) {
    let world = ddp_comm::World::single().unwrap();
    let model = model(&[2], seed);
    let optimizer =
        ddp_nn::optim::Optimizer::new(ddp_nn::optim::Rule::adamw(), &model.params).unwrap();
    let group = world.group("gradients").unwrap();
    let loss = Box::new(ddp_nn::Mse);
    let step = crate::step::Step::new(
        model,
        loss,
        optimizer,
        group,
        &crate::step::StepOptions::default(),
    )
    .unwrap();
    (world, step)
}

/// Saves these steps of a run in `out`.
fn save(out: &Path, steps: &[u64]) {
    let (world, mut step) = run(1);
    let mut saver = Saver::new(&world, out, 9).unwrap();
    steps
        .iter()
        .for_each(|&number| saver.save(&mut step, state(number)).unwrap());
    saver.finish().unwrap();
}
