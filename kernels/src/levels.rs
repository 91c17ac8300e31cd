//! Grey levels as numbers. Here and not beside the data that have them, because tests run this
//! crate optimised.

/// `out = (levels − mean) · scale`, element by element.
pub fn normalize_levels(out: &mut [f32], levels: &[u8], mean: f32, scale: f32) {
    for (out, &level) in out.iter_mut().zip(levels) {
        *out = (f32::from(level) - mean) * scale;
    }
}
