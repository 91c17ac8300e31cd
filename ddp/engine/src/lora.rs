//! `--lora`: adapters of low rank beside frozen weights, as PEFT trains them. `peft.rs` reads and
//! writes PEFT's folders.

mod peft;

use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use ddp_kernels::{DType, Device, Tensor, ops};
use ddp_nn::Lora;
use ddp_nn::lora::{LORA_A, LORA_B};
use ddp_nn::models::{DataShape, ModelSpec};
use ddp_nn::optim::ParameterGroup;
use ddp_nn::params::{Parameter, Params};
use serde::{Deserialize, Serialize};

pub use self::peft::{describe, export, load};
use crate::error::{Error, Result};
use crate::hugging_face;
use crate::setting::LORA;
use crate::shown::some_of;

/// Every linear layer between the embedding and the head, as in PEFT.
const ALL_LINEAR: &str = "all-linear";
/// The most columns of an adapter.
const RANK_MAX: usize = 4096;

/// Which layers get adapters, and how.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct LoraSetting {
    /// The inner size of the two matrices; 0 until `from` was read.
    pub rank: usize,
    /// The output is multiplied by alpha / rank.
    pub alpha: f64,
    /// Names or patterns of layers, here or in transformers.
    pub on: Vec<String>,
    /// The probability that an element of the input is dropped in training.
    pub dropout: f64,
    /// Whether alpha is divided by the root of the rank.
    pub rslora: bool,
    /// The folder whose adapters are the initial ones.
    pub from: Option<PathBuf>,
}

impl fmt::Display for LoraSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let on = self.on.join(",");
        write!(f, "rank={},alpha={},on={on}", self.rank, self.alpha)?;
        if self.dropout > 0.0 {
            write!(f, ",dropout={}", self.dropout)?;
        }
        if self.rslora {
            f.write_str(",rslora=true")?;
        }
        match &self.from {
            Some(from) => write!(f, ",from={}", from.display()),
            None => Ok(()),
        }
    }
}

impl FromStr for LoraSetting {
    type Err = String;

    fn from_str(text: &str) -> Result<LoraSetting, String> {
        let mut read = LoraSetting::default();
        let mut given = Vec::new();
        for part in text.split(',') {
            // A list has commas, too: on=q_proj,v_proj.
            let (name, value) = match part.split_once('=') {
                None if given.last() == Some(&"on") => ("on", part),
                None if given.last() == Some(&"from") => {
                    let path = read.from.get_or_insert_default().as_mut_os_string();
                    path.push(",");
                    path.push(part);
                    continue;
                }
                Some((name, _)) if given.contains(&name) => return Err(wrong(part)),
                Some((name, value)) => {
                    given.push(name);
                    (name, value)
                }
                None => return Err(wrong(part)),
            };
            match name {
                "rank" => read.rank = within(part, value, 1..RANK_MAX + 1)?,
                "alpha" => read.alpha = within(part, value, f64::MIN_POSITIVE..1e6)?,
                "dropout" => read.dropout = within(part, value, 0.0..1.0)?,
                "rslora" => read.rslora = value.parse().map_err(|_| wrong(part))?,
                "from" if !value.is_empty() => read.from = Some(value.into()),
                "on" if ParameterGroup::new(value, None, None).is_ok() && !value.is_empty() => {
                    read.on.push(value.into());
                }
                _ => return Err(wrong(part)),
            }
        }
        if read.rank == 0 && given != ["from"] {
            let help = "help: as in rank=16,alpha=32, or give from=FOLDER alone";
            return Err(format!("expected a rank; {help}"));
        }
        if read.alpha == 0.0 {
            read.alpha = 2.0 * read.rank as f64;
        }
        if read.on.is_empty() {
            read.on.push(ALL_LINEAR.into());
        }
        Ok(read)
    }
}

/// The number `value`, if it is within `range`.
fn within<T: FromStr + PartialOrd>(part: &str, value: &str, range: Range<T>) -> Result<T, String> {
    let number = value.parse().ok().filter(|number| range.contains(number));
    number.ok_or_else(|| wrong(part))
}

fn wrong(part: &str) -> String {
    format!(
        "{part:?}: expected rank=N (up to {RANK_MAX}), alpha=X, on={ALL_LINEAR} or names or patterns \
         of layers, dropout=P (below 1), rslora=true, from=FOLDER, each at most once, separated by \
         commas"
    )
}

/// A layer that has an adapter: its name in transformers, or here if it has none there, and its
/// outputs in the layer here.
type Unit = (String, Range<usize>);

impl LoraSetting {
    /// What an adapter's output is multiplied by.
    pub fn scale(&self) -> f64 {
        let rank = self.rank as f64;
        self.alpha / if self.rslora { rank.sqrt() } else { rank }
    }

    /// Elements of all adapters of a model.
    pub fn count(&self, model: &ModelSpec, shape: &DataShape<'_>) -> Result<u128> {
        Ok(model.adapter_count(shape, self.of_model(model))?)
    }

    /// The adapters of a model.
    pub(crate) fn of_model(&self, model: &ModelSpec) -> Lora {
        let (setting, model) = (self.clone(), model.clone());
        let adapted = move |layer: &str, parts: &[usize]| {
            let units = setting.units(&model, layer, parts).into_iter();
            units.map(|(_, rows)| rows).collect()
        };
        Lora {
            rank: self.rank,
            scale: self.scale(),
            dropout: self.dropout,
            adapted: Arc::new(adapted),
        }
    }

