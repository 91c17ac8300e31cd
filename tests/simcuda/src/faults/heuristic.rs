//! Faults of cuBLASLt's search for an algorithm.

/// What a search answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeuristicEffect {
    /// Success, with no algorithm.
    None,
    /// CUBLAS_STATUS_NOT_SUPPORTED.
    Refused,
    /// All algorithms need this many bytes of workspace.
    Workspace(u64),
}

pub(super) fn parse_effect(text: &str) -> Result<HeuristicEffect, String> {
    match text {
        "none" => Ok(HeuristicEffect::None),
        "not_supported" => Ok(HeuristicEffect::Refused),
        _ => {
            let bytes = text
                .strip_prefix("workspace(")
                .and_then(|rest| rest.strip_suffix(')'));
            let problem =
                || format!("expected none, not_supported or workspace(BYTES), got `{text}`");
            let bytes = bytes.and_then(|bytes| bytes.trim().parse().ok());
            bytes.map(HeuristicEffect::Workspace).ok_or_else(problem)
        }
    }
}

/// The shape of a matmul as reports write it: `64x32x16` is m, n, k.
pub(super) fn parse_shape(text: &str) -> Result<[u64; 3], String> {
    let lengths: Option<Vec<u64>> = text
        .split('x')
        .map(|size| size.trim().parse().ok())
        .collect();
    lengths
        .and_then(|lengths| lengths.try_into().ok())
        .ok_or_else(|| format!("`{text}` is not a shape like 64x32x16"))
}
