//! Whether an algorithm can be used for a kind of matmul, and which of several is the fastest.

use std::sync::Arc;

use super::Engine;
use super::library::Candidate;
use super::library::{BIAS, GELU, GELU_GRADIENT, HAS_AUX, NOTHING, RELU};
use super::plan::{Kind, Operands, Plan};
use crate::cuda::cache;
use crate::cuda::calls::driver;
use crate::dtype::bf16;
use crate::error::Result;
use crate::launch::Launcher;
use crate::panics::{read, write};
use crate::{DType, Tensor};

/// How many algorithms of the heuristic are tried.
const CANDIDATES: usize = 8;
/// How often each is timed; its fastest time counts.
const ROUNDS: usize = 3;
/// A timing goes through several sets of operands, so that not all are in the GPU's cache.
const SETS_MAX: usize = 8;
const SETS_BYTES: usize = 256 << 20;
/// Bytes that are read back from either end of an output.
const PIECE_BYTES: usize = 4096;
/// Each byte of the operands: as f32 and as bf16 a small finite number.
const FILL: u8 = 0x3c;

/// In place of an algorithm: the epilogue is left to a pass of ours.
const UNFUSED: [u64; 8] = [u64::MAX; 8];
/// The share of the memory's bandwidth that such a pass reaches.
const REACHED: f64 = 0.9;

/// Memory on which a kind of matmul is tried.
struct Scratch {
    _memory: Tensor,
    sets: Vec<Operands>,
}

/// The bytes of A, B, D, bias and aux.
fn sizes(kind: &Kind) -> [usize; 5] {
    let [rows, columns, inner] = [kind.rows, kind.columns, kind.inner].map(|it| it as usize);
    let [operand, result] = kind.dtypes.map(DType::bytes);
    let present = |bit: u32| usize::from(kind.epilogue & bit != 0);
    let batch = kind.batch as usize;
    [
        batch * rows * inner * operand,
        batch * inner * columns * operand,
        batch * rows * columns * result,
        rows * result * present(BIAS),
        rows * columns * result * present(HAS_AUX),
    ]
}

impl Launcher {
    /// The kinds of matmuls that this device has plans for.
    pub(crate) fn kinds_of_matmuls(&self) -> Result<Vec<Kind>> {
        let plans = read(&Engine::of(self)?.plans);
        let is_tried = |kind: &Kind| kind.has_gelu() && uses_epilogues();
        let planned = plans
            .iter()
            .filter(|(kind, plan)| plan.is_some() || is_tried(kind));
        Ok(planned.map(|(kind, _)| kind.clone()).collect())
    }

    /// The version of cuBLASLt.
    pub(crate) fn cublaslt_version(&self) -> Result<usize> {
        // SAFETY: takes no arguments and needs no context.
        Ok(unsafe { (Engine::of(self)?.blas.functions.cublasLtGetVersion)() })
    }

    /// Uses an algorithm for a kind of matmul from here on. Returns false and changes nothing if
    /// it cannot be used.
    pub(crate) fn use_algorithm(&self, kind: &Kind, words: [u64; 8]) -> Result<bool> {
        let engine = Engine::of(self)?;
        if words == UNFUSED {
            let (plain, _) = kind.unfused();
            // Made now, because a capture cannot.
            let made = Plan::make(&engine.blas, &plain, 0);
            let mut plans = write(&engine.plans);
            plans
                .entry(plain)
                .or_insert(made.ok().flatten().map(Arc::new));
            plans.insert(kind.clone(), None);
            return Ok(true);
        }
        let Some((mut plan, checked)) = engine.check(kind, words) else {
            return Ok(false);
        };
        plan.algorithm = checked;
        if kind.has_relu() {
            let Ok(scratch) = self.scratch(engine, kind, 1) else {
                return Ok(false);
            };
            if !self.keeps_nan(&plan, kind, &scratch.sets[0])? {
                return Ok(false);
            }
        }
        let mut plans = write(&engine.plans);
        plans.insert(kind.clone(), Some(Arc::new(plan)));
        Ok(true)
    }

