//! How operations launch kernels and, through cuBLASLt (`blaslt.rs`), matmuls.
//!
//! ```text
//! static SOURCE: CuFile = CuFile::new("activation.cu", include_str!("activation.cu"));
//!
//! gpu.launch(&SOURCE, ("activate", dtype), grid, args![out, x, count, number])?;
//! ```
//!
//! Arguments must have the order and the types of the kernel's parameters. Only the tests check
//! that they match.

pub(crate) mod blaslt;
mod stream_memory;

pub(crate) use crate::cuda::nvrtc::{CuFile, text_of};

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::CUfunction;

use crate::cuda::calls::driver;
use crate::cuda::nodes::{self, NodeKind, NodeWork};
use crate::cuda::nvrtc::{self, KernelName};
use crate::cuda::queue::Queue;
use crate::cuda::{Gpu, copies};
use crate::error::{Caller, Result};
use crate::storage::ContentsOrigin;
use crate::{DType, Shape, Tensor};

/// Threads of a block, for kernels that work with any number.
pub(crate) const BLOCK_THREADS: u32 = 256;
/// Sixteen blocks on each of 132 multiprocessors: with more, threads loop over several elements.
pub(crate) const BLOCKS_MAX: usize = 16 * 132;

/// How many blocks of how many threads. A grid without blocks launches nothing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    pub(crate) blocks: [u32; 3],
    pub(crate) threads: [u32; 3],
    /// For `bench --explain`: see `NodeWork::dependent_loads`.
    pub(crate) dependent_loads: usize,
}

impl Grid {
    /// For kernels that loop over their elements with the stride of the whole grid: a thread for
    /// each element, up to the number of blocks that keeps every multiprocessor busy.
    pub(crate) fn elements(count: usize) -> Grid {
        let all = count.div_ceil(BLOCK_THREADS as usize);
        let blocks = all.min(BLOCKS_MAX);
        Grid::blocks(blocks, BLOCK_THREADS, all.div_ceil(blocks.max(1)))
    }

    /// As `elements`, for threads that handle 16 bytes each.
    pub(crate) fn packs(count: usize, dtype: DType) -> Grid {
        Grid::elements((count * dtype.bytes()).div_ceil(16))
    }

    /// This many blocks of this many threads, in one dimension. Each thread makes `dependent_loads`
    /// loads (or groups of loads), each of which waits for the one before.
    pub(crate) fn blocks(blocks: usize, threads: u32, dependent_loads: usize) -> Grid {
        let blocks = blocks.min(i32::MAX as usize) as u32;
        Grid {
            blocks: [blocks, 1, 1],
            threads: [threads, 1, 1],
            dependent_loads,
        }
    }

    /// Each round of a thread has this many loads, one after another.
    pub(crate) fn rounds_of(mut self, loads: usize) -> Grid {
        self.dependent_loads *= loads;
        self
    }

    fn work(&self) -> NodeWork {
        let count = |sides: [u32; 3]| sides.iter().map(|&side| side as usize).product();
        NodeWork {
            blocks: count(self.blocks),
            threads: count(self.threads),
            dependent_loads: self.dependent_loads,
            flop: 0.0,
        }
    }
}

/// An argument of a kernel.
pub(crate) trait KernelArgument {
    /// The argument in the first bytes of a word.
    fn word(&self) -> u64;
}

macro_rules! argument {
    ($($T:ty: |$value:ident| $word:expr;)*) => {$(
        impl KernelArgument for $T {
            fn word(&self) -> u64 {
                let $value = *self;
                $word
            }
        }
    )*};
}
argument! {
    bool: |value| value.into(); // `unsigned int`
    u32: |value| value.into(); // `unsigned int`
    i32: |value| value.cast_unsigned().into(); // `int`
    u64: |value| value; // `unsigned long long`, or an address
    i64: |value| value.cast_unsigned(); // `long long`
    usize: |value| value as u64; // `unsigned long long`
    f32: |value| value.to_bits().into(); // `float`
    f64: |value| value.to_bits(); // `double`
}

impl<T: KernelArgument> KernelArgument for &T {
    fn word(&self) -> u64 {
        (**self).word()
    }
}

/// None is a null pointer.
impl<T: KernelArgument> KernelArgument for Option<T> {
    fn word(&self) -> u64 {
        self.as_ref().map_or(0, T::word)
    }
}

/// The arguments of a kernel, for `GpuLaunch::launch`.
macro_rules! args {
    ($($value:expr),* $(,)?) => { &[$($crate::launch::KernelArgument::word(&$value)),*] };
}
pub(crate) use args;

/// The most parameters that a kernel has.
pub(crate) const PARAMETERS_MAX: usize = 24;

/// The words of a stream's counters.
const COUNTERS: usize = 8;

/// Where an operation's kernels run: a device and a stream.
pub(crate) struct GpuLaunch {
    pub(crate) gpu: &'static Gpu,
    pub(crate) queue: Arc<Queue>,
    pub(crate) by: Caller,
}

impl GpuLaunch {
    pub(crate) fn new(queue: Arc<Queue>, by: Caller) -> GpuLaunch {
        let gpu = queue.gpu;
        GpuLaunch { gpu, queue, by }
    }

    /// Compiles the kernel at its first use. Its blocks may have this much dynamic shared memory.
    pub(crate) fn load(
        &self,
        source: &'static CuFile,
        name: impl Into<KernelName>,
        shared_bytes: u32,
    ) -> Result<CUfunction> {
        nvrtc::function(self.gpu, source, name.into(), shared_bytes, self.by)
    }

