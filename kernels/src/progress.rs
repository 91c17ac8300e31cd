//! How far a stream is, reported by the device: a tiny kernel before each piece of work, and after
//! it if no other follows soon, writes its number and name (a hash) to host memory. It works
//! eagerly and in graphs. Reading needs no CUDA call, so a thread that must not wait for a driver
//! or a lock can say where a stream hangs.
//!
//! Work is counted in lanes. A lane's work must be ordered, by a stream or by events. Numbers
//! begin at 1 and wrap at 2³². A lane keeps the last [`RING`] names, so that two processes that
//! should do the same work can compare what they did, and [`SPARSE`] names of every [`STRIDE`]th
//! piece, to compare further back.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::cuda::Gpu;
use crate::cuda::queue::Queue;
use crate::error::{Caller, Error, Result, Site};
use crate::launch::{CuFile, GpuLaunch, Grid, args};
use crate::stream::Stream;
use crate::{DType, Device, Tensor};

pub(crate) static SOURCE: CuFile = CuFile::new("progress.cu", include_str!("ops/progress.cu"));

/// How many names a lane keeps. A power of two, because numbers wrap.
pub const RING: usize = 64;
/// The step between the names that are kept for longer. A power of two.
pub const STRIDE: usize = 256;
/// How many of those are kept: a third of a second at 25 000 pieces per second. A power of two.
pub const SPARSE: usize = 32;
/// Words per name in the ring.
const SLOT_WORDS: usize = 3;
/// Where a lane's words hold the last number begun and the last ended.
const BEGUN_AT: usize = (RING + SPARSE) * SLOT_WORDS;
const ENDED_AT: usize = BEGUN_AT + 1;
/// The stop word comes before the lanes and shares no cache line with them.
const LANES_AT: usize = 16;
/// Words per lane, in whole cache lines.
const LANE_WORDS: usize = (ENDED_AT + 1).next_multiple_of(16);

/// One piece of work, as the device reported it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReportedWork {
    /// Its number in the lane.
    pub number: u32,
    /// Its name.
    pub call: u32,
    /// A hash of its name and all names before it.
    pub chain: u32,
    /// What the caller passed with it.
    pub place: u32,
}

impl ReportedWork {
    /// What the words of a slot say; None for an empty one, or one that is being written.
    pub fn of_words(words: [u64; 3]) -> Option<ReportedWork> {
        let number = (words[0] >> 32) as u32;
        let whole = number != 0 && words.iter().all(|word| (word >> 32) as u32 == number);
        let [call, chain, place] = words.map(|word| word as u32);
        whole.then_some(ReportedWork {
            number,
            call,
            chain,
            place,
        })
    }
}

/// Lanes of work on one device.
#[derive(Debug)]
pub struct DeviceProgress {
    device: Device,
    /// I64, on the device: two words a lane.
    counts: Tensor,
    /// I64, pinned: the stop word, then `LANE_WORDS` a lane.
    words: Tensor,
    board: ProgressBoard,
}

/// What the device reports, readable by any thread. It is leaked, with its few kilobytes of memory.
#[derive(Clone, Copy, Debug)]
pub struct ProgressBoard {
    start: NonNull<u64>,
    lanes: usize,
}

// SAFETY: the words are only read as atomics, and their memory is never freed
// (`DeviceProgress::new`).
unsafe impl Send for ProgressBoard {}
// SAFETY: as above.
unsafe impl Sync for ProgressBoard {}

/// A word of host memory that steps on a device read before they change anything
/// (`ops::decide_step`). It is leaked.
#[derive(Clone, Copy, Debug)]
pub struct StopWord(NonNull<u64>);

// SAFETY: the host only writes the word, as an atomic, and its memory is never freed.
unsafe impl Send for StopWord {}
// SAFETY: as above.
unsafe impl Sync for StopWord {}

impl StopWord {
    /// From now on no step changes anything.
    pub fn set(self) {
        // SAFETY: the first of the words, which are never freed; the device only reads it.
        unsafe { AtomicU64::from_ptr(self.0.as_ptr()) }.store(1, Ordering::SeqCst);
    }

    /// Where a kernel reads it.
    pub(crate) fn address(self) -> u64 {
        self.0.addr().get() as u64
    }
}

