//! How the algorithms that the heuristic returns for one matmul differ: in time, and in faults.

/// One of the heuristic's algorithms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variant {
    /// Its place in the heuristic's answer.
    pub number: usize,
    /// Its duration, in percent of the usual one.
    pub percent: u64,
    /// Whether its matmuls are refused, although the heuristic returns it.
    pub is_refused: bool,
    /// Whether its ReLU makes 0 of NaN, in matrices of more than 16 rows.
    pub hides_nan: bool,
}

/// What `SIMCUDA_ALGORITHMS` is if it is not set: the second is the fastest.
pub const DEFAULT: &str = "100,50,200";

/// Reads `100,50:nan,60:refused`: durations in percent, with faults.
pub fn parse(text: &str) -> Result<Vec<Variant>, String> {
    let variant = |(number, entry): (usize, &str)| {
        let (percent, fault) = entry.split_once(':').unwrap_or((entry, ""));
        let percent = percent.trim().parse().ok();
        let is_known = ["", "nan", "refused"].contains(&fault);
        let percent = percent.filter(|percent| is_known && *percent > 0);
        Ok(Variant {
            number,
            percent: percent.ok_or_else(|| {
                format!("SIMCUDA_ALGORITHMS={text}: expected as in 100,50:nan,60:refused")
            })?,
            is_refused: fault == "refused",
            hides_nan: fault == "nan",
        })
    };
    text.split(',').enumerate().map(variant).collect()
}
