//! Findings: addresses, alignment, barriers, warps, races inside a launch; and the exact touched
//! ranges.

use super::{Ground, library, shot};
use crate::error::CUresult;
use crate::machine::testing::played;
use crate::work::Touched;

const ILLEGAL: CUresult = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
const MISALIGNED: CUresult = CUresult::CUDA_ERROR_MISALIGNED_ADDRESS;
const FAILED: CUresult = CUresult::CUDA_ERROR_LAUNCH_FAILED;

fn assert_says(message: &str, words: &[&str]) {
    for word in words {
        assert!(message.contains(word), "no {word:?} in: {message}");
    }
}

#[test]
fn only_launches_that_succeed_are_noted() {
    let name = format!("simcuda-launches-{}", std::process::id());
    let file = std::env::temp_dir().join(name);
    let path = file.to_str().expect("the path is UTF-8");
    let test = concat!(module_path!(), "::only_launches_that_succeed_are_noted");
    let ended = played(test, &[("SIMCUDA_KERNELS", path)], || {
        let code = library(
            r#"extern "C" __global__ void inside(int* x) { x[threadIdx.x] = 1; }
               extern "C" __global__ void outside(int* x) { x[threadIdx.x + 4096] = 1; }"#,
        );
        let mut ground = Ground::default();
        let x = ground.upload(&[0_i32; 8]);
        shot(&code, "outside", 1, 8, &[x]).expect_failure(&ground, ILLEGAL);
        shot(&code, "inside", 1, 8, &[x]).expect(&ground);
    });
    let Some(ended) = ended else {
        return;
    };
    ended.came_to_its_end();
    let lines = std::fs::read_to_string(&file).expect("a launch was noted");
    std::fs::remove_file(&file).expect("it is the test's own file");
    let names: Vec<_> = lines.lines().map(|line| line.split('\t').next()).collect();
    assert_eq!(names, [Some("inside")]);
}

#[test]
fn strided_accesses_come_back_as_they_were() {
    let code = library(
        r#"extern "C" __global__ void columns(const short* x, double* y, int n) {
             int i = blockIdx.x * blockDim.x + threadIdx.x;
             if (i < n) y[3 * i] = x[5 * i + 1];
           }
           struct Seven { float v[7]; };
           extern "C" __global__ void structs(const Seven* x, Seven* y, char* z) {
             y[1] = x[threadIdx.x + 1];
             memcpy(z + 3, x, 11);
             for (int i = 20; i < 90; i++) z[i] = 0;
           }"#,
    );
    let mut ground = Ground::default();
    let (x, y) = (
        ground.upload(&vec![3_i16; 5000]),
        ground.upload(&vec![0_f64; 3000]),
    );
    for seed in 0..8 {
        let Touched {
            reads,
            writes,
            atomics,
            ..
        } = shot(&code, "columns", 4, 256, &[x, y, 1000])
            .seed(seed)
            .expect(&ground);
        let expected: Vec<_> = (0..1000).map(|i| x + 10 * i + 2..x + 10 * i + 4).collect();
        assert_eq!(reads, expected, "seed {seed}");
        let expected: Vec<_> = (0..1000).map(|i| y + 24 * i..y + 24 * i + 8).collect();
        assert_eq!(writes, expected, "seed {seed}");
        assert_eq!(atomics, []);
    }
    let (x, y, z) = (
        ground.upload(&[1_f32; 14]),
        ground.allocate(56),
        ground.allocate(100),
    );
    let touched = shot(&code, "structs", 1, 1, &[x, y, z]).expect(&ground);
    assert_eq!(touched.reads, [x..x + 11, x + 28..x + 56]);
    let mut writes = touched.writes;
    writes.sort_by_key(|range| range.start);
    let mut expected = vec![y + 28..y + 56, z + 3..z + 14, z + 20..z + 90];
    expected.sort_by_key(|range| range.start);
    assert_eq!(writes, expected);
}

