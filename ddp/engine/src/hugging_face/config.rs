//! `config.json`: the settings of a model, from and to the family `gpt`, by the tables of
//! architectures.

use std::path::{Path, PathBuf};

use ddp_kernels::setting::SettingName;
use ddp_nn::models::Family;
use ddp_nn::models::family::{SettingField, Settings};
use ddp_nn::models::gpt::GptSpec;
use serde_json::{Map, Value, json};

use super::architecture::Architecture;
use super::keys::Keys;
use super::special;
use super::{ADAPTER_FILE, CONFIG_FILE};
use crate::checkpoint::refuse;
use crate::error::{Error, Result};
use crate::setting::LORA;

/// What a folder says its model is.
#[derive(Clone, Debug, PartialEq)]
pub struct DescribedModel {
    /// The model.
    pub spec: GptSpec,
    /// Why the user must decide its `dropout`.
    pub dropout_refusal: Option<String>,
    pub(super) architecture: &'static Architecture,
}

/// What the folder's `config.json` says.
pub fn describe(folder: &Path) -> Result<DescribedModel> {
    if folder.join(ADAPTER_FILE).exists() {
        let why = format!(
            "expected a whole model, got an adapter ({ADAPTER_FILE}), which transformers adds to \
             it; help: give its base model, and the adapter as {LORA} from=FOLDER"
        );
        return Err(refuse(folder, why));
    }
    let path = folder.join(CONFIG_FILE);
    let described = read(Keys::read(&path)?)?;
    let check = described.spec.check();
    check.map_err(|error| Error::Data(format!("{}: {error}", path.display())))?;
    Ok(described)
}

/// The setting `name` of a model.
fn field<'a>(spec: &'a mut GptSpec, name: &str) -> &'a mut dyn SettingField {
    let mut settings = spec.settings().into_iter();
    let setting = settings.find(|setting| setting.name == name);
    setting.expect("tables name settings").field
}

/// A word of a table as a value: a number, true, false, or text.
fn value_of(word: &str) -> Value {
    serde_json::from_str(word).unwrap_or_else(|_| word.into())
}

/// Parts of the names of classes that are not read, and why.
const UNREAD: [(&str, &str); 6] = [
    (
        "ForConditionalGeneration",
        "models with images or sound are",
    ),
    ("Moe", "mixtures of experts are"),
    ("Mixtral", "mixtures of experts are"),
    ("GptOss", "mixtures of experts are"),
    ("Qwen3Next", "linear attention is"),
    ("Qwen3_5", "linear attention is"),
];

fn read(mut keys: Keys) -> Result<DescribedModel> {
    let named: Value = keys.take("architectures", Value::Null)?;
    let mut all = Architecture::all().iter();
    let Some(architecture) = all.find(|one| named == json!([one.class()])) else {
        let known = Architecture::all().iter();
        let known: Vec<String> = known.map(|one| format!("[{:?}]", one.class())).collect();
        let name = named.to_string();
        let why = UNREAD.iter().find(|(part, _)| name.contains(part));
        let why = why.map_or(String::new(), |(_, has)| {
            format!(", since {has} not supported")
        });
        let expected = known.join(" or ") + &why;
        return Err(keys.unknown("architectures", &named, &expected));
    };
    keys.expect("model_type", architecture.model_type().into())?;
    for words in architecture.all_words("only") {
        keys.expect(words[0], value_of(words[1]))?;
    }
    let mut spec = GptSpec::default();
    for words in architecture.all_words("fixed") {
        let set = field(&mut spec, words[0]).set_value(value_of(words[1]));
        set.expect("tables have values of settings");
    }
    for words in architecture.all_words("setting") {
        read_setting(&mut keys, &mut spec, words)?;
    }
    if spec.vocab == 0 {
        return Err(keys.unknown("vocab_size", &0.into(), "at least 1"));
    }
    let dropout_refusal = special::read(architecture, &mut keys, &mut spec)?;
    keys.finish(architecture)?;
    let vocabulary = spec.vocab;
    spec.write_out(vocabulary);
    spec.export_class = architecture.class().into();
    Ok(DescribedModel {
        spec,
        dropout_refusal,
        architecture,
    })
}

