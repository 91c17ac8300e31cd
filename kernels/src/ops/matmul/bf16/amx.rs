//! Intel's AMX, by `asm!`: its intrinsics are not stable in Rust.

use std::arch::asm;

use super::kernels::{PairKernel, TILE_MAX, store_tile};
use super::pack::{Form, TILE_ALONG};

/// Lines of a tile, and its bytes a line.
const LINES: usize = 16;
const LINE_BYTES: usize = 64;

/// What `ldtilecfg` reads: eight tiles of 16 lines of 64 bytes.
#[repr(C, align(64))]
struct Configuration([u8; 64]);

static CONFIGURATION: Configuration = {
    let mut bytes = [0; 64];
    bytes[0] = 1;
    let mut tile = 0;
    while tile < 8 {
        bytes[16 + 2 * tile] = LINE_BYTES as u8;
        bytes[48 + tile] = LINES as u8;
        tile += 1;
    }
    Configuration(bytes)
};

/// Runs `body` with tiles, and releases them.
///
/// # Safety
/// The processor has AMX, and this process may use it.
pub(super) unsafe fn with_tiles<R>(body: impl FnOnce() -> R) -> R {
    struct Release;
    impl Drop for Release {
        fn drop(&mut self) {
            // SAFETY: this thread has tiles.
            unsafe { asm!("tilerelease", options(nostack, nomem)) };
        }
    }
    // SAFETY: the caller's promise; it reads 64 bytes.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const CONFIGURATION, options(nostack, readonly)) };
    let _release = Release;
    body()
}

/// `tdpbf16ps` on 2 × 2 tiles of sums.
pub(super) struct Tiles;

impl PairKernel for Tiles {
    const ROWS: usize = 2 * LINES;
    const COLUMNS: usize = 2 * LINES;
    const ROWS_AT_ONCE: usize = 64;
    const LEFT: Form = Form::Tiles;
    const RIGHT: Form = Form::TilePairs;

    unsafe fn run(
        along: usize,
        a: *const f32,
        b: *const f32,
        out: *mut f32,
        stride: usize,
        scales: (f32, f32),
    ) {
        let steps = along.div_ceil(TILE_ALONG);
        let mut sums = [0f32; TILE_MAX];
        if steps > 0 {
            // SAFETY: the caller has tiles. Each step reads 2 KiB of each panel: of `a` two tiles
            // one after another, of `b` two beside each other. Sums have 32 lines of 128 bytes.
            unsafe {
                asm!(
                    "tilezero tmm0; tilezero tmm1; tilezero tmm2; tilezero tmm3",
                    "2: tileloadd tmm4, [{a} + {line}]",
                    "tileloadd tmm6, [{b} + {wide}]; tileloadd tmm7, [{b} + {wide} + 64]",
                    "tdpbf16ps tmm0, tmm4, tmm6; tileloadd tmm5, [{a} + {line} + 1024]",
                    "tdpbf16ps tmm1, tmm4, tmm7; tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    "add {a}, 2048; add {b}, 2048; dec {steps}; jnz 2b",
                    "tilestored [{c} + {wide}], tmm0; tilestored [{c} + {wide} + 64], tmm1",
                    "tilestored [{below} + {wide}], tmm2; tilestored [{below} + {wide} + 64], tmm3",
                    a = inout(reg) a => _,
                    b = inout(reg) b => _,
                    steps = inout(reg) steps => _,
                    c = in(reg) sums.as_mut_ptr(),
                    below = in(reg) sums[LINES * 2 * LINES..].as_mut_ptr(),
                    line = in(reg) LINE_BYTES,
                    wide = in(reg) 2 * LINE_BYTES,
                    options(nostack)
                );
            }
        }
        // SAFETY: by the caller's promise.
        unsafe { store_tile(&sums, Self::COLUMNS, out, stride, scales) };
    }
}
