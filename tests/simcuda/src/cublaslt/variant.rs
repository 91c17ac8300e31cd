//! Faults of the algorithms that the heuristic returns for one matmul.

/// One of the heuristic's algorithms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// Without faults.
    Sound,
    /// Its ReLU makes 0 of NaN, in matrices of more than 16 rows.
    HidesNan,
    /// Its matmuls are refused, although the heuristic returns it.
    Refused,
}

/// Reads `sound,nan,refused`.
pub fn parse(text: &str) -> Result<Vec<Variant>, String> {
    let variant = |name: &str| match name {
        "sound" => Ok(Variant::Sound),
        "nan" => Ok(Variant::HidesNan),
        "refused" => Ok(Variant::Refused),
        _ => Err(format!(
            "SIMCUDA_ALGORITHMS={text}: expected as in sound,nan,refused"
        )),
    };
    text.split(',').map(variant).collect()
}
