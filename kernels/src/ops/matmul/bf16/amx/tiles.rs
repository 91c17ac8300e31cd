//! The processor's tiles: their form in memory, and the instructions that multiply them.

use std::arch::asm;

/// Lines of a tile, and elements of a line.
pub(super) const LINES: usize = 16;
pub(super) const ALONG: usize = 32;

/// A tile of 16 lines with 32 elements each, or of 16 pairs of elements along k with 16 lines each.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct TileBytes(pub(super) [u32; LINES * LINES]);

/// How to multiply tiles.
pub(crate) trait TileUnit {
    /// Runs `body` with tiles.
    ///
    /// # Safety
    /// The processor has the instructions, and this process may use them.
    unsafe fn with_tiles(body: impl FnOnce());
    /// `out = a·b`, or added to `out` unless `is_first`: 32 × 32 sums in rows `stride` apart. Of
    /// `PARTS` 2 each step adds three products, in the order of `split.rs`.
    ///
    /// # Safety
    /// Within `with_tiles`; `a` and `b` are panels of `steps` pairs of tiles of each part, and
    /// `out` is writable.
    unsafe fn multiply<const PARTS: usize>(
        is_first: bool,
        steps: usize,
        a: *const TileBytes,
        b: *const TileBytes,
        out: *mut f32,
        stride: usize,
    );
}

/// `tdpbf16ps`.
pub(crate) struct Amx;

/// What `ldtilecfg` reads: eight tiles of 16 lines of 64 bytes.
#[repr(C, align(64))]
struct Configuration([u8; 64]);

static CONFIGURATION: Configuration = {
    let mut bytes = [0; 64];
    bytes[0] = 1;
    let mut tile = 0;
    while tile < 8 {
        bytes[16 + 2 * tile] = 64;
        bytes[48 + tile] = LINES as u8;
        tile += 1;
    }
    Configuration(bytes)
};

impl TileUnit for Amx {
    unsafe fn with_tiles(body: impl FnOnce()) {
        /// Releases the tiles, by return or by panic.
        struct Release;
        impl Drop for Release {
            fn drop(&mut self) {
                // SAFETY: this thread has tiles.
                unsafe { asm!("tilerelease", options(nostack, nomem)) };
            }
        }
        let configuration = &raw const CONFIGURATION;
        // SAFETY: the caller's promise; it reads 64 bytes.
        unsafe { asm!("ldtilecfg [{}]", in(reg) configuration, options(nostack, readonly)) };
        let _release = Release;
        body();
    }

    #[inline(always)]
    unsafe fn multiply<const PARTS: usize>(
        is_first: bool,
        steps: usize,
        a: *const TileBytes,
        b: *const TileBytes,
        out: *mut f32,
        stride: usize,
    ) {
        macro_rules! multiply {
            ($($step:literal),*) => {
                // Columns are read once for each panel of rows, past the first cache.
                // SAFETY: the caller has tiles. Each step reads the tiles of each panel; 32 rows of
                // 128 bytes are read, unless they are the first, and written.
                unsafe {
                    asm!(
                        "test {is_first:e}, {is_first:e}; jnz 4f",
                        "tileloadd tmm0, [{c} + {stride}]; tileloadd tmm1, [{c} + {stride} + 64]",
                        "tileloadd tmm2, [{d} + {stride}]; tileloadd tmm3, [{d} + {stride} + 64]",
                        "jmp 2f",
                        "4: tilezero tmm0; tilezero tmm1; tilezero tmm2; tilezero tmm3",
                        "test {steps}, {steps}; jz 3f",
                        "2:",
                        $($step,)*
                        "add {a}, {bytes}; add {b}, {bytes}; dec {steps}; jnz 2b",
                        "3: tilestored [{c} + {stride}], tmm0",
                        "tilestored [{c} + {stride} + 64], tmm1",
                        "tilestored [{d} + {stride}], tmm2",
                        "tilestored [{d} + {stride} + 64], tmm3",
                        is_first = in(reg) u32::from(is_first),
                        a = inout(reg) a => _,
                        b = inout(reg) b => _,
                        steps = inout(reg) steps => _,
                        c = in(reg) out,
                        d = in(reg) out.add(LINES * stride),
                        line = in(reg) 64usize,
                        stride = in(reg) 4 * stride,
                        bytes = const PARTS * 2048,
                        options(nostack)
                    )
                }
            };
        }
        if PARTS == 1 {
            multiply!(
                "tileloadd tmm4, [{a} + {line}]; tileloaddt1 tmm6, [{b} + {line}]",
                "tdpbf16ps tmm0, tmm4, tmm6; tileloaddt1 tmm7, [{b} + {line} + 1024]",
                "tdpbf16ps tmm1, tmm4, tmm7; tileloadd tmm5, [{a} + {line} + 1024]",
                "tdpbf16ps tmm2, tmm5, tmm6; tdpbf16ps tmm3, tmm5, tmm7"
            );
        } else {
            multiply!(
                "tileloadd tmm4, [{a} + {line}]; tileloaddt1 tmm6, [{b} + {line} + 2048]",
                "tdpbf16ps tmm0, tmm4, tmm6; tileloaddt1 tmm7, [{b} + {line} + 3072]",
                "tdpbf16ps tmm1, tmm4, tmm7; tileloadd tmm5, [{a} + {line} + 1024]",
                "tdpbf16ps tmm2, tmm5, tmm6; tileloaddt1 tmm6, [{b} + {line}]",
                "tdpbf16ps tmm3, tmm5, tmm7; tileloaddt1 tmm7, [{b} + {line} + 1024]",
                "tdpbf16ps tmm0, tmm4, tmm6; tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm4, [{a} + {line} + 2048]",
                "tdpbf16ps tmm2, tmm5, tmm6; tdpbf16ps tmm3, tmm5, tmm7",
                "tileloadd tmm5, [{a} + {line} + 3072]",
                "tdpbf16ps tmm0, tmm4, tmm6; tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6; tdpbf16ps tmm3, tmm5, tmm7"
            );
        }
    }
}
