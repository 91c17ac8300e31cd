//! PEFT's folders: `adapter_config.json`, and two tensors for each adapted layer of transformers in
//! `adapter_model.safetensors`, whose rows follow each other in a parameter here.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::{Path, PathBuf};

use ddp_data::safetensors::Header;
use ddp_data::text::Vocabulary;
use ddp_kernels::files as disk;
use ddp_nn::models::ModelSpec;
use ddp_nn::params::{Parameter, Params};
use serde_json::{Map, Value, json};

use super::{LoraSetting, RANK_MAX, adapted, layers, matches};
use crate::checkpoint::{
    FileDType, Foreign, ReadFrom, fill, header_of, refuse, text_of, unreadable, write_file,
};
use crate::error::{Error, Result};
use crate::hugging_face::{self, ADAPTER_FILE};
use crate::setting::{INIT_FROM, LORA};
use crate::shown::some_of;

/// The file with the tensors.
const TENSORS_FILE: &str = "adapter_model.safetensors";
/// Longer settings are refused.
const CONFIG_BYTES_MAX: u64 = 1 << 20;
/// What the names of all tensors begin with.
const PREFIX: &str = "base_model.model.";
/// The key that names the base model.
const BASE_KEY: &str = "base_model_name_or_path";
/// The keys that leave out layers.
const ONLY: &str = "layers_to_transform";
const EXCLUDED: &str = "exclude_modules";
/// The digest of the base model's weights, in the metadata of the file with the tensors: PEFT
/// ignores it.
const BASE_DIGEST: &str = "base_digest";
/// Keys that do not change what is computed, or say which layers are adapted: that follows from the
/// tensors.
const IRRELEVANT: &str = "base_model_name_or_path auto_mapping corda_config ensure_weight_tying \
                          eva_config exclude_modules fan_in_fan_out inference_mode layers_pattern \
                          layers_to_transform megatron_core peft_version qalora_group_size \
                          revision target_modules task_type";

/// The settings of the adapters in a folder, and the base model that it names.
pub fn describe(folder: &Path) -> Result<(LoraSetting, Option<String>)> {
    let path = folder.join(ADAPTER_FILE);
    let text = text_of(&path, CONFIG_BYTES_MAX)?;
    let unknown = |key: &str, got: &Value, expected: &str| {
        let path = path.display();
        let help = "give another adapter";
        Error::Data(format!(
            "{path}: {key} {got}: expected {expected}; help: {help}"
        ))
    };
    let keys: Map<String, Value> = serde_json::from_str(&text)
        .map_err(|error| unknown("it", &error.to_string().into(), "a JSON object"))?;
    let mut setting = LoraSetting {
        rank: 8,
        alpha: 8.0,
        from: Some(folder.to_path_buf()),
        ..LoraSetting::default()
    };
    for (key, value) in &keys {
        let number = |from: f64, most: f64| {
            let number = value.as_f64().filter(|it| (from..=most).contains(it));
            number.ok_or_else(|| unknown(key, value, &format!("a number from {from} to {most}")))
        };
        let is_unset = [json!(null), json!(false), json!({})].contains(value);
        match (key.as_str(), value.as_str()) {
            ("r", _) if value.is_u64() => setting.rank = number(1.0, RANK_MAX as f64)? as usize,
            ("r", _) => return Err(unknown(key, value, "a whole number")),
            ("lora_alpha", _) => setting.alpha = number(1e-6, 1e6)?,
            ("lora_dropout", _) => setting.dropout = number(0.0, 0.999)?,
            ("use_rslora", _) if value.is_boolean() || value.is_null() => {
                setting.rslora = value == true
            }
            ("peft_type", Some("LORA"))
            | ("bias", Some("none"))
            | ("init_lora_weights", None | Some("gaussian" | "orthogonal" | "eva")) => {}
            (key, _) if is_unset || IRRELEVANT.split_whitespace().any(|it| it == key) => {}
            _ => return Err(unknown(key, value, "plain LoRA, without this")),
        }
    }
    let (_, _, header) = open(folder)?;
    let of = |name: &'_ str| {
        Some(
            name.strip_prefix(PREFIX)?
                .split_once(".lora_")?
                .0
                .to_string(),
        )
    };
    let layers = header.entries.iter().filter_map(|entry| of(&entry.name));
    let layers: BTreeSet<String> = layers.collect();
    let is_used = |on: &String| layers.iter().any(|layer| matches(on, layer, layer));
    let given = |key: &str| keys.get(key).filter(|value| !value.is_null());
    let [only, excluded] = [ONLY, EXCLUDED].map(given);
    let any = |all: &Value, is_one: &dyn Fn(&Value) -> bool| match all {
        Value::Array(all) => all.iter().any(is_one),
        one => is_one(one),
    };
    for layer in &layers {
        let number = layer.split('.').find_map(|part| part.parse::<u64>().ok());
        let is_it = |value: &Value| value.as_u64() == number;
        let ends_it = |value: &Value| value.as_str().is_some_and(|on| matches(on, layer, layer));
        if let Some(only) = only.filter(|only| !any(only, &is_it)) {
            let expected = format!("also the layer of {layer}, which has tensors");
            return Err(unknown(ONLY, only, &expected));
        }
        // A text is a pattern of Python's.
        if let Some(excluded) = excluded.filter(|it| it.is_array() && any(it, &ends_it)) {
            let expected = format!("no name of {layer}, which has tensors");
            return Err(unknown(EXCLUDED, excluded, &expected));
        }
    }
    // Ends of names; one without a layer is dropped, as in PEFT. A text is a pattern of Python's.
    // Where other keys leave out some layers, the tensors say which are left.
    let some = only.is_some() || excluded.is_some();
    let targets = keys.get("target_modules").filter(|_| !some);
    let targets = serde_json::from_value::<Vec<String>>(targets.cloned().unwrap_or_default());
    let targets = targets.unwrap_or_else(|_| layers.iter().cloned().collect());
    setting.on = targets.into_iter().filter(is_used).collect();
    let base = keys.get(BASE_KEY).and_then(Value::as_str);
    Ok((setting, base.map(String::from)))
}

