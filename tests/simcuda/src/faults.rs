//! Planned faults: `SIMCUDA_FAULTS="cuMemAllocFromPoolAsync@3=out_of_memory; kernel@7=hang"`.
//!
//! | form | effect |
//! |---|---|
//! | `FUNCTION@K[/DEVICE]=CODE` | the K-th call (with DEVICE current) only returns CODE |
//! | `stream@K[/DEVICE]=CODE` | the K-th queued operation fails when it runs; the device is lost |
//! | `kernel@K[/DEVICE]=…`, `copy@K[/DEVICE]=…` | the same for kernels, for copies |
//! | `…=hang` (of an operation) | it never ends: waits block, queries return "not ready" |
//! | `ncclFUNCTION@K[/DEVICE]=NCCL` | the K-th call returns this NCCL code and does nothing |
//! | `ncclFUNCTION@K[/DEVICE]=hang` | the K-th call never returns |
//! | `nccl@K[/DEVICE]=hang` | the K-th NCCL call to run hangs until ncclCommAbort |
//! | `nccl/ncclAllGather@K=…` | the same for the K-th of this function |
//! | `nccl@K=async_error`, `async_error(NCCL)` | so, and ncclCommGetAsyncError reports it |
//! | `nccl@K=slow(NS)` | it is delayed by this many nanoseconds, in wall time and simulated time |
//! | `nccl@K=flip`, `flip(BIT)` | one bit of what this rank receives is inverted silently |
//! | `heuristic@K[/DEVICE]=none` | the K-th search for an algorithm succeeds and finds none |
//! | `heuristic@K=not_supported` | it returns CUBLAS_STATUS_NOT_SUPPORTED |
//! | `heuristic@K=workspace(BYTES)` | it finds what needs so much workspace, or refuses |
//! | `heuristic/MxNxK=…` | the same, for every search with this shape |
//! | `nccl@K=lost` | the device is lost when its turn comes |
//! | `rankR:ENTRY` | ENTRY counts only in the process whose launcher says that it is rank R |
//! | `…=flip_bit` (of an operation) | one bit of its output is inverted |
//! | `device/D=slow` | everything on device D takes 100 times as long in simulated time |
//! | `symbol=FUNCTION` | a driver without FUNCTION: every call returns CUDA_ERROR_NOT_SUPPORTED |
//! | `no_peer` | no device can access another's memory |
//!
//! K counts from 1, per process; `nccl` counts each call of a group. NCCL is `unhandled_cuda_error`
//! (1), `system_error` (2), `internal_error` (3), `invalid_argument` (4), `invalid_usage` (5),
//! `remote_error` (6), or a number. FUNCTION may omit its version suffix (`cuMemAlloc` for
//! `cuMemAlloc_v2`). CODE is the name of a driver code, with or without `CUDA_ERROR_`, any number,
//! or `launch_failure` (719) or `device_lost` (46). Codes that CUDA documents as leaving the
//! process unusable stay with the device.

mod heuristic;
mod injected;
mod nccl;
#[cfg(test)]
mod tests;

use std::collections::HashMap;

use crate::error::CUresult;

pub(crate) use self::heuristic::HeuristicEffect;
pub use self::injected::Injected;
pub(crate) use self::injected::Struck;
pub(crate) use self::nccl::NcclEffect;
use crate::error;

/// Stands for a code of a call of NCCL that never returns.
pub(crate) const NEVER_RETURNS: i32 = -1;

/// The effect of a fault on the call or operation that it hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Effect {
    Code(CUresult),
    Hang,
    FlipBit,
    Nccl(NcclEffect),
    /// A call of NCCL returns this code.
    NcclCode(i32),
    Heuristic(HeuristicEffect),
}

/// Which operations an entry counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Class {
    Any,
    Kernel,
    Copy,
}

/// What an entry counts.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Target {
    Function(String),
    Operation(Class),
    /// NCCL calls that reach their turn: of all functions, or of this one.
    Nccl(Option<String>),
    /// Searches of cuBLASLt for an algorithm.
    Heuristic,
}

#[derive(Clone, Debug)]
struct Entry {
    target: Target,
    device: Option<usize>,
    at: u64,
    effect: Effect,
}

