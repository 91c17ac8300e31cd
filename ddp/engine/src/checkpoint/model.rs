//! `model.safetensors`: all parameters and buffers as f32 under their names, in the format of
//! `safetensors.torch`. Where there are adapters, these alone: the base is read where it is.

use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use ddp_kernels::files::{open_ordinary, read_up_to};
use ddp_kernels::transfer::{Phase, announced, in_phase};
use ddp_kernels::{DType, Device, Tensor};

use super::files::{ReadFrom, mismatch, unreadable};
use super::manifest::{self, Opened};
use super::tensors::{self, FileDType};
use crate::error::{Error, Result};
use crate::setting::MODEL;
use ddp_data::safetensors::{Header, TensorEntry};
use ddp_nn::lora::is_adapter;
use ddp_nn::params::{Parameter, Params};
use std::hash::Hasher as _;
use twox_hash::XxHash3_64;

/// Writes a new file with all parameters and buffers in the order of declaration. The file is the
/// same for a model in one part or in several.
pub fn write_model(path: &Path, parts: &[&Params]) -> Result<()> {
    if parts.iter().any(|params| params.is_divided()) {
        let help = "save with a Saver, or use Reducer::copy_masters";
        return Err(Error::Usage(format!(
            "write_model: expected whole weights, got those that ranks have divided; help: {help}"
        )));
    }
    let list = saved(parts);
    let on_host = |(params, parameter): &(&Params, &Parameter)| -> Result<Tensor> {
        let bring = || params.master(parameter.id).to((Device::Cpu, DType::F32));
        Ok(in_phase(Phase::Checkpoint, || {
            announced("saving the model", bring)
        })?)
    };
    tensors::write_file(path, &header(&list), list.iter().map(on_host)).map(drop)
}

/// The header of a file with these parameters.
pub(super) fn header(list: &[(&Params, &Parameter)]) -> Header {
    let parameters = list.iter().map(|(_, parameter)| parameter);
    Header::of(parameters.map(|it| (it.name.as_str(), it.shape.as_slice())))
}

/// The largest value of a model that is plausible. A damaged exponent gives larger ones.
const VALUE_MAX: f32 = 1e6;

/// Loads a file with exactly the names and shapes of `parts`, in f32, bf16 or f16. A file in a
/// checkpoint must match its checksum. All of that is checked before anything changes; an error
/// while reading values leaves some of them changed.
pub fn load_model(path: &Path, parts: &[&Params]) -> Result<()> {
    let file = manifest::open_model(path)?.into();
    ModelFile::of(path, file, saved(parts), false)?
        .load()
        .map(drop)
}

/// The same for a file of unknown origin to start from, which has no adapters: values that are not
/// finite or very large are refused, and a model may have fewer positions. The checksum is compared
/// on rank 0. Returns a digest of the values.
pub(crate) fn load_initial(path: &Path, parts: &[&Params], rank: usize) -> Result<String> {
    let file = match rank {
        0 => manifest::open_model(path)?,
        _ => open_ordinary(path).map_err(unreadable(path))?,
    };
    ModelFile::of(path, file.into(), initial(parts), true)?.load()
}

/// Fills `parts` from the checked file of a checkpoint, even if its folder was removed since.
pub fn load_opened(opened: &Opened, parts: &[&Params]) -> Result<()> {
    let (path, file) = (opened.model_file(), model_of(opened)?);
    ModelFile::of(&path, file, saved(parts), false)?
        .load()
        .map(drop)
}

/// The file that was checked when the checkpoint was opened.
pub(super) fn model_of(opened: &Opened) -> Result<Arc<File>> {
    let none = || Error::Internal("a folder of another program has no such file".into());
    opened.model.clone().ok_or_else(none)
}

/// A file with the names and shapes of a model.
pub(super) struct ModelFile<'a> {
    path: &'a Path,
    file: Arc<File>,
    header: Header,
    list: Vec<(&'a Params, &'a Parameter)>,
    /// Whether its origin is unknown: it may have more positions, and its values are checked.
    is_foreign: bool,
    /// Whether its names were changed by `without_dropout`.
    pub(super) is_renamed: bool,
}

