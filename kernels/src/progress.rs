//! Where a stream is, told by the device itself: a tiny kernel before and after a piece of work writes its number and its name (a hash) to
//! host memory. It works in graphs as well as eagerly, and reading asks nothing of CUDA: a thread that must not wait for
//! a driver, or for a lock that a stuck thread holds, can say what a stream hangs in.
//!
//! Work is counted in lanes. Each lane's work must be in order, by its stream or by events; numbers begin at 1 and wrap at 2³².
//! A lane keeps the last [`RING`] names, so that two processes that should do the same work in the same order can compare what they did; and
//! [`SPARSE`] names of every [`STRIDE`]th piece, so that they can also where each sees what the other told a while ago.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::cuda::{Gpu, Grid, Launcher, Source};
use crate::error::{Error, Result, Site};
use crate::stream::Stream;
use crate::{DType, Device, Tensor};

static SOURCE: Source = Source::new("progress.cu", include_str!("ops/progress.cu"));

/// How many names of work a lane keeps. A power of two: numbers wrap.
pub const RING: usize = 64;
/// Of which pieces a lane keeps names for longer: every so many. A power of two.
pub const STRIDE: usize = 256;
/// How many of these: enough for a third of a second of 25 000 pieces a second. A power of two.
pub const SPARSE: usize = 32;
/// Words of a name in the ring.
const SLOT_WORDS: usize = 3;
/// Where in a lane's words the last begun and the last ended are told.
const BEGUN_AT: usize = (RING + SPARSE) * SLOT_WORDS;
const ENDED_AT: usize = BEGUN_AT + 1;
/// Words of one lane, in whole cache lines.
const LANE_WORDS: usize = (ENDED_AT + 1).next_multiple_of(16);

/// One piece of work as the device has told of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Told {
    /// Its number in its lane.
    pub number: u32,
    /// Its name.
    pub call: u32,
    /// A hash of its name and those of all before it.
    pub chain: u32,
    /// What the caller said besides.
    pub place: u32,
}

/// Lanes of work on one device.
#[derive(Debug)]
pub struct Progress {
    device: Device,
    /// I64, on the device: two words a lane.
    counts: Tensor,
    /// I64, pinned: `LANE_WORDS` a lane.
    words: Tensor,
    board: Board,
}

/// What the device tells, for any thread to read. It lives for ever, and so does the memory: a few kilobytes.
#[derive(Clone, Copy, Debug)]
pub struct Board {
    start: NonNull<u64>,
    lanes: usize,
}

// SAFETY: the words are read as atomics alone, and their memory is never given back (`Progress::new`).
unsafe impl Send for Board {}
// SAFETY: as above.
unsafe impl Sync for Board {}

impl Progress {
    /// Lanes on `device`, which must be a GPU. Their work may begin on any stream.
    /// It compiles its kernels here, so that no work waits for that.
    #[track_caller]
    pub fn new(device: Device, lanes: usize) -> Result<Progress> {
        let at = std::panic::Location::caller();
        let Device::Cuda(index) = device else {
            return Err(Error::value("progress", "device", "a GPU", device));
        };
        // This device before any other: pinned memory is made by one that is in use, or else by the first.
        let gpu = Gpu::get(index, "progress", at)?;
        let lanes = lanes.max(1);
        let words = Tensor::zeros_pinned(&[lanes * LANE_WORDS], DType::I64)?.named("progress words");
        let counts = Tensor::zeros(&[lanes * 2], DType::I64, device)?.named("progress counts");
        let start = {
            let entered = words.enter("words", true, "progress", at)?;
            // Graphs and work under way write here for as long as anybody launches them, and readers read as long as they like.
            entered.leave_never();
            NonNull::new(std::ptr::with_exposed_provenance_mut::<u64>(entered.address() as usize))
                .expect("memory is not at 0")
        };
        let queue = gpu.default_queue().map_err(|fault| fault.of("progress", device, at))?;
        let launcher = Launcher { gpu, queue, op: "progress", at };
        drop(launcher.kernel(&SOURCE, "progress_begin")?);
        drop(launcher.kernel(&SOURCE, "progress_end")?);
        Ok(Progress { device, counts, words, board: Board { start, lanes } })
    }

