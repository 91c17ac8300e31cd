//! Whether an algorithm can be used for a kind of product, and which of several is the fastest.

use std::sync::{Arc, PoisonError};

use super::epilogue::{BIAS, HAS_AUX, RELU};
use super::library::Candidate;
use super::plan::{Kind, Operands, Plan};
use super::{Engine, read};
use crate::cuda::cache;
use crate::cuda::fault::driver;
use crate::dtype::bf16;
use crate::error::Result;
use crate::launch::Launcher;
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

/// Memory on which a kind of product is tried.
struct Scratch {
    _memory: Tensor,
    sets: Vec<Operands>,
}

/// The bytes of A, B, D, bias and aux.
fn sizes(kind: &Kind) -> [usize; 5] {
    let [rows, columns, inner] = [kind.rows, kind.columns, kind.inner].map(|it| it as usize);
    let [operand, result] = kind.dtypes.map(DType::bytes);
    let present = |bit: u32| usize::from(kind.epilogue & bit != 0);
    [
        rows * inner * operand,
        inner * columns * operand,
        rows * columns * result,
        rows * result * present(BIAS),
        rows * columns * result * present(HAS_AUX),
    ]
}

impl Launcher {
    /// The kinds of products that this device has plans for.
    pub(crate) fn kinds_of_products(&self) -> Result<Vec<Kind>> {
        let plans = read(&Engine::of(self)?.plans);
        let planned = plans.iter().filter(|(_, plan)| plan.is_some());
        Ok(planned.map(|(kind, _)| kind.clone()).collect())
    }

    /// The version of cuBLASLt.
    pub(crate) fn version_of_products(&self) -> Result<usize> {
        // SAFETY: takes no arguments and needs no context.
        Ok(unsafe { (Engine::of(self)?.functions.cublasLtGetVersion)() })
    }

    /// Uses an algorithm for a kind of product from here on. Returns false and changes nothing if
    /// it cannot be used.
    pub(crate) fn use_algorithm(&self, kind: &Kind, words: [u64; 8]) -> Result<bool> {
        let engine = Engine::of(self)?;
        let Some((mut plan, checked)) = engine.check(kind, words) else {
            return Ok(false);
        };
        plan.algorithm = checked;
        if kind.has_relu() {
            let Ok(scratch) = self.scratch(engine, kind, 1) else {
                return Ok(false);
            };
            if !self.keeps_nan(engine, &plan, kind, &scratch.sets[0])? {
                return Ok(false);
            }
        }
        let mut plans = engine.plans.write().unwrap_or_else(PoisonError::into_inner);
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
        if let Some(words) = known.filter(|&words| engine.check(kind, words).is_some()) {
            return Ok(Some(words));
        }
        let fastest = self.measure(engine, kind)?;
        if let Some(words) = fastest {
            entry.write(words.map(u64::to_le_bytes).as_flattened());
        }
        Ok(fastest)
    }

    fn measure(&self, engine: &Engine, kind: &Kind) -> Result<Option<[u64; 8]>> {
        let Ok(mut plan) = Plan::without_algorithm(engine.functions, kind) else {
            return Ok(None);
        };
        let found = plan.candidates(engine.functions, engine.handle.0, kind, CANDIDATES);
        let bytes: usize = sizes(kind).iter().sum();
        let sets = (SETS_BYTES / bytes.max(1)).clamp(1, SETS_MAX);
        // Without memory for it, the product stays as it is.
        let Ok(scratch) = self.scratch(engine, kind, sets) else {
            return Ok(None);
        };
        let mut timed: Vec<(f32, Candidate)> = Vec::new();
        for candidate in found.unwrap_or_default() {
            plan.algorithm = candidate;
            if self.keeps_nan(engine, &plan, kind, &scratch.sets[0])? {
                timed.push((f32::INFINITY, candidate));
            }
        }
        for round in 0..=ROUNDS {
            for (fastest, candidate) in &mut timed {
                plan.algorithm = *candidate;
                let time = self.time(engine, &plan, &scratch)?;
                // The first round loads code.
                if round > 0 {
                    *fastest = fastest.min(time);
                }
            }
        }
        let times: Vec<f32> = timed.iter().map(|timed| timed.0).collect();
        tracing::debug!("milliseconds of the algorithms for {kind:?}: {times:?}");
        let usable = timed.iter().filter(|timed| timed.0.is_finite());
        let fastest = usable.min_by(|a, b| a.0.total_cmp(&b.0));
        Ok(fastest.map(|(_, candidate)| candidate.algorithm.data))
    }

    /// The milliseconds of a product on each set; infinite if the library refuses it.
    fn time(&self, engine: &Engine, plan: &Plan, scratch: &Scratch) -> Result<f32> {
        let failed = |fault| self.failed(fault);
        let before = self.queue.record(true).map_err(failed)?;
        for operands in &scratch.sets {
            // SAFETY: the context is current, which `record` made it. The memory is for this kind,
            // and only this stream uses it.
            let run = unsafe { plan.run(engine.functions, engine.handle.0, operands) };
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
    pub(super) fn keeps_nan(
        &self,
        engine: &Engine,
        plan: &Plan,
        kind: &Kind,
        operands: &Operands,
    ) -> Result<bool> {
        if !kind.has_relu() {
            return Ok(true);
        }
        let operands = Operands {
            alpha: f32::NAN,
            ..*operands
        };
        self.bind()?;
        // SAFETY: the context is current; the caller vouches for the operands.
        if unsafe { plan.run(engine.functions, engine.handle.0, &operands) }.is_err() {
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
        Ok(match kind.dtypes[1] {
            DType::BF16 => {
                let mut elements = here.as_chunks().0.iter();
                elements.all(|&bytes| bf16::from_le_bytes(bytes).is_nan())
            }
            _ => {
                let mut elements = here.as_chunks().0.iter();
                elements.all(|&bytes| f32::from_le_bytes(bytes).is_nan())
            }
        })
    }
}

impl Engine {
    /// A plan for the kind, and an algorithm that another process chose, if the library can use it.
    fn check(&self, kind: &Kind, words: [u64; 8]) -> Option<(Plan, Candidate)> {
        let plan = Plan::without_algorithm(self.functions, kind).ok()?;
        let checked = plan.check(self.functions, self.handle.0, words)?;
        Some((plan, checked))
    }
}

impl Kind {
    fn has_relu(&self) -> bool {
        self.epilogue & RELU != 0
    }
}

fn words_of(bytes: &[u8]) -> Option<[u64; 8]> {
    let (words, []) = bytes.as_chunks() else {
        return None;
    };
    let words: Vec<u64> = words.iter().copied().map(u64::from_le_bytes).collect();
    words.try_into().ok()
}