impl<'a> ModelFile<'a> {
    /// Checks the file, which was opened at `path`, against these parameters.
    pub(super) fn of(
        path: &'a Path,
        file: Arc<File>,
        list: Vec<(&'a Params, &'a Parameter)>,
        is_foreign: bool,
    ) -> Result<ModelFile<'a>> {
        let mut header = header_of(path, &file)?;
        let parameters: Vec<&Parameter> = list.iter().map(|(_, parameter)| *parameter).collect();
        let is_renamed = rename(&mut header, &parameters);
        check(&header, &parameters, is_foreign).map_err(|why| refuse(path, why))?;
        Ok(ModelFile {
            path,
            file,
            header,
            list,
            is_foreign,
            is_renamed,
        })
    }

    /// Fills the parameters with its values. Returns a digest of these if their origin is unknown.
    pub(super) fn load(self) -> Result<String> {
        let (mut bytes, mut foreign) = (Vec::new(), Foreign::default());
        for (params, parameter) in self.list {
            let entry = self.header.find(&parameter.name).expect("checked");
            let dtype = FileDType::of(entry).expect("checked");
            let mut file = ReadFrom::place(&self.file, self.header.data_start + entry.start);
            fill(params, parameter, 0..height(parameter), |values| {
                let read = dtype.read(&mut file, values, &mut bytes);
                read.map_err(unreadable(self.path))?;
                if self.is_foreign {
                    let checked = foreign.check(&parameter.name, values);
                    return checked.map_err(|why| refuse(self.path, why));
                }
                Ok(())
            })?;
        }
        Ok(foreign.digest())
    }
}

/// Elements that are in host memory at a time on their way to another device or type; fewer in unit
/// tests, so that they see several pieces.
const HOST_PIECE: usize = if cfg!(test) { 64 } else { 1 << 24 };

/// The rows of a parameter; one number is one.
fn height(parameter: &Parameter) -> usize {
    parameter.shape.first().copied().unwrap_or(1)
}

/// Gives these rows of a parameter the values that `read` writes, in order, piece by piece. The
/// last rows of a parameter come last.
pub(crate) fn fill(
    params: &Params,
    parameter: &Parameter,
    rows: Range<usize>,
    mut read: impl FnMut(&mut [f32]) -> Result<()>,
) -> Result<()> {
    let why = "loading the model";
    if !params.has_master(parameter) {
        let columns = parameter.range.len() / height(parameter).max(1);
        let at_once = (HOST_PIECE / columns.max(1)).max(1);
        for first in rows.clone().step_by(at_once) {
            let count = (rows.end - first).min(at_once) * columns;
            let host = Tensor::zeros(&[count], DType::F32, Device::Cpu)?;
            host.with_slice_mut(&mut read)??;
            let set = || params.set_part(parameter, first * columns, &host, why);
            in_phase(Phase::Checkpoint, set)?;
        }
        return Ok(());
    }
    let is_last = rows.end == height(parameter);
    let master = params.master(parameter.id);
    let master = if parameter.shape.is_empty() {
        master.flatten()?
    } else {
        master.slice(rows)?
    };
    tensors::read_into(&master, why, HOST_PIECE, read)?;
    if parameter.is_base || !is_last {
        return Ok(());
    }
    Ok(params.refresh(parameter.range.clone())?)
}

/// Values of unknown origin, and their digest.
#[derive(Default)]
pub(crate) struct Foreign(XxHash3_64);

impl Foreign {
    /// Refuses values of the tensor `name` that are not finite, or very large. Digests them.
    pub(crate) fn check(&mut self, name: &str, values: &[f32]) -> Result<(), String> {
        let is_odd = |value: &&f32| value.is_nan() || value.abs() > VALUE_MAX;
        if let Some(value) = values.iter().find(is_odd) {
            return Err(format!(
                "{name}: expected values up to {VALUE_MAX:e}, got {value:e}; help: the file is \
                 damaged or its training diverged: give another"
            ));
        }
        let mut bytes = [0; 4096];
        for piece in values.chunks(bytes.len() / 4) {
            for (four, value) in bytes.chunks_exact_mut(4).zip(piece) {
                four.copy_from_slice(&value.to_le_bytes());
            }
            self.0.write(&bytes[..4 * piece.len()]);
        }
        Ok(())
    }

    /// Of all values so far: the same for those of a file in bf16 and in f32.
    pub(crate) fn digest(&self) -> String {
        format!("{:016x}", self.0.finish())
    }
}

/// The header of a safetensors file that was opened at `path`.
pub(crate) fn header_of(path: &Path, file: &File) -> Result<Header> {
    let length = file.metadata().map_err(unreadable(path))?.len();
    Header::read(&mut ReadFrom::place(file, 0), length)
        .map_err(unreadable(path))?
        .map_err(|why| refuse(path, why))
}

