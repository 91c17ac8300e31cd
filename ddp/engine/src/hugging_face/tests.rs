mod treatments;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use ddp_data::safetensors::Header;
use ddp_kernels::files::testing::Scratch;
use ddp_kernels::{DType, Device, Tensor};
use ddp_nn::Decoder;
use ddp_nn::models::gpt::{GptSpec, MlpKind, NormKind, PositionKind};
use ddp_nn::models::{DataShape, Family, Model, ModelSpec};
use ddp_nn::params::Precision;
use serde_json::{Value, json};

use super::architecture::Architecture;
use super::config::{DescribedModel, architecture_of, keys_of};
use super::names::{TensorPart, parts};
use super::*;
use crate::checkpoint::MODEL_FILE;
use crate::error::Error;
use crate::model::ModelOptions;
use crate::tasks::LossOptions;

fn gpt2() -> Value {
    json!({
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 3, "n_head": 2, "n_embd": 8, "n_inner": null,
        "n_positions": 16, "vocab_size": 50, "activation_function": "gelu_new", "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0,
        "layer_norm_epsilon": 1e-3, "summary_type": "cls_index", "use_cache": true
    })
}

fn llama() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "hidden_size": 8, "intermediate_size": 12, "max_position_embeddings": 16, "vocab_size": 50,
        "hidden_act": "silu", "rms_norm_eps": 1e-3, "rope_parameters": { "rope_theta": 500.0, "rope_type": "default" }, "head_dim": 2
    })
}

/// The class of transformers with this model_type.
fn class(model_type: &str) -> &'static Architecture {
    let mut all = Architecture::all().iter();
    all.find(|one| one.model_type() == model_type).unwrap()
}

fn described(config: &Value) -> crate::Result<DescribedModel> {
    let scratch = Scratch::new();
    fs::write(scratch.path().join(CONFIG_FILE), config.to_string()).unwrap();
    describe(scratch.path())
}

fn gpt2_spec() -> GptSpec {
    GptSpec {
        layers: 3,
        heads: 2,
        kv_heads: 2,
        head_size: 4,
        attention_scalar: 4,
        width: 8,
        mlp_width: 32,
        context: 16,
        vocab: 50,
        norm_epsilon: 1e-3,
        export_class: "GPT2LMHeadModel".into(),
        ..GptSpec::default()
    }
}

fn llama_spec() -> GptSpec {
    GptSpec {
        heads: 4,
        head_size: 2,
        attention_scalar: 2,
        mlp_width: 12,
        longest_context: 16,
        norm: NormKind::Rms,
        position: PositionKind::Rope,
        mlp: MlpKind::Swiglu,
        bias: false,
        tied: false,
        rope_base: 500.0,
        export_class: "LlamaForCausalLM".into(),
        ..gpt2_spec()
    }
}

#[test]
fn settings_follow_from_config_json_and_come_back() {
    for (config, spec) in [(gpt2(), gpt2_spec()), (llama(), llama_spec())] {
        assert_eq!(described(&config).unwrap().spec, spec);
        let written = keys_of(&spec, 50, None, architecture_of(&spec).unwrap());
        let written = Value::Object(written).to_string();
        assert_eq!(described(&written.parse().unwrap()).unwrap().spec, spec);
    }
    let mut before_5 = llama();
    before_5.as_object_mut().unwrap().remove("rope_parameters");
    before_5["rope_theta"] = json!(500.0);
    before_5["rope_scaling"] = Value::Null;
    assert_eq!(described(&before_5).unwrap().spec, llama_spec());
}

