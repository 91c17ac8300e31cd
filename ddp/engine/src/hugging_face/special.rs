//! The keys of config.json that are more than a setting: rotary positions, kinds of attention by
//! layer, dropout, and the padding token.

use ddp_nn::models::gpt::{GptSpec, PositionKind, ROPE_SCALINGS, rope_scaling};
use serde_json::{Map, Value, json};

use super::architecture::Architecture;
use super::keys::Keys;
use crate::error::Result;
use crate::setting::DROPOUT;

/// What transformers calls the numbers of `ROPE_SCALINGS`.
const ROPE_KEYS: [&[&str]; 4] = [
    &["factor"],
    &["factor", "low_freq_factor", "high_freq_factor", ORIGINAL],
    &[
        "factor",
        ORIGINAL,
        "beta_fast",
        "beta_slow",
        ATTENTION,
        "truncate",
    ],
    &[ORIGINAL, ATTENTION],
];
const ORIGINAL: &str = "original_max_position_embeddings";
const ATTENTION: &str = "attention_factor";
const LOCAL: &str = "rope_local_base_freq";
const SHARE: &str = "partial_rotary_factor";
/// The factors of longrope for contexts up to the original one, and for longer ones.
const FACTORS: [&str; 2] = ["short_factor", "long_factor"];

/// The default of a key that is special in this architecture; null without one.
fn default_of(architecture: &Architecture, key: &str) -> Option<Value> {
    match architecture.treatment(key) {
        Some(("special", words)) => {
            let number = words
                .first()
                .and_then(|word| serde_json::from_str(word).ok());
            Some(number.unwrap_or(Value::Null))
        }
        _ => None,
    }
}

/// Reads the special keys into `spec`, whose other settings are read. Returns why the user must
/// decide its dropout.
pub(super) fn read(
    architecture: &Architecture,
    keys: &mut Keys,
    spec: &mut GptSpec,
) -> Result<Option<String>> {
    if spec.position == PositionKind::Rope {
        spec.longest_context = spec.context;
        read_rope(architecture, keys, spec)?;
    }
    if let Some(default) = default_of(architecture, "sliding_window") {
        let default = default.as_u64().map(|window| window as usize);
        spec.window = keys.optional("sliding_window", default)?.unwrap_or(0);
    }
    read_layers(architecture, keys, spec)?;
    if let Some(default) = default_of(architecture, "pad_token_id") {
        let padding = keys.optional("pad_token_id", default.as_i64())?;
        spec.untrained_tokens = padding
            .map(|it| token(keys, it, spec.vocab))
            .transpose()?
            .into_iter()
            .collect();
    }
    read_dropout(architecture, keys, spec)
}

/// The padding token. As in PyTorch, a negative number counts from the end.
fn token(keys: &Keys, given: i64, vocabulary: usize) -> Result<usize> {
    let all = vocabulary as i64;
    let token = if given < 0 { given + all } else { given };
    if (0..all).contains(&token) {
        return Ok(token as usize);
    }
    let expected = format!("a token below {all}, as vocab_size says");
    Err(keys.unknown("pad_token_id", &given.into(), &expected))
}

/// The n for which every n-th layer has a property, and no other; 0 if none has it.
fn every(layers: &[bool]) -> Option<usize> {
    let first = layers.iter().position(|has| *has);
    let n = first.map_or(0, |first| first + 1);
    let is_every = |(index, has): (usize, &bool)| *has == (n != 0 && index % n == 0);
    (1..).zip(layers).all(is_every).then_some(n)
}

/// What differs by layer.
fn read_layers(architecture: &Architecture, keys: &mut Keys, spec: &mut GptSpec) -> Result<()> {
    let count = spec.layers;
    if default_of(architecture, "no_rope_layers").is_some()
        && let Some(layers) = keys.optional::<Vec<usize>>("no_rope_layers", None)?
    {
        // 0 means without.
        let without: Vec<bool> = layers.iter().map(|it| *it == 0).collect();
        let skip = every(&without).filter(|_| layers.len() == count);
        spec.rope_skip = skip.ok_or_else(|| {
            let expected = format!("a list of {count} layers, every n-th of which is 0");
            keys.unknown("no_rope_layers", &json!(layers), &expected)
        })?;
    }
    if default_of(architecture, "layer_types").is_some()
        && let Some(layers) = keys.optional::<Vec<String>>("layer_types", None)?
    {
        let full: Vec<bool> = layers.iter().map(|it| it == "full_attention").collect();
        let is_known = |(kind, full): (&String, &bool)| {
            *full || spec.window != 0 && kind == "sliding_attention"
        };
        let is_known = layers.len() == count && layers.iter().zip(&full).all(is_known);
        spec.window_skip = every(&full).filter(|_| is_known).ok_or_else(|| {
            let expected = format!(
                "a list of {count} layers, every n-th of which has full_attention, and the others \
                 sliding_attention, if there is a window"
            );
            keys.unknown("layer_types", &json!(layers), &expected)
        })?;
    }
    if spec.window_skip == 1 {
        (spec.window, spec.window_skip) = (0, 0);
    }
    Ok(())
}

