//! Writes a model as a folder that transformers loads.

use std::fs;
use std::path::Path;

use ddp_data::safetensors::Header;
use ddp_data::text::{CHAT_FILES, Vocabulary};
use ddp_kernels::files as disk;
use ddp_kernels::{DType, Device, Tensor};
use ddp_nn::lora::is_adapter;
use ddp_nn::models::ModelSpec;
use ddp_nn::models::gpt::GptSpec;
use ddp_nn::params::Params;
use serde_json::{Value, json};

use super::CONFIG_FILE;
use super::architecture::Architecture;
use super::base::Base;
use super::config::{self, architecture_of};
use super::load::transpose;
use super::names::{self, TensorPart};
use crate::checkpoint::{MODEL_FILE, unreadable, write_file};
use crate::error::{Error, Result};

/// What is exported.
#[derive(Debug)]
pub struct Exported<'a> {
    /// The model's settings.
    pub model: &'a ModelSpec,
    /// How many tokens there are, without those that pad the vocabulary.
    pub vocabulary: usize,
    /// Its weights, in f32 on the CPU.
    pub params: &'a Params,
    /// The tokenizer of its data, and the token after each document.
    pub tokenizer: Option<(&'a Vocabulary, Option<usize>)>,
    /// The Hugging Face folder that its run started from.
    pub base: Option<Base>,
    /// The type of the numbers in the file: f32 or bf16.
    pub dtype: DType,
}

/// Writes `config.json`, `model.safetensors` and the files of the tokenizer in the new folder
/// `folder`, which is written whole or not at all. An empty folder is replaced. Returns the name of
/// the class of transformers.
pub fn export(folder: &Path, exported: Exported<'_>) -> Result<&'static str> {
    let (spec, architecture) = known(exported.model)?;
    write_folder(folder, |folder| write(folder, spec, architecture, exported))?;
    Ok(architecture.class())
}

/// The settings and the class of a model. Refuses one that transformers does not have.
fn known(model: &ModelSpec) -> Result<(&GptSpec, &'static Architecture)> {
    let spec = model.get::<GptSpec>().ok_or_else(|| {
        Error::Usage(format!(
            "a model of the family {}: expected gpt, which transformers has; help: for other \
             programs there is model.safetensors in the checkpoint",
            model.name()
        ))
    })?;
    Ok((spec, architecture_of(spec)?))
}

/// The layers of transformers that the linear layer `layer` of a model is made of. None if it has
/// no such class or layer.
pub fn modules(model: &ModelSpec, layer: &str) -> Option<Vec<String>> {
    names::modules(known(model).ok()?.1, layer)
}

/// Whether the class of a model stores weights of linear layers as (I, O).
pub fn is_conv1d(model: &ModelSpec) -> Result<bool> {
    Ok(names::is_conv1d(known(model)?.1))
}

/// Writes a new folder, whole or not at all. An empty one is replaced.
pub fn write_folder(folder: &Path, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let refused = |expected: &str| {
        let folder = folder.display();
        Error::Usage(format!("{folder}: expected {expected}; help: give another"))
    };
    let is_free = match fs::read_dir(folder) {
        Ok(mut entries) => entries.next().is_none(),
        Err(_) => fs::symlink_metadata(folder).is_err(),
    };
    if !is_free {
        return Err(refused("a new or empty folder, got one with files"));
    }
    let folder = std::path::absolute(folder).map_err(unreadable(folder))?;
    let name = folder.file_name();
    let name = name.ok_or_else(|| refused("the name of a folder"))?;
    // In the same folder, so that it can be renamed.
    let aside = folder.with_file_name(format!(".{}.exporting", name.to_string_lossy()));
    let Some(_lock) = disk::lock_folder(&aside)? else {
        return Err(refused("a folder that no other process writes, got one"));
    };
    remove_left(&aside)?;
    let sync = |()| Ok(disk::sync_folder(&aside)?);
    let written = write(&aside).and_then(sync);
    let written = written.and_then(|()| Ok(disk::rename(&aside, &folder)?));
    if written.is_err() {
        // The first error says why; what is left has a hidden name.
        let _ = disk::remove_folder(&aside);
    }
    written
}

/// Removes what a killed process left in the folder.
fn remove_left(folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder).map_err(unreadable(folder))? {
        let path = entry.map_err(unreadable(folder))?.path();
        fs::remove_file(&path).map_err(disk::failed("remove", &path))?;
    }
    Ok(())
}