    /// The address of this stream's counters, i64 (8): zero before each kernel, which leaves them
    /// zero. The first call makes them. A graph uses those of the streams it was captured from.
    pub(crate) fn counters(&self) -> Result<u64> {
        self.stream_memory("counters", COUNTERS * DType::I64.bytes(), Some(0))
    }

    /// Memory of the launcher's stream, which must be the current one, filled with `byte`; and its
    /// address.
    fn memory(&self, name: &str, bytes: usize, byte: Option<u8>) -> Result<(Tensor, u64)> {
        let (shape, device) = (Shape::new(&[bytes])?, self.gpu.device());
        let (by, origin) = (self.by, ContentsOrigin::Computed);
        let tensor = Tensor::allocate(shape, DType::U8, device, origin, by)?.named(name);
        let address = tensor.enter("memory", true, by)?.address();
        if let Some(byte) = byte {
            // SAFETY: the tensor is new, and this many bytes of this device's memory.
            let filled = unsafe { copies::fill(&self.queue, address, byte, bytes) };
            filled.map_err(|fault| fault.of(by, device))?;
        }
        Ok((tensor, address))
    }

    /// Puts a kernel on the stream. The operands must stay entered until this returns; after that
    /// the order of the stream protects them.
    pub(crate) fn launch(
        &self,
        source: &'static CuFile,
        name: impl Into<KernelName>,
        grid: Grid,
        args: &[u64],
    ) -> Result<()> {
        self.launch_with(source, name.into(), (grid, 0), args)
    }

    /// As `launch`, with this many bytes of dynamic shared memory for each block, the same in every
    /// launch of the kernel.
    pub(crate) fn launch_with(
        &self,
        source: &'static CuFile,
        name: KernelName,
        (grid, bytes): (Grid, u32),
        args: &[u64],
    ) -> Result<()> {
        if grid.blocks.contains(&0) {
            return Ok(());
        }
        let function = self.load(source, name, bytes)?;
        let mut parameters: [*mut c_void; PARAMETERS_MAX] = [std::ptr::null_mut(); PARAMETERS_MAX];
        for (parameter, word) in parameters[..args.len()].iter_mut().zip(args) {
            *parameter = std::ptr::from_ref(word).cast_mut().cast();
        }
        let ([x, y, z], [bx, by, bz]) = (grid.blocks, grid.threads);
        let (parameters, none) = (parameters.as_mut_ptr(), std::ptr::null_mut());
        let stream = self.queue.raw();
        // SAFETY: function and stream belong to this device's context, which is current. Each
        // parameter points to a word with at least as many bytes as the kernel's parameter; the
        // driver copies them before it returns. The kernel touches only memory that the operation
        // entered, which stays in its pool until the stream has passed its release.
        let launch = || unsafe {
            driver!(cuLaunchKernel(
                function, x, y, z, bx, by, bz, bytes, stream, parameters, none
            ))
        };
        let bound = self.gpu.bind();
        let launched = bound.and_then(|()| nodes::launch(&self.queue, launch)?);
        launched.map_err(|fault| fault.of(self.by, self.gpu.device()))?;
        nodes::node(NodeKind::Kernel, name, self.by.op, args, grid.work());
        Ok(())
    }
}

/// How f32 matrices are multiplied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum F32Math {
    /// In f32: each product and each sum is rounded to 24 bits. The default.
    #[default]
    Strict,
    /// On a GPU operands are rounded to TF32 (11 bits, the range of f32), products are exact and
    /// sums are in f32: several times as fast, with a relative error of up to 2⁻⁹ per product. On
    /// the CPU each operand is the sum of two bf16, in an order of bf16 matmuls: up to 2⁻¹⁶.
    Tf32,
}

thread_local! {
    static MATH: Cell<F32Math> = const { Cell::new(F32Math::Strict) };
}

/// Runs `body` with matmuls of f32 computed as `math` says.
///
/// ```
/// use ddp_kernels::ops::{F32Math, f32_math, with_f32_math};
/// with_f32_math(F32Math::Tf32, || assert_eq!(f32_math(), F32Math::Tf32));
/// assert_eq!(f32_math(), F32Math::Strict);
/// ```
pub fn with_f32_math<R>(math: F32Math, body: impl FnOnce() -> R) -> R {
    /// Restores the former one, on return or panic.
    struct RestoreMath(F32Math);
    impl Drop for RestoreMath {
        fn drop(&mut self) {
            MATH.set(self.0);
        }
    }
    let _restore = RestoreMath(MATH.replace(math));
    body()
}

/// What is in force on this thread.
pub fn f32_math() -> F32Math {
    MATH.get()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scopes_nest_end_with_a_panic_and_belong_to_their_thread() {
        assert_eq!(f32_math(), F32Math::Strict);
        with_f32_math(F32Math::Tf32, || {
            with_f32_math(F32Math::Strict, || assert_eq!(f32_math(), F32Math::Strict));
            assert_eq!(f32_math(), F32Math::Tf32);
            assert_eq!(
                std::thread::spawn(f32_math).join().unwrap(),
                F32Math::Strict
            );
            let _ = std::panic::catch_unwind(|| {
                with_f32_math(F32Math::Strict, || panic!("on purpose"))
            });
            assert_eq!(f32_math(), F32Math::Tf32);
        });
        assert_eq!(f32_math(), F32Math::Strict);
    }
}