#[test]
fn an_access_outside_leaves_the_kernel_and_is_named() {
    let code = library(
        "extern \"C\" __global__ void fill(float* x, int n) {\n\
           int i = blockIdx.x * blockDim.x + threadIdx.x;\n\
           x[i] = 1.0f;\n\
         }\n\
         extern \"C\" __global__ void host(const int* p, int* out) { *out = *p; }\n",
    );
    let mut ground = Ground::default();
    let x = ground.upload(&[0_f32; 100]);
    let message = shot(&code, "fill", 1, 101, &[x, 100]).expect_failure(&ground, ILLEGAL);
    let place = format!("{:#x}", x + 400);
    assert_says(
        &message,
        &[
            "kernel fill<<<1, 101>>>",
            "thread (100, 0, 0) of block (0, 0, 0)",
            "wrote 4 bytes",
            &place,
            "no allocation",
        ],
    );
    assert_says(&message, &["kernel.cu:3"]);
    // A host pointer, readable here but not on a device.
    let (value, out) = (Box::new(7_i32), ground.allocate(4));
    let message = shot(&code, "host", 1, 1, &[(&raw const *value) as u64, out])
        .expect_failure(&ground, ILLEGAL);
    assert_says(&message, &["read 4 bytes"]);
    assert_eq!(
        ground.download::<u32>(out, 1),
        [u32::MAX],
        "nothing is written after the failure"
    );
}

#[test]
fn vectors_must_be_aligned() {
    let code = library(
        r#"extern "C" __global__ void copy(const float* x, float* y) {
             reinterpret_cast<float4*>(y)[threadIdx.x] = reinterpret_cast<const float4*>(x)[threadIdx.x];
           }"#,
    );
    let mut ground = Ground::default();
    let (x, y) = (ground.upload(&[1_f32; 64]), ground.allocate(256));
    shot(&code, "copy", 1, 16, &[x, y]).expect(&ground);
    let message = shot(&code, "copy", 1, 8, &[x + 4, y]).expect_failure(&ground, MISALIGNED);
    assert_says(&message, &["16 bytes", "not a multiple of 16"]);
}

#[test]
fn threads_that_miss_each_other_are_found() {
    let code = library(
        "extern \"C\" __global__ void early(int n) {\n\
           if (threadIdx.x >= n) return;\n\
           __syncthreads();\n\
         }\n\
         extern \"C\" __global__ void two(int* out) {\n\
           if (threadIdx.x < 7) {\n\
             __syncthreads();\n\
             out[threadIdx.x] = 1;\n\
           } else {\n\
             out[threadIdx.x] = 2;\n\
             __syncthreads();\n\
           }\n\
         }\n\
         extern \"C\" __global__ void two_warps(int* out) {\n\
           if (threadIdx.x < 32) {\n\
             __syncthreads();\n\
             out[threadIdx.x] = 1;\n\
           } else {\n\
             out[threadIdx.x] = 2;\n\
             __syncthreads();\n\
           }\n\
         }\n\
         extern \"C\" __global__ void warps(int* out, int n) {\n\
           if (threadIdx.x >= n) return;\n\
           out[threadIdx.x] = __shfl_down_sync(0xffffffffu, threadIdx.x, 1);\n\
         }\n\
         extern \"C\" __global__ void outside() { if (threadIdx.x >= 4) __syncwarp(0xf); }\n\
         extern \"C\" __global__ void both(int* out, int n) {\n\
           if (threadIdx.x >= 40) return;\n\
           if (threadIdx.x < n) {\n\
             __syncthreads();\n\
             out[threadIdx.x] = 1;\n\
           }\n\
           __syncthreads();\n\
         }\n\
         extern \"C\" __global__ void counts(int* out) {\n\
           if (threadIdx.x >= 40) return;\n\
           out[threadIdx.x] = __syncthreads_and(1) + 10 * __syncthreads_count(threadIdx.x < 50);\n\
         }\n",
    );
    let mut ground = Ground::default();
    let out = ground.allocate(64 * 4);
    for seed in 0..6 {
        // From sm_70 on a barrier waits for the threads that have not returned.
        for arriving in [64, 50, 0] {
            shot(&code, "early", 1, 64, &[arriving])
                .seed(seed)
                .expect(&ground);
        }
        shot(&code, "counts", 1, 64, &[out])
            .seed(seed)
            .expect(&ground);
        assert_eq!(ground.download::<i32>(out, 40), [401; 40]);
        shot(&code, "both", 1, 64, &[out, 40])
            .seed(seed)
            .expect(&ground);
        for (name, arguments) in [
            ("both", &[out, 39][..]),
            ("two", &[out]),
            ("two_warps", &[out]),
        ] {
            let message = shot(&code, name, 1, 64, arguments)
                .seed(seed)
                .expect_failure(&ground, FAILED);
            assert_says(&message, &["divergence at a barrier", "kernel.cu:"]);
        }
        shot(&code, "warps", 1, 32, &[out, 32])
            .seed(seed)
            .expect(&ground);
        shot(&code, "warps", 1, 64, &[out, 52])
            .seed(seed)
            .expect(&ground);
        let message = shot(&code, "outside", 1, 8, &[])
            .seed(seed)
            .expect_failure(&ground, FAILED);
        assert_says(
            &message,
            &["divergence in a warp", "is not among the members"],
        );
    }
}