    /// The fastest of the heuristic's first algorithms: found on disk, or measured now and kept
    /// there, under the name `measured_on` of device and library. None if none can be used.
    pub(crate) fn fastest(&self, kind: &Kind, measured_on: &str) -> Result<Option<[u64; 8]>> {
        let engine = Engine::of(self)?;
        let key = cache::Key::new().part(measured_on.as_bytes());
        let key = key.part(format!("{kind:?}").as_bytes()).finish();
        let entry = cache::Entry::of_process("algorithm", key);
        let known = entry.read().and_then(|bytes| words_of(&bytes));
        let is_usable = |words| words == UNFUSED || engine.check(kind, words).is_some();
        if let Some(words) = known.filter(|&words| is_usable(words)) {
            return Ok(Some(words));
        }
        let mut fastest = self.measure(engine, kind)?;
        if let Some((fused_ms, _)) = fastest.filter(|_| kind.has_gelu()) {
            let (plain, moved_bytes) = kind.unfused();
            let pass_ms = moved_bytes as f64 / (REACHED * self.gpu.bandwidth) * 1e3;
            let apart_ms = self
                .measure(engine, &plain)?
                .map(|(ms, _)| f64::from(ms) + pass_ms);
            tracing::debug!(
                "milliseconds of {kind:?}: {fused_ms}, with a pass of ours {apart_ms:?}"
            );
            fastest = match apart_ms {
                Some(apart_ms) if apart_ms < fused_ms.into() => Some((0.0, UNFUSED)),
                _ => fastest,
            };
        }
        let fastest = fastest.map(|(_, words)| words);
        if let Some(words) = fastest {
            entry.write(words.map(u64::to_le_bytes).as_flattened());
        }
        Ok(fastest)
    }

    /// The fastest algorithm and its milliseconds.
    fn measure(&self, engine: &'static Engine, kind: &Kind) -> Result<Option<(f32, [u64; 8])>> {
        let Ok(mut plan) = Plan::without_algorithm(&engine.blas, kind) else {
            return Ok(None);
        };
        let found = plan.candidates(kind, CANDIDATES);
        let bytes: usize = sizes(kind).iter().sum();
        let sets = (SETS_BYTES / bytes.max(1)).clamp(1, SETS_MAX);
        // Without memory for it, the matmul stays as it is.
        let Ok(scratch) = self.scratch(engine, kind, sets) else {
            return Ok(None);
        };
        let mut timed: Vec<(f32, Candidate)> = Vec::new();
        for candidate in found.unwrap_or_default() {
            plan.algorithm = candidate;
            if self.keeps_nan(&plan, kind, &scratch.sets[0])? {
                timed.push((f32::INFINITY, candidate));
            }
        }
        for round in 0..=ROUNDS {
            for (fastest, candidate) in &mut timed {
                plan.algorithm = *candidate;
                let time = self.time(&plan, &scratch)?;
                // The first round loads code.
                if round > 0 {
                    *fastest = fastest.min(time);
                }
            }
        }
        let of_one = 1.0 / scratch.sets.len() as f32;
        let times: Vec<f32> = timed.iter().map(|timed| timed.0).collect();
        tracing::debug!("milliseconds of the algorithms for {kind:?}: {times:?}");
        let usable = timed.iter().filter(|timed| timed.0.is_finite());
        let fastest = usable.min_by(|a, b| a.0.total_cmp(&b.0));
        Ok(fastest.map(|(ms, candidate)| (ms * of_one, candidate.algorithm.data)))
    }

    /// The milliseconds of a matmul on each set; infinite if the library refuses it.
    fn time(&self, plan: &Plan, scratch: &Scratch) -> Result<f32> {
        let failed = |fault| self.failed(fault);
        let before = self.queue.record(true).map_err(failed)?;
        for operands in &scratch.sets {
            // SAFETY: the context is current, which `record` made it. The memory is for this kind,
            // and only this stream uses it.
            let run = unsafe { plan.run(operands) };
            if run.is_err() {
                return Ok(f32::INFINITY);
            }
        }
        let after = self.queue.record(true).map_err(failed)?;
        after.synchronize().map_err(failed)?;
        after.milliseconds_since(&before).map_err(failed)
    }

    fn scratch(&self, engine: &Engine, kind: &Kind, count: usize) -> Result<Scratch> {
        self.not_captured("algorithms are chosen before")?;
        let sizes = sizes(kind).map(|bytes| bytes.next_multiple_of(256));
        let bytes: usize = sizes.iter().sum();
        let (memory, start) = self.memory("operands for a trial", count * bytes, Some(FILL))?;
        let workspace = self.workspace(engine)?;
        let set = |index: usize| {
            let mut next = start + (index * bytes) as u64;
            let [a, b, d, bias, aux] = sizes.map(|bytes| {
                next += bytes as u64;
                next - bytes as u64
            });
            Operands {
                a,
                b,
                c: d,
                d,
                alpha: 1.0,
                beta: if kind.beta_is_zero { 0.0 } else { 1.0 },
                bias: (kind.epilogue & BIAS != 0).then_some(bias),
                aux: (kind.epilogue & HAS_AUX != 0).then_some(aux),
                workspace,
                stream: self.queue.raw().cast(),
            }
        };
        Ok(Scratch {
            sets: (0..count).map(set).collect(),
            _memory: memory,
        })
    }

