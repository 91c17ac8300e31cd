//! Tests of matmuls of bf16: every kernel has the bits of the order that it says, spelled out.

#[cfg(target_arch = "x86_64")]
mod tiles;

#[cfg(target_arch = "x86_64")]
use self::tiles::TilesInF32;
use super::flush::flushed;
use super::product::{SPLIT_ALONG_MAX, parts};
use super::*;
use crate::dtype::{bf16_nearest, bf16_wide};
use crate::launch::{F32Math, with_f32_math};
use crate::ops::matmul::TileKernel;
use crate::ops::testing::random_f32;

/// `a·b + sum`, as the instructions compute it. It is 0 where it would be below the smallest normal
/// number after rounding to 24 bits: half a place more than that is rounded up. Near there f64 is
/// exact.
fn multiply_add(a: f32, b: f32, sum: f32) -> f32 {
    let exact = f64::from(a).mul_add(f64::from(b), f64::from(sum));
    if exact.abs() < f64::from(f32::MIN_POSITIVE) * (1.0 - 2f64.powi(-25)) {
        return 0f32.copysign(exact as f32);
    }
    a.mul_add(b, sum)
}

/// The sum of products of a block along k, in an order.
fn plain_sum(order: Bf16Order, a: &[bf16], b: &[bf16]) -> f32 {
    let at = |x: &[bf16], index: usize| x.get(index).copied().unwrap_or(bf16::ZERO);
    let number = |x: &[bf16], index| flushed(bf16_wide(at(x, index)));
    let add = |sum, index| multiply_add(number(a, index), number(b, index), sum);
    match order {
        Bf16Order::Dpbf16 => {
            let pairs = (0..a.len()).step_by(2);
            pairs.fold(0.0, |sum, first| add(add(sum, first + 1), first))
        }
        Bf16Order::Amx => (0..a.len()).step_by(32).fold(0.0, |sum, first| {
            let half = |odd| (0..16).fold(0.0, |sum, pair| add(sum, first + 2 * pair + odd));
            flushed(sum + flushed(half(0) + half(1)))
        }),
    }
}

/// Awkward shapes around tiles, blocks and pieces: (m, n, k).
const SHAPES: [(usize, usize, usize); 15] = [
    (128, 100, 784),
    (1, 1000, 700),
    (1, 33, 31),
    (1, 90, 64),
    (1, 600, 9050),
    (65, 65, 1025),
    (64, 800, 64),
    (161, 3, 300),
    (3, 161, 9000),
    (20, 20, 2),
    (97, 193, 51),
    (13, 40, 4097),
    (5, 7, 1),
    (4, 3, 0),
    (32, 32, 32),
];
const LAYOUTS: [(bool, bool); 4] = [(false, false), (false, true), (true, false), (true, true)];
const ORDERS: [Bf16Order; 2] = [Bf16Order::Amx, Bf16Order::Dpbf16];

fn random(count: usize, seed: u64) -> Vec<bf16> {
    random_f32(count, seed)
        .into_iter()
        .map(bf16_nearest)
        .collect()
}

struct Case {
    shape: (usize, usize, usize),
    layout: (bool, bool),
    a: Vec<bf16>,
    b: Vec<bf16>,
    existing: Vec<f32>,
}

impl Case {
    fn new(shape: (usize, usize, usize), layout: (bool, bool)) -> Case {
        let (m, n, k) = shape;
        Case {
            shape,
            layout,
            a: random(m * k, 1),
            b: random(k * n, 2),
            existing: random_f32(m * n, 3),
        }
    }

