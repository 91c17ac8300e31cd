//! Helpers for tests of streams and graphs: a fresh machine, and work that only says what it
//! touches.

use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{CUevent, CUstream};

use crate::config::Config;
use crate::context::{cuCtxSetCurrent, cuDevicePrimaryCtxRetain};
use crate::device::calls::cuInit;
use crate::error::CUresult;
use crate::event::calls::*;
use crate::machine::{LockedMachine, Machine, Out};
use crate::report::{Finding, FindingKind};
use crate::stream::calls::*;
use crate::stream::{enqueue, resolve};
use crate::work::{Address, Failure, Memory, Touched, Work};

pub(crate) const SUCCESS: CUresult = CUresult::CUDA_SUCCESS;
pub(crate) const NON_BLOCKING: u32 = 1;

/// The entry points' shared machine, created anew and held for one test; such tests run one after
/// another.
pub(crate) struct Bench {
    _turn: MutexGuard<'static, ()>,
}

pub(crate) fn bench(config: Config) -> Bench {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let devices = config.devices;
    *LockedMachine::take() = Machine::new(config);
    assert_eq!(cuInit(0), SUCCESS);
    let bench = Bench { _turn: turn };
    for device in (0..devices).rev() {
        bench.set_device(device);
    }
    bench
}

/// A small machine that keeps its findings.
pub(crate) fn config(seed: u64) -> Config {
    Config {
        devices: 2,
        memory_bytes: 16 << 20,
        seed,
        ..Config::default()
    }
}

/// What a call writes back.
pub(crate) fn got<T>(call: impl FnOnce(Out<'_, T>) -> CUresult) -> T {
    let mut value = MaybeUninit::uninit();
    assert_eq!(call(Some(&mut value)), SUCCESS);
    // SAFETY: entry points that succeed have written what they give back.
    unsafe { value.assume_init() }
}

/// Work that says what it touched, and touches nothing: the addresses need not exist.
pub(crate) struct Touch {
    pub(crate) name: String,
    pub(crate) reads: Vec<Range<Address>>,
    pub(crate) writes: Vec<Range<Address>>,
    /// Whether it knows its ranges before it runs, as copies do.
    pub(crate) knows: bool,
    pub(crate) fails_with: Option<CUresult>,
}

impl Touch {
    pub(crate) fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            reads: Vec::new(),
            writes: Vec::new(),
            knows: false,
            fails_with: None,
        }
    }

    pub(crate) fn writing(mut self, range: Range<Address>) -> Self {
        self.writes.push(range);
        self
    }

    fn touched(&self) -> Touched {
        Touched {
            reads: self.reads.clone(),
            writes: self.writes.clone(),
            ..Touched::default()
        }
    }
}

pub(crate) const TOUCH_NS: u64 = 2_000_000;

impl Work for Touch {
    fn describe(&self) -> String {
        self.name.clone()
    }

    fn known_ranges(&self) -> Touched {
        if self.knows {
            self.touched()
        } else {
            Touched::default()
        }
    }

    fn run(
        &self,
        _device: usize,
        _memory: &dyn Memory,
        touched: &mut Touched,
    ) -> Result<(), Failure> {
        *touched = self.touched();
        match self.fails_with {
            None => Ok(()),
            Some(code) => Err(Failure {
                code,
                message: format!("{} fails", self.name),
            }),
        }
    }

    fn duration_ns(&self) -> u64 {
        TOUCH_NS
    }
}

impl Bench {
    pub(crate) fn set_device(&self, device: usize) {
        let context = got(|context| cuDevicePrimaryCtxRetain(context, device as i32));
        assert_eq!(cuCtxSetCurrent(context), SUCCESS);
    }

    pub(crate) fn stream(&self) -> CUstream {
        got(|stream| cuStreamCreate(stream, NON_BLOCKING))
    }

    pub(crate) fn blocking_stream(&self) -> CUstream {
        got(|stream| cuStreamCreate(stream, 0))
    }

    pub(crate) fn event(&self) -> CUevent {
        got(|event| cuEventCreate(event, 0))
    }

    pub(crate) fn try_give(&self, stream: CUstream, work: Touch) -> Result<(), CUresult> {
        let mut held = LockedMachine::take();
        let stream = resolve(&mut held, stream)?;
        enqueue(&mut held, stream, Arc::new(work))
    }

    pub(crate) fn run(&self, stream: CUstream, name: &str) {
        self.try_give(stream, Touch::new(name))
            .expect("the stream takes it");
    }

    pub(crate) fn run_all(&self, stream: CUstream, names: &[&str]) {
        names.iter().for_each(|name| self.run(stream, name));
    }

    pub(crate) fn write(&self, stream: CUstream, name: &str) {
        self.try_give(stream, Touch::new(name).writing(0x1000..0x2000))
            .expect("the stream takes it");
    }

    /// The second waits for all that is in the first.
    pub(crate) fn order(&self, first: CUstream, second: CUstream) {
        let event = self.event();
        assert_eq!(cuEventRecord(event, first), SUCCESS);
        assert_eq!(cuStreamWaitEvent(second, event, 0), SUCCESS);
    }

    pub(crate) fn ran(&self) -> Vec<String> {
        LockedMachine::take()
            .streams
            .scheduler
            .ran
            .iter()
            .map(|name| name.to_string())
            .collect()
    }

    pub(crate) fn findings(&self) -> Vec<Finding> {
        LockedMachine::take().report.findings.clone()
    }

    pub(crate) fn finding_kinds(&self) -> Vec<FindingKind> {
        self.findings()
            .into_iter()
            .map(|finding| finding.kind)
            .collect()
    }
}