    /// What the device tells.
    pub fn board(&self) -> Board {
        self.board
    }

    /// Work of `lane` that is given to `stream` from now on, up to `end`, is one piece, named `call`. `place` is told with it.
    pub fn begin(&self, lane: usize, call: u32, place: u32, stream: &Stream, at: Site) -> Result<()> {
        self.mark(lane, stream, at, |launcher, lane_counts, lane_words| {
            let kernel = launcher.kernel(&SOURCE, "progress_begin")?;
            let kernel = kernel.address(lane_counts).address(lane_words).count(RING).count(STRIDE).count(SPARSE);
            kernel.u32(call).u32(place).launch(Grid::blocks(1, 1))
        })
    }

    /// The piece that began last ends.
    pub fn end(&self, lane: usize, stream: &Stream, at: Site) -> Result<()> {
        self.mark(lane, stream, at, |launcher, lane_counts, lane_words| {
            let kernel = launcher.kernel(&SOURCE, "progress_end")?;
            kernel.address(lane_counts).address(lane_words + 8 * ENDED_AT as u64).launch(Grid::blocks(1, 1))
        })
    }

    fn mark(
        &self,
        lane: usize,
        stream: &Stream,
        at: Site,
        launch: impl FnOnce(&Launcher, u64, u64) -> Result<()>,
    ) -> Result<()> {
        assert!(lane < self.board.lanes, "lane {lane} of {}", self.board.lanes);
        let Some(queue) = stream.queue().filter(|_| stream.device() == self.device) else {
            let (expected, got) = (format!("one on {}", self.device), format!("one on {}", stream.device()));
            return Err(Error::Value { op: "progress", what: "stream".into(), expected, got, at });
        };
        let counts = self.counts.slice(2 * lane..2 * lane + 2)?;
        let counts = counts.enter_for("counts", true, queue, "progress", at)?;
        // The graph keeps them; they are never anybody else's in any case.
        self.words.join_capture(queue);
        let words = self.board.start.addr().get() + 8 * lane * LANE_WORDS;
        let launcher = Launcher { gpu: queue.gpu, queue: queue.clone(), op: "progress", at };
        launch(&launcher, counts.address(), words as u64)
    }
}

impl Board {
    /// How many lanes.
    pub fn lanes(&self) -> usize {
        self.lanes
    }

    fn word(&self, lane: usize, at: usize) -> &AtomicU64 {
        assert!(lane < self.lanes && at < LANE_WORDS);
        // SAFETY: within the words, which `Progress::new` made and never gives back; aligned, since blocks are. The host only reads
        // them, and the device writes whole words.
        unsafe { AtomicU64::from_ptr(self.start.as_ptr().add(lane * LANE_WORDS + at)) }
    }

    /// Number and name of the last piece of `lane` that has begun; number 0 for none yet.
    pub fn begun(&self, lane: usize) -> (u32, u32) {
        let word = self.word(lane, BEGUN_AT).load(Ordering::Acquire);
        ((word >> 32) as u32, word as u32)
    }

    /// The number of the last piece of `lane` that has ended.
    pub fn ended(&self, lane: usize) -> u32 {
        self.word(lane, ENDED_AT).load(Ordering::Acquire) as u32
    }

    /// The last pieces of `lane` that have begun, and some from before, in no order; those that are being written just now are left out. Some
    /// may come twice.
    pub fn ring(&self, lane: usize) -> impl Iterator<Item = Told> {
        (0..RING + SPARSE).filter_map(move |slot| {
            let read = || [0, 1, 2].map(|word| self.word(lane, SLOT_WORDS * slot + word).load(Ordering::Relaxed));
            let words = read();
            fence(Ordering::Acquire);
            let number = (words[0] >> 32) as u32;
            let whole = number != 0 && words.iter().all(|word| (word >> 32) as u32 == number);
            whole.then(|| Told { number, call: words[0] as u32, chain: words[1] as u32, place: words[2] as u32 })
        })
    }
}
