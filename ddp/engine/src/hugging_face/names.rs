//! Which tensors of transformers make which parameter here.
//!
//! `gpt2.txt` and `llama.txt` have a line for each layer: its name here, then the layers of
//! transformers whose rows follow each other in it. `#` is the number of a block.

use super::Architecture;

/// The weight that a tied head shares, and the head's.
pub(super) fn tied(architecture: Architecture) -> [&'static str; 2] {
    match architecture {
        Architecture::Gpt2 => ["transformer.wte.weight", "lm_head.weight"],
        Architecture::Llama => ["model.embed_tokens.weight", "lm_head.weight"],
    }
}

/// Whether the parameter `name` has a row for each token.
pub(super) fn has_token_rows(name: &str) -> bool {
    ["embedding.tokens.weight", "head.weight"].contains(&name)
}

/// A tensor of transformers, which is some rows of a parameter here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// Its name there.
    pub(super) name: String,
    /// The shape of these rows here.
    pub(super) shape: Vec<usize>,
    /// Whether it is transposed there, as weights of GPT-2's `Conv1D`.
    pub(super) is_transposed: bool,
}

impl Part {
    /// Its shape there.
    pub(super) fn shape_there(&self) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if self.is_transposed {
            shape.reverse();
        }
        shape
    }

    /// Whether the tensor has a row for each position.
    pub(super) fn is_of_positions(&self) -> bool {
        self.name == "transformer.wpe.weight"
    }
}

/// The tensors that make the parameter `name` of this shape, in the order of its rows. None if the
/// architecture has no such parameter.
pub(super) fn parts(architecture: Architecture, name: &str, shape: &[usize]) -> Option<Vec<Part>> {
    let (layer, leaf) = name.rsplit_once('.')?;
    let there = modules(architecture, layer)?;
    let is_in_block = layer.starts_with("blocks.");
    let is_conv1d = architecture == Architecture::Gpt2 && is_in_block && shape.len() == 2;
    let part = |(there, rows): (&String, usize)| Part {
        name: format!("{there}.{leaf}"),
        shape: [&[rows], &shape[1..]].concat(),
        is_transposed: is_conv1d,
    };
    let rows = rows_of_parts(shape, there.len());
    Some(there.iter().zip(rows).map(part).collect())
}

/// The layers of transformers that the layer `name` is made of.
pub(super) fn modules(architecture: Architecture, name: &str) -> Option<Vec<String>> {
    let (layer, block) = without_number(name);
    let table = match architecture {
        Architecture::Gpt2 => include_str!("gpt2.txt"),
        Architecture::Llama => include_str!("llama.txt"),
    };
    let mut lines = table.lines().map(str::split_whitespace);
    let there = lines.find_map(|mut line| (line.next()? == layer).then_some(line))?;
    Some(there.map(|name| name.replace('#', block)).collect())
}

/// How the rows of a parameter are divided. Three parts are queries, keys and values: there are as
/// many queries as columns, and as many keys as values.
fn rows_of_parts(shape: &[usize], parts: usize) -> Vec<usize> {
    match (parts, shape) {
        (3, [rows, columns]) => {
            let keys = rows.saturating_sub(*columns) / 2;
            vec![*columns, keys, keys]
        }
        _ => vec![shape[0] / parts; parts],
    }
}

/// `blocks.#.mlp` and `7` of `blocks.7.mlp`.
fn without_number(layer: &str) -> (String, &str) {
    let rest = layer.strip_prefix("blocks.");
    match rest.and_then(|rest| rest.split_once('.')) {
        Some((number, rest)) => (format!("blocks.#.{rest}"), number),
        None => (layer.to_string(), ""),
    }
}

/// The name of a tensor with the prefix that the whole model has: models without a head were saved
/// without it.
pub(super) fn with_prefix(architecture: Architecture, name: &str) -> String {
    let prefix = match architecture {
        Architecture::Gpt2 => "transformer.",
        Architecture::Llama => "model.",
    };
    if name.starts_with(prefix) || name.starts_with("lm_head.") {
        return name.to_string();
    }
    format!("{prefix}{name}")
}

/// Whether a tensor holds no values of the model, but a mask or angles, which old versions saved.
pub(super) fn is_constant(architecture: Architecture, name: &str) -> bool {
    let (start, ends): (_, &[&str]) = match architecture {
        Architecture::Gpt2 => ("transformer.h.", &["attn.bias", "attn.masked_bias"]),
        Architecture::Llama => ("model.layers.", &["self_attn.rotary_emb.inv_freq"]),
    };
    let of_block = name.strip_prefix(start);
    let of_block = of_block.and_then(|rest| rest.split_once('.'));
    of_block.is_some_and(|(_, rest)| ends.contains(&rest))
}
