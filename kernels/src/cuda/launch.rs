//! How operations run kernels.
//!
//! ```text
//! static SOURCE: Source = Source::new("relu.cu", include_str!("relu.cu"));
//!
//! let placed = call.place(x, &FLOATS)?;
//! if let Some(gpu) = placed.launcher()? {
//!     let [out, x] = placed.enter([out, x])?;
//!     let count = placed.tensor(slot).count();
//!     gpu.kernel(&SOURCE, "relu_f32")?.output(&out).input(&x, &out).count(count).launch(Grid::elements(count))?;
//! }
//! ```
//!
//! The arguments are given in the order and of the types of the kernel's parameters; nothing checks that but the tests.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::CUfunction;

use super::fault::driver;
use super::gpu::Gpu;
use super::nvrtc;
use super::queue::Queue;
use crate::error::{Result, Site};
use crate::ops::Lent;

/// A `.cu` file of this crate.
pub(crate) struct Source {
    /// The file's name.
    pub(crate) name: &'static str,
    pub(crate) text: &'static str,
    /// What was compiled and loaded of it, for `nvrtc.rs`.
    pub(super) loaded: nvrtc::Loaded,
}

impl Source {
    pub(crate) const fn new(name: &'static str, text: &'static str) -> Source {
        Source { name, text, loaded: nvrtc::Loaded::new() }
    }
}

/// Where an operation's kernels go: a device and a stream.
pub(crate) struct Launcher {
    pub(crate) gpu: &'static Gpu,
    pub(crate) queue: Arc<Queue>,
    pub(crate) op: &'static str,
    pub(crate) at: Site,
}

/// Threads of a block where a kernel does not care.
pub(crate) const BLOCK_THREADS: u32 = 256;

/// How many blocks of how many threads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    pub(crate) blocks: [u32; 3],
    pub(crate) threads: [u32; 3],
}

impl Grid {
    /// For elementwise kernels that go over their elements with a stride of the whole grid (`for (i = thread; i < count; i += threads)`): enough
    /// blocks for one element a thread, but never more than keep every processor busy.
    pub(crate) fn elements(count: usize) -> Grid {
        /// Sixteen blocks on each of 132 processors: beyond that a thread takes several elements.
        const BLOCKS_MAX: usize = 16 * 132;
        Grid::blocks(count.div_ceil(BLOCK_THREADS as usize).clamp(1, BLOCKS_MAX), BLOCK_THREADS)
    }

    /// So many blocks of so many threads, in one dimension.
    pub(crate) fn blocks(blocks: usize, threads: u32) -> Grid {
        let blocks = u32::try_from(blocks.max(1)).unwrap_or(u32::MAX).min(i32::MAX as u32);
        Grid { blocks: [blocks, 1, 1], threads: [threads, 1, 1] }
    }
}

/// The most parameters of a kernel.
const PARAMETERS_MAX: usize = 24;

/// A kernel being given its arguments.
#[must_use = "nothing runs before launch()"]
pub(crate) struct Kernel<'a> {
    launcher: &'a Launcher,
    function: CUfunction,
    /// Each argument in the first bytes of a word.
    words: [u64; PARAMETERS_MAX],
    count: usize,
}

impl Launcher {
    /// The kernel `name` of `source`, compiled at first use.
    pub(crate) fn kernel(&self, source: &'static Source, name: &'static str) -> Result<Kernel<'_>> {
        let function = nvrtc::function(self.gpu, source, name, self.op, self.at)?;
        Ok(Kernel { launcher: self, function, words: [0; PARAMETERS_MAX], count: 0 })
    }
}

impl Kernel<'_> {
    fn word(mut self, word: u64) -> Self {
        assert!(self.count < PARAMETERS_MAX, "a kernel has at most {PARAMETERS_MAX} parameters");
        self.words[self.count] = word;
        self.count += 1;
        self
    }

    /// An address, whatever it points to; null for none.
    pub(crate) fn address(self, address: u64) -> Self {
        self.word(address)
    }

    /// An operand that is written.
    pub(crate) fn output(self, lent: &Lent<'_>) -> Self {
        let address = lent.address().expect("outputs are never in place of another");
        self.word(address)
    }

    /// An operand that is read and may be in place of `output`.
    pub(crate) fn input(self, lent: &Lent<'_>, output: &Lent<'_>) -> Self {
        let address = lent.address().or(output.address()).expect("an output has an address");
        self.word(address)
    }

    /// An operand that is read and cannot be in place.
    pub(crate) fn reads(self, lent: &Lent<'_>) -> Self {
        let address = lent.address().expect("only operands declared with may_be_in_place are ever in place");
        self.word(address)
    }

    /// An operand that may be absent: a null pointer then.
    pub(crate) fn maybe(self, lent: Option<&Lent<'_>>) -> Self {
        let address = lent.and_then(Lent::address).unwrap_or(0);
        self.word(address)
    }

    /// A number of things: `unsigned long long`.
    pub(crate) fn count(self, count: usize) -> Self {
        self.word(count as u64)
    }

    /// `unsigned int`.
    pub(crate) fn u32(self, value: u32) -> Self {
        self.word(u64::from(value))
    }

    /// `int`.
    pub(crate) fn i32(self, value: i32) -> Self {
        self.word(u64::from(value as u32))
    }

    /// `long long`.
    pub(crate) fn i64(self, value: i64) -> Self {
        self.word(value as u64)
    }

    /// `unsigned long long`.
    pub(crate) fn u64(self, value: u64) -> Self {
        self.word(value)
    }

    /// `float`.
    pub(crate) fn f32(self, value: f32) -> Self {
        self.word(u64::from(value.to_bits()))
    }

    /// `double`.
    pub(crate) fn f64(self, value: f64) -> Self {
        self.word(value.to_bits())
    }

    /// Gives the kernel to the launcher's stream. The operands must stay entered until this returns; from then on the stream's order keeps them.
    pub(crate) fn launch(mut self, grid: Grid) -> Result<()> {
        let Launcher { gpu, queue, op, at } = self.launcher;
        let mut parameters: [*mut c_void; PARAMETERS_MAX] = [std::ptr::null_mut(); PARAMETERS_MAX];
        for (parameter, word) in parameters.iter_mut().zip(&mut self.words) {
            *parameter = std::ptr::from_mut(word).cast();
        }
        let [x, y, z] = grid.blocks;
        let [block_x, block_y, block_z] = grid.threads;
        let launched = gpu.bind().and_then(|()| {
            // SAFETY: function and stream belong to this device's context, which is current. Each parameter points to a word that holds at least as
            // many bytes as the kernel's parameter has; the driver copies them before it returns. What the kernel may touch is what the operation
            // entered, whose memory stays in its pool until the stream has passed the point where it is freed.
            unsafe {
                driver!(cuLaunchKernel(
                    self.function,
                    x,
                    y,
                    z,
                    block_x,
                    block_y,
                    block_z,
                    0,
                    queue.raw(),
                    parameters.as_mut_ptr(),
                    std::ptr::null_mut(),
                ))
            }
        });
        launched.map_err(|fault| fault.of(op, gpu.device(), at))
    }
}