/// A plan and its progress.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    entries: Vec<Entry>,
    slow: Vec<usize>,
    /// Matmuls by shape whose searches are hit.
    shapes: Vec<([u64; 3], HeuristicEffect)>,
    missing: Vec<String>,
    no_peer: bool,
    /// How often each target was met, in total and per device.
    met: HashMap<(Target, Option<usize>), u64>,
}

/// A call that the plan makes fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    /// What it returns.
    pub code: CUresult,
    /// Whether the device is lost.
    pub is_sticky: bool,
}

impl Plan {
    /// Reads a plan for a process that is not a rank; an empty text is a plan without faults.
    pub fn parse(text: &str) -> Result<Self, String> {
        Self::parse_for(text, None)
    }

    /// Reads a plan for a process with this rank.
    pub fn parse_for(text: &str, rank: Option<u64>) -> Result<Self, String> {
        let mut plan = Self::default();
        // Entries for other ranks are parsed too, so that all ranks refuse an invalid plan.
        let mut others = Self::default();
        for entry in text
            .split(';')
            .map(str::trim)
            .filter(|entry| !entry.is_empty())
        {
            let is_for = |meant: u64| rank == Some(meant);
            let read = match nccl::rank_prefix(entry) {
                Err(problem) => Err(problem),
                Ok((Some(meant), entry)) if !is_for(meant) => others.parse_entry(entry),
                Ok((_, entry)) => plan.parse_entry(entry),
            };
            read.map_err(|problem| {
                format!("SIMCUDA_FAULTS: `{entry}`: {problem}; an entry is [rankR:]FUNCTION@K[/DEVICE]=KIND, stream@K=…, kernel@K=…, \
                         copy@K=…, nccl@K=…, heuristic@K=…, heuristic/MxNxK=…, device/D=slow, symbol=FUNCTION or no_peer")
            })?;
        }
        Ok(plan)
    }

    fn parse_entry(&mut self, entry: &str) -> Result<(), String> {
        if entry == "no_peer" {
            self.no_peer = true;
            return Ok(());
        }
        let (left, kind) = entry.split_once('=').ok_or("expected a `=`")?;
        let (left, kind) = (left.trim(), kind.trim());
        if left == "symbol" {
            self.missing.push(base(kind).to_owned());
            return Ok(());
        }
        if let Some(device) = left.strip_prefix("device/") {
            if kind != "slow" {
                return Err(format!("a device can be `slow`, not `{kind}`"));
            }
            self.slow.push(parse_number(device)? as usize);
            return Ok(());
        }
        if let Some(shape) = left.strip_prefix("heuristic/") {
            let effect = heuristic::parse_effect(kind)?;
            self.shapes.push((heuristic::parse_shape(shape)?, effect));
            return Ok(());
        }
        let (name, place) = left.split_once('@').ok_or("expected `@K` before the `=`")?;
        let (at, device) = match place.split_once('/') {
            Some((at, device)) => (parse_number(at)?, Some(parse_number(device)? as usize)),
            None => (parse_number(place)?, None),
        };
        if at == 0 {
            return Err("K counts from 1".to_owned());
        }
        let target = match name.trim() {
            "stream" => Target::Operation(Class::Any),
            "kernel" => Target::Operation(Class::Kernel),
            "copy" => Target::Operation(Class::Copy),
            "nccl" => Target::Nccl(None),
            "heuristic" => Target::Heuristic,
            name if name.starts_with("nccl/") => Target::Nccl(Some(name[5..].to_owned())),
            function
                if ["cu", "nvrtc", "nccl"]
                    .iter()
                    .any(|library| function.starts_with(library)) =>
            {
                Target::Function(base(function).to_owned())
            }
            other => {
                return Err(format!(
                    "`{other}` is neither a function (cu…, nvrtc…, nccl…) nor stream, kernel, copy, nccl or heuristic"
                ));
            }
        };
        let effect = parse_effect(kind, &target)?;
        self.entries.push(Entry {
            target,
            device,
            at,
            effect,
        });
        Ok(())
    }

    /// Whether the plan disables peer access.
    pub fn refuses_peers(&self) -> bool {
        self.no_peer
    }

    /// Whether the plan removes this function from the driver.
    pub fn is_missing(&self, function: &str) -> bool {
        self.missing.iter().any(|missing| missing == base(function))
    }

