//! One launch as a piece of work: a copy of the arguments, and the PTX that `ddp-ptx` executes.

use std::io::Write as _;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use ddp_ptx::{GlobalMemory, Kernel, Launch, Outcome, Shadows, Window};

use super::message::Scene;
use crate::work::{Address, Failure, Memory, Reads, Touched, Views, Work};

/// A launch with so few blocks leaves room for another kernel: devices have at least as many
/// multiprocessors.
const BLOCKS_BESIDE_MAX: u32 = 8;
/// How many accesses of a launch are checked for races between its threads; SIMCUDA_INTRA=1 checks
/// all, 0 none.
const INTRA_ACCESSES_MAX: u64 = 1 << 20;

/// A launch.
pub(super) struct KernelLaunch {
    pub(super) kernel: Arc<Kernel>,
    pub(super) grid: [u32; 3],
    pub(super) block: [u32; 3],
    pub(super) dynamic_shared_bytes: u32,
    pub(super) arguments: Vec<Vec<u8>>,
    pub(super) seed: u64,
    /// How often it ran: a graph runs it repeatedly, each time in another order.
    pub(super) runs: AtomicU64,
}

/// Shared by all launches, of which one runs at a time.
static SHADOWS: OnceLock<Mutex<Shadows>> = OnceLock::new();

/// The memory that a launch may touch. Each allocation that an argument points to has its own view,
/// so that an address says which argument it was computed from.
struct Sights<'a> {
    device: usize,
    memory: &'a dyn Memory,
    views: Views,
    ranges: Vec<Range<Address>>,
}

impl Sights<'_> {
    /// Gives each pointer among the arguments the view of its allocation. Pointers of one
    /// allocation stay comparable. A kernel that stores or loads pointers gets its arguments as
    /// they are: others see what it stores.
    fn aim(&mut self, kernel: &Kernel, arguments: &mut [Vec<u8>]) {
        if kernel.holds_pointers() {
            return;
        }
        let words = arguments
            .iter_mut()
            .flat_map(|argument| argument.as_chunks_mut::<8>().0);
        for word in words {
            let address = u64::from_le_bytes(*word);
            if let Some(view) = self.view_for(address) {
                *word = self.views.at(view, address).to_le_bytes();
            }
        }
    }

    /// The view for a pointer; None if it is not one, or if no view is left.
    fn view_for(&mut self, address: Address) -> Option<usize> {
        if address.wrapping_sub(self.views.low) >= self.views.each_bytes {
            return None;
        }
        let at = |address| self.memory.allocation(self.device, address).ok();
        // The end of an array is compared with pointers into it, and nothing is read there.
        let range = at(address).or_else(|| at(address - 1))?;
        let known = self.ranges.iter().position(|known| *known == range);
        if known.is_none() && self.ranges.len() + 1 < Views::COUNT {
            self.ranges.push(range);
            return Some(self.ranges.len());
        }
        known.map(|known| known + 1)
    }

    /// The allocation of the pointer from which an access strayed.
    fn strayed(&self, address: Address) -> Option<Range<Address>> {
        let (view, address) = self.views.split(address);
        let range = self.ranges.get(view.checked_sub(1)?)?;
        (!range.contains(&address)).then(|| range.clone())
    }
}

// SAFETY: an allocation stays while a launch that may touch it runs: the machine's lock is held.
// No reference to these bytes exists. If the host touches pinned memory meanwhile, the race is in
// the program under test.
unsafe impl GlobalMemory for Sights<'_> {
    fn find(&self, address: u64) -> Option<Window> {
        let (view, own) = self.views.split(address);
        let range = match view.checked_sub(1) {
            None => self.memory.allocation(self.device, own).ok()?,
            Some(index) => self.ranges.get(index)?.clone(),
        };
        range.contains(&own).then(|| Window {
            range: self.views.at(view, range.start)..self.views.at(view, range.end),
            start: range.start,
            data: self.memory.host_pointer(range.start),
        })
    }

    fn unwritten(&self, range: &Range<u64>) -> Option<Range<u64>> {
        self.memory.unwritten(range)
    }
}