    /// The bits of the output in f32, and of that in bf16, after `body`.
    fn run(
        &self,
        order: Bf16Order,
        scales: (f32, f32),
        mut body: impl FnMut(&Product<'_>),
    ) -> (Vec<u32>, Vec<u16>) {
        let (m, n, k) = self.shape;
        let mut wide = self.existing.clone();
        let mut rounded: Vec<bf16> = wide.iter().map(|&x| bf16_nearest(x)).collect();
        for out in [
            Target::F32(wide.as_mut_ptr()),
            Target::Bf16(rounded.as_mut_ptr()),
        ] {
            body(&Product {
                out,
                a: Matrix::new(&self.a, m, k, self.layout.0),
                b: Matrix::new(&self.b, k, n, self.layout.1),
                scales,
                order,
            });
        }
        let bits = wide.iter().map(|value| value.to_bits()).collect();
        (bits, rounded.iter().map(|value| value.to_bits()).collect())
    }

    /// Some elements by the definition of the order: index, bits in f32, and in bf16.
    fn plainly(&self, order: Bf16Order, scales: (f32, f32)) -> Vec<(usize, u32, u16)> {
        let (m, n, k) = self.shape;
        let line = |of: &[bf16], transposed: bool, lines: usize, line: usize| -> Vec<bf16> {
            let at = |along: usize| {
                if transposed {
                    along * lines + line
                } else {
                    line * k + along
                }
            };
            (0..k).map(|along| of[at(along)]).collect()
        };
        let blocks = k.div_ceil(ALONG_MAX).max(1);
        let element = |index: usize| {
            let a = line(&self.a, self.layout.0, m, index / n);
            let b = line(&self.b, !self.layout.1, n, index % n);
            let value = |existing: f32| {
                (0..blocks).fold(existing, |out, block| {
                    let along = threads::cut(k, ALONG_GRAIN, blocks, block);
                    let sum = plain_sum(order, &a[along.clone()], &b[along]);
                    let sum = multiply_add(scales.0, sum, -0.0);
                    match if block == 0 { scales.1 } else { 1.0 } {
                        0.0 => sum,
                        scale => multiply_add(scale, flushed(out), sum),
                    }
                })
            };
            let existing = self.existing[index];
            let rounded = bf16_nearest(value(bf16_wide(bf16_nearest(existing))));
            (index, value(existing).to_bits(), rounded.to_bits())
        };
        (0..m * n)
            .step_by((m * n / 100).max(1))
            .map(element)
            .collect()
    }
}

/// Each shape with each layout, and with each order and scales once.
fn cases() -> impl Iterator<Item = (usize, (usize, usize, usize), (bool, bool))> {
    let of_shape = |(number, shape)| {
        let of_layout = move |(layout, which)| ((number + layout) % 4, shape, which);
        LAYOUTS.into_iter().enumerate().map(of_layout)
    };
    SHAPES.into_iter().enumerate().flat_map(of_shape)
}

#[test]
fn each_element_is_added_in_its_order_for_any_number_of_threads() {
    for (number, shape, layout) in cases() {
        let (order, scales) = (ORDERS[number / 2], [(1.0, 0.0), (0.5, 2.0)][number % 2]);
        let case = Case::new(shape, layout);
        let alone = case.run(order, scales, |work| in_pieces(work, 1, &AsIs));
        let what = format!("{shape:?} {layout:?} {order:?}");
        for (index, wide, rounded) in case.plainly(order, scales) {
            let got = (alone.0[index], alone.1[index]);
            assert_eq!(got, (wide, rounded), "{what}, element {index}");
        }
        for threads in [2, 3, 7] {
            let pieces = case.run(order, scales, |work| in_pieces(work, threads, &AsIs));
            assert!(pieces == alone, "{what} on {threads}");
        }
    }
}

/// Runs a piece with one kernel.
type Piece = unsafe fn(&Product<'_>, Range<usize>, Range<usize>, &AsIs, &mut PieceBuffers);

/// The kernels that this processor can run, by name and order.
fn kernels() -> Vec<(&'static str, Bf16Order, Piece)> {
    use Bf16Order::{Amx, Dpbf16};
    #[cfg_attr(
        not(target_arch = "x86_64"),
        allow(unused_mut, reason = "one kernel there")
    )]
    let mut kernels: Vec<(&str, Bf16Order, Piece)> = vec![
        ("plain", Dpbf16, piece::<Emulated<Flushed, false>>),
        ("plain", Amx, piece::<Emulated<Flushed, true>>),
    ];
    #[cfg(target_arch = "x86_64")]
    {
        if simd::level() >= Level::Avx2 {
            kernels.push(("AVX2", Dpbf16, piece::<Emulated<Avx2F32, false>>));
            kernels.push(("AVX2", Amx, piece::<Emulated<Avx2F32, true>>));
        }
        if simd::level() >= Level::Avx512 {
            kernels.push(("AVX-512", Dpbf16, piece::<Emulated<Avx512F32, false>>));
            kernels.push(("AVX-512", Amx, piece::<Emulated<Avx512F32, true>>));
        }
        if simd::bf16_unit() >= Bf16Unit::Dpbf16 {
            kernels.push(("vdpbf16ps", Dpbf16, piece::<kernels::Dpbf16>));
        }
        if simd::level() >= Level::Avx512 {
            kernels.push(("tiles in f32", Amx, |work, _, _, finish, _| {
                // SAFETY: the caller's promises; it has AVX-512.
                unsafe { amx::multiply::<TilesInF32, _>(work, 2, finish) };
            }));
        }
        if simd::bf16_unit() >= Bf16Unit::Amx {
            kernels.push(("tdpbf16ps", Amx, |work, _, _, finish, _| {
                // SAFETY: the caller's promises; this process has tiles.
                unsafe { amx::multiply::<amx::Amx, _>(work, 1, finish) };
            }));
        }
    }
    for (name, order, _) in &kernels {
        eprintln!("the order {order:?} by {name}");
    }
    kernels
}