/// The text of a small file of a model's folder.
pub(crate) fn text_of(path: &Path, bytes_max: u64) -> Result<String> {
    let read = read_up_to(path, bytes_max).map_err(unreadable(path))?;
    let long = || {
        refuse(
            path,
            format!("expected at most {bytes_max} bytes, got more; help: give a model's file"),
        )
    };
    let text = String::from_utf8(read.ok_or_else(long)?);
    text.map_err(|error| refuse(path, format!("expected UTF-8: {error}")))
}

/// The parameters of a checkpoint's file: all but those of a base.
pub(super) fn saved<'a>(parts: &[&'a Params]) -> Vec<(&'a Params, &'a Parameter)> {
    let mut list = in_order(parts);
    list.retain(|(_, parameter)| !parameter.is_base);
    list
}

/// The parameters that initial weights fill: all but adapters.
pub(crate) fn initial<'a>(parts: &[&'a Params]) -> Vec<(&'a Params, &'a Parameter)> {
    let mut list = in_order(parts);
    list.retain(|(_, parameter)| !is_adapter(&parameter.name));
    list
}

/// All parameters in the order of the layers, each with its part.
fn in_order<'a>(parts: &[&'a Params]) -> Vec<(&'a Params, &'a Parameter)> {
    let of_part = |params: &&'a Params| {
        let params: &'a Params = params;
        params.in_order().into_iter().map(move |it| (params, it))
    };
    parts.iter().flat_map(of_part).collect()
}

/// Renames the tensors of a perceptron whose dropout layers have numbers, if that gives the names
/// of this model. Returns whether it did.
fn rename(header: &mut Header, list: &[&Parameter]) -> bool {
    let entries = header.entries.iter();
    let names: Option<Vec<String>> = entries.map(|entry| without_dropout(&entry.name)).collect();
    let fits = |names: &Vec<String>| list.iter().all(|p| names.contains(&p.name));
    let Some(names) = names.filter(fits) else {
        return false;
    };
    for (entry, name) in header.entries.iter_mut().zip(names) {
        entry.name = name;
    }
    true
}

/// The name here of a perceptron's parameter where dropout layers have numbers, as in versions up
/// to 0.6 and in a `torch.nn.Sequential` of all layers: linear layers are 0, 3, 6 there, and 0, 2,
/// 4 here.
pub(super) fn without_dropout(name: &str) -> Option<String> {
    let (layer, rest) = name.split_once('.')?;
    let layer: usize = layer.parse().ok()?;
    layer
        .is_multiple_of(3)
        .then(|| format!("{}.{rest}", layer / 3 * 2))
}

/// Whether the tensor holds positions, of which a parameter of this shape has the first ones.
fn has_more_positions(entry: &TensorEntry, shape: &[usize]) -> bool {
    entry.name == "embedding.positions.weight"
        && entry.shape.len() == 2
        && entry.shape.first() >= shape.first()
        && entry.shape.get(1..) == shape.get(1..)
}

/// Refuses a file that does not have exactly this model's parameters, in shapes that fit and a
/// dtype that f32 holds exactly.
fn check(header: &Header, list: &[&Parameter], is_foreign: bool) -> Result<(), String> {
    let names = list.iter().map(|parameter| parameter.name.as_str());
    let missing: Vec<&str> = names.filter(|name| header.find(name).is_none()).collect();
    let found = header.entries.iter().map(|entry| entry.name.as_str());
    let is_known = |name: &&str| list.iter().any(|parameter| parameter.name == *name);
    let others: Vec<&str> = found.filter(|name| !is_known(name)).collect();
    if let Some(why) = mismatch(&missing, &others, "the model") {
        return Err(format!(
            "it is of another model: {why}; help: give the {MODEL} and the settings it was trained \
             with"
        ));
    }
    for parameter in list {
        let entry = header.find(&parameter.name).expect("none is missing");
        let fits = entry.shape == parameter.shape;
        if !(fits || is_foreign && has_more_positions(entry, &parameter.shape)) {
            return Err(format!(
                "{} has the shape {:?}, and {:?} in the model; help: give the {MODEL} and the \
                 settings it was trained with",
                entry.name, entry.shape, parameter.shape
            ));
        }
        FileDType::of(entry)?;
    }
    Ok(())
}

pub(crate) fn refuse(path: &Path, why: String) -> Error {
    Error::Data(format!(
        "cannot load the model from {}: {why}",
        path.display()
    ))
}