impl DeviceProgress {
    /// Lanes on `device`, which must be a GPU; their work may be on any stream. Compiles the
    /// kernels, so that no work waits for that.
    #[track_caller]
    pub fn new(device: Device, lanes: usize) -> Result<DeviceProgress> {
        let by = Caller::new("progress");
        let Device::Cuda(index) = device else {
            return Err(Error::value("progress", "device", "a GPU", device));
        };
        // Uses this device first, because pinned memory is made by a device in use.
        let gpu = Gpu::get(index, by)?;
        let lanes = lanes.max(1);
        let words = Tensor::zeros_pinned(&[LANES_AT + lanes * LANE_WORDS], DType::I64)?
            .named("progress words");
        let counts = Tensor::zeros(&[lanes * 2], DType::I64, device)?.named("progress counts");
        let start = {
            let entered = words.enter("words", true, by)?;
            // Leaked: graphs and pending work may write here at any time, and readers may read.
            entered.leave_never();
            NonNull::new(std::ptr::with_exposed_provenance_mut::<u64>(
                entered.address() as usize,
            ))
            .expect("memory is not at 0")
        };
        let queue = Queue::default_of(gpu).map_err(|fault| fault.of(by, device))?;
        let launcher = GpuLaunch::new(queue, by);
        launcher.load(&SOURCE, "progress_begin", 0)?;
        launcher.load(&SOURCE, "progress_end", 0)?;
        Ok(DeviceProgress {
            device,
            counts,
            words,
            board: ProgressBoard { start, lanes },
        })
    }

    /// What the device reports.
    pub fn board(&self) -> ProgressBoard {
        self.board
    }

    /// The work of `lane` on `stream` from here to `end` is one piece, named `call`. `place` is
    /// reported with it.
    pub fn begin(
        &self,
        lane: usize,
        call: u32,
        place: u32,
        stream: &Stream,
        at: Site,
    ) -> Result<()> {
        self.mark(lane, stream, at, |launcher, lane_counts, lane_words| {
            launcher.launch(
                &SOURCE,
                "progress_begin",
                Grid::blocks(1, 1, 1),
                args![lane_counts, lane_words, RING, STRIDE, SPARSE, call, place],
            )
        })
    }

    /// Ends the piece that began last; it ends, too, when another begins.
    pub fn end(&self, lane: usize, stream: &Stream, at: Site) -> Result<()> {
        self.mark(lane, stream, at, |launcher, lane_counts, lane_words| {
            let ended = lane_words + 8 * ENDED_AT as u64;
            let args = args![lane_counts, ended];
            launcher.launch(&SOURCE, "progress_end", Grid::blocks(1, 1, 1), args)
        })
    }

    fn mark(
        &self,
        lane: usize,
        stream: &Stream,
        at: Site,
        launch: impl FnOnce(&GpuLaunch, u64, u64) -> Result<()>,
    ) -> Result<()> {
        let op = "progress";
        let (by, lanes) = (Caller { op, at }, self.board.lanes);
        assert!(lane < lanes, "lane {lane} of {lanes}");
        let Some(queue) = stream.queue().filter(|_| stream.device() == self.device) else {
            let [expected, got] = [self.device, stream.device()].map(|it| format!("one on {it}"));
            return Err(by.value("stream", expected, got));
        };
        let counts = self.counts.slice(2 * lane..2 * lane + 2)?;
        let counts = counts.enter_for("counts", true, queue, by)?;
        // Graphs keep them; they are never reused anyway.
        self.words.join_capture(queue);
        let words = self.board.start.addr().get() + 8 * (LANES_AT + lane * LANE_WORDS);
        launch(
            &GpuLaunch::new(queue.clone(), by),
            counts.address(),
            words as u64,
        )
    }
}

impl ProgressBoard {
    /// What tells the device that the results of calls mean nothing from now on.
    pub fn stop_word(&self) -> StopWord {
        StopWord(self.start)
    }

    /// The number of lanes.
    pub fn lanes(&self) -> usize {
        self.lanes
    }

    fn word(&self, lane: usize, at: usize) -> &AtomicU64 {
        assert!(lane < self.lanes && at < LANE_WORDS);
        // SAFETY: within the words, which are never freed, and aligned, because blocks are. The
        // host only reads them, and the device writes whole words.
        unsafe { AtomicU64::from_ptr(self.start.as_ptr().add(LANES_AT + lane * LANE_WORDS + at)) }
    }

    /// Number and name of the last piece of `lane` that began; number 0 for none.
    pub fn begun(&self, lane: usize) -> (u32, u32) {
        let word = self.word(lane, BEGUN_AT).load(Ordering::Acquire);
        ((word >> 32) as u32, word as u32)
    }

    /// The number of the last piece of `lane` that ended.
    pub fn ended(&self, lane: usize) -> u32 {
        self.word(lane, ENDED_AT).load(Ordering::Acquire) as u32
    }

    /// The last pieces of `lane` that began, and some earlier ones, unordered. Leaves out those
    /// that are being written; some may appear twice.
    pub fn ring(&self, lane: usize) -> impl Iterator<Item = ReportedWork> {
        (0..RING + SPARSE).filter_map(move |slot| {
            let slot = [0, 1, 2].map(|word| self.word(lane, SLOT_WORDS * slot + word));
            let words = slot.map(|word| word.load(Ordering::Relaxed));
            fence(Ordering::Acquire);
            ReportedWork::of_words(words)
        })
    }
}
