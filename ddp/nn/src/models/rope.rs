//! Rotary positions of a transformer, also of one whose context was stretched after training, with
//! the formulas of Hugging Face's transformers.

use std::f64::consts::TAU;

use ddp_kernels::ops;

use crate::attention::Rope;

/// Ways to stretch a context, and what the numbers after each mean. Those of `longrope` continue
/// with a factor for each frequency up to `original` positions, then as many for longer contexts.
pub const ROPE_SCALINGS: [(&str, &[&str]); 4] = [
    ("linear", &["factor"]),
    (
        "llama3",
        &["factor", "low-frequency", "high-frequency", "original"],
    ),
    (
        "yarn",
        &["factor", "original", "fast", "slow", "scale", "truncate"],
    ),
    ("longrope", &["original", "scale"]),
];

/// The kind and the numbers of `llama3:8:1:4:8192`. None if it is nothing like that.
pub fn rope_scaling(text: &str) -> Option<(&'static str, Vec<f64>)> {
    let mut parts = text.split(':');
    let kind = parts.next()?;
    let (kind, names) = ROPE_SCALINGS
        .into_iter()
        .find(|(known, _)| *known == kind)?;
    let numbers: Option<Vec<f64>> = parts.map(|part| part.parse().ok()).collect();
    let numbers = numbers.filter(|all| all.iter().all(|it| it.is_finite() && *it >= 0.0))?;
    // The factor, or the original context.
    let is_scaling = numbers.first().is_some_and(|first| *first > 0.0);
    let fits = match kind {
        "longrope" => numbers.len() > names.len(),
        _ => numbers.len() == names.len(),
    };
    (fits && is_scaling).then_some((kind, numbers))
}

/// What turns `columns` columns of a head. `scaling` is "none" or what [`rope_scaling`] can read.
/// The error is what was expected of it.
pub(super) fn rope(columns: usize, base: f64, scaling: &str) -> Result<Rope, String> {
    let frequencies = ops::rope_frequencies(columns, base);
    let mut frequencies = frequencies.map_err(|error| error.to_string())?;
    let mut scale = 1.0;
    match rope_scaling(scaling) {
        None if scaling == "none" => {}
        None => {
            let forms = ROPE_SCALINGS.map(|(kind, names)| format!("{kind}:{}", names.join(":")));
            return Err(format!("none, or numbers as in {}", forms.join(", ")));
        }
        Some(("linear", numbers)) => frequencies.iter_mut().for_each(|it| *it /= numbers[0]),
        Some(("llama3", numbers)) => {
            let [factor, low, high, original] = numbers[..] else {
                unreachable!("it was read")
            };
            for it in &mut frequencies {
                let turns = original * *it / TAU;
                let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                *it *= kept + (1.0 - kept) / factor;
            }
        }
        Some(("yarn", numbers)) => {
            let [factor, original, fast, slow, by, truncate] = numbers[..] else {
                unreachable!("it was read")
            };
            // The column whose point turns this often over the original context.
            let column =
                |turns: f64| columns as f64 * (original / (turns * TAU)).ln() / (2.0 * base.ln());
            let (mut first, mut last) = (column(fast), column(slow));
            if truncate != 0.0 {
                (first, last) = (first.floor(), last.ceil());
            }
            (first, last) = (first.max(0.0), last.min(columns as f64 - 1.0));
            let width = if first == last { 0.001 } else { last - first };
            for (it, index) in frequencies.iter_mut().zip(0..) {
                let slowed = ((f64::from(index) - first) / width).clamp(0.0, 1.0);
                *it *= 1.0 - slowed + slowed / factor;
            }
            scale = by;
        }
        Some((_, numbers)) => {
            let factors = &numbers[2..];
            if factors.len() != columns {
                return Err(format!("{columns} factors, got {}", factors.len()));
            }
            for (it, factor) in frequencies.iter_mut().zip(factors) {
                *it /= factor;
            }
            scale = numbers[1];
        }
    }
    Ok(Rope::new(frequencies, scale))
}
