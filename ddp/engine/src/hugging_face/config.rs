//! `config.json`: the settings of a model, from and to the family `gpt`.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use ddp_nn::models::gpt::{GptSpec, MlpKind, NormKind, PositionKind};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::{Architecture, CONFIG_FILE};
use crate::checkpoint::unreadable;
use crate::error::{Error, Result};

/// Longer files are refused.
const BYTES_MAX: u64 = 1 << 20;

/// Keys that do not change what a language model computes.
const NEUTRAL: [&str; 39] = [
    "_attn_implementation_autoset",
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "finetuning_task",
    "gradient_checkpointing",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_encoder_decoder",
    "label2id",
    "max_length",
    "model_type",
    "n_ctx",
    "output_attentions",
    "output_hidden_states",
    "output_past",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "sep_token_id",
    "summary_activation",
    "summary_first_dropout",
    "summary_hidden_size",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "task_specific_params",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "unk_token_id",
    "use_bfloat16",
    "use_cache",
    "vocab_type",
];

/// What a folder says its model is.
#[derive(Clone, Debug, PartialEq)]
pub struct Described {
    /// The model. Its `dropout` is NaN if the user must decide it.
    pub spec: GptSpec,
    /// Why the user must decide it.
    pub dropout_refusal: Option<String>,
}

/// What the folder's `config.json` says.
pub fn describe(folder: &Path) -> Result<Described> {
    let mut keys = Keys::read(&folder.join(CONFIG_FILE))?;
    let described = match keys.architecture()? {
        Architecture::Gpt2 => gpt2(&mut keys)?,
        Architecture::Llama => llama(&mut keys)?,
    };
    keys.finish()?;
    let with_dropout = GptSpec {
        dropout: 0.0,
        ..described.spec.clone()
    };
    let check = ddp_nn::models::Family::check(&with_dropout);
    check.map_err(|error| keys.refused(&error.to_string()))?;
    Ok(described)
}

/// The folder's architecture.
pub(super) fn architecture(folder: &Path) -> Result<Architecture> {
    Keys::read(&folder.join(CONFIG_FILE))?.architecture()
}

fn gpt2(keys: &mut Keys) -> Result<Described> {
    let width = keys.take("n_embd", Some(768))?;
    let heads = keys.take("n_head", Some(12))?;
    keys.expect("scale_attn_weights", true.into(), true.into())?;
    for key in [
        "scale_attn_by_inverse_layer_idx",
        "reorder_and_upcast_attn",
        "add_cross_attention",
    ] {
        keys.expect(key, false.into(), false.into())?;
    }
    let spec = GptSpec {
        layers: keys.take("n_layer", Some(12))?,
        heads,
        kv_heads: heads,
        width,
        mlp_width: keys.take("n_inner", Some(4 * width))?,
        context: keys.take("n_positions", Some(1024))?,
        vocab: keys.vocabulary(50257)?,
        norm: NormKind::Layer,
        position: PositionKind::Learned,
        mlp: keys.choose(
            "activation_function",
            "gelu_new",
            &[
                ("gelu_new", MlpKind::GeluTanh),
                ("gelu_pytorch_tanh", MlpKind::GeluTanh),
                ("gelu", MlpKind::Gelu),
            ],
        )?,
        bias: true,
        tied: keys.take("tie_word_embeddings", Some(true))?,
        norm_epsilon: keys.take("layer_norm_epsilon", Some(1e-5))?,
        ..GptSpec::default()
    };
    let [embedding, rest, attention] =
        ["embd_pdrop", "resid_pdrop", "attn_pdrop"].map(|key| keys.take::<f64>(key, Some(0.1)));
    let (embedding, rest, attention) = (embedding?, rest?, attention?);
    Ok(if attention != 0.0 {
        undecided(spec, keys.no_dropout("attn_pdrop", attention))
    } else if embedding != rest {
        let why = format!(
            "resid_pdrop {rest}: expected {embedding}, as embd_pdrop says, since there is one \
             `dropout` here; help: give `dropout` to decide it"
        );
        undecided(spec, keys.text(&why))
    } else {
        let dropout = rest;
        Described {
            spec: GptSpec { dropout, ..spec },
            dropout_refusal: None,
        }
    })
}