/// Numbers of a kind: 0 with products near the smallest normal number, 1 any bits.
fn extreme(count: usize, kind: u32, seed: u64) -> Vec<bf16> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let near = ((state >> 63) as u16) << 15
            | (44 + ((state >> 20) % 40) as u16) << 7
            | (state as u16 & 0x7f);
        bf16::from_bits(if kind == 0 {
            near
        } else {
            (state >> 48) as u16
        })
    };
    (0..count).map(|_| next()).collect()
}

#[test]
fn every_kernel_has_the_bits_of_its_order_also_of_extremes() {
    let bits = |out: &[u32]| -> Vec<Option<u32>> {
        // A NaN is as good as another.
        out.iter()
            .map(|&x| (!f32::from_bits(x).is_nan()).then_some(x))
            .collect()
    };
    // More rows than a block of AMX has, several panels of columns, and more than 16 steps along k.
    for (shape, kind) in [(65, 130, 545), (13, 70, 30), (33, 31, 1)]
        .into_iter()
        .flat_map(|shape| [0, 1, 2].map(|kind| (shape, kind)))
    {
        for layout in LAYOUTS {
            let mut case = Case::new(shape, layout);
            if kind < 2 {
                case.a = extreme(case.a.len(), kind, 1);
                case.b = extreme(case.b.len(), kind, 2);
                case.existing.fill(if kind == 0 { 1e-38 } else { 1.0 });
            }
            // With other factors, products become subnormal where they are scaled.
            let scales = if kind == 0 { (0.125, 0.5) } else { (1.0, 1.0) };
            let of = |order| case.run(order, scales, |work| in_pieces(work, 1, &AsIs));
            let expected = ORDERS.map(of);
            for (name, order, piece) in kernels() {
                let expected = &expected[usize::from(order == ORDERS[1])];
                let mut rooms = PieceBuffers::default();
                // SAFETY: the whole output, on this thread alone, with a kernel that exists here.
                let got = case.run(order, scales, |work| unsafe {
                    piece(work, 0..shape.0, 0..shape.1, &AsIs, &mut rooms);
                });
                assert!(
                    bits(&got.0) == bits(&expected.0),
                    "{shape:?} {layout:?} of kind {kind}: {order:?} by {name}"
                );
            }
        }
    }
}

/// Powers of two of either sign.
fn powers(count: usize, powers: &[i32], seed: u64) -> Vec<bf16> {
    let draws = random_f32(count, seed).into_iter().map(f32::to_bits);
    let number = |bits: u32| {
        let sign = if bits >> 8 & 1 == 0 { 1.0 } else { -1.0 };
        bf16_nearest(sign * 2f32.powi(powers[bits as usize % powers.len()]))
    };
    draws.map(number).collect()
}

/// Times 2^`LEAST` they are 2⁻¹²⁶, and a half, a quarter and an eighth of its last place.
const AROUND_LEAST: [i32; 4] = [-63, -87, -88, -89];
const LEAST: i32 = -63;

#[test]
fn sums_just_below_the_smallest_normal_number_are_flushed_after_rounding() {
    for scales in [(1.0, 0.0), (0.125, 0.0), (1.0, 0.5), (1.0, 1.0)] {
        let mut case = Case::new((9, 33, 64), (false, false));
        let up = if scales.0 < 1.0 { 3 } else { 0 };
        case.a = powers(9 * 64, &AROUND_LEAST, 4);
        case.b = powers(64 * 33, &[up + LEAST], 5);
        case.existing.fill(f32::MIN_POSITIVE);
        for (name, order, piece) in kernels() {
            let mut rooms = PieceBuffers::default();
            // SAFETY: the whole output, on this thread alone, with a kernel that exists here.
            let got = case.run(order, scales, |work| unsafe {
                piece(work, 0..9, 0..33, &AsIs, &mut rooms);
            });
            let expected = case.plainly(order, scales);
            let of_f32 = expected
                .iter()
                .map(|&(index, wide, _)| (wide, got.0[index]));
            let wrong: Vec<_> = of_f32.filter(|(expected, got)| expected != got).collect();
            assert!(
                wrong.is_empty(),
                "{order:?} by {name}, {scales:?}: {wrong:x?}"
            );
        }
    }
}

