//! One launch as a piece of work: a copy of the arguments, and the call into the kernel's library.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::library::{Kernel, Library, RawFailure, RawLaunch, Span, THREADS_MAX, Window};
use super::message::{Scene, kind};
use super::pinned::Opened;
use super::second;
use super::shadow::{Shadows, cells_of};
use crate::work::{Address, Failure, Memory, Reads, Touched, Views, Work};

/// The stack of one thread of a block. The lowest page is inaccessible.
const STACK_BYTES: usize = 128 << 10;
const GUARD_BYTES: usize = 4096;
/// A launch with so few blocks leaves room for another kernel: devices have at least as many
/// multiprocessors.
const BLOCKS_BESIDE_MAX: u32 = 8;
/// How many accesses of a launch are checked for races between its threads; SIMCUDA_INTRA=1 checks
/// all, 0 none.
const INTRA_ACCESSES_MAX: u64 = 1 << 20;

/// A launch.
pub(super) struct KernelLaunch {
    pub(super) library: Arc<Library>,
    pub(super) kernel: usize,
    pub(super) grid: [u32; 3],
    pub(super) block: [u32; 3],
    pub(super) dynamic_shared_bytes: u32,
    /// The values of the arguments, each at a multiple of 16 bytes.
    pub(super) arguments: Vec<u128>,
    /// Where each begins, in units of 16 bytes.
    pub(super) offsets: Vec<usize>,
    pub(super) seed: u64,
    /// How often it ran: a graph runs it repeatedly, each time in another order.
    pub(super) runs: AtomicU64,
}

/// Shared by all launches.
#[derive(Default)]
struct Grounds {
    shadows: Shadows,
    stacks: Option<Stacks>,
}

/// One set of stacks for all libraries: one launch runs at a time.
struct Stacks(*mut u8);

// SAFETY: memory that is used by whoever holds the lock of the grounds.
unsafe impl Send for Stacks {}

impl Stacks {
    fn new() -> Option<Self> {
        let bytes = STACK_BYTES * THREADS_MAX as usize;
        // SAFETY: a fresh mapping anywhere, and closed pages within it, of which nothing is used
        // yet.
        unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            let base = libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                -1,
                0,
            );
            if base == libc::MAP_FAILED {
                return None;
            }
            for stack in 0..THREADS_MAX as usize {
                libc::mprotect(
                    base.cast::<u8>().add(stack * STACK_BYTES).cast(),
                    GUARD_BYTES,
                    libc::PROT_NONE,
                );
            }
            Some(Self(base.cast()))
        }
    }
}

static GROUNDS: OnceLock<Mutex<Grounds>> = OnceLock::new();

/// An allocation of the arguments, in a view of its own.
struct Sight {
    range: Range<Address>,
    /// Its reads may go through a cache that does not see the launch's writes.
    is_cached: bool,
}

/// What a launch asks while it runs.
struct Finder<'a> {
    device: usize,
    memory: &'a dyn Memory,
    views: Views,
    /// From view 1 on.
    sights: Vec<Sight>,
    shadows: &'a mut Shadows,
    with_cells: bool,
    opened: BTreeMap<Address, Opened>,
}

