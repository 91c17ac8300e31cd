//! Attention on a GPU: which kernels, with which arguments. bf16 is multiplied on tensor cores or,
//! where heads do not fit them, in f32, several times slower.

use std::sync::Once;

use super::sizes::Sizes;
use crate::DType;
use crate::error::Result;
use crate::launch::{CuFile, GpuLaunch, Grid, PARAMETERS_MAX, args};
use crate::message::warn;
use crate::ops::call::Buffer;

pub(in crate::ops) static PLAIN: CuFile =
    CuFile::new("attention.cu", include_str!("../attention.cu"));
pub(in crate::ops) static TENSOR: CuFile =
    CuFile::new("attention_bf16.cu", include_str!("../attention_bf16.cu"));

/// Tensor cores read heads of whole tiles, at most this wide, from addresses of whole packs.
const TENSOR_TILE: usize = 16;
const TENSOR_HEAD_SIZE_MAX: usize = 128;
const PACK_BYTES: u64 = 16;
/// The oldest GPUs that multiply bf16 on tensor cores, and those that do so by `wgmma`: those for
/// which nvrtc/compiler.rs compiles sm_90a, where blocks have other rows.
const TENSOR_CAPABILITY: (u32, u32) = (8, 0);
const HOPPER_CAPABILITY: (u32, u32) = (9, 0);

/// The kernels of one file for heads up to some width.
struct Kernels {
    source: &'static CuFile,
    threads: u32,
    /// Of a block: rows in forward, and in backward.
    rows: [usize; 2],
    shared_bytes: u32,
    forward: &'static str,
    /// dq, dk and dv, or dq and both others.
    backward: &'static [&'static str],
}

static PLAIN_64: Kernels = Kernels {
    source: &PLAIN,
    threads: 256,
    rows: [64, 64],
    shared_bytes: 0,
    forward: "attention_64",
    backward: &["attention_dq_64", "attention_dk_64", "attention_dv_64"],
};
static PLAIN_256: Kernels = Kernels {
    forward: "attention_256",
    backward: &["attention_dq_256", "attention_dk_256", "attention_dv_256"],
    ..PLAIN_64
};
/// The kernels on tensor cores whose names end with `$end`.
macro_rules! tensor {
    ($rows:expr, $shared_bytes:expr, $end:literal) => {
        Kernels {
            source: &TENSOR,
            threads: 128,
            rows: $rows,
            shared_bytes: $shared_bytes,
            forward: concat!("attention_tensor_", $end),
            backward: &[
                concat!("attention_tensor_dq_", $end),
                concat!("attention_tensor_dkv_", $end),
            ],
        }
    };
}
// A block has its rows and two tiles of two operands in shared memory: 384 rows of 64 columns and 8
// more, or 256 of 128 and 8 more, and 128 numbers. Apart: for windows, and sequences of several
// documents. tests/checks/kernels.py reads the names with the bytes.
static TENSOR_64: Kernels = tensor!([128, 128], 384 * 144 + 512, "64");
static TENSOR_128: Kernels = tensor!([128, 64], 256 * 272 + 512, "128");
static TENSOR_APART_64: Kernels = tensor!([128, 128], 384 * 144 + 512, "apart_64");
static TENSOR_APART_128: Kernels = tensor!([64, 64], 256 * 272 + 512, "apart_128");

// On Hopper a block has its rows and two tiles of two operands, without gaps: at most 384 rows. dk
// and dv of 128 columns also have 256 numbers; those of 64 have 320 rows, which leaves room for
// theirs.
static HOPPER_64: Kernels = tensor!([64, 64], 384 * 128, "64");
static HOPPER_128: Kernels = tensor!([128, 64], 384 * 256 + 1024, "128");
static HOPPER_APART_64: Kernels = tensor!([64, 64], 384 * 128, "apart_64");
static HOPPER_APART_128: Kernels = tensor!([64, 64], 384 * 256 + 1024, "apart_128");

impl Kernels {
    /// Those for these heads on this GPU, where packs are read at these addresses.
    fn of(
        gpu: &GpuLaunch,
        dtype: DType,
        (sizes, begins): (Sizes, Option<&Buffer<'_>>),
        addresses: &[u64],
    ) -> &'static Kernels {
        static SAID: Once = Once::new();
        let (head_size, sharing) = (sizes.head_size, sizes.group());
        let is_aligned = |address: &u64| address.is_multiple_of(PACK_BYTES);
        let (capability, scale) = (gpu.gpu.capability, sizes.scale as f32);
        // A token's number is computed from that of its row in 32 bits; the largest score is found
        // before the scale is applied.
        let fits = sizes.time * sharing * sharing < 1 << 31 && scale > 0.0;
        let reason = if capability < TENSOR_CAPABILITY {
            Some(format!(
                "this GPU has compute capability {}.{}, expected 8.0 or newer; help: train on a \
                 newer GPU",
                capability.0, capability.1
            ))
        } else if !head_size.is_multiple_of(TENSOR_TILE) || head_size > TENSOR_HEAD_SIZE_MAX {
            Some(format!(
                "bf16 heads of {head_size} columns, expected a multiple of {TENSOR_TILE} up to \
                 {TENSOR_HEAD_SIZE_MAX}; help: choose a head size of 64 or 128"
            ))
        } else if sizes.cap.is_some() {
            Some("a soft cap, expected none; help: Gemma 2 takes this longer way".into())
        } else if !addresses.iter().all(is_aligned) {
            Some(format!(
                "q, k, v, out or a gradient at an address that is not a multiple of {PACK_BYTES} \
                 bytes; help: begin views of tensors at multiples of {PACK_BYTES} bytes"
            ))
        } else if !fits {
            Some(format!(
                "expected time·(heads/kv_heads)² below 2³¹ and a scale above 0, got {}·{sharing}² \
                 and {scale}; help: choose more kv_heads, or a positive scale",
                sizes.time
            ))
        } else {
            None
        };
        let is_bf16 = dtype == DType::BF16;
        if let (true, Some(reason)) = (is_bf16, &reason) {
            let text = format!("attention does not run on tensor cores and is slow: {reason}");
            SAID.call_once(|| warn(&text));
        }
        let is_apart = begins.is_some() || sizes.window.is_some();
        if !is_bf16 || reason.is_some() {
            return match head_size {
                ..=64 if !is_bf16 => &PLAIN_64,
                _ => &PLAIN_256,
            };
        }
        let [on_hopper, elsewhere]: [&Kernels; 2] = match (head_size <= 64, is_apart) {
            (true, false) => [&HOPPER_64, &TENSOR_64],
            (false, false) => [&HOPPER_128, &TENSOR_128],
            (true, true) => [&HOPPER_APART_64, &TENSOR_APART_64],
            (false, true) => [&HOPPER_APART_128, &TENSOR_APART_128],
        };
        if capability == HOPPER_CAPABILITY {
            on_hopper
        } else {
            elsewhere
        }
    }