fn llama(keys: &mut Keys) -> Result<Described> {
    let heads: usize = keys.take("num_attention_heads", Some(32))?;
    let width: usize = keys.take("hidden_size", Some(4096))?;
    keys.choose("hidden_act", "silu", &[("silu", ()), ("swish", ())])?;
    for key in ["attention_bias", "mlp_bias", "rope_interleaved"] {
        keys.expect(key, false.into(), false.into())?;
    }
    let head_size = width / heads.max(1);
    keys.expect("head_dim", head_size.into(), head_size.into())?;
    let spec = GptSpec {
        layers: keys.take("num_hidden_layers", Some(32))?,
        heads,
        kv_heads: keys.take("num_key_value_heads", Some(heads))?,
        width,
        mlp_width: keys.take("intermediate_size", Some(11008))?,
        context: keys.take("max_position_embeddings", Some(2048))?,
        vocab: keys.vocabulary(32000)?,
        norm: NormKind::Rms,
        position: PositionKind::Rope,
        mlp: MlpKind::Swiglu,
        bias: false,
        tied: keys.take("tie_word_embeddings", Some(false))?,
        dropout: 0.0,
        norm_epsilon: keys.take("rms_norm_eps", Some(1e-6))?,
        rope_base: keys.rope_base()?,
        ..GptSpec::default()
    };
    let attention = keys.take("attention_dropout", Some(0.0))?;
    Ok(if attention != 0.0 {
        undecided(spec, keys.no_dropout("attention_dropout", attention))
    } else {
        Described {
            spec,
            dropout_refusal: None,
        }
    })
}

fn undecided(spec: GptSpec, why: String) -> Described {
    Described {
        spec: GptSpec {
            dropout: f64::NAN,
            ..spec
        },
        dropout_refusal: Some(why),
    }
}

/// The keys that were not taken yet.
struct Keys {
    path: PathBuf,
    left: Map<String, Value>,
}

impl Keys {
    fn read(path: &Path) -> Result<Keys> {
        let mut text = String::new();
        let file = File::open(path).map_err(unreadable(path))?;
        let read = file.take(BYTES_MAX).read_to_string(&mut text);
        read.map_err(unreadable(path))?;
        let left = serde_json::from_str(&text).map_err(|error| {
            Error::Data(format!(
                "{}: expected a JSON object of less than {BYTES_MAX} bytes: {error}; help: give a \
                 folder that save_pretrained wrote",
                path.display()
            ))
        })?;
        let path = path.to_path_buf();
        Ok(Keys { path, left })
    }

    fn architecture(&self) -> Result<Architecture> {
        let names = Architecture::ALL.map(Architecture::name);
        let got = self.left.get("architectures").unwrap_or(&Value::Null);
        let known = |one: &Architecture| *got == json!([one.name()]);
        Architecture::ALL.into_iter().find(known).ok_or_else(|| {
            let expected = format!("[{:?}] or [{:?}]", names[0], names[1]);
            self.unknown("architectures", got, &expected)
        })
    }

    /// The value of `key`; `default` where it is missing or null.
    fn take<T: DeserializeOwned>(&mut self, key: &str, default: Option<T>) -> Result<T> {
        match (self.left.remove(key).unwrap_or(Value::Null), default) {
            (Value::Null, Some(default)) => Ok(default),
            (value, _) => serde_json::from_value(value.clone()).map_err(|error| {
                // The parser names types of Rust.
                let error = error.to_string();
                let (_, expected) = error.rsplit_once("expected ").unwrap_or(("", &error));
                let expected = match expected {
                    "usize" => "a whole number",
                    "f64" => "a number",
                    other => other,
                };
                self.unknown(key, &value, expected)
            }),
        }
    }

    /// How many tokens there are.
    fn vocabulary(&mut self, default: usize) -> Result<usize> {
        match self.take("vocab_size", Some(default))? {
            0 => Err(self.unknown("vocab_size", &0.into(), "at least 1")),
            count => Ok(count),
        }
    }

    /// Refuses another value of `key` than `only`.
    fn expect(&mut self, key: &str, default: Value, only: Value) -> Result<()> {
        let got = self.take(key, Some(default))?;
        if got == only {
            return Ok(());
        }
        Err(self.unknown(key, &got, &format!("{only}: this program has nothing else")))
    }

    /// What the text of `key` stands for.
    fn choose<T: Copy>(&mut self, key: &str, default: &str, all: &[(&str, T)]) -> Result<T> {
        let got: String = self.take(key, Some(default.to_string()))?;
        match all.iter().find(|(name, _)| *name == got) {
            Some((_, value)) => Ok(*value),
            None => {
                let names: Vec<_> = all.iter().map(|(name, _)| *name).collect();
                Err(self.unknown(key, &got.into(), &names.join(" or ")))
            }
        }
    }

    /// The base of rotary positions. Before version 5 of transformers it was a key beside
    /// `rope_scaling`; since then, `rope_parameters` has both.
    fn rope_base(&mut self) -> Result<f64> {
        let before: f64 = self.take("rope_theta", Some(10_000.0))?;
        self.expect("rope_scaling", Value::Null, Value::Null)?;
        let mut rope: Map<String, Value> = self.take("rope_parameters", Some(Map::new()))?;
        let base = rope.remove("rope_theta").unwrap_or(before.into());
        let kind = rope.remove("rope_type").unwrap_or("default".into());
        let is_plain = kind == "default" && rope.values().all(Value::is_null);
        match base.as_f64() {
            Some(base) if is_plain => Ok(base),
            _ => {
                rope.insert("rope_type".into(), kind);
                let expected = "rope_type default, and no scaling";
                Err(self.unknown("rope_parameters", &rope.into(), expected))
            }
        }
    }