/// There, `or` gives the default in place of 0.
#[test]
fn betas_of_0_are_those_of_transformers() {
    let scaling = |betas: Value| {
        let mut config = llama();
        config["rope_scaling"] =
            json!({ "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4 });
        let all = betas.as_object().unwrap().clone();
        config["rope_scaling"].as_object_mut().unwrap().extend(all);
        described(&config).unwrap().spec.rope_scaling
    };
    let expected = scaling(json!({}));
    assert_eq!(
        scaling(json!({ "beta_slow": 0, "beta_fast": 0.0 })),
        expected
    );
    assert_ne!(scaling(json!({ "beta_slow": 2 })), expected);
}

#[test]
fn dropout_that_is_not_ours_is_left_to_the_user() {
    let undecided = |mut config: Value, key: &str, value: f64| {
        config[key] = json!(value);
        let described = described(&config).unwrap();
        let text = described.dropout_refusal.unwrap();
        assert!(text.contains(&format!("{key} {value}: expected")), "{text}");
    };
    undecided(gpt2(), "attn_pdrop", 0.1);
    undecided(gpt2(), "resid_pdrop", 0.1);
    undecided(llama(), "attention_dropout", 0.1);
    let mut both = gpt2();
    both["embd_pdrop"] = json!(0.2);
    both["resid_pdrop"] = json!(0.2);
    assert_eq!(described(&both).unwrap().spec.dropout, 0.2);
}

#[test]
fn only_models_that_transformers_has_are_exported() {
    let refused = |setting: &str, spec: GptSpec| {
        let error = architecture_of(&spec).unwrap_err();
        assert!(
            error.to_string().starts_with(&format!("`{setting}`")),
            "{error}"
        );
        assert_eq!(error.exit_code(), 2);
    };
    let norm = NormKind::Rms;
    refused(
        "norm",
        GptSpec {
            norm,
            ..gpt2_spec()
        },
    );
    let mlp = MlpKind::Relu2;
    refused("mlp", GptSpec { mlp, ..gpt2_spec() });
    let mlp = MlpKind::Gelu;
    refused(
        "mlp",
        GptSpec {
            mlp,
            ..llama_spec()
        },
    );
    refused(
        "bias",
        GptSpec {
            bias: false,
            ..gpt2_spec()
        },
    );
    refused(
        "bias",
        GptSpec {
            bias: true,
            ..llama_spec()
        },
    );
    refused(
        "kv-heads",
        GptSpec {
            kv_heads: 1,
            ..gpt2_spec()
        },
    );
}

#[test]
fn parameters_are_rows_of_tensors_there() {
    let part = |name: &str, shape: &[usize], is_transposed| TensorPart {
        name: name.into(),
        shape: shape.into(),
        is_transposed,
        shift: 0.0,
    };
    let qkv = "blocks.12.attention.mix.qkv.weight";
    assert_eq!(
        parts(class("gpt2"), &gpt2_spec(), qkv, &[24, 8]).unwrap(),
        [part("transformer.h.12.attn.c_attn.weight", &[24, 8], true)]
    );
    assert_eq!(
        parts(class("llama"), &llama_spec(), qkv, &[16, 8]).unwrap(),
        [
            part("model.layers.12.self_attn.q_proj.weight", &[8, 8], false),
            part("model.layers.12.self_attn.k_proj.weight", &[4, 8], false),
            part("model.layers.12.self_attn.v_proj.weight", &[4, 8], false),
        ]
    );
    assert_eq!(
        parts(
            class("llama"),
            &llama_spec(),
            "blocks.0.mlp.up.weight",
            &[24, 8]
        )
        .unwrap(),
        [
            part("model.layers.0.mlp.gate_proj.weight", &[12, 8], false),
            part("model.layers.0.mlp.up_proj.weight", &[12, 8], false),
        ]
    );
    assert_eq!(
        parts(
            class("llama"),
            &llama_spec(),
            "embedding.positions.weight",
            &[16, 8]
        ),
        None
    );
}

/// Writes a folder with the tensors of these names and shapes, filled as by
/// tests/peers/families.py.
fn write_filled(folder: &Path, config: &Value, shapes: &Value) {
    fs::write(folder.join(CONFIG_FILE), config.to_string()).unwrap();
    let shapes: BTreeMap<String, Vec<usize>> = serde_json::from_value(shapes.clone()).unwrap();
    let named = shapes.iter().map(|(name, shape)| (&name[..], &shape[..]));
    let mut bytes = Header::of(named).to_bytes();
    let mut numbers = 0u64..;
    for (name, shape) in &shapes {
        let is_norm = name.ends_with("weight") && (name.contains("ln_") || name.contains("norm"));
        for _ in 0..shape.iter().product() {
            let hash = numbers.next().unwrap() * 2_654_435_761 % (1 << 32);
            let hash = (hash ^ (hash >> 15)).wrapping_mul(2_246_822_519) % (1 << 32);
            let value = (hash >> 16) as f32 / 65536.0 - 0.5 + f32::from(is_norm);
            bytes.extend(value.to_le_bytes());
        }
    }
    fs::write(folder.join(MODEL_FILE), bytes).unwrap();
}

/// The model of a folder, for rows of 16 tokens.
fn model_of(folder: &Path) -> (GptSpec, Model) {
    let spec = GptSpec {
        context: 16,
        ..describe(folder).unwrap().spec
    };
    let shape = DataShape {
        row_shape: &[16],
        image: &[],
        dtype: DType::I64,
        outputs: spec.vocab,
        documents: false,
    };
    let layers = Box::new(spec.layers(&shape).unwrap());
    let model = Model::new(layers, &[16], DType::F32, Device::Cpu, 0, &|_| true).unwrap();
    load(folder, &[&model.params]).unwrap();
    (spec, model)
}

#[test]
fn every_family_has_the_logits_of_transformers_and_comes_back() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/families.json");
    let golden: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let mut classes: Vec<&str> = Vec::new();
    for (name, one) in golden.as_object().unwrap() {
        let scratch = Scratch::new();
        let there = scratch.path();
        write_filled(there, &one["config"], &one["tensors"]);
        let (spec, model) = model_of(there);
        classes.push(one["config"]["architectures"][0].as_str().unwrap());
        let tokens: Vec<i64> = (0..16).map(|at| at * 7 % 61).collect();
        let mut decoder = Decoder::new(&model, 16).unwrap();
        let rows = one["logits"].as_array().unwrap();
        for (row, range) in rows.iter().zip([0..1, 1..9, 9..16]) {
            let logits = decoder.next(&tokens[range]).unwrap();
            let expected: Vec<f32> = serde_json::from_value(row.clone()).unwrap();
            let apart = logits.iter().step_by(6).zip(&expected);
            let apart = apart.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            // The tables of angles there are computed in f32, and logits are up to 10.
            assert!(apart <= 1e-5, "{name}: {apart}");
        }
        for (to, base) in [("alone", None), ("of-base", Base::of(there, None))] {
            let exported = Exported {
                model: &ModelSpec::from(spec.clone()),
                vocabulary: 61,
                params: &model.params,
                tokenizer: None,
                base,
                dtype: DType::F32,
            };
            export(&there.join(to), exported).unwrap();
            let (spec_again, again) = model_of(&there.join(to));
            assert_eq!(spec_again, spec, "{name} {to}");
            let values = |model: &Model| model.params.values().to_vec::<f32>().unwrap();
            assert!(values(&model) == values(&again), "{name} {to}");
        }
        let text = fs::read_to_string(there.join("of-base").join(CONFIG_FILE)).unwrap();
        let mut kept: Value = serde_json::from_str(&text).unwrap();
        let mut expected = one["config"].clone();
        // The tokenizer is not known, so its tokens are not either; a model may see fewer tokens.
        for key in [
            "bos_token_id",
            "eos_token_id",
            "dtype",
            "torch_dtype",
            "n_positions",
        ] {
            (kept[key], expected[key]) = (Value::Null, Value::Null);
        }
        assert_eq!(kept, expected, "{name}");
    }
    for architecture in Architecture::all() {
        assert!(classes.contains(&architecture.class()), "{architecture:?}");
    }
}

/// The frozen weights beside adapters. A piece has up to 64 elements here.
#[test]
fn a_base_in_bf16_is_read_in_pieces_to_the_rounded_values() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/families.json");
    let golden: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    for (name, one) in golden.as_object().unwrap() {
        let scratch = Scratch::new();
        write_filled(scratch.path(), &one["config"], &one["tensors"]);
        let (spec, model) = model_of(scratch.path());
        let shape = DataShape {
            row_shape: &[16],
            image: &[],
            dtype: DType::I64,
            outputs: spec.vocab,
            documents: false,
        };
        let options = ModelOptions {
            spec: spec.into(),
            precision: Precision::Bf16,
            seed: 0,
            loss: LossOptions::default(),
            lora: Some("rank=2".parse().unwrap()),
            recompute_parts: 0,
        };
        let adapted = options
            .models(&shape, &[Device::Cpu], &|_| false, 1)
            .unwrap();
        let base = &adapted[0].params;
        let digests = [base, &model.params].map(|params| load(scratch.path(), &[params]).unwrap());
        assert_eq!(digests[0], digests[1], "{name}");
        let mut compared = 0;
        for parameter in base.in_order().into_iter().filter(|it| it.is_base) {
            let there = model.params.find(&parameter.name).unwrap();
            let rounded = model.params.master(there.id).to_dtype(DType::BF16).unwrap();
            let values = |tensor: &Tensor| {
                tensor
                    .to_dtype(DType::F32)
                    .unwrap()
                    .to_vec::<f32>()
                    .unwrap()
            };
            let here = base.master(parameter.id);
            assert_eq!(here.dtype(), DType::BF16);
            assert!(
                values(here) == values(&rounded),
                "{name}: {}",
                parameter.name
            );
            compared += 1;
        }
        assert_eq!(compared, model.params.list().len(), "{name}");
    }
}

