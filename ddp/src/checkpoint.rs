//! Saving and loading a model: OUT/checkpoints/step-%08d/model.safetensors, f32, under the parameters' names, as
//! `safetensors.torch` reads and writes it.
//!
//! A checkpoint appears whole or not at all. Values go to the file piece by piece: there is never a second copy of the model in
//! memory. A file is checked against the model, and its claims against its size, before a value is read.

mod safetensors;
mod state;

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use ddp_kernels::transfer::{Phase, announced, in_phase};
use ddp_kernels::{DType, Device, Tensor};

use self::safetensors::{Entry, Header};
pub use self::state::{Best, Position, STATE_FILE, ScheduleState, State, WorldState};
use crate::error::{Error, Result};
use crate::files;
use crate::params::{Parameter, Params};

/// The file of a checkpoint that holds the model.
pub const MODEL_FILE: &str = "model.safetensors";

/// Elements that are turned into bytes, or back, at a time.
const PIECE: usize = 1 << 16;

/// The folder of the checkpoint of step `step` under a run's folder.
pub fn folder(out: &Path, step: u64) -> PathBuf {
    out.join("checkpoints").join(format!("step-{step:08}"))
}

/// Saves the model as it is after step `step`: its parameters, or those of its parts from the input on. Returns the file. Fails if
/// that step is saved already.
pub fn save_model(out: &Path, step: u64, parts: &[&Params]) -> Result<PathBuf> {
    let folder = folder(out, step);
    files::make_whole_folder(&folder, |aside| write_model(&aside.join(MODEL_FILE), parts))?;
    Ok(folder.join(MODEL_FILE))
}

/// Writes a new file with all parameters and buffers, in the order of their declaration: the same file whether the model is in one
/// part or in several.
pub fn write_model(path: &Path, parts: &[&Params]) -> Result<()> {
    let list = in_order(parts);
    let header = Header::of(list.iter().map(|(_, parameter)| (parameter.name.as_str(), parameter.shape.as_slice())));
    files::write_file(path, |file| {
        file.write_all(&header.to_bytes()).map_err(files::failed("write", path))?;
        let mut bytes = Vec::with_capacity(4 * PIECE);
        for (params, parameter) in list {
            let on_host = || params.master(parameter.id).to((Device::Cpu, DType::F32));
            let values = in_phase(Phase::Checkpoint, || announced("saving the model", on_host))?;
            write_values(file, &values, &mut bytes).map_err(files::failed("write", path))?;
        }
        Ok(())
    })
}

fn write_values(file: &mut File, values: &Tensor, bytes: &mut Vec<u8>) -> std::io::Result<()> {
    let write = |values: &[f32]| {
        for piece in values.chunks(PIECE) {
            bytes.clear();
            piece.iter().for_each(|value| bytes.extend(value.to_le_bytes()));
            file.write_all(bytes)?;
        }
        Ok(())
    };
    values.with_slice(write).map_err(std::io::Error::other)?
}

/// Fills `parts`, those of one model, from a file that has exactly their names and shapes. Until that is known nothing is changed; a file that
/// cannot be read to its end leaves some values changed, and is an error.
pub fn load_model(path: &Path, parts: &[&Params]) -> Result<()> {
    let failed = |source: std::io::Error| Error::Io {
        action: "read",
        path: path.to_path_buf(),
        source,
        way_out: "Check that it is there and may be read".into(),
    };
    let mut file = File::open(path).map_err(failed)?;
    let length = file.metadata().map_err(failed)?.len();
    let header = Header::read(&mut file, length).map_err(failed)?.map_err(|why| refuse(path, why))?;
    let list = in_order(parts);
    let parameters: Vec<&Parameter> = list.iter().map(|(_, parameter)| *parameter).collect();
    check(&header, &parameters).map_err(|why| refuse(path, why))?;
    let mut bytes = vec![0; 4 * PIECE];
    for (params, parameter) in list {
        let entry = header.find(&parameter.name).expect("checked");
        file.seek(SeekFrom::Start(header.data_start + entry.start)).map_err(failed)?;
        let target = params.master(parameter.id);
        // On the CPU and in f32 values are read into their place.
        let direct = target.device() == Device::Cpu && target.dtype() == DType::F32;
        let host = if direct { target.clone() } else { Tensor::empty(&parameter.shape, DType::F32, Device::Cpu)? };
        host.with_slice_mut(|values: &mut [f32]| read_values(&mut file, values, &mut bytes))?.map_err(failed)?;
        if !direct {
            let host = host.to_dtype(target.dtype())?;
            in_phase(Phase::Checkpoint, || announced("loading the model", || target.copy_from(&host)))?;
        }
        params.refresh(parameter.range.clone())?;
    }
    Ok(())
}

fn read_values(file: &mut File, values: &mut [f32], bytes: &mut [u8]) -> std::io::Result<()> {
    for piece in values.chunks_mut(PIECE) {
        let bytes = &mut bytes[..4 * piece.len()];
        file.read_exact(bytes)?;
        for (value, bytes) in piece.iter_mut().zip(bytes.as_chunks().0) {
            *value = f32::from_le_bytes(*bytes);
        }
    }
    Ok(())
}

/// In the order of declaration: that of the layers, from the input on. Each with the part that it is of.
fn in_order<'a>(parts: &[&'a Params]) -> Vec<(&'a Params, &'a Parameter)> {
    let of_part = |params: &'a Params| params.in_order().into_iter().map(move |parameter| (params, parameter));
    parts.iter().flat_map(|params| of_part(params)).collect()
}

/// Whether the file has this model's parameters: all of them, no others, in their shapes and dtype.
fn check(header: &Header, list: &[&Parameter]) -> Result<(), String> {
    let names = |names: Vec<&str>| match names.len() {
        0..=4 => names.join(", "),
        count => format!("{} and {} more", names[..3].join(", "), count - 3),
    };
    let missing: Vec<_> = list.iter().map(|p| p.name.as_str()).filter(|name| header.find(name).is_none()).collect();
    let known = |entry: &&Entry| list.iter().any(|parameter| parameter.name == entry.name);
    let others: Vec<_> = header.entries.iter().filter(|entry| !known(entry)).map(|e| e.name.as_str()).collect();
    if !missing.is_empty() || !others.is_empty() {
        let lacks = (!missing.is_empty()).then(|| format!("it lacks {}", names(missing)));
        let has = (!others.is_empty()).then(|| format!("it has {}, which the model does not", names(others)));
        let text = [lacks, has].into_iter().flatten().collect::<Vec<_>>().join("; ");
        return Err(format!(
            "it is of another model: {text}. Give the flags it was trained with (--hidden, --dropout …)"
        ));
    }
    for parameter in list {
        let entry = header.find(&parameter.name).expect("none is missing");
        if entry.shape != parameter.shape {
            return Err(format!(
                "{} has the shape {:?} in it, {:?} in the model. Give the flags it was trained with (--hidden …)",
                entry.name, entry.shape, parameter.shape
            ));
        }
        if entry.dtype != "F32" {
            return Err(format!("{} is {} in it: expected F32. Save it again in that dtype", entry.name, entry.dtype));
        }
    }
    Ok(())
}

fn refuse(path: &Path, why: String) -> Error {
    Error::Data(format!("cannot load the model from {}: {why}", path.display()))
}

#[cfg(test)]
mod tests;