impl Finder<'_> {
    /// Gives each pointer among the arguments the view of its allocation, from which the kernel's
    /// addresses then stem. Pointers of one allocation stay comparable. A kernel that may store or
    /// load pointers gets its arguments as they are: others see what it stores.
    fn aim(&mut self, kernel: &Kernel, arguments: &mut [u128], offsets: &[usize]) {
        if kernel.holds_pointers {
            return;
        }
        for (index, ((bytes, _), offset)) in kernel.arguments.iter().zip(offsets).enumerate() {
            let is_cached = kernel.cached >> index.min(63) & 1 == 1;
            for word in 0..bytes / 8 {
                let (place, shift) = (&mut arguments[offset + word / 2], word % 2 * 64);
                let address = (*place >> shift) as u64;
                if let Some(view) = self.view_for(address, is_cached) {
                    let moved = self.views.at(view, address);
                    *place = *place & !(u128::from(u64::MAX) << shift) | u128::from(moved) << shift;
                }
            }
        }
    }

    /// The view for a pointer; None if it is not one, or if no view is left.
    fn view_for(&mut self, address: Address, is_cached: bool) -> Option<usize> {
        if address.wrapping_sub(self.views.low) >= self.views.each_bytes {
            return None;
        }
        let at = |address| self.memory.allocation(self.device, address).ok();
        let own = at(address);
        // The end of an array is compared with pointers into it, and nothing is read there.
        let is_end = own.is_none();
        let range = own.or_else(|| at(address - 1))?;
        let is_same =
            |sight: &Sight| sight.range == range && (is_end || sight.is_cached == is_cached);
        if let Some(known) = self.sights.iter().position(is_same) {
            return Some(known + 1);
        }
        self.sights.push(Sight { range, is_cached });
        let view = self.sights.len();
        if view == Views::OF_LDG {
            self.sights.pop();
            return None;
        }
        Some(view)
    }

    /// The allocation that `view` may reach at an address of view 0, and whether it is cached.
    fn sight(&self, view: usize, address: Address) -> Option<(Range<Address>, bool)> {
        if view == 0 || view == Views::OF_LDG {
            let range = self.memory.allocation(self.device, address).ok()?;
            return Some((range, view != 0));
        }
        let sight = self.sights.get(view - 1)?;
        let is_in_it = sight.range.contains(&address);
        is_in_it.then(|| (sight.range.clone(), sight.is_cached))
    }

    fn find(&mut self, address: Address) -> Option<Window> {
        let (view, address) = self.views.split(address);
        let (range, is_cached) = self.sight(view, address)?;
        if self.memory.host_pointer(range.start) as u64 != range.start
            && !self.opened.contains_key(&range.start)
        {
            self.opened.insert(range.start, Opened::new(&range));
        }
        let parts = self.shadows.of(&range, self.with_cells, is_cached)?;
        let is_partial = self.memory.unwritten(&range).is_some();
        let none = std::ptr::null_mut();
        Some(Window {
            low: self.views.at(view, range.start),
            length_bytes: range.end - range.start,
            marks: parts.marks,
            pages: parts.pages,
            cells: parts.cells,
            read_marks: if is_partial { none } else { parts.marks },
        })
    }
}

/// The allocation of the pointer from which a failed access strayed.
fn strayed(failure: &RawFailure, finder: &Finder<'_>) -> Option<Range<Address>> {
    let (view, address) = finder.views.split(failure.address);
    let sight = finder.sights.get(view.checked_sub(1)?)?;
    let has_left = failure.kind == kind::ADDRESS && !sight.range.contains(&address);
    has_left.then(|| sight.range.clone())
}

/// The runtime asks which memory is at an address.
unsafe extern "C" fn find(context: *mut c_void, address: u64, window: *mut Window) -> u32 {
    // SAFETY: the context is the finder that `run` gave, which lives as long as the launch and is
    // used by nobody else meanwhile; the window is the runtime's to be filled.
    unsafe {
        match (*context.cast::<Finder<'_>>()).find(address) {
            Some(found) => {
                window.write(found);
                1
            }
            None => 0,
        }
    }
}