/// Reads a setting as `words` say: key, setting, default, and TEXT=VALUE if the key is text.
fn read_setting(keys: &mut Keys, spec: &mut GptSpec, words: &[&str]) -> Result<()> {
    let (key, field, texts) = (words[0], field(spec, words[1]), &words[3..]);
    let value = match keys.left.remove(key) {
        // The setting then follows from others.
        Some(Value::Null) if field.value().as_f64() == Some(0.0) => return Ok(()),
        None | Some(Value::Null) => value_of(words[2]),
        Some(value) => value,
    };
    let pairs: Vec<_> = texts
        .iter()
        .filter_map(|text| text.split_once('='))
        .collect();
    let there = value.as_str().unwrap_or_default();
    match pairs.iter().find(|(text, _)| *text == there) {
        Some((_, here)) => field.set_value(value_of(here)),
        None if pairs.is_empty() => field.set_value(value.clone()),
        None => {
            let known: Vec<_> = pairs.iter().map(|(text, _)| *text).collect();
            Err(format!("expected {}", known.join(" or ")))
        }
    }
    .map_err(|error| keys.of_wrong_type(key, &value, &error))
}

/// Settings that a Hugging Face folder does not say, or says of the whole model.
const UNSAID: [&str; 7] = [
    "context",
    "dropout",
    "export-class",
    "longest-context",
    "recompute",
    "recompute-blocks",
    "vocab",
];

/// The architecture that can express this model, or the setting that none can.
pub(super) fn architecture_of(spec: &GptSpec) -> Result<&'static Architecture> {
    let mut spec = spec.clone();
    let vocabulary = spec.vocab.max(1);
    spec.write_out(vocabulary);
    let preferred = |one: &&Architecture| one.class() != spec.export_class;
    let mut all: Vec<_> = Architecture::all().iter().collect();
    all.sort_by_key(preferred);
    let mut closest: Option<(usize, String)> = None;
    for architecture in all {
        let left = keys_of(&spec, vocabulary, None, architecture);
        let mut back = read(Keys {
            path: PathBuf::new(),
            left,
        })?
        .spec;
        let mut settings = spec.settings().into_iter().zip(back.settings());
        let mut others: Vec<String> = Vec::new();
        for (here, there) in settings.by_ref() {
            let [got, expected] = [here.field.value(), there.field.value()];
            if got != expected && !UNSAID.contains(&&*here.name) {
                let name = SettingName(&here.name).to_string();
                others.push(format!(
                    "{name} {got}: expected {expected}, as in {}, the most similar class of \
                     transformers; help: no class there has this model: use the checkpoint's \
                     model.safetensors",
                    architecture.class()
                ));
            }
        }
        let count = others.len();
        match others.into_iter().next() {
            None => return Ok(architecture),
            Some(first) if closest.as_ref().is_none_or(|(least, _)| count < *least) => {
                closest = Some((count, first));
            }
            Some(_) => {}
        }
    }
    let (_, why) = closest.expect("there is an architecture");
    Err(Error::Usage(why))
}

/// The keys of `config.json`. None is left to the defaults of transformers.
pub(super) fn keys_of(
    spec: &GptSpec,
    vocabulary: usize,
    end_of_text: Option<usize>,
    architecture: &Architecture,
) -> Map<String, Value> {
    let (mut spec, mut keys) = (spec.clone(), Map::new());
    spec.write_out(vocabulary);
    for words in architecture.all_words("only") {
        keys.insert(words[0].into(), value_of(words[1]));
    }
    for words in architecture.all_words("setting") {
        let value = field(&mut spec, words[1]).value();
        let mut pairs = words[3..]
            .iter()
            .filter_map(|text| text.split_once('='))
            .peekable();
        let is_text = pairs.peek().is_some();
        let there = pairs
            .find(|(_, here)| value == *here)
            .map(|(there, _)| there);
        // Caps.
        let is_none = value.is_f64() && value.as_f64() == Some(0.0);
        let number = if is_none { Value::Null } else { value };
        keys.insert(words[0].into(), if is_text { json!(there) } else { number });
    }
    special::write(architecture, &spec, &mut keys);
    let rest = json!({
        "architectures": [architecture.class()],
        "model_type": architecture.model_type(),
        "vocab_size": vocabulary,
        "torch_dtype": "float32",
        "bos_token_id": null,
        "eos_token_id": end_of_text,
    });
    keys.extend(
        rest.as_object()
            .into_iter()
            .flatten()
            .map(|(key, value)| (key.clone(), value.clone())),
    );
    keys
}
