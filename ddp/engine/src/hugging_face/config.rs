//! `config.json`: the settings of a model, from and to the family `gpt`.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use ddp_kernels::setting::SettingName;
use ddp_nn::models::gpt::{GptSpec, MlpKind, NormKind, PositionKind};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::{Architecture, CONFIG_FILE, is_folder};
use crate::checkpoint::{refuse, unreadable};
use crate::error::{Error, Result};
use crate::setting::{BIAS, DROPOUT, MLP, NORM, POSITION};

/// Where transformers finds weights that it adds to those of the folder.
pub const ADAPTER_FILE: &str = "adapter_config.json";
/// Longer files are refused.
const BYTES_MAX: u64 = 1 << 20;

/// What this program does with each key of `config.json`, of GPT-2 and of Llama: see keys.txt.
pub(super) fn treatments() -> impl Iterator<Item = (&'static str, [&'static str; 2])> {
    let lines = include_str!("keys.txt").lines();
    lines.filter(|line| !line.starts_with('#')).map(|line| {
        let mut words = line.split_whitespace();
        let mut next = || words.next().unwrap_or_default();
        (next(), [next(), next()])
    })
}

/// What a folder says its model is.
#[derive(Clone, Debug, PartialEq)]
pub struct Described {
    /// The model.
    pub spec: GptSpec,
    /// Why the user must decide its `dropout`.
    pub dropout_refusal: Option<String>,
    /// The token whose row of the embedding transformers does not train.
    pub untrained_token: Option<u64>,
    pub(super) architecture: Architecture,
}

/// What the folder's `config.json` says.
pub fn describe(folder: &Path) -> Result<Described> {
    if folder.join(ADAPTER_FILE).exists() {
        let why = format!(
            "expected a whole model, got an adapter ({ADAPTER_FILE}), which transformers adds to \
             it; help: give its base model, and the adapter as --lora from=FOLDER"
        );
        return Err(refuse(folder, why));
    }
    let mut keys = Keys::read(&folder.join(CONFIG_FILE))?;
    let architecture = keys.architecture()?;
    keys.expect("model_type", architecture.model_type().into())?;
    for (key, treatments) in treatments() {
        if let Ok(only) = treatments[architecture as usize].parse::<bool>() {
            keys.expect(key, only.into())?;
        }
    }
    let (spec, dropout_refusal) = match architecture {
        Architecture::Gpt2 => gpt2(&mut keys)?,
        Architecture::Llama => llama(&mut keys)?,
    };
    let untrained_token = match architecture {
        Architecture::Gpt2 => None,
        Architecture::Llama => keys.untrained_token(spec.vocab)?,
    };
    keys.finish(architecture)?;
    let check = ddp_nn::models::Family::check(&spec);
    check.map_err(|error| keys.refused(&error.to_string()))?;
    Ok(Described {
        spec,
        dropout_refusal,
        untrained_token,
        architecture,
    })
}

/// The token whose row of the embedding transformers does not train, if `path` is a folder that
/// names one.
pub fn untrained_token(path: &Path) -> Option<u64> {
    let described = is_folder(path).then(|| describe(path).ok());
    described.flatten()?.untrained_token
}

/// A model, and why the user must decide its dropout.
type Settings = (GptSpec, Option<String>);

fn gpt2(keys: &mut Keys) -> Result<Settings> {
    let activations = [
        ("gelu_new", MlpKind::GeluTanh),
        ("gelu_pytorch_tanh", MlpKind::GeluTanh),
        ("gelu", MlpKind::Gelu),
    ];
    let width = keys.take("n_embd", Some(768))?;
    let heads = keys.take("n_head", Some(12))?;
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
        mlp: keys.choose("activation_function", "gelu_new", &activations)?,
        bias: true,
        tied: keys.take("tie_word_embeddings", Some(true))?,
        norm_epsilon: keys.take("layer_norm_epsilon", Some(1e-5))?,
        ..GptSpec::default()
    };
    let [embedding, rest, attention] =
        ["embd_pdrop", "resid_pdrop", "attn_pdrop"].map(|key| keys.take::<f64>(key, Some(0.1)));
    let (embedding, rest, attention) = (embedding?, rest?, attention?);
    Ok(if attention != 0.0 {
        (spec, Some(keys.no_dropout("attn_pdrop", attention)))
    } else if embedding != rest {
        let why = format!(
            "resid_pdrop {rest}: expected {embedding}, the same as embd_pdrop: ddp-train has \
             one {DROPOUT} for both; help: give {DROPOUT} to choose it"
        );
        (spec, Some(keys.text(&why)))
    } else {
        let dropout = rest;
        (GptSpec { dropout, ..spec }, None)
    })
}