/// SIMCUDA_INTRA: how many accesses of a launch are looked at for races between its threads.
fn intra_accesses_max() -> u64 {
    static MAX: OnceLock<u64> = OnceLock::new();
    *MAX.get_or_init(|| match std::env::var("SIMCUDA_INTRA").as_deref() {
        Ok("0") => 0,
        Ok("1") => u64::MAX,
        _ => INTRA_ACCESSES_MAX,
    })
}

/// SIMCUDA_APPROXIMATE: the seed by which approximate instructions err.
fn errors() -> Option<u64> {
    static SEED: OnceLock<Option<u64>> = OnceLock::new();
    *SEED.get_or_init(|| std::env::var("SIMCUDA_APPROXIMATE").ok()?.parse().ok())
}

/// A pseudo-random number from two numbers.
fn mix(seed: u64, run: u64) -> u64 {
    let mixed =
        (seed ^ run.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed ^ mixed >> 31
}

/// How long the processor has worked for this thread.
fn thread_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the pointer is to a local variable.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

impl KernelLaunch {
    fn blocks(&self) -> u64 {
        self.grid.iter().map(|size| u64::from(*size)).product()
    }

    /// A line in the file that SIMCUDA_KERNELS names, for a launch that succeeded.
    fn note(&self, outcome: &Outcome, took: Duration) {
        let Ok(counts) = &outcome.result else {
            return;
        };
        let Some(path) = std::env::var_os("SIMCUDA_KERNELS") else {
            return;
        };
        let line = format!(
            "{}\t{}\t{}\t{}\n",
            self.kernel.name(),
            counts.instructions,
            counts.thread_instructions,
            took.as_nanos(),
        );
        let file = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path);
        if let Err(error) = file.and_then(|mut file| file.write_all(line.as_bytes())) {
            eprintln!("simcuda: SIMCUDA_KERNELS={}: {error}", path.display());
        }
    }
}

impl Work for KernelLaunch {
    fn describe(&self) -> String {
        let size = |size: [u32; 3]| match size {
            [x, 1, 1] => x.to_string(),
            [x, y, z] => format!("({x}, {y}, {z})"),
        };
        format!(
            "kernel {}<<<{}, {}>>>",
            self.kernel.name(),
            size(self.grid),
            size(self.block)
        )
    }

    fn run(
        &self,
        device: usize,
        memory: &dyn Memory,
        touched: &mut Touched,
    ) -> Result<(), Failure> {
        let mut shadows = SHADOWS
            .get_or_init(Mutex::default)
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mut sights = Sights {
            device,
            memory,
            views: memory.views(),
            ranges: Vec::new(),
        };
        let mut arguments = self.arguments.clone();
        sights.aim(&self.kernel, &mut arguments);
        let launch = Launch {
            grid: self.grid,
            block: self.block,
            dynamic_shared_bytes: self.dynamic_shared_bytes,
            arguments,
            seed: mix(self.seed, self.runs.fetch_add(1, Ordering::Relaxed)),
            compared_max: intra_accesses_max(),
            errors: errors(),
        };
        let start = thread_time();
        let outcome = self.kernel.run(&launch, &sights, &mut shadows);
        self.note(&outcome, thread_time() - start);
        touched.reads.extend(outcome.touched.reads);
        touched.writes.extend(outcome.touched.writes);
        touched.atomics.extend(outcome.touched.atomics);
        let scene = Scene {
            describe: self.describe(),
            device,
            memory,
            views: sights.views,
        };
        touched.unwritten = outcome
            .unwritten
            .and_then(|finding| scene.unwritten(&finding));
        outcome.result.map(drop).map_err(|finding| {
            let address = finding.access.as_deref().map(|(bytes, _)| bytes.start);
            scene.failure(
                &finding,
                address.and_then(|address| sights.strayed(address)),
            )
        })
    }

    fn reads(&self) -> Reads {
        Reads::Watched
    }

    fn fills_device(&self) -> bool {
        self.blocks() > u64::from(BLOCKS_BESIDE_MAX)
    }

    fn duration_ns(&self) -> u64 {
        let threads: u64 = self.block.iter().map(|size| u64::from(*size)).product();
        // Any rate would do: it is the same for all, and is never shown.
        2000 + self.blocks().saturating_mul(threads) / 64
    }
}