/// The file with the tensors of a folder.
fn open(folder: &Path) -> Result<(PathBuf, File, Header)> {
    let path = folder.join(TENSORS_FILE);
    let file = disk::open_ordinary(&path).map_err(unreadable(&path))?;
    let header = header_of(&path, &file)?;
    Ok((path, file, header))
}

/// A parameter of adapters here, and the tensors that follow each other in it: names and shapes.
type Parts<'a> = (&'a Params, &'a Parameter, Vec<(String, [usize; 2])>);

/// All parameters of adapters in these parts of a model.
fn parts<'a>(
    lora: &LoraSetting,
    model: &ModelSpec,
    params: &[&'a Params],
) -> Result<Vec<Parts<'a>>> {
    let mut all = Vec::new();
    for (params, weight, [a, b], units) in adapted(lora, model, params)? {
        let (rank, inputs) = (lora.rank, weight.shape[1]);
        let named = |which: &str, shape: &dyn Fn(usize) -> [usize; 2]| {
            let name = |name: &str| format!("{PREFIX}{name}.lora_{which}.weight");
            let units = units.iter();
            units
                .map(|(of, rows)| (name(of), shape(rows.len())))
                .collect()
        };
        all.push((params, a, named("A", &|_| [rank, inputs])));
        all.push((params, b, named("B", &|rows| [rows, rank])));
    }
    Ok(all)
}

/// Fills the adapters of a model with those of the folder that `lora` names, if it names one. They
/// stand beside the weights of `base`, a folder with its digest: rank 0 warns if they were made for
/// others.
pub fn load(
    lora: &LoraSetting,
    model: &ModelSpec,
    params: &[&Params],
    base: (&Path, Option<&str>),
    rank: usize,
) -> Result<()> {
    let Some(folder) = &lora.from else {
        return Ok(());
    };
    let (path, file, header) = open(folder)?;
    if rank == 0 {
        warn_of_another(folder, &header, base)?;
    }
    let refused = |why: String| {
        let help = "give the adapter and the base model that belong together";
        refuse(&path, format!("{why}; help: {help}"))
    };
    let all = parts(lora, model, params)?;
    let here = all.iter().flat_map(|(_, _, tensors)| tensors);
    let here: BTreeSet<&str> = here.map(|(name, _)| name.as_str()).collect();
    let entries = header.entries.iter();
    let there = entries.map(|entry| entry.name.as_str()).collect();
    let different: Vec<&str> = here.symmetric_difference(&there).copied().collect();
    if !different.is_empty() {
        return Err(refused(format!(
            "expected tensors for exactly the adapted layers of the model, got others: {} in only \
             one of both",
            some_of(&different, 4)
        )));
    }
    let (mut foreign, mut bytes) = (Foreign::default(), Vec::new());
    for (params, parameter, tensors) in &all {
        let mut rows = 0..0;
        for (name, shape) in tensors {
            rows = rows.end..rows.end + shape[0];
            let entry = header.find(name).expect("compared");
            if entry.shape != shape {
                let got = &entry.shape;
                return Err(refused(format!("{name}: expected {shape:?}, got {got:?}")));
            }
            let dtype = FileDType::of(entry).map_err(&refused)?;
            let mut file = ReadFrom::place(&file, header.data_start + entry.start);
            fill(params, parameter, rows.clone(), |values| {
                let read = dtype.read(&mut file, values, &mut bytes);
                read.map_err(unreadable(&path))?;
                foreign.check(name, values).map_err(&refused)
            })?;
        }
    }
    Ok(())
}