/// Rotary positions. Before version 5 of transformers, `rope_theta` was a key beside
/// `rope_scaling`; since then, `rope_parameters` has both.
fn read_rope(architecture: &Architecture, keys: &mut Keys, spec: &mut GptSpec) -> Result<()> {
    let base = default_of(architecture, "rope_theta").and_then(|default| default.as_f64());
    let base: f64 = keys.take("rope_theta", base.unwrap_or(10_000.0))?;
    let mut share = 1.0;
    if default_of(architecture, SHARE).is_some() {
        share = keys.take(SHARE, share)?;
    }
    let context = spec.context as f64;
    let mut original = context;
    if let Some(default) = default_of(architecture, ORIGINAL) {
        original = keys.take(ORIGINAL, default.as_f64().unwrap_or(context))?;
    }
    let mut key = "rope_scaling";
    let mut rope: Map<String, Value> = keys.take(key, Map::new())?;
    let mut parameters: Map<String, Value> = keys.take("rope_parameters", Map::new())?;
    if let Some(default) = default_of(architecture, LOCAL) {
        spec.window_rope_base = keys.take(LOCAL, default.as_f64().unwrap_or(base))?;
        let all = Value::Object(parameters.clone());
        let mut of = |kind: &str| match parameters.remove(kind) {
            Some(Value::Object(map)) => map,
            _ => Map::new(),
        };
        let (full, mut local) = (of("full_attention"), of("sliding_attention"));
        if let Some(base) = local.remove("rope_theta").and_then(|base| base.as_f64()) {
            spec.window_rope_base = base;
        }
        let is_plain = |(name, value): (&String, &Value)| {
            value.is_null() || name == "rope_type" && value == "default"
        };
        if !local.iter().all(is_plain) || !parameters.is_empty() {
            let expected = "full_attention, and sliding_attention of rope_type default";
            return Err(keys.unknown("rope_parameters", &all, expected));
        }
        parameters = full;
    }
    if rope.is_empty() {
        (key, rope) = ("rope_parameters", parameters);
    }
    let given = Value::Object(rope.clone());
    let kinds = ["rope_type", "type"].map(|name| rope.remove(name));
    let kind = kinds
        .into_iter()
        .flatten()
        .next()
        .unwrap_or("default".into());
    let kind = match kind.as_str() {
        Some("su") => "longrope",
        kind => kind.unwrap_or_default(),
    };
    let known = architecture.words("rope");
    let refused = |name: &str| {
        let kinds = known.join(", ");
        let what = format!(
            "rope_type default or {kinds}, and that type's numbers: {name} is missing or unknown"
        );
        keys.unknown(key, &given, &what)
    };
    let mut number = |name: &str, default: Option<f64>| match rope.remove(name) {
        None | Some(Value::Null) => default.ok_or_else(|| refused(name)),
        Some(Value::Bool(value)) => Ok(f64::from(u8::from(value))),
        Some(value) => value.as_f64().ok_or_else(|| refused(name)),
    };
    spec.rope_base = number("rope_theta", Some(base))?;
    // Other classes leave it out of account.
    if default_of(architecture, SHARE).is_some() {
        share = number(SHARE, Some(share))?;
    }
    spec.rope_share = share;
    if kind != "default" {
        let index = ROPE_SCALINGS.iter().position(|(one, _)| *one == kind);
        let Some(index) = index.filter(|_| known.contains(&kind)) else {
            return Err(refused(kind));
        };
        let original = number(ORIGINAL, Some(original))?;
        let stretched = Some(context / original).filter(|_| ["yarn", "longrope"].contains(&kind));
        let factor = number("factor", stretched)?;
        let scales = [
            number("mscale", Some(0.0))?,
            number("mscale_all_dim", Some(0.0))?,
        ];
        let scale = attention_scale(kind, factor, original, scales);
        let mut numbers = Vec::new();
        for name in ROPE_KEYS[index] {
            numbers.push(match *name {
                ORIGINAL => original,
                "factor" => factor,
                // As there, 0 means the default.
                "beta_fast" | "beta_slow" => match number(name, Some(0.0))? {
                    0.0 if *name == "beta_fast" => 32.0,
                    0.0 => 1.0,
                    given => given,
                },
                "truncate" => number(name, Some(1.0))?,
                ATTENTION => number(name, Some(scale))?,
                _ => number(name, None)?,
            });
        }
        for name in FACTORS.iter().filter(|_| kind == "longrope") {
            let factors = rope.remove(*name).unwrap_or_default();
            let factors: Option<Vec<f64>> = serde_json::from_value(factors).ok();
            numbers.extend(factors.ok_or_else(|| refused(name))?);
        }
        let numbers: Vec<_> = numbers.iter().map(f64::to_string).collect();
        spec.rope_scaling = format!("{kind}:{}", numbers.join(":"));
    }
    match rope.iter().find(|(_, value)| !value.is_null()) {
        None => Ok(()),
        Some((name, _)) => Err(refused(name)),
    }
}