    /// Whether relu of NaN is NaN with this plan; true for a kind without relu. NVIDIA does not
    /// document it, and a 0 would hide a diverged training. So each plan is tried before its first
    /// use, on operands whose D may be overwritten. Waits for the stream.
    pub(super) fn keeps_nan(&self, plan: &Plan, kind: &Kind, operands: &Operands) -> Result<bool> {
        if !kind.has_relu() {
            return Ok(true);
        }
        let operands = Operands {
            alpha: f32::NAN,
            ..*operands
        };
        self.bind()?;
        // SAFETY: the context is current; the caller vouches for the operands.
        if unsafe { plan.run(&operands) }.is_err() {
            return Ok(false);
        }
        let bytes = sizes(kind)[2];
        let piece = bytes.min(PIECE_BYTES);
        let last = operands.d + (bytes - piece) as u64;
        let keeps = self.is_nan(operands.d, piece, kind)? && self.is_nan(last, piece, kind)?;
        if !keeps {
            tracing::debug!("relu of NaN is not NaN in an algorithm for {kind:?}: it is not used");
        }
        Ok(keeps)
    }

    /// Whether all elements of a piece of D are NaN.
    fn is_nan(&self, address: u64, bytes: usize, kind: &Kind) -> Result<bool> {
        let mut here = vec![0u8; bytes];
        let (to, stream) = (here.as_mut_ptr().cast(), self.queue.raw());
        // SAFETY: the caller has bound the context and given D to this stream. The host's memory
        // outlives the copy: after an error it is leaked.
        let read = unsafe { driver!(cuMemcpyDtoHAsync_v2(to, address, bytes, stream)) }
            .and_then(|()| self.queue.synchronize());
        if let Err(fault) = read {
            // The device may still write to it.
            here.leak();
            return Err(self.failed(fault));
        }
        let bf16_is_nan = |&bytes: &[u8; 2]| bf16::from_le_bytes(bytes).is_nan();
        let f32_is_nan = |&bytes: &[u8; 4]| f32::from_le_bytes(bytes).is_nan();
        Ok(match kind.dtypes[1] {
            DType::BF16 => here.as_chunks().0.iter().all(bf16_is_nan),
            _ => here.as_chunks().0.iter().all(f32_is_nan),
        })
    }
}

impl Engine {
    /// A plan for the kind, and an algorithm that another process chose, if the library can use it.
    fn check(&'static self, kind: &Kind, words: [u64; 8]) -> Option<(Plan, Candidate)> {
        let plan = Plan::without_algorithm(&self.blas, kind).ok()?;
        let checked = plan.check(words)?;
        Some((plan, checked))
    }
}

impl Kind {
    fn has_relu(&self) -> bool {
        self.epilogue & RELU != 0
    }

    fn has_gelu(&self) -> bool {
        self.epilogue & (GELU | GELU_GRADIENT) != 0
    }

    /// The same without its function, and the bytes that a pass of ours moves instead: it reads and
    /// writes D, and reads the derivative's operand.
    fn unfused(&self) -> (Kind, usize) {
        let operands = 2 + usize::from(self.epilogue & GELU_GRADIENT != 0);
        let mut plain = self.clone();
        plain.epilogue = match self.epilogue & BIAS {
            0 => NOTHING,
            bias => bias,
        };
        (plain, operands * sizes(self)[2])
    }
}

/// Whether epilogues are used at all: `DDP_EPILOGUES=off` leaves them to passes of ours.
fn uses_epilogues() -> bool {
    std::env::var_os("DDP_EPILOGUES").is_none_or(|value| value != "off")
}

impl Launcher {
    /// Whether gelu is an epilogue unless timing decides. It was a slower kernel before CUDA 12.5,
    /// and is known to be fast on Hopper alone.
    pub(crate) fn fuses_gelu(&self) -> Result<bool> {
        let is_fast = self.gpu.capability == (9, 0) && self.cublaslt_version()? >= 120_500;
        Ok(is_fast && uses_epilogues())
    }

    /// Whether this kind's epilogue is left to a pass of ours.
    pub(super) fn leaves(&self, kind: &Kind) -> Result<bool> {
        let is_slow = kind.has_gelu() && !self.fuses_gelu()?;
        Ok(is_slow || (kind.epilogue != NOTHING && !uses_epilogues()))
    }
}

fn words_of(bytes: &[u8]) -> Option<[u64; 8]> {
    let (words, []) = bytes.as_chunks() else {
        return None;
    };
    let words: Vec<u64> = words.iter().copied().map(u64::from_le_bytes).collect();
    words.try_into().ok()
}