    /// The adapters of a layer whose parts have this many outputs. What is one layer in
    /// transformers (GPT-2's c_attn) has one.
    fn units(&self, model: &ModelSpec, layer: &str, parts: &[usize]) -> Vec<Unit> {
        let is_wanted = |(name, _): &Unit| self.on.iter().any(|on| matches(on, layer, name));
        let all = units(model, layer, parts).into_iter();
        all.filter(is_wanted).collect()
    }

    /// Refuses names that no layer has.
    pub(crate) fn check(&self, model: &ModelSpec, params: &[&Params]) -> Result<()> {
        let of = |(layer, _, weight): (_, _, &Parameter)| {
            let units = units(model, layer, &weight.matrices).into_iter();
            units.map(move |(name, _)| (layer, name))
        };
        let names: Vec<_> = layers(params).into_iter().flat_map(of).collect();
        let is_unknown = |on: &&String| !names.iter().any(|(layer, name)| matches(on, layer, name));
        let Some(unknown) = self.on.iter().find(is_unknown) else {
            return Ok(());
        };
        let names: Vec<_> = names.iter().map(|(_, name)| name).collect();
        Err(Error::Usage(format!(
            "{LORA} on={unknown}: expected {ALL_LINEAR}, or a name or pattern of linear layers; \
             help: the model has {}",
            some_of(&names, 8)
        )))
    }
}

/// All layers of transformers that a linear layer here is made of.
fn units(model: &ModelSpec, layer: &str, parts: &[usize]) -> Vec<Unit> {
    let modules = hugging_face::modules(model, layer).unwrap_or_default();
    let rows = match modules.len() {
        1 => vec![parts.iter().sum()],
        _ => parts.to_vec(),
    };
    let mut start = 0;
    let unit = |(index, rows): (usize, usize)| {
        let name = modules.get(index).map_or(layer, String::as_str);
        start += rows;
        (name.to_string(), start - rows..start)
    };
    rows.into_iter().enumerate().map(unit).collect()
}

/// Whether `on` means the layer called `layer` here and `name` in transformers. The ends of names
/// suffice, as in PEFT: q_proj.
fn matches(on: &str, layer: &str, name: &str) -> bool {
    let patterns = [on, &format!("*.{on}")].map(|it| ParameterGroup::new(it, None, None));
    let is_one = |pattern: &ParameterGroup| pattern.matches(layer) || pattern.matches(name);
    on == ALL_LINEAR || patterns.iter().flatten().any(is_one)
}

/// The linear layers that may have adapters, by name, with their weights.
fn layers<'a>(params: &[&'a Params]) -> Vec<(&'a str, &'a Params, &'a Parameter)> {
    let of = |params: &&'a Params| {
        let params: &'a Params = params;
        let list = params.in_order().into_iter();
        let hidden = list.filter(|weight| weight.is_base && !weight.matrices.is_empty());
        hidden.filter_map(move |weight| Some((weight.name.rsplit_once('.')?.0, params, weight)))
    };
    params.iter().flat_map(of).collect()
}

/// A layer with adapters: its model, its weight, A and B, and what these are in transformers.
type AdaptedLayer<'a> = (&'a Params, &'a Parameter, [&'a Parameter; 2], Vec<Unit>);

/// All layers with adapters.
fn adapted<'a>(
    lora: &LoraSetting,
    model: &ModelSpec,
    params: &[&'a Params],
) -> Result<Vec<AdaptedLayer<'a>>> {
    let of = |(layer, params, weight): (&str, &'a Params, &'a Parameter)| {
        let units = lora.units(model, layer, &weight.matrices);
        let find = |leaf: &str| params.find(&format!("{layer}.{leaf}"));
        (!units.is_empty()).then(|| Ok((params, weight, [find(LORA_A)?, find(LORA_B)?], units)))
    };
    layers(params).into_iter().filter_map(of).collect()
}

/// Adds the adapters to the weights of a model in f32 on the CPU: W + scale · B·A.
pub fn merge(lora: &LoraSetting, model: &ModelSpec, params: &Params) -> Result<()> {
    for (params, weight, ab, units) in adapted(lora, model, &[params])? {
        let [a, b] = ab.map(|parameter| params.master(parameter.id));
        let mut start = 0;
        for (index, (_, rows)) in units.into_iter().enumerate() {
            let a = a.slice(index * lora.rank..(index + 1) * lora.rank)?;
            let b = b.slice(start..start + rows.len())?;
            start += rows.len();
            let product = Tensor::zeros(&[rows.len(), weight.shape[1]], DType::F32, Device::Cpu)?;
            ops::linear_backward_input_into(&product, &b, &a, None)?;
            let weight = params.master(weight.id).slice(rows)?;
            ops::axpy(&weight, lora.scale(), &product)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_read_back_as_they_print() {
        for text in [
            "rank=16,alpha=32,on=all-linear",
            "rank=4,alpha=2.5,on=q_proj,v_proj,dropout=0.1,rslora=true",
            "rank=4,alpha=8,on=blocks.?.mlp.*,from=an/adapter",
        ] {
            assert_eq!(text.parse::<LoraSetting>().unwrap().to_string(), text);
        }
        let short: LoraSetting = "rank=8".parse().unwrap();
        assert_eq!(short.to_string(), "rank=8,alpha=16,on=all-linear");
        assert_eq!("from=f".parse::<LoraSetting>().unwrap().rank, 0);
        for wrong in [
            "",
            "16",
            "rank=0",
            "rank=1.5.2",
            "alpha=8",
            "rank=8,rank=9",
            "rank=8,dropout=1",
            "rank=8,on=",
            "rank=8,on=[",
            "rank=8,x=1",
            "alpha=8,from=f",
            "rank=8,rslora=1",
        ] {
            assert!(wrong.parse::<LoraSetting>().is_err(), "{wrong}");
        }
    }
}
