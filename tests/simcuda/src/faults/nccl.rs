//! The text of NCCL faults.

/// The effect of a fault on an NCCL call whose turn has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NcclEffect {
    /// It never reaches the other ranks.
    Hang,
    /// The same, and this code of NCCL is the asynchronous error of the communicator.
    AsyncError(i32),
    /// It is delayed by this many nanoseconds.
    Slow(u64),
    /// This bit of the result is inverted, or one in the middle.
    Flip(Option<u64>),
    /// The device is lost.
    Lost,
}

/// Splits `rankR:` off an entry.
pub(super) fn rank_prefix(entry: &str) -> Result<(Option<u64>, &str), String> {
    match entry.split_once(':') {
        None => Ok((None, entry)),
        Some((prefix, rest)) => match prefix.trim().strip_prefix("rank").map(str::parse) {
            Some(Ok(rank)) => Ok((Some(rank), rest.trim())),
            _ => Err(format!("`{prefix}` is not `rankR`")),
        },
    }
}

/// A code of NCCL by name or number.
pub(super) fn parse_code(text: &str) -> Result<i32, String> {
    const NAMES: [&str; 6] = [
        "unhandled_cuda_error",
        "system_error",
        "internal_error",
        "invalid_argument",
        "invalid_usage",
        "remote_error",
    ];
    let by_name = NAMES
        .iter()
        .position(|name| *name == text)
        .map(|at| at as i32 + 1);
    let code = by_name.or_else(|| text.parse().ok().filter(|code| (1..=6).contains(code)));
    code.ok_or_else(|| {
        format!(
            "`{text}` is not an NCCL code (1 to 6, or {})",
            NAMES.join(", ")
        )
    })
}

pub(super) fn parse_effect(text: &str) -> Result<NcclEffect, String> {
    let (name, argument) = match text.split_once('(') {
        None => (text, None),
        Some((name, rest)) => (
            name,
            Some(rest.strip_suffix(')').ok_or("expected a `)`")?.trim()),
        ),
    };
    let number = |text: &str| {
        text.parse::<u64>()
            .map_err(|_| format!("`{text}` is not a whole number"))
    };
    Ok(match (name.trim(), argument) {
        ("hang", None) => NcclEffect::Hang,
        ("lost", None) => NcclEffect::Lost,
        ("async_error", None) => NcclEffect::AsyncError(6),
        ("async_error", Some(code)) => NcclEffect::AsyncError(parse_code(code)?),
        ("slow", Some(time_ns)) => NcclEffect::Slow(number(time_ns)?),
        ("flip" | "flip_bit", None) => NcclEffect::Flip(None),
        ("flip" | "flip_bit", Some(bit)) => NcclEffect::Flip(Some(number(bit)?)),
        _ => {
            return Err(format!(
                "`{text}` is none of hang, async_error, async_error(CODE), slow(NS), flip, flip(BIT), lost"
            ));
        }
    })
}