/// A pipe would be waited for, and a device never ends.
#[test]
fn files_of_a_models_folder_that_are_not_ordinary_or_too_long_are_refused_at_once() {
    let scratch = Scratch::new();
    let folder = scratch.path();
    let make = |name: &str, how: &str| {
        let path = folder.join(name);
        let _ = fs::remove_file(&path);
        match how {
            "pipe" => {
                let made = std::process::Command::new("mkfifo").arg(&path).status();
                assert!(made.unwrap().success());
            }
            "device" => std::os::unix::fs::symlink("/dev/zero", &path).unwrap(),
            _ => {
                let file = fs::File::create(&path).unwrap();
                file.set_len(65 << 20).unwrap();
            }
        }
    };
    let refused = |name: &str, how: &str, error: Error| {
        let text = error.to_string();
        assert_eq!(error.exit_code(), 65, "{name}, {how}: {text}");
        assert!(text.contains(name), "{text}");
    };
    for how in ["pipe", "device", "long"] {
        make("config.json", how);
        refused("config.json", how, describe(folder).unwrap_err());
        make(super::ADAPTER_FILE, how);
        let error = crate::lora::describe(folder).unwrap_err();
        refused(super::ADAPTER_FILE, how, error);
        fs::remove_file(folder.join(super::ADAPTER_FILE)).unwrap();
        make("tokenizer.json", how);
        let read = ddp_data::text::Vocabulary::read(&folder.join("tokenizer.json"));
        refused("tokenizer.json", how, read.unwrap_err().into());
    }
    // Caches of hubs are links to ordinary files.
    fs::write(folder.join("blob"), "{}").unwrap();
    fs::remove_file(folder.join("config.json")).unwrap();
    std::os::unix::fs::symlink("blob", folder.join("config.json")).unwrap();
    let text = describe(folder).unwrap_err().to_string();
    assert!(text.contains("architectures"), "{text}");
    // The index, and the files that it names.
    let architecture = &Architecture::all()[0];
    for how in ["pipe", "device", "long"] {
        make("model.safetensors.index.json", how);
        let error = super::folder::Tensors::open(folder, architecture).unwrap_err();
        refused("index.json", how, error);
        let index = folder.join("model.safetensors.index.json");
        fs::remove_file(&index).unwrap();
        fs::write(&index, r#"{"weight_map": {"a": "one.safetensors"}}"#).unwrap();
        make("one.safetensors", how);
        let error = super::folder::Tensors::open(folder, architecture).unwrap_err();
        refused("one.safetensors", how, error);
    }
}

/// What a stranger's folder may hold. Damage that changes nothing is no error.
#[test]
fn damaged_settings_indices_and_adapters_are_read_or_refused() {
    let scratch = Scratch::new();
    let folder = scratch.path();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/families.json");
    let golden: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let configs = golden.as_object().unwrap().values();
    let configs: Vec<String> = configs.map(|it| it["config"].to_string()).collect();
    let index = r#"{"metadata": {"total_size": 8}, "weight_map": {"a.b": "one.safetensors", "c": "two.safetensors"}}"#;
    let adapter = r#"{"peft_type": "LORA", "r": 8, "lora_alpha": 16.0, "lora_dropout": 0.1, "bias": "none",
                      "target_modules": ["q_proj"], "layers_to_transform": [0, 1], "use_rslora": false}"#;
    let refused = |error: Error| {
        let text = error.to_string();
        assert!([65, 74].contains(&error.exit_code()), "{text}");
        assert!(text.len() < 4000, "{text}");
    };
    for seed in ddp_testing::cases("damaged files of models", 50_000, 500) {
        let config = configs[seed % configs.len()].as_bytes();
        fs::write(
            folder.join("config.json"),
            ddp_testing::mutated(config, seed),
        )
        .unwrap();
        describe(folder).err().map(refused);
        let write = |name: &str, example: &str| {
            let damaged = ddp_testing::mutated(example.as_bytes(), seed);
            fs::write(folder.join(name), damaged).unwrap();
        };
        write("model.safetensors.index.json", index);
        let architecture = &Architecture::all()[seed % Architecture::all().len()];
        super::folder::Tensors::open(folder, architecture)
            .err()
            .map(refused);
        write(super::ADAPTER_FILE, adapter);
        crate::lora::describe(folder).err().map(refused);
        fs::remove_file(folder.join(super::ADAPTER_FILE)).unwrap();
    }
}
