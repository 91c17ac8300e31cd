//! Applying the plan: wrapped work that fails, flips a bit or takes long, and calls of NCCL.

use std::sync::Arc;

use super::heuristic::HeuristicEffect;
use super::nccl::NcclEffect;
use super::{Class, Effect, Plan, Target, base};
use crate::error::CUresult;
use crate::work::{Failure, Memory, Reads, Touched, Work};

/// How much longer a slow device takes.
const SLOWDOWN: u64 = 100;

/// What a stream queues in place of a piece of work.
pub struct Injected {
    /// The work, or what wraps it.
    pub work: Arc<dyn Work>,
    /// It never ends: nothing after it runs.
    pub hangs: bool,
    /// It fails when it runs.
    pub fails: bool,
}

struct Faulty {
    inner: Arc<dyn Work>,
    fails_with: Option<CUresult>,
    flips_bit: bool,
    slowdown: u64,
}

impl Work for Faulty {
    fn describe(&self) -> String {
        self.inner.describe()
    }

    fn known_ranges(&self) -> Touched {
        self.inner.known_ranges()
    }

    fn reads(&self) -> Reads {
        self.inner.reads()
    }

    fn run(
        &self,
        device: usize,
        memory: &dyn Memory,
        touched: &mut Touched,
    ) -> Result<(), Failure> {
        if let Some(code) = self.fails_with {
            let message = format!("{}: fails by the plan of faults", self.inner.describe());
            return Err(Failure { code, message });
        }
        self.inner.run(device, memory, touched)?;
        if self.flips_bit
            && let Some(range) = touched.writes.first()
        {
            // In the middle, so that a test of the first or last element alone misses it.
            let address = range.start + (range.end - range.start) / 2;
            // SAFETY: the work has just written `range`, which was checked before, and nothing else
            // runs now.
            unsafe { *memory.host_pointer(address) ^= 1 << 4 };
        }
        Ok(())
    }

    fn fills_device(&self) -> bool {
        self.inner.fills_device()
    }

    fn duration_ns(&self) -> u64 {
        self.inner.duration_ns().saturating_mul(self.slowdown)
    }
}

/// The effect of a fault of operations on a piece of NCCL work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Struck {
    Code(CUresult),
    Hang,
    Flip,
}

fn class_of(description: &str) -> Class {
    if description.starts_with("kernel ") {
        Class::Kernel
    } else if description.starts_with("cuMemcpy") {
        Class::Copy
    } else {
        Class::Any
    }
}

impl Plan {
    /// By which factor everything on `device` is slower.
    pub(crate) fn slowdown(&self, device: usize) -> u64 {
        if self.slow.contains(&device) {
            SLOWDOWN
        } else {
            1
        }
    }

    /// Counts work queued on `device`, and returns what to queue instead.
    pub fn inject(&mut self, device: usize, work: Arc<dyn Work>) -> Injected {
        if self.entries.is_empty() && self.slow.is_empty() {
            return Injected {
                work,
                hangs: false,
                fails: false,
            };
        }
        let class = class_of(&work.describe());
        let by_class = if class == Class::Any {
            None
        } else {
            self.strikes(&Target::Operation(class), Some(device))
        };
        let effect = self
            .strikes(&Target::Operation(Class::Any), Some(device))
            .or(by_class);
        let faulty = Faulty {
            inner: work,
            fails_with: if let Some(Effect::Code(code)) = effect {
                Some(code)
            } else {
                None
            },
            flips_bit: effect == Some(Effect::FlipBit),
            slowdown: self.slowdown(device),
        };
        Injected {
            work: Arc::new(faulty),
            hangs: effect == Some(Effect::Hang),
            fails: matches!(effect, Some(Effect::Code(_))),
        }
    }

    /// Counts a call of an NCCL function, and returns the code if it fails.
    pub(crate) fn before_nccl_call(
        &mut self,
        function: &str,
        device: Option<usize>,
    ) -> Option<i32> {
        if self.is_missing(function) {
            // ncclInternalError: a library without the function would not load at all.
            return Some(3);
        }
        match self.strikes(&Target::Function(base(function).to_owned()), device)? {
            Effect::NcclCode(code) => Some(code),
            _ => None,
        }
    }

    /// Counts a search for a matmul of this shape, and returns what the plan makes of it.
    pub(crate) fn strike_heuristic(
        &mut self,
        shape: [u64; 3],
        device: usize,
    ) -> Option<HeuristicEffect> {
        let of_shape = self.shapes.iter().find(|(planned, _)| *planned == shape);
        let of_shape = of_shape.map(|(_, effect)| *effect);
        match self.strikes(&Target::Heuristic, Some(device)) {
            Some(Effect::Heuristic(effect)) => Some(effect),
            _ => of_shape,
        }
    }

    /// Counts a call of an NCCL function whose turn has come on `device`.
    pub(crate) fn strike_nccl(&mut self, function: &str, device: usize) -> Option<NcclEffect> {
        let of_function = self.strikes(&Target::Nccl(Some(function.to_owned())), Some(device));
        match self
            .strikes(&Target::Nccl(None), Some(device))
            .or(of_function)?
        {
            Effect::Nccl(effect) => Some(effect),
            _ => None,
        }
    }

    /// Counts a queued piece of NCCL work as an operation.
    pub(crate) fn strike_queued_nccl(&mut self, device: usize) -> Option<Struck> {
        match self.strikes(&Target::Operation(Class::Any), Some(device))? {
            Effect::Code(code) => Some(Struck::Code(code)),
            Effect::Hang => Some(Struck::Hang),
            Effect::FlipBit => Some(Struck::Flip),
            _ => None,
        }
    }
}
