//! The meaning of CUDA C++: values, shared memory, warps, atomics, vectors.

use super::{Ground, library, library_with, shot};
use crate::nvrtc::Program;

#[test]
fn saxpy_computes_without_contraction() {
    let code = library(
        "extern \"C\" __global__ void saxpy(float a, const float* x, float* y, int n) {\n\
           int i = blockIdx.x * blockDim.x + threadIdx.x;\n\
           if (i < n) y[i] = a * x[i] + y[i];\n\
         }\n",
    );
    let mut ground = Ground::default();
    let x: Vec<f32> = (0..1000).map(|i| 1.0 + i as f32 * 1e-3).collect();
    let y: Vec<f32> = (0..1000).map(|i| -(i as f32) / 7.0).collect();
    let (dx, dy) = (ground.upload(&x), ground.upload(&y));
    let a = 1.1_f32;
    shot(&code, "saxpy", 4, 256, &[a.to_bits().into(), dx, dy, 1000]).expect(&ground);
    let expected: Vec<f32> = x.iter().zip(&y).map(|(x, y)| a * x + y).collect();
    assert_eq!(ground.download::<f32>(dy, 1000), expected);
}

const REDUCTIONS: &str = r#"
__device__ float warp_sum(float v) {
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_down_sync(0xffffffffu, v, offset);
  return v;
}
template <class T> __device__ T block_sum(T v) {
  static __shared__ T parts[32];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  v = warp_sum(v);
  if (lane == 0) parts[warp] = v;
  __syncthreads();
  v = threadIdx.x < blockDim.x / 32 ? parts[lane] : T(0);
  if (warp == 0) v = warp_sum(v);
  return v;
}
extern "C" __global__ void __launch_bounds__(256) sum_static(const float* x, float* out, int n) {
  float v = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) v += x[blockIdx.x * n + i];
  v = block_sum(v);
  if (threadIdx.x == 0) out[blockIdx.x] = v;
}
extern "C" __global__ void sum_dynamic(const float* x, float* out) {
  extern __shared__ __align__(16) float tile[];
  tile[threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x];
  __syncthreads();
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) tile[threadIdx.x] += tile[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) out[blockIdx.x] = tile[0];
}
"#;

#[test]
fn block_reductions_are_right_in_every_order() {
    let code = library(REDUCTIONS);
    let mut ground = Ground::default();
    // Integers: every order of additions gives the same float.
    let x: Vec<f32> = (0..4 * 256).map(|i| (i % 97) as f32).collect();
    let expected: Vec<f32> = x.chunks(256).map(|block| block.iter().sum()).collect();
    let input = ground.upload(&x);
    for seed in 0..20 {
        let output = ground.upload(&[0_f32; 4]);
        shot(&code, "sum_static", 4, 256, &[input, output, 256])
            .seed(seed)
            .expect(&ground);
        assert_eq!(
            ground.download::<f32>(output, 4),
            expected,
            "static, seed {seed}"
        );
        let output = ground.upload(&[0_f32; 4]);
        shot(&code, "sum_dynamic", 4, 256, &[input, output])
            .dynamic(1024)
            .seed(seed)
            .expect(&ground);
        assert_eq!(
            ground.download::<f32>(output, 4),
            expected,
            "dynamic, seed {seed}"
        );
    }
    let kernel = |name| &code.kernels[code.find(name).unwrap()];
    assert_eq!(
        (
            kernel("sum_static").static_shared_bytes(),
            kernel("sum_static").threads_max
        ),
        (128, 256)
    );
    assert_eq!(
        (
            kernel("sum_dynamic").static_shared_bytes(),
            kernel("sum_dynamic").threads_max
        ),
        (0, 1024)
    );
}

