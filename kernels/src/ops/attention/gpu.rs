//! Attention on a GPU: which kernels, with which arguments. bf16 is multiplied on tensor cores, and
//! in f32 where heads do not fit these.

use super::sizes::{Columns, Sizes};
use crate::DType;
use crate::error::Result;
use crate::launch::{BLOCK_THREADS, Grid, Launcher, Source, args};
use crate::ops::call::Buffer;

static PLAIN: Source = Source::new("attention.cu", include_str!("../attention.cu"));
static TENSOR: Source = Source::new("attention_bf16.cu", include_str!("../attention_bf16.cu"));

/// Rows of a thread block, as in both files.
const SIDE: usize = 64;

/// Tensor cores read heads of whole tiles, at most this wide, from addresses of whole packs.
const TENSOR_TILE: usize = 16;
const TENSOR_HEAD_SIZE_MAX: usize = 128;
const PACK_BYTES: u64 = 16;
/// The oldest GPUs that multiply bf16 on tensor cores.
const TENSOR_CAPABILITY: (u32, u32) = (8, 0);

/// q, k and v, or their gradients: the address of the first element of each, and its rows' stride.
#[derive(Clone, Copy)]
pub(super) struct Heads {
    pub(super) addresses: [u64; 3],
    pub(super) strides: [usize; 3],
}

impl Heads {
    /// `buffers` are three, or one that holds all.
    pub(super) fn new(buffers: &[Option<Buffer<'_>>], columns: [Columns; 3]) -> Heads {
        let mut heads = Heads {
            addresses: [0; 3],
            strides: columns.map(|columns| columns.stride),
        };
        for (operand, columns) in columns.iter().enumerate() {
            if let Some(buffer) = &buffers[operand.min(buffers.len() - 1)] {
                let bytes = columns.first * buffer.dtype.bytes();
                heads.addresses[operand] = buffer.address() + bytes as u64;
            }
        }
        heads
    }
}

/// The kernels of one file for heads up to some width: forward, then dq, dk and dv.
struct Kernels {
    source: &'static Source,
    threads: u32,
    names: [&'static str; 4],
}

macro_rules! kernels {
    ($source:ident, $threads:literal, $prefix:literal, $width:literal) => {
        Kernels {
            source: &$source,
            threads: $threads,
            names: [
                concat!($prefix, "_", $width),
                concat!($prefix, "_dq_", $width),
                concat!($prefix, "_dk_", $width),
                concat!($prefix, "_dv_", $width),
            ],
        }
    };
}

impl Kernels {
    /// Those for this size of head on this GPU, where packs are read at these addresses.
    fn new(gpu: &Launcher, dtype: DType, head_size: usize, addresses: &[u64]) -> Kernels {
        let tensor = dtype == DType::BF16
            && head_size.is_multiple_of(TENSOR_TILE)
            && head_size <= TENSOR_HEAD_SIZE_MAX
            && gpu.gpu.capability >= TENSOR_CAPABILITY
            && addresses
                .iter()
                .all(|address| address.is_multiple_of(PACK_BYTES));
        match (tensor, head_size) {
            (true, ..=64) => kernels!(TENSOR, 128, "attention_tensor", "64"),
            (true, _) => kernels!(TENSOR, 128, "attention_tensor", "128"),
            (false, ..=64) if dtype == DType::F32 => kernels!(PLAIN, 256, "attention", "64"),
            (false, _) => kernels!(PLAIN, 256, "attention", "256"),
        }
    }

    /// A block of threads for each block of rows of each of so many heads in each sequence.
    fn grid(&self, sizes: Sizes, heads: usize) -> Grid {
        let blocks = sizes.batch * heads * sizes.time.div_ceil(SIDE);
        Grid::blocks(blocks, self.threads)
    }
}

/// Writes `out` and `log_sum_exp`.
pub(super) fn forward(
    gpu: &Launcher,
    [out, log_sum_exp]: [&Buffer<'_>; 2],
    inputs: Heads,
    sizes: Sizes,
) -> Result<()> {
    let ([q, k, v], [q_stride, kv_stride, _]) = (inputs.addresses, inputs.strides);
    let addresses = [out.address(), q, k, v];
    let kernels = Kernels::new(gpu, out.dtype, sizes.head_size, &addresses);
    let (causal, scale) = (sizes.causal, sizes.scale as f32);
    let args = args![
        out,
        log_sum_exp,
        q,
        k,
        v,
        q_stride,
        kv_stride,
        sizes.time,
        sizes.heads,
        sizes.kv_heads,
        sizes.head_size,
        causal,
        scale
    ];
    let grid = kernels.grid(sizes, sizes.heads);
    gpu.launch(kernels.source, (kernels.names[0], out.dtype), grid, args)
}

/// Writes dq, dk and dv, and `delta` before them.
pub(super) fn backward(
    gpu: &Launcher,
    gradients: Heads,
    delta: &Buffer<'_>,
    [dout, out, log_sum_exp]: [&Buffer<'_>; 3],
    inputs: Heads,
    sizes: Sizes,
) -> Result<()> {
    const WARPS: usize = BLOCK_THREADS as usize / 32;
    let Sizes {
        time,
        heads,
        kv_heads,
        head_size,
        causal,
        ..
    } = sizes;
    let rows = sizes.batch * time;
    let blocks = Grid::blocks((rows * heads).div_ceil(WARPS), BLOCK_THREADS);
    let args = args![delta, dout, out, rows, time, heads, head_size];
    gpu.launch(&PLAIN, ("attention_delta", out.dtype), blocks, args)?;
    let ([q, k, v], [q_stride, kv_stride, _]) = (inputs.addresses, inputs.strides);
    let [dq, dk, dv] = gradients.addresses;
    let addresses = [dout.address(), q, k, v, dq, dk, dv];
    let kernels = Kernels::new(gpu, out.dtype, head_size, &addresses);
    for (operand, kernel) in kernels.names[1..].iter().enumerate() {
        let args = args![
            gradients.addresses[operand],
            gradients.strides[operand],
            q,
            k,
            v,
            dout,
            log_sum_exp,
            delta,
            q_stride,
            kv_stride,
            time,
            heads,
            kv_heads,
            head_size,
            causal,
            sizes.scale as f32
        ];
        let grid = kernels.grid(sizes, [heads, kv_heads, kv_heads][operand]);
        gpu.launch(kernels.source, (*kernel, out.dtype), grid, args)?;
    }
    Ok(())
}
