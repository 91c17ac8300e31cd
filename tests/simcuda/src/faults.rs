//! What is to go wrong, from a plan: `SIMCUDA_FAULTS="cuMemAllocFromPoolAsync@3=out_of_memory; kernel@7=hang"`.
//!
//! | form | what it does |
//! |---|---|
//! | `FUNCTION@K[/DEVICE]=CODE` | the K-th call of FUNCTION (of those with DEVICE current) returns CODE and does nothing |
//! | `stream@K[/DEVICE]=CODE` | the K-th operation that is queued fails with CODE when it runs; the device is lost |
//! | `kernel@K[/DEVICE]=…`, `copy@K[/DEVICE]=…` | the same of kernels, of copies |
//! | `…=hang` (of an operation) | it never ends: waits for it block, queries say that it is not ready |
//! | `…=flip_bit` (of an operation) | one bit of what it wrote is inverted |
//! | `device/D=slow` | everything on device D takes 100 times as long by the simulated clock |
//! | `symbol=FUNCTION` | a driver without FUNCTION: every call returns CUDA_ERROR_NOT_SUPPORTED |
//! | `no_peer` | no device can access another's memory |
//!
//! K counts from 1. FUNCTION may leave out the version that the exported name ends in (`cuMemAlloc` for `cuMemAlloc_v2`). CODE is the name of a driver's code, with or without `CUDA_ERROR_`, its number, or `launch_failure` (719) or
//! `device_lost` (46); of these, the codes that CUDA documents as leaving the process unusable stay with the device.

mod injected;
#[cfg(test)]
mod tests;

use std::collections::HashMap;

use cudarc::driver::sys::CUresult;

pub use self::injected::Injected;
use crate::error;

/// What a fault makes of the call or operation that it strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Effect {
    Code(CUresult),
    Hang,
    FlipBit,
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
}

#[derive(Clone, Debug)]
struct Entry {
    target: Target,
    device: Option<usize>,
    at: u64,
    effect: Effect,
}

/// A plan, and how far it has come.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    entries: Vec<Entry>,
    slow: Vec<usize>,
    missing: Vec<String>,
    no_peer: bool,
    /// How often each target of an entry was met, in all and on each device.
    met: HashMap<(Target, Option<usize>), u64>,
}

/// A call that the plan refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    /// What it returns.
    pub code: CUresult,
    /// Whether the device is lost by it.
    pub is_sticky: bool,
}

impl Plan {
    /// Reads a plan; an empty text is one in which nothing goes wrong.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut plan = Self::default();
        for entry in text.split(';').map(str::trim).filter(|entry| !entry.is_empty()) {
            plan.parse_entry(entry).map_err(|problem| {
                format!("SIMCUDA_FAULTS: `{entry}`: {problem}; an entry is FUNCTION@K[/DEVICE]=KIND, stream@K=…, kernel@K=…, \
                         copy@K=…, device/D=slow, symbol=FUNCTION or no_peer")
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
            function if function.starts_with("cu") || function.starts_with("nvrtc") => {
                Target::Function(base(function).to_owned())
            }
            other => return Err(format!("`{other}` is neither a function (cu…, nvrtc…) nor stream, kernel or copy")),
        };
        let effect = parse_effect(kind, &target)?;
        self.entries.push(Entry { target, device, at, effect });
        Ok(())
    }

    /// Whether the plan takes peer access away.
    pub fn refuses_peers(&self) -> bool {
        self.no_peer
    }

    /// Whether the plan has a driver without this function.
    pub fn is_missing(&self, function: &str) -> bool {
        self.missing.iter().any(|missing| missing == base(function))
    }

    /// Counts a call, and says whether it is refused.
    pub fn before_call(&mut self, function: &str, device: Option<usize>) -> Option<Refused> {
        if self.is_missing(function) {
            return Some(Refused { code: CUresult::CUDA_ERROR_NOT_SUPPORTED, is_sticky: false });
        }
        if self.entries.is_empty() {
            return None;
        }
        match self.strikes(&Target::Function(base(function).to_owned()), device)? {
            Effect::Code(code) => Some(Refused { code, is_sticky: is_sticky(code) }),
            Effect::Hang | Effect::FlipBit => None,
        }
    }

    /// Counts one more meeting of `target` and gives the effect of the entry that it strikes.
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
                let met = if entry.device.is_none() { Some(in_all) } else { on_device };
                entry.target == *target && (entry.device.is_none() || entry.device == device) && met == Some(entry.at)
            })
            .map(|entry| entry.effect)
    }
}

/// A function's name without the version that the exported name may end in: programs are written without it.
fn base(function: &str) -> &str {
    function.trim_end_matches("_v2").trim_end_matches("_v3")
}

fn parse_number(text: &str) -> Result<u64, String> {
    text.trim().parse().map_err(|_| format!("`{text}` is not a whole number"))
}

fn parse_effect(kind: &str, target: &Target) -> Result<Effect, String> {
    let is_operation = matches!(target, Target::Operation(_));
    match kind {
        "hang" | "flip_bit" if !is_operation => {
            Err(format!("`{kind}` befalls operations (stream@K, kernel@K, copy@K), not calls"))
        }
        "hang" => Ok(Effect::Hang),
        "flip_bit" => Ok(Effect::FlipBit),
        "launch_failure" => Ok(Effect::Code(CUresult::CUDA_ERROR_LAUNCH_FAILED)),
        "device_lost" => Ok(Effect::Code(CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE)),
        other => {
            let code = other.parse::<u32>().map_or_else(|_| error::from_name(other), error::from_number);
            code.filter(|code| *code != CUresult::CUDA_SUCCESS)
                .map(Effect::Code)
                .ok_or_else(|| format!("`{other}` is no kind of fault"))
        }
    }
}

/// The codes after which "the process must be terminated and relaunched", by their documentation; a device that is gone, too.
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
            | C::CUDA_ERROR_DEVICE_UNAVAILABLE
            | C::CUDA_ERROR_EXTERNAL_DEVICE
            | C::CUDA_ERROR_UNKNOWN
    )
}