#[test]
fn warp_functions_move_what_cuda_says() {
    let code = library(
        r#"extern "C" __global__ void warps(int* out) {
             int lane = threadIdx.x;
             int* mine = out + lane * 12;
             mine[0] = __shfl_sync(0xffffffffu, lane * 10, 5, 8);
             mine[1] = __shfl_up_sync(0xffffffffu, lane, 3);
             mine[2] = __shfl_down_sync(0xffffffffu, lane, 3, 16);
             mine[3] = __shfl_xor_sync(0xffffffffu, lane, 1);
             mine[4] = __ballot_sync(0xffffffffu, lane % 3 == 0);
             mine[5] = __any_sync(0xffffffffu, lane == 40) * 2 + __all_sync(0xffffffffu, lane < 32);
             mine[6] = __reduce_add_sync(0xffffffffu, lane);
             mine[7] = (int)__shfl_sync(0xffffffffu, 1ll << (lane + 20), 11) + (int)(__shfl_sync(0xffffffffu, 1.5 * lane, 4));
             mine[8] = __popc(__match_any_sync(0xffffffffu, lane / 5));
             // Half of a warp alone.
             if (lane < 16) mine[9] = __shfl_sync(0x0000ffffu, lane, 15); else mine[9] = __ballot_sync(0xffff0000u, 1);
             mine[10] = __syncthreads_count(lane < 7) + 100 * __syncthreads_or(lane == 3) + 1000 * __syncthreads_and(lane < 9);
             mine[11] = __reduce_max_sync(0xffffffffu, -lane);
           }"#,
    );
    let mut ground = Ground::default();
    let out = ground.allocate(32 * 12 * 4);
    for seed in 0..6 {
        shot(&code, "warps", 1, 32, &[out])
            .seed(seed)
            .expect(&ground);
        let got = ground.download::<i32>(out, 32 * 12);
        let multiples: i32 = (0..32)
            .filter(|lane| lane % 3 == 0)
            .map(|lane| 1_i32 << lane)
            .sum();
        for lane in 0..32 {
            let expected = [
                (lane / 8 * 8 + 5) * 10,
                if lane < 3 { lane } else { lane - 3 },
                if lane % 16 + 3 > 15 { lane } else { lane + 3 },
                lane ^ 1,
                multiples,
                1,
                496,
                (1_i64 << 31) as i32 + 6,
                if lane / 5 == 6 { 2 } else { 5 },
                if lane < 16 {
                    15
                } else {
                    0xffff_0000_u32 as i32
                },
                107,
                0,
            ];
            assert_eq!(
                got[lane as usize * 12..][..12],
                expected,
                "lane {lane}, seed {seed}"
            );
        }
    }
}

#[test]
fn atomics_lose_nothing_and_vectors_are_one_access() {
    let code = library(
        r#"extern "C" __global__ void count(int* i, unsigned long long* l, float* f, double* d, unsigned* u, const float4* x, float4* y) {
             atomicAdd(i, 2); atomicAdd(l, 3ull); atomicAdd(f, 1.0f); atomicAdd(d, 0.5);
             atomicMax(u, threadIdx.x); atomicOr(u + 1, 1u << (threadIdx.x % 32)); atomicMin(i + 1, -(int)threadIdx.x);
             atomicCAS(u + 2, 0u, 7u); atomicExch(u + 3, 9u); atomicInc(u + 4, 9u);
             unsigned t = blockIdx.x * blockDim.x + threadIdx.x;
             float4 v = x[t]; v.x += v.w; y[t] = make_float4(v.w, v.z, v.y, v.x);
           }"#,
    );
    let mut ground = Ground::default();
    let (i, l) = (ground.upload(&[0_i32, 5]), ground.upload(&[0_u64]));
    let (f, d, u) = (
        ground.upload(&[0_f32]),
        ground.upload(&[0_f64]),
        ground.upload(&[0_u32; 5]),
    );
    let values: Vec<f32> = (0..512).map(|value| value as f32).collect();
    let (x, y) = (ground.upload(&values), ground.allocate(2048));
    let touched = shot(&code, "count", 2, 64, &[i, l, f, d, u, x, y]).expect(&ground);
    assert_eq!(ground.download::<i32>(i, 2), [256, -63]);
    assert_eq!(ground.download::<u64>(l, 1), [384]);
    assert_eq!(
        (
            ground.download::<f32>(f, 1)[0],
            ground.download::<f64>(d, 1)[0]
        ),
        (128.0, 64.0)
    );
    assert_eq!(ground.download::<u32>(u, 5), [63, u32::MAX, 7, 9, 8]);
    assert_eq!(
        ground.download::<f32>(y, 8),
        [3.0, 2.0, 1.0, 3.0, 7.0, 6.0, 5.0, 11.0]
    );
    assert_eq!(
        (touched.reads, touched.writes),
        (vec![x..x + 2048], vec![y..y + 2048])
    );
    let mut atomics = touched.atomics;
    atomics.sort_by_key(|range| range.start);
    let mut expected = vec![i..i + 8, l..l + 8, f..f + 4, d..d + 8, u..u + 20];
    expected.sort_by_key(|range| range.start);
    assert_eq!(atomics, expected);
}