#[test]
fn a_tile_flushes_by_itself_where_the_processor_does_not() {
    let steps = 64;
    for of in [AROUND_LEAST.as_slice(), &[-130, -63], &[0, 1]] {
        let numbers = |count, powers_of: &[i32], seed| -> Vec<f32> {
            let drawn = powers(count, powers_of, seed);
            drawn.into_iter().map(bf16_wide).collect()
        };
        let (a, b) = (numbers(4 * steps, of, 6), numbers(8 * steps, &[LEAST], 7));
        let mut out = [0f32; 32];
        // SAFETY: panels of so many steps, and a whole tile. Nothing has changed MXCSR.
        unsafe {
            let (a, out) = ((a.as_ptr(), 0, 0), out.as_mut_ptr());
            Flushed::run::<true>(steps, a, b.as_ptr(), out, 8, (1.0, 0.0));
        }
        for (place, &got) in out.iter().enumerate() {
            let (row, column) = (place / 8, place % 8);
            let expected = (0..steps).fold(0.0, |sum, step| {
                multiply_add(flushed(a[step * 4 + row]), b[step * 8 + column], sum)
            });
            assert_eq!(
                got.to_bits(),
                expected.to_bits(),
                "{of:?}: row {row}, column {column}"
            );
        }
    }
}

/// Numbers that f32 holds and bf16 does not, of many sizes.
fn wide(count: usize, seed: u64) -> Vec<f32> {
    let sizes = (0..count).map(|index| 2f32.powi(index as i32 % 7 - 3));
    let numbers = random_f32(count, seed).into_iter().zip(sizes);
    numbers.map(|(x, size)| x * size).collect()
}