#[test]
fn traps_end_the_launch() {
    let code = library("extern \"C\" __global__ void trap() { if (threadIdx.x == 3) __trap(); }\n");
    let ground = Ground::default();
    assert_says(
        &shot(&code, "trap", 1, 8, &[]).expect_failure(&ground, FAILED),
        &["thread (3, 0, 0)", "trap"],
    );
}

#[test]
fn a_missing_barrier_is_a_race() {
    let source = |barrier: &str| {
        format!(
            "extern \"C\" __global__ void reverse(float* x) {{\n\
               __shared__ float tile[256];\n\
               tile[threadIdx.x] = x[threadIdx.x];\n\
               {barrier}\n\
               x[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];\n\
             }}\n"
        )
    };
    let (right, wrong) = (library(&source("__syncthreads();")), library(&source("")));
    for seed in 0..12 {
        let mut ground = Ground::default();
        let values: Vec<f32> = (0..256).map(|i| i as f32).collect();
        let x = ground.upload(&values);
        shot(&right, "reverse", 1, 256, &[x])
            .seed(seed)
            .expect(&ground);
        assert_eq!(
            ground.download::<f32>(x, 256),
            values.iter().rev().copied().collect::<Vec<_>>()
        );
        let message = shot(&wrong, "reverse", 1, 256, &[x])
            .seed(seed)
            .expect_failure(&ground, FAILED);
        assert_says(
            &message,
            &["race inside kernel reverse", "of tile", "no barrier"],
        );
        // The line of the one and of the other, whichever ran first.
        assert_says(
            &message,
            &["wrote", "read", "at kernel.cu:3", "at kernel.cu:5"],
        );
    }
}

#[test]
fn races_between_threads_are_told_from_what_only_looks_like_them() {
    let code = library(
        r#"extern "C" __global__ void histogram(const int* x, int* bins) { int b = x[blockIdx.x * blockDim.x + threadIdx.x]; bins[b] = bins[b] + 1; }
           extern "C" __global__ void atomic(const int* x, int* bins) { atomicAdd(&bins[x[blockIdx.x * blockDim.x + threadIdx.x]], 1); }
           extern "C" __global__ void mixed(int* x) { if (threadIdx.x == 0) x[0] = 1; else atomicAdd(x, 1); }
           // Equal values, too: what is there in between is undefined.
           extern "C" __global__ void flag(int* x) { *x = 1; }
           extern "C" __global__ void last(int* x) { *x = threadIdx.x; }
           extern "C" __global__ void halves(short* x) { x[threadIdx.x] = x[threadIdx.x] + 1; }
           extern "C" __global__ void warp(int* x) {
             __shared__ int s[64]; s[threadIdx.x] = threadIdx.x; __syncwarp(); x[threadIdx.x] = s[threadIdx.x ^ 1];
           }
           extern "C" __global__ void across(int* x) {
             __shared__ int s[64]; s[threadIdx.x] = threadIdx.x; __syncwarp(); x[threadIdx.x] = s[threadIdx.x ^ 32];
           }
           extern "C" __global__ void neighbours(int* x) { x[blockIdx.x] = blockIdx.x; x[gridDim.x + blockIdx.x] = x[(blockIdx.x + 1) % gridDim.x]; }"#,
    );
    let mut ground = Ground::default();
    let input: Vec<i32> = (0..128).map(|i| i % 5).collect();
    let (x, bins) = (ground.upload(&input), ground.upload(&[0_i32; 8]));
    let flags = ground.upload(&[0_i32; 256]);
    for seed in 0..12 {
        let race = |name, grid, block, arguments: &[u64]| {
            let message = shot(&code, name, grid, block, arguments)
                .seed(seed)
                .expect_failure(&ground, FAILED);
            assert_says(&message, &["race inside kernel", name]);
        };
        let clean = |name, grid, block, arguments: &[u64]| {
            drop(
                shot(&code, name, grid, block, arguments)
                    .seed(seed)
                    .expect(&ground),
            )
        };
        race("histogram", 1, 64, &[x, bins]);
        race("histogram", 64, 1, &[x, bins]);
        clean("atomic", 2, 64, &[x, bins]);
        race("mixed", 1, 64, &[flags]);
        race("flag", 1, 64, &[flags]);
        race("flag", 4, 1, &[flags]);
        race("last", 1, 64, &[flags]);
        clean("halves", 1, 64, &[flags]);
        clean("warp", 1, 64, &[flags]);
        race("across", 1, 64, &[flags]);
        race("neighbours", 8, 1, &[flags]);
    }
}