fn llama(keys: &mut Keys) -> Result<Settings> {
    let heads: usize = keys.take("num_attention_heads", Some(32))?;
    let width: usize = keys.take("hidden_size", Some(4096))?;
    keys.choose("hidden_act", "silu", &[("silu", ()), ("swish", ())])?;
    let head_size = width / heads.max(1);
    keys.expect("head_dim", head_size.into())?;
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
    let is_undecided = attention != 0.0;
    let why = is_undecided.then(|| keys.no_dropout("attention_dropout", attention));
    Ok((spec, why))
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

    fn architecture(&mut self) -> Result<Architecture> {
        let names = Architecture::ALL.map(Architecture::name);
        let got = self.left.remove("architectures").unwrap_or(Value::Null);
        let known = |one: &Architecture| got == json!([one.name()]);
        Architecture::ALL.into_iter().find(known).ok_or_else(|| {
            let expected = format!("[{:?}] or [{:?}]", names[0], names[1]);
            self.unknown("architectures", &got, &expected)
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
                    "usize" | "i64" => "a whole number",
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

    /// The row of the embedding that has no gradient in transformers. As in PyTorch, a negative
    /// number counts from the end.
    fn untrained_token(&mut self, vocabulary: usize) -> Result<Option<u64>> {
        let Some(given) = self.take::<Option<i64>>("pad_token_id", Some(None))? else {
            return Ok(None);
        };
        let all = vocabulary as i64;
        let token = if given < 0 { given + all } else { given };
        if (0..all).contains(&token) {
            return Ok(Some(token as u64));
        }
        let expected = format!("a token below {all}, as vocab_size says");
        Err(self.unknown("pad_token_id", &given.into(), &expected))
    }

    /// Refuses any value of `key` except `only`, its default.
    fn expect(&mut self, key: &str, only: Value) -> Result<()> {
        let got = self.take(key, Some(only.clone()))?;
        if got == only {
            return Ok(());
        }
        Err(self.unknown(key, &got, &format!("{only}: nothing else is supported")))
    }

    /// What the text of `key` means.
    fn choose<T: Copy>(&mut self, key: &str, default: &str, all: &[(&str, T)]) -> Result<T> {
        let got: String = self.take(key, Some(default.to_string()))?;
        if let Some((_, value)) = all.iter().find(|(name, _)| *name == got) {
            return Ok(*value);
        }
        let names: Vec<_> = all.iter().map(|(name, _)| *name).collect();
        Err(self.unknown(key, &got.into(), &names.join(" or ")))
    }

    /// The base of rotary positions. Before version 5 of transformers it was a key beside
    /// `rope_scaling`; since then, `rope_parameters` has both.
    fn rope_base(&mut self) -> Result<f64> {
        let before: f64 = self.take("rope_theta", Some(10_000.0))?;
        self.expect("rope_scaling", Value::Null)?;
        let mut rope: Map<String, Value> = self.take("rope_parameters", Some(Map::new()))?;
        let base = rope.remove("rope_theta").unwrap_or(before.into());
        let kind = rope.remove("rope_type").unwrap_or("default".into());
        let is_plain = kind == "default" && rope.values().all(Value::is_null);
        if let Some(base) = base.as_f64().filter(|_| is_plain) {
            return Ok(base);
        }
        rope.insert("rope_type".into(), kind);
        let expected = "rope_type default, and no scaling";
        Err(self.unknown("rope_parameters", &rope.into(), expected))
    }

    /// Refuses the remaining keys, except those that this program knows not to matter.
    fn finish(&self, architecture: Architecture) -> Result<()> {
        let is_irrelevant = |key: &str| {
            let known = treatments().find(|(known, _)| *known == key);
            known.is_some_and(|(_, of)| of[architecture as usize] == "irrelevant")
        };
        let is_unknown = |(key, value): &(&String, &Value)| !is_irrelevant(key) && !value.is_null();
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
            "{key} {got}: expected 0, since attention has no dropout here; help: give {DROPOUT}, \
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
            "{} of the model: expected as in {name} (GPT2LMHeadModel: {POSITION} learned, \
             {NORM} layer, {MLP} gelu or gelu-tanh, {BIAS}; LlamaForCausalLM: {POSITION} rope, \
             {NORM} rms, {MLP} swiglu, no {BIAS}), got another; help: transformers has no such \
             class: use the checkpoint's model.safetensors",
            SettingName(setting)
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
        "model_type": architecture.model_type(),
        "vocab_size": vocabulary,
        "tie_word_embeddings": spec.tied,
        "torch_dtype": "float32",
        "bos_token_id": null,
        "eos_token_id": end_of_text,
    });
    let maps = [&both, &value].into_iter().filter_map(Value::as_object);
    let all = maps
        .flatten()
        .map(|(key, value)| (key.clone(), value.clone()));
    format!("{:#}\n", all.collect::<Value>())
}