/// The runtime asks up to where bytes of an allocation were written before.
unsafe extern "C" fn written_until(context: *mut c_void, address: u64, end: u64) -> u64 {
    // SAFETY: as in `find`.
    let (memory, views) = unsafe {
        let finder = &*context.cast::<Finder<'_>>();
        (finder.memory, finder.views)
    };
    let (view, first) = views.split(address);
    memory
        .unwritten(&(first..first + (end - address)))
        .map_or(end, |part| views.at(view, part.start))
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

/// A pseudo-random number from two numbers.
fn mix(seed: u64, run: u64) -> u64 {
    let mixed =
        (seed ^ run.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed ^ mixed >> 31
}

impl KernelLaunch {
    fn kernel(&self) -> &Kernel {
        &self.library.kernels[self.kernel]
    }

    fn blocks(&self) -> u64 {
        self.grid.iter().map(|size| u64::from(*size)).product()
    }

    fn pointers(&self, arguments: &[u128]) -> Vec<*mut c_void> {
        // The runtime reads them only.
        self.offsets
            .iter()
            .map(|offset| arguments[*offset..].as_ptr().cast_mut().cast())
            .collect()
    }

    /// The same launch, for the PTX of the kernel.
    fn as_ptx(&self) -> ddp_ptx::Launch {
        ddp_ptx::Launch {
            grid: self.grid,
            block: self.block,
            dynamic_shared_bytes: self.dynamic_shared_bytes,
            arguments: second::arguments(&self.kernel().arguments, &self.arguments, &self.offsets),
            seed: self.seed,
            errors: second::errors().filter(|&seed| seed != 0),
        }
    }

    fn out_of_memory(&self) -> Failure {
        let message = format!(
            "{}: the simulator has no memory for stacks and shadows",
            self.describe()
        );
        Failure {
            code: crate::error::CUresult::CUDA_ERROR_OUT_OF_MEMORY,
            message,
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
            self.kernel().name,
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
        let opinion = self.library.second.as_ref().map(|second| {
            let launch = self.as_ptx();
            second.execute(&self.kernel().name, &launch, device, memory)
        });
        let mut grounds = GROUNDS
            .get_or_init(Mutex::default)
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let Grounds { shadows, stacks } = &mut *grounds;
        if stacks.is_none() {
            *stacks = Stacks::new();
        }
        let stacks = stacks.as_ref().ok_or_else(|| self.out_of_memory())?.0;
        let first_serial = shadows.begin(self.blocks());
        let accesses_max = if first_serial.is_some() {
            intra_accesses_max()
        } else {
            0
        };
        let with_cells = accesses_max > 0;
        let shared_cells = if with_cells {
            let of_static = self.kernel().shared.iter().map(Span::bytes);
            let sizes = of_static.chain([u64::from(self.dynamic_shared_bytes)]);
            shadows.shared_cells(sizes.map(cells_of).sum())
        } else {
            std::ptr::null_mut()
        };
        let mut finder = Finder {
            device,
            memory,
            views: memory.views(),
            sights: Vec::new(),
            shadows,
            with_cells,
            opened: BTreeMap::new(),
        };
        let mut arguments = self.arguments.clone();
        finder.aim(self.kernel(), &mut arguments, &self.offsets);
        let views = finder.views;
        let mut pointers = self.pointers(&arguments);
        let mut launch = RawLaunch {
            kernel: self.kernel().raw,
            arguments: pointers.as_mut_ptr(),
            grid: self.grid,
            block: self.block,
            dynamic_shared_bytes: self.dynamic_shared_bytes,
            intra: u32::from(with_cells),
            intra_accesses_max: accesses_max,
            seed: mix(self.seed, self.runs.fetch_add(1, Ordering::Relaxed)),
            first_serial: first_serial.unwrap_or(1),
            spare: 0,
            shared: self.kernel().shared.as_ptr(),
            shared_spans: self.kernel().shared.len() as u64,
            shared_cells,
            stacks,
            stack_bytes: STACK_BYTES as u64,
            views_low: views.low,
            views_bytes: views.bytes(),
            view_bytes: views.each_bytes,
            context: (&raw mut finder).cast(),
            find,
            written_until,
            failure: RawFailure::default(),
            unwritten: RawFailure::default(),
            accesses: 0,
        };
        // SAFETY: the launch is filled with what lives until it is over; the kernel is of this
        // library; the lock of the grounds makes it the only launch.
        unsafe { self.library.run(&mut launch) };
        finder.opened.clear();
        let stale = finder.shadows.end(touched);
        let strayed = strayed(&launch.failure, &finder);
        for failure in [&mut launch.failure, &mut launch.unwritten] {
            if failure.kind != kind::INDEX {
                failure.address = views.split(failure.address).1;
            }
        }
        let scene = Scene {
            describe: self.describe(),
            library: &self.library,
            kernel: self.kernel(),
            grid: self.grid,
            block: self.block,
            dynamic_shared_bytes: self.dynamic_shared_bytes,
            device,
            memory,
            strayed,
        };
        touched.unwritten = scene.unwritten(&launch.unwritten);
        let failure = scene.failure(&launch.failure);
        let failure = failure.or_else(|| stale.map(|bytes| scene.stale(&bytes)));
        let failure = failure.or_else(|| {
            let name = &self.kernel().name;
            opinion?.compare(&self.describe(), name, memory, touched)
        });
        failure.map_or(Ok(()), Err)
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