#[test]
fn sixteen_bit_floats_round_as_the_crate_half_does() {
    let code = library(
        r#"#include <cuda_bf16.h>
           #include <cuda_fp16.h>
           extern "C" __global__ void convert(const float* x, __half* h, __nv_bfloat16* b, float* back) {
             int i = threadIdx.x;
             h[i] = __float2half_rn(x[i]); b[i] = __float2bfloat16(x[i]);
             back[2 * i] = __half2float(h[i]); back[2 * i + 1] = __bfloat162float(b[i]);
           }
           extern "C" __global__ void multiply_add(const __half* h, const __nv_bfloat16* b, __half* hs, __nv_bfloat16* bs) {
             int i = threadIdx.x;
             hs[i] = __hfma(h[i], h[i + 1], h[i + 2]); bs[i] = __hfma(b[i], b[i + 1], b[i + 2]);
           }"#,
    );
    let mut ground = Ground::default();
    let mut x = vec![
        0.0,
        -0.0,
        1.0,
        65504.0,
        65519.9,
        65520.0,
        1e-8,
        2.98e-8,
        2.99e-8,
        6e-5,
        f32::INFINITY,
        -1e38,
        3e-41,
        0.1,
    ];
    x.extend(
        (0..500_u32)
            .map(|i| f32::from_bits(i.wrapping_mul(0x9e37_79b9)))
            .filter(|value| value.is_finite()),
    );
    let count = x.len().min(512);
    x.truncate(count);
    let input = ground.upload(&x);
    let (h, b, back) = (
        ground.allocate(count as u64 * 2),
        ground.allocate(count as u64 * 2),
        ground.allocate(count as u64 * 8),
    );
    shot(&code, "convert", 1, count as u32, &[input, h, b, back]).expect(&ground);
    let (halves, bfloats) = (
        ground.download::<u16>(h, count),
        ground.download::<u16>(b, count),
    );
    let back = ground.download::<f32>(back, count * 2);
    for (i, value) in x.iter().enumerate() {
        assert_eq!(
            halves[i],
            half::f16::from_f32(*value).to_bits(),
            "{value:e}"
        );
        assert_eq!(
            bfloats[i],
            half::bf16::from_f32(*value).to_bits(),
            "{value:e}"
        );
        assert_eq!(
            back[2 * i].to_bits(),
            half::f16::from_bits(halves[i]).to_f32().to_bits()
        );
        assert_eq!(
            back[2 * i + 1].to_bits(),
            half::bf16::from_bits(bfloats[i]).to_f32().to_bits()
        );
    }
    let b = ground.upload(
        &[2_f32.powi(-20), 2_f32.powi(-20), 1.0].map(|v| half::bf16::from_f32(v).to_bits()),
    );
    let h = ground
        .upload(&[2_f32.powi(-12), 2_f32.powi(-12), 1.0].map(|v| half::f16::from_f32(v).to_bits()));
    let (hs, bs) = (ground.allocate(2), ground.allocate(2));
    shot(&code, "multiply_add", 1, 1, &[h, b, hs, bs]).expect(&ground);
    assert_eq!(
        (
            ground.download::<u16>(hs, 1)[0],
            ground.download::<u16>(bs, 1)[0]
        ),
        (0x3c00, 0x3f80)
    );
}