fn write(
    folder: &Path,
    spec: &GptSpec,
    architecture: &Architecture,
    exported: Exported<'_>,
) -> Result<()> {
    let Exported {
        vocabulary,
        params,
        tokenizer,
        base,
        dtype,
        ..
    } = exported;
    let end = tokenizer.and_then(|(_, end)| end);
    let tokenizer = tokenizer.map(|(vocabulary, _)| vocabulary);
    let mut config = config::keys_of(spec, vocabulary, end, architecture);
    if dtype == DType::BF16 {
        config.insert("torch_dtype".into(), "bfloat16".into());
    }
    if let Some(base) = &base {
        config = base.config(config, tokenizer, end);
    }
    let mut files = match base {
        Some(base) => base.files(tokenizer, end),
        None => {
            let own = tokenizer.into_iter().flat_map(Vocabulary::files);
            own.map(|(name, bytes)| (name, bytes.to_vec())).collect()
        }
    };
    if let Some(vocabulary) = tokenizer {
        let end = end.and_then(|end| vocabulary.special_text(end));
        let class = "PreTrainedTokenizerFast";
        let about = json!({ "tokenizer_class": class, "eos_token": end });
        let about = || format!("{about:#}\n").into();
        files.entry(CHAT_FILES[0]).or_insert_with(about);
    }
    files.insert(CONFIG_FILE, format!("{:#}\n", Value::Object(config)).into());
    for (name, bytes) in files {
        disk::write_file(&folder.join(name), |output| output.write(&bytes))?;
    }
    let mut tensors = Vec::new();
    let weights = params.in_order().into_iter();
    for parameter in weights.filter(|weight| !is_adapter(&weight.name)) {
        let mut shape = parameter.shape.clone();
        if names::has_token_rows(&parameter.name) {
            shape[0] = vocabulary;
        }
        let parts = names::parts(architecture, spec, &parameter.name, &shape);
        let parts = parts.ok_or_else(|| {
            let class = architecture.class();
            Error::Internal(format!("{class} has nothing for {}", parameter.name))
        })?;
        let mut start = 0;
        for part in parts {
            let count: usize = part.shape.iter().product();
            tensors.push((params.master(parameter.id), start..start + count, part));
            start += count;
        }
    }
    let parts = || tensors.iter().map(|(_, _, part)| part);
    let shapes: Vec<_> = parts().map(TensorPart::shape_there).collect();
    let names = parts().map(|part| part.name.as_str());
    let mut header = Header::of(names.zip(shapes.iter().map(Vec::as_slice)));
    if dtype == DType::BF16 {
        header.become_bf16();
    }
    let values = tensors.iter();
    let values = values.map(|(parameter, range, part)| -> Result<Tensor> {
        let value = parameter.with_slice(|all: &[f32]| there(&all[range.clone()], part))??;
        Ok(value.to_dtype(dtype)?)
    });
    write_file(&folder.join(MODEL_FILE), &header, values).map(drop)
}

/// The rows `here` of a parameter, as a tensor of transformers.
fn there(here: &[f32], part: &TensorPart) -> Result<Tensor> {
    let there = Tensor::empty(&part.shape_there(), DType::F32, Device::Cpu)?;
    there.with_slice_mut(|values: &mut [f32]| {
        if part.is_transposed {
            transpose(here, values, part.shape[1]);
        } else {
            values.copy_from_slice(here);
        }
        if part.shift != 0.0 {
            values.iter_mut().for_each(|value| *value -= part.shift);
        }
    })?;
    Ok(there)
}