    /// Counts a call, and says whether it fails.
    pub fn before_call(&mut self, function: &str, device: Option<usize>) -> Option<Refused> {
        if self.is_missing(function) {
            return Some(Refused {
                code: CUresult::CUDA_ERROR_NOT_SUPPORTED,
                is_sticky: false,
            });
        }
        if self.entries.is_empty() {
            return None;
        }
        match self.strikes(&Target::Function(base(function).to_owned()), device)? {
            Effect::Code(code) => Some(Refused {
                code,
                is_sticky: is_sticky(code),
            }),
            _ => None,
        }
    }

    /// Counts one more meeting of `target` and returns the effect of the entry that it hits.
    fn strikes(&mut self, target: &Target, device: Option<usize>) -> Option<Effect> {
        if !self.entries.iter().any(|entry| entry.target == *target) {
            return None;
        }
        let mut count = |key: Option<usize>| {
            let met = self.met.entry((target.clone(), key)).or_default();
            *met += 1;
            *met
        };
        let in_all = count(None);
        let on_device = device.map(|device| count(Some(device)));
        self.entries
            .iter()
            .find(|entry| {
                let met = if entry.device.is_none() {
                    Some(in_all)
                } else {
                    on_device
                };
                entry.target == *target
                    && (entry.device.is_none() || entry.device == device)
                    && met == Some(entry.at)
            })
            .map(|entry| entry.effect)
    }
}

/// A function's name without the version suffix of the exported name.
fn base(function: &str) -> &str {
    function.trim_end_matches("_v2").trim_end_matches("_v3")
}

fn parse_number(text: &str) -> Result<u64, String> {
    text.trim()
        .parse()
        .map_err(|_| format!("`{text}` is not a whole number"))
}

fn parse_effect(kind: &str, target: &Target) -> Result<Effect, String> {
    match target {
        Target::Nccl(_) => return nccl::parse_effect(kind).map(Effect::Nccl),
        Target::Heuristic => return heuristic::parse_effect(kind).map(Effect::Heuristic),
        Target::Function(name) if name.starts_with("nccl") => {
            if kind == "hang" {
                return Ok(Effect::NcclCode(NEVER_RETURNS));
            }
            return nccl::parse_code(kind).map(Effect::NcclCode);
        }
        Target::Function(_) | Target::Operation(_) => {}
    }
    let is_operation = matches!(target, Target::Operation(_));
    match kind {
        "hang" | "flip_bit" if !is_operation => Err(format!(
            "`{kind}` befalls operations (stream@K, kernel@K, copy@K), not calls"
        )),
        "hang" => Ok(Effect::Hang),
        "flip_bit" => Ok(Effect::FlipBit),
        "launch_failure" => Ok(Effect::Code(CUresult::CUDA_ERROR_LAUNCH_FAILED)),
        "device_lost" => Ok(Effect::Code(CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE)),
        other => {
            let code = other
                .parse::<u32>()
                .map_or_else(|_| error::from_name(other), |number| Some(CUresult(number)));
            code.filter(|code| *code != CUresult::CUDA_SUCCESS)
                .map(Effect::Code)
                .ok_or_else(|| format!("`{other}` is not a kind of fault"))
        }
    }
}

/// The codes after which "the process must be terminated and relaunched" (documentation), and a
/// lost device.
pub fn is_sticky(code: CUresult) -> bool {
    use CUresult as C;
    matches!(
        code,
        C::CUDA_ERROR_ILLEGAL_ADDRESS
            | C::CUDA_ERROR_LAUNCH_TIMEOUT
            | C::CUDA_ERROR_ASSERT
            | C::CUDA_ERROR_HARDWARE_STACK_ERROR
            | C::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | C::CUDA_ERROR_MISALIGNED_ADDRESS
            | C::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | C::CUDA_ERROR_INVALID_PC
            | C::CUDA_ERROR_LAUNCH_FAILED
            | C::CUDA_ERROR_ECC_UNCORRECTABLE
            | C::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | C::CUDA_ERROR_CONTAINED
            | C::CUDA_ERROR_TENSOR_MEMORY_LEAK
            | C::CUDA_ERROR_DEVICE_UNAVAILABLE
            | C::CUDA_ERROR_EXTERNAL_DEVICE
            | C::CUDA_ERROR_UNKNOWN
    )
}
