//! Which tensors of transformers make which parameter here: the lines `layer` of an architecture.
//! `#` is the number of a block.

use ddp_nn::models::gpt::GptSpec;

use super::architecture::Architecture;

/// The weight that a tied head shares, and the head's.
pub(super) fn tied(architecture: &Architecture) -> [String; 2] {
    let layers = architecture.all_words("layer");
    ["embedding.tokens", "head"].map(|here| {
        let there = layers.iter().find(|layer| layer[0] == here);
        format!("{}.weight", there.expect("each class has both")[1])
    })
}

/// Whether the parameter `name` has a row for each token.
pub(super) fn has_token_rows(name: &str) -> bool {
    ["embedding.tokens.weight", "head.weight"].contains(&name)
}

/// A tensor of transformers, which is some rows of a parameter here.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TensorPart {
    /// Its name there.
    pub(super) name: String,
    /// The shape of these rows here.
    pub(super) shape: Vec<usize>,
    /// Whether it is transposed there, as weights of GPT-2's `Conv1D`.
    pub(super) is_transposed: bool,
    /// What is added to its values here.
    pub(super) shift: f32,
}

impl TensorPart {
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
pub(super) fn parts(
    architecture: &Architecture,
    spec: &GptSpec,
    name: &str,
    shape: &[usize],
) -> Option<Vec<TensorPart>> {
    let (layer, leaf) = name.rsplit_once('.')?;
    let there = modules(architecture, layer)?;
    let is_in_block = layer.starts_with("blocks.");
    let is_conv1d = is_conv1d(architecture) && is_in_block && shape.len() == 2;
    let is_shifted = layer.ends_with("norm") && !architecture.words("shifted").is_empty();
    let shift = f32::from(u8::from(is_shifted));
    let part = |(there, rows): (&String, usize)| TensorPart {
        name: format!("{there}.{leaf}"),
        shape: [&[rows], &shape[1..]].concat(),
        is_transposed: is_conv1d,
        shift,
    };
    // Three parts are queries, keys and values.
    let rows = match there.len() {
        3 => [spec.heads, spec.kv_heads(), spec.kv_heads()]
            .map(|heads| heads * spec.head_size())
            .to_vec(),
        parts => vec![shape[0] / parts; parts],
    };
    Some(there.iter().zip(rows).map(part).collect())
}

/// Whether weights of linear layers are (I, O).
pub(super) fn is_conv1d(architecture: &Architecture) -> bool {
    architecture.model_type() == "gpt2"
}

/// The layers of transformers that the layer `name` is made of.
pub(super) fn modules(architecture: &Architecture, name: &str) -> Option<Vec<String>> {
    let (layer, block) = without_number(name);
    let layers = architecture.all_words("layer");
    let there = &layers.iter().find(|it| it[0] == layer)?[1..];
    Some(there.iter().map(|name| name.replace('#', block)).collect())
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
pub(super) fn with_prefix(architecture: &Architecture, name: &str) -> String {
    let [embedding, _] = tied(architecture);
    let (prefix, _) = embedding.split_once('.').expect("the name has a prefix");
    if name.starts_with(&format!("{prefix}.")) || name.starts_with("lm_head.") {
        return name.to_string();
    }
    format!("{prefix}.{name}")
}

/// Whether a tensor holds no values of the model, but a mask or angles, which old versions saved.
pub(super) fn is_constant(architecture: &Architecture, name: &str) -> bool {
    architecture.all_words("constant").iter().any(|constant| {
        let (start, end) = constant[0].split_once('#').expect("each block has one");
        let number = name
            .strip_prefix(start)
            .and_then(|rest| rest.strip_suffix(end));
        number.is_some_and(|number| number.parse::<usize>().is_ok())
    })
}