#[test]
fn f32_is_multiplied_by_its_two_parts_with_the_bits_of_the_order() {
    for (number, shape, layout) in cases() {
        let (order, scales) = (ORDERS[number / 2], [(1.0, 0.0), (0.5, 2.0)][number % 2]);
        let (m, n, k) = shape;
        let (a, b, existing) = (wide(m * k, 1), wide(k * n, 2), wide(m * n, 3));
        let run = |body: &dyn Fn(&Product<'_, f32>)| -> Vec<f32> {
            let mut out = existing.clone();
            body(&Product {
                out: Target::F32(out.as_mut_ptr()),
                a: Matrix::new(&a, m, k, layout.0),
                b: Matrix::new(&b, k, n, layout.1),
                scales,
                order,
            });
            out
        };
        let blocks = k.div_ceil(SPLIT_ALONG_MAX).max(1);
        let alone = run(&|work| split::in_copies(work, 1, &AsIs));
        for index in (0..m * n).step_by((m * n / 20).max(1)) {
            let line = |of: &[f32], transposed: bool, lines: usize, line: usize| -> Vec<f32> {
                let of_line = (0..k).map(|along| {
                    if transposed {
                        of[along * lines + line]
                    } else {
                        of[line * k + along]
                    }
                });
                of_line.collect()
            };
            let (row, column) = (
                line(&a, layout.0, m, index / n),
                line(&b, !layout.1, n, index % n),
            );
            let spread = |line: &[f32], order: [usize; 3]| -> Vec<bf16> {
                let chunks = line.chunks(ALONG_GRAIN);
                let spread = chunks.flat_map(|chunk| {
                    order.map(|part| {
                        let mut of_part = [bf16::ZERO; ALONG_GRAIN];
                        for (to, &x) in of_part.iter_mut().zip(chunk) {
                            *to = parts(x)[part];
                        }
                        of_part
                    })
                });
                spread.flatten().collect()
            };
            let expected = (0..blocks).fold(existing[index], |out, block| {
                let along = threads::cut(k, ALONG_GRAIN, blocks, block);
                let row = spread(&row[along.clone()], [0, 0, 1]);
                let column = spread(&column[along], [1, 0, 0]);
                let sum = scales.0 * plain_sum(order, &row, &column);
                match if block == 0 { scales.1 } else { 1.0 } {
                    0.0 => sum,
                    scale => scale.mul_add(out, sum),
                }
            });
            let what = format!("{shape:?} {layout:?} {order:?}, element {index}");
            assert_eq!(alone[index].to_bits(), expected.to_bits(), "{what}");
            // What is left out of a product is at most 3 · 2⁻¹⁶ of it: two parts leave 2⁻¹⁶ of
            // a number, and low · low is 2⁻¹⁶. Sums of n products round 3n + 3 times, in
            // random directions.
            let of_f64 = |(&a, &b): (&f32, &f32)| f64::from(a) * f64::from(b);
            let products: Vec<f64> = row.iter().zip(&column).map(of_f64).collect();
            let (scale, there) = (f64::from(scales.0), f64::from(scales.1));
            let there = there * f64::from(existing[index]);
            let exact = scale * products.iter().sum::<f64>() + there;
            let sizes = scale * products.iter().map(|x| x.abs()).sum::<f64>() + there.abs();
            let roundings = (3.0 * k as f64 + 3.0).sqrt() * 4.0 * 2f64.powi(-24);
            let bound = sizes * (3.0 * 2f64.powi(-16) + roundings);
            assert!((f64::from(alone[index]) - exact).abs() <= bound, "{what}");
        }
        let same = |name: &str, body: &dyn Fn(&Product<'_, f32>)| {
            assert!(
                run(body) == alone,
                "{shape:?} {layout:?} {order:?} by {name}"
            );
        };
        same("three threads", &|work| {
            split::in_copies(work, 3, &AsIs);
        });
        #[cfg(target_arch = "x86_64")]
        if order == Bf16Order::Amx && simd::level() >= Level::Avx512 {
            same("tiles in f32", &|work| {
                // SAFETY: the whole output; the processor has AVX-512.
                unsafe { amx::multiply::<TilesInF32, _>(work, 2, &AsIs) };
            });
        }
        #[cfg(target_arch = "x86_64")]
        if order == Bf16Order::Amx && simd::bf16_unit() >= Bf16Unit::Amx {
            same("tdpbf16ps", &|work| {
                // SAFETY: as above; this process has tiles.
                unsafe { amx::multiply::<amx::Amx, _>(work, 2, &AsIs) };
            });
        }
    }
}

#[test]
fn matmuls_of_f32_go_by_bf16_where_they_are_asked_to() {
    let (a, b) = (wide(40 * 70, 1), wide(70 * 50, 2));
    let run = |math: F32Math, order: Bf16Order| {
        let mut out = vec![0f32; 40 * 50];
        let (a, b) = (
            Matrix::new(&a, 40, 70, false),
            Matrix::new(&b, 70, 50, false),
        );
        with_f32_math(math, || {
            with_bf16_order(order, || {
                crate::ops::matmul::matmul(&mut out, a, b, 1.0, 0.0, &AsIs);
            });
        });
        out
    };
    let [strict, amx, dpbf16] = [
        (F32Math::Strict, Bf16Order::Amx),
        (F32Math::Tf32, Bf16Order::Amx),
        (F32Math::Tf32, Bf16Order::Dpbf16),
    ]
    .map(|(math, order)| run(math, order));
    assert!(strict != amx && strict != dpbf16 && amx != dpbf16);
    let extremes = |x: f32| {
        let mut out = [0f32];
        let [a, b] = [[x, 1.0], [1.0, 0.5]];
        with_f32_math(F32Math::Tf32, || {
            let (a, b) = (Matrix::new(&a, 1, 2, false), Matrix::new(&b, 2, 1, false));
            crate::ops::matmul::matmul(&mut out, a, b, 1.0, 0.0, &AsIs);
        });
        out[0]
    };
    assert!(
        [f32::NAN, f32::INFINITY, f32::MAX]
            .map(extremes)
            .iter()
            .all(|x| !x.is_finite())
    );
    assert_eq!(extremes(1e-40), 0.5);
}

#[test]
fn a_thread_has_its_own_order_and_gets_the_former_one_back() {
    let native = Bf16Order::native();
    for order in ORDERS {
        with_bf16_order(order, || {
            assert_eq!(bf16_order(), order);
            assert_eq!(std::thread::spawn(bf16_order).join().unwrap(), native);
        });
    }
    assert_eq!(bf16_order(), native);
}