    /// Launches a kernel for the queries, or the keys, of all heads and sequences. On tensor cores
    /// the heads of q that share a head of k are rows of one matrix. All kernels have the sizes
    /// after the other arguments.
    fn launch(
        &self,
        gpu: &GpuLaunch,
        name: (&'static str, DType),
        (sizes, begins, is_of_keys): (Sizes, Option<&Buffer<'_>>, bool),
        block_rows: usize,
        args: &[u64],
    ) -> Result<()> {
        let (heads, rows) = match (is_of_keys, self.shared_bytes > 0) {
            (true, _) => (sizes.kv_heads, sizes.time),
            (false, true) => (sizes.kv_heads, sizes.time * sizes.group()),
            (false, false) => (sizes.heads, sizes.time),
        };
        let blocks = sizes.batch * heads * rows.div_ceil(block_rows);
        // Tiles of the other side, which have 32 rows or more: a key meets the queries of all heads
        // that share it.
        let others = if is_of_keys {
            sizes.time * sizes.group()
        } else {
            sizes.time
        };
        let grid = Grid::blocks(blocks, self.threads, others.div_ceil(32));
        let grid = (grid, self.shared_bytes);
        let (causal, scale) = (sizes.causal, sizes.scale as f32);
        let (heads, kv_heads, width) = (sizes.heads, sizes.kv_heads, sizes.head_size);
        // 0 for all: no window is longer than a sequence.
        let window = sizes.window.map_or(0, |window| window.min(sizes.time));
        let cap = sizes.cap.unwrap_or(0.0) as f32;
        let sizes = args![
            sizes.time, heads, kv_heads, width, causal, scale, window, begins, cap
        ];
        // Kernels for tensor cores have no cap.
        let sizes = &sizes[..sizes.len() - usize::from(self.shared_bytes > 0)];
        let (mut all, count) = ([0; PARAMETERS_MAX], args.len() + sizes.len());
        all[..args.len()].copy_from_slice(args);
        all[args.len()..count].copy_from_slice(sizes);
        gpu.launch_with(self.source, name.into(), grid, &all[..count])
    }
}

/// The addresses of q, k and v, or of their gradients.
fn heads(buffer: &Buffer<'_>, sizes: Sizes) -> [u64; 3] {
    let bytes = buffer.dtype.bytes();
    let columns = sizes.columns();
    columns.map(|columns| buffer.address() + (columns.first * bytes) as u64)
}

/// Writes `out` and `log_sum_exp`.
pub(super) fn forward(
    gpu: &GpuLaunch,
    [out, log_sum_exp, qkv]: [&Buffer<'_>; 3],
    begins: Option<&Buffer<'_>>,
    sizes: Sizes,
) -> Result<()> {
    let ([q, k, v], stride) = (heads(qkv, sizes), sizes.packed_width());
    let kernels = Kernels::of(gpu, out.dtype, (sizes, begins), &[out.address(), q, k, v]);
    let args = args![out, log_sum_exp, q, k, v, stride, stride];
    let name = (kernels.forward, out.dtype);
    kernels.launch(gpu, name, (sizes, begins, false), kernels.rows[0], args)
}

/// Writes dq, dk and dv; the kernel of dq, which comes first, writes `delta` too.
pub(super) fn backward(
    gpu: &GpuLaunch,
    [dqkv, delta]: [&Buffer<'_>; 2],
    [dout, out, sums, qkv]: [&Buffer<'_>; 4],
    begins: Option<&Buffer<'_>>,
    sizes: Sizes,
) -> Result<()> {
    let ([q, k, v], stride) = (heads(qkv, sizes), sizes.packed_width());
    let [dq, dk, dv] = heads(dqkv, sizes);
    let addresses = [dout.address(), out.address(), q, k, v, dq, dk, dv];
    let kernels = Kernels::of(gpu, out.dtype, (sizes, begins), &addresses);
    let args = args![
        dq, dk, dv, delta, stride, stride, q, k, v, out, dout, sums, stride, stride
    ];
    for (index, kernel) in kernels.backward.iter().enumerate() {
        let of = (sizes, begins, index > 0);
        kernels.launch(gpu, (kernel, out.dtype), of, kernels.rows[1], args)?;
    }
    Ok(())
}