/// What transformers multiplies turned columns by, if it is not told. `scales` are 0 if not given.
fn attention_scale(kind: &str, factor: f64, original: f64, scales: [f64; 2]) -> f64 {
    let by = |scale: f64| 0.1 * scale * factor.ln() + 1.0;
    match (kind, scales) {
        _ if factor <= 1.0 => 1.0,
        ("longrope", _) => (1.0 + factor.ln() / original.ln()).sqrt(),
        (_, [scale, all]) if scale != 0.0 && all != 0.0 => by(scale) / by(all),
        _ => by(1.0),
    }
}

/// The probability of dropping, and why the user must decide it.
fn read_dropout(
    architecture: &Architecture,
    keys: &mut Keys,
    spec: &mut GptSpec,
) -> Result<Option<String>> {
    let mut taken = |key: &str| match default_of(architecture, key) {
        Some(default) => keys.take(key, default.as_f64().unwrap_or(0.0)),
        None => Ok(0.0),
    };
    let [embedding, rest] = [taken("embd_pdrop")?, taken("resid_pdrop")?];
    for key in ["attn_pdrop", "attention_dropout"] {
        let got = taken(key)?;
        if got != 0.0 {
            return Ok(Some(keys.text(&format!(
                "{key} {got}: expected 0, since attention has no dropout here; help: give \
                 {DROPOUT}, which then replaces all of the folder's"
            ))));
        }
    }
    if embedding != rest {
        return Ok(Some(keys.text(&format!(
            "resid_pdrop {rest}: expected {embedding}, the same as embd_pdrop: ddp-train has \
             one {DROPOUT} for both; help: give {DROPOUT} to choose it"
        ))));
    }
    spec.dropout = rest;
    Ok(None)
}

/// Adds the special keys of `spec`.
pub(super) fn write(architecture: &Architecture, spec: &GptSpec, keys: &mut Map<String, Value>) {
    let mut add = |key: &str, value: Value| {
        if default_of(architecture, key).is_some() {
            keys.insert(key.into(), value);
        }
    };
    add("embd_pdrop", spec.dropout.into());
    add("resid_pdrop", spec.dropout.into());
    add("attn_pdrop", 0.0.into());
    add("attention_dropout", 0.0.into());
    add("pad_token_id", json!(spec.untrained_tokens.first()));
    let window = Some(spec.window).filter(|window| *window != 0);
    add("sliding_window", json!(window));
    if default_of(architecture, "sliding_window").is_some() {
        let kinds = ["sliding_attention", "full_attention"];
        let is_full = |index: usize| window.is_none() || index.is_multiple_of(spec.window_skip);
        let kind = |index: usize| kinds[usize::from(is_full(index))];
        add("layer_types", (1..=spec.layers).map(kind).collect());
    }
    add("rope_theta", spec.rope_base.into());
    add(LOCAL, spec.window_rope_base.into());
    add(SHARE, spec.rope_share.into());
    let scaling = rope_scaling(&spec.rope_scaling);
    let scaling = scaling.filter(|(kind, _)| architecture.words("rope").contains(kind));
    let mut rope = Map::new();
    if let Some((kind, numbers)) = &scaling {
        let index = ROPE_SCALINGS.iter().position(|(one, _)| one == kind);
        let names = ROPE_KEYS[index.expect("it was read")];
        rope.insert("rope_type".into(), (*kind).into());
        for (name, number) in names.iter().zip(numbers) {
            let value = match *name {
                ORIGINAL => json!(*number as usize),
                "truncate" => json!(*number != 0.0),
                _ => json!(number),
            };
            rope.insert((*name).into(), value);
        }
        let factors = &numbers[names.len()..];
        for (name, part) in FACTORS
            .iter()
            .zip(factors.chunks(factors.len().div_ceil(2).max(1)))
        {
            rope.insert((*name).into(), json!(part));
        }
    }
    if let Some(original) = rope.get(ORIGINAL) {
        add(ORIGINAL, original.clone());
    }
    add(
        "rope_scaling",
        if rope.is_empty() {
            Value::Null
        } else {
            rope.into()
        },
    );
    if let Some(context) = keys.get_mut("max_position_embeddings") {
        *context = spec.longest_context.into();
    }
}