    /// Refuses keys that are left and that this program does not know.
    fn finish(&self) -> Result<()> {
        let is_unknown =
            |(key, value): &(&String, &Value)| !NEUTRAL.contains(&key.as_str()) && !value.is_null();
        match self.left.iter().find(is_unknown) {
            None => Ok(()),
            Some((key, value)) => Err(self.refused(&format!(
                "{key} {value}: expected no such key, since this program does not know it; help: \
                 remove it, if the model does not depend on it"
            ))),
        }
    }

    fn unknown(&self, key: &str, got: &Value, expected: &str) -> Error {
        self.refused(&format!(
            "{key} {got}: expected {expected}; help: give another folder"
        ))
    }

    fn refused(&self, why: &str) -> Error {
        Error::Data(self.text(why))
    }

    fn text(&self, why: &str) -> String {
        format!("{}: {why}", self.path.display())
    }

    fn no_dropout(&self, key: &str, got: f64) -> String {
        self.text(&format!(
            "{key} {got}: expected 0, since attention has no dropout here; help: give `dropout`, \
             which then replaces all of the folder's"
        ))
    }
}

/// The architecture that can express this model, or the setting that none can.
pub(super) fn architecture_of(spec: &GptSpec) -> Result<Architecture> {
    let architecture = match spec.position {
        PositionKind::Learned => Architecture::Gpt2,
        PositionKind::Rope => Architecture::Llama,
    };
    let (is_llama, name) = (architecture == Architecture::Llama, architecture.name());
    let mlp = match spec.mlp {
        MlpKind::Swiglu => is_llama,
        MlpKind::Gelu | MlpKind::GeluTanh => !is_llama,
        MlpKind::Relu2 => false,
    };
    let checks = [
        ("norm", (spec.norm == NormKind::Rms) == is_llama),
        ("mlp", mlp),
        ("bias", spec.bias != is_llama),
        ("kv-heads", is_llama || spec.kv_heads() == spec.heads),
    ];
    match checks.iter().find(|(_, fits)| !fits) {
        None => Ok(architecture),
        Some((setting, _)) => Err(Error::Usage(format!(
            "`{setting}` of the model: expected as in {name} (GPT2LMHeadModel: `position` learned, \
             `norm` layer, `mlp` gelu or gelu-tanh, `bias`; LlamaForCausalLM: `position` rope, \
             `norm` rms, `mlp` swiglu, no `bias`), got another; help: transformers has no such \
             class: use the checkpoint's model.safetensors"
        ))),
    }
}

/// The content of `config.json`. No key is left to the defaults of transformers.
pub(super) fn text(
    spec: &GptSpec,
    vocabulary: usize,
    end_of_text: Option<usize>,
    architecture: Architecture,
) -> String {
    let value = match architecture {
        Architecture::Gpt2 => json!({
            "model_type": "gpt2",
            "n_layer": spec.layers,
            "n_head": spec.heads,
            "n_embd": spec.width,
            "n_inner": spec.mlp_width(),
            "n_positions": spec.context,
            "activation_function": if spec.mlp == MlpKind::Gelu { "gelu" } else { "gelu_new" },
            "layer_norm_epsilon": spec.norm_epsilon,
            "embd_pdrop": spec.dropout,
            "resid_pdrop": spec.dropout,
            "attn_pdrop": 0.0,
        }),
        Architecture::Llama => json!({
            "model_type": "llama",
            "num_hidden_layers": spec.layers,
            "num_attention_heads": spec.heads,
            "num_key_value_heads": spec.kv_heads(),
            "hidden_size": spec.width,
            "intermediate_size": spec.mlp_width(),
            "max_position_embeddings": spec.context,
            "hidden_act": "silu",
            "rms_norm_eps": spec.norm_epsilon,
            "rope_theta": spec.rope_base,
            "attention_bias": false,
            "attention_dropout": 0.0,
            "mlp_bias": false,
        }),
    };
    let both = json!({
        "architectures": [architecture.name()],
        "vocab_size": vocabulary,
        "tie_word_embeddings": spec.tied,
        "torch_dtype": "float32",
        "bos_token_id": null,
        "eos_token_id": end_of_text,
    });
    let mut all = Map::new();
    for value in [both, value] {
        if let Value::Object(map) = value {
            all.extend(map);
        }
    }
    format!("{:#}\n", Value::Object(all))
}

/// Whether the folder's head and embedding are one weight.
pub(super) fn is_tied(folder: &Path) -> Result<bool> {
    let mut keys = Keys::read(&folder.join(CONFIG_FILE))?;
    let default = keys.architecture()? == Architecture::Gpt2;
    keys.take("tie_word_embeddings", Some(default))
}