#[test]
fn kernels_made_by_macros_and_templates_are_exported() {
    let mut program = Program {
        name: "made.cu".to_owned(),
        source: "#include \"common.cuh\"\nMAKE(first, +)\nMAKE(second, *)\n\
                 namespace ops { template <class T> __global__ void fill(T* x, T v) { x[threadIdx.x] = v; }\n\
                 constexpr int LIMIT = 96;\n\
                 extern \"C\" __global__ void __launch_bounds__(LIMIT) inside(int* x) { x[threadIdx.x] = WIDTH; } }\n\
                 __device__ int helper() { return 3; }\n"
            .to_owned(),
        headers: vec![(
            "common.cuh".to_owned(),
            "#pragma once\n#define WIDTH 4\n#define MAKE(NAME, OP) extern \"C\" __global__ void NAME(int* x) \
             { x[threadIdx.x] = x[threadIdx.x] OP 5; }\n"
                .to_owned(),
        )],
        expressions: vec!["ops::fill<float>".to_owned()],
    };
    let code = library_with(&program);
    let mut ground = Ground::default();
    let x = ground.upload(&[1_i32, 2, 3]);
    shot(&code, "first", 1, 3, &[x]).expect(&ground);
    shot(&code, "second", 1, 3, &[x]).expect(&ground);
    assert_eq!(ground.download::<i32>(x, 3), [30, 35, 40]);
    shot(&code, "inside", 1, 3, &[x]).expect(&ground);
    assert_eq!(ground.download::<i32>(x, 3), [4, 4, 4]);
    shot(
        &code,
        "simcuda_expression_0",
        1,
        3,
        &[x, 1.5_f32.to_bits().into()],
    )
    .expect(&ground);
    assert_eq!(ground.download::<f32>(x, 3), [1.5; 3]);
    assert_eq!((code.kernels.len(), code.find("helper")), (4, None));
    assert_eq!(code.kernels[code.find("inside").unwrap()].threads_max, 96);
    program.expressions.clear();
    assert_eq!(
        library_with(&program).kernels.len(),
        3,
        "a template that nobody names is not a kernel"
    );
}

#[test]
fn shared_memory_is_understood_in_all_its_forms() {
    let code = library(
        r#"__shared__ int at_file_scope[4];
           template <class T, int N> struct Pair { T v[N]; };
           template <int N> __device__ int of_template(int x) { __shared__ int slot; if (threadIdx.x == 0) slot = x * N; __syncthreads(); return slot; }
           extern "C" __global__ void forms(int* out) {
             __shared__ float a[32], b[2][8]; static __shared__ __align__(16) double c;
             __shared__ Pair<int, 3> pair;
             __shared__ struct { int first, second; } both;
             volatile __shared__ int flag;
             __shared__ alignas(8) unsigned char bytes[5];
             extern __shared__ __align__(16) unsigned char raw[];
             float2* dynamic = reinterpret_cast<float2*>(raw);
             if (threadIdx.x == 0) {
               a[31] = 1; b[1][7] = 2; c = 3; pair.v[2] = 4; both.second = 5; flag = 6; bytes[4] = 7; at_file_scope[3] = 8;
               dynamic[3] = make_float2(9, 10);
             }
             __syncthreads();
             auto sum = [&] { return a[31] + b[1][7] + c + pair.v[2] + both.second + flag + bytes[4] + at_file_scope[3] + dynamic[3].y; };
             out[threadIdx.x] = (int)sum() + of_template<100>(1) + of_template<1000>(1);
             if (threadIdx.x == 1) out[1] = sizeof(a) + sizeof(b);
           }
           extern "C" __global__ void rows(float* out) {
             extern __shared__ float rows[][4];
             rows[threadIdx.x][threadIdx.x] = threadIdx.x;
             __syncthreads();
             out[threadIdx.x] = rows[3 - threadIdx.x][3 - threadIdx.x];
           }"#,
    );
    let mut ground = Ground::default();
    let out = ground.allocate(16);
    for seed in 0..6 {
        shot(&code, "forms", 3, 4, &[out])
            .dynamic(64)
            .seed(seed)
            .run(&ground)
            .expect_err("blocks write the same");
        shot(&code, "forms", 1, 4, &[out])
            .dynamic(64)
            .seed(seed)
            .expect(&ground);
        assert_eq!(ground.download::<i32>(out, 4), [1146, 192, 1146, 1146]);
        shot(&code, "rows", 1, 4, &[out])
            .dynamic(64)
            .seed(seed)
            .expect(&ground);
        assert_eq!(ground.download::<f32>(out, 4), [3.0, 2.0, 1.0, 0.0]);
    }
    // 32 floats, 16 floats, 8, 12, 8, 4 and 5 bytes, 16 at file scope, and an int for each instance
    // of the template.
    assert_eq!(
        code.kernels[code.find("forms").unwrap()].static_shared_bytes(),
        128 + 64 + 8 + 12 + 8 + 4 + 5 + 16 + 8
    );
    let beyond = ground.allocate(16);
    let failure = shot(&code, "rows", 1, 4, &[beyond])
        .dynamic(48)
        .run(&ground)
        .expect_err("past the dynamic memory");
    assert_eq!(failure.code.0, 700, "{}", failure.message);
}