/// Warns of adapters that were made beside other weights than those of `base`: of another digest,
/// or where PEFT wrote none, in a folder of another name.
fn warn_of_another(
    folder: &Path,
    header: &Header,
    (base, now): (&Path, Option<&str>),
) -> Result<()> {
    let (_, named) = describe(folder)?;
    let named = named.unwrap_or_default();
    let then = header.metadata.get(BASE_DIGEST).map(String::as_str);
    let name = |path: &Path| path.file_name().map(std::ffi::OsStr::to_os_string);
    let is_same = match then {
        Some(_) => then == now,
        None => named.is_empty() || name(Path::new(&named)) == name(base),
    };
    if !is_same {
        let digests = |of: Option<&str>| of.map_or(String::new(), |it| format!(" (weights {it})"));
        tracing::warn!(
            "{LORA} from={}: the adapter was made beside {named}{}, and is used beside {}{}: unless both are the same \
             model, it teaches nonsense; help: give its base as {INIT_FROM}",
            folder.display(),
            digests(then),
            base.display(),
            digests(now.filter(|_| then.is_some()))
        );
    }
    Ok(())
}

/// Writes the adapters of a model, in f32 on the CPU, as a new PEFT folder, with the files of
/// its tokenizer. `base` is the folder of the base model, with the digest of its weights.
pub fn export(
    folder: &Path,
    lora: &LoraSetting,
    model: &ModelSpec,
    params: &Params,
    (base, digest): (&Path, Option<&str>),
    tokenizer: Option<&Vocabulary>,
) -> Result<()> {
    let transposes = hugging_face::is_conv1d(model)?;
    let config = json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        BASE_KEY: std::path::absolute(base).unwrap_or_else(|_| base.into()),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "target_modules": targets(lora, model, params),
        "fan_in_fan_out": transposes,
        "bias": "none",
        "inference_mode": true,
    });
    let all = parts(lora, model, &[params])?;
    let tensors = all.iter().flat_map(|(_, _, tensors)| tensors);
    let mut metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    metadata.extend(digest.map(|digest| (BASE_DIGEST.to_string(), digest.to_string())));
    let shapes = tensors.map(|(name, shape)| (name.as_str(), &shape[..]));
    let header = Header::with_metadata(shapes, metadata);
    hugging_face::write_folder(folder, |folder| {
        disk::write_file(&folder.join(ADAPTER_FILE), |output| {
            output.write(format!("{config:#}\n").as_bytes())
        })?;
        for (name, bytes) in tokenizer.into_iter().flat_map(Vocabulary::files) {
            disk::write_file(&folder.join(name), |output| output.write(bytes))?;
        }
        // The tensors of a parameter follow each other there, too.
        let value = |(params, parameter, _): &Parts<'_>| Ok(params.master(parameter.id).clone());
        let values = all.iter().map(value);
        write_file(&folder.join(TENSORS_FILE), &header, values).map(drop)
    })
}

/// The shortest names that mean exactly the adapted layers to PEFT: their ends, if no other layer
/// has these.
fn targets(lora: &LoraSetting, model: &ModelSpec, params: &Params) -> Vec<String> {
    let named = |on: &[String]| -> Vec<String> {
        let (mut names, on) = (Vec::new(), on.to_vec());
        let lora = LoraSetting { on, ..lora.clone() };
        for (layer, _, weight) in layers(&[params]) {
            names.extend(lora.units(model, layer, &weight.matrices));
        }
        names
            .into_iter()
            .map(|(name, _): (String, _)| name)
            .collect()
    };
    let all = named(&lora.on);
    let ends = all.iter().filter_map(|name| name.rsplit('.').next());
    let ends = Vec::from_iter(ends.map(String::from).collect::<BTreeSet<_>>());
    if named(&ends) == all { ends } else { all }
}
