//! Accesses outside of shared and local variables, and variables that are not simulated.

use super::{Ground, library, library_with, shot};
use crate::error::CUresult;
use crate::nvrtc::Program;

const ILLEGAL: CUresult = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;

fn says(message: &str, words: &[&str]) {
    for word in words {
        assert!(message.contains(word), "no {word:?} in: {message}");
    }
}

/// Each kernel is right for an argument of 0 and leaves its array for 1.
#[test]
fn what_leaves_an_array_is_found_and_named() {
    let code = library(
        "extern \"C\" __global__ void behind(int* out, int wrong) {\n\
           __shared__ int before[8], tile[32], after[8];\n\
           int* x = tile;\n\
           x[threadIdx.x + wrong] = 1; if (threadIdx.x < 8) before[threadIdx.x] = after[threadIdx.x] = 1;\n\
           __syncthreads(); out[threadIdx.x] = x[31 - threadIdx.x] + before[threadIdx.x / 4] + after[threadIdx.x / 4];\n\
         }\n\
         extern \"C\" __global__ void in_front(int* out, int wrong) {\n\
           __shared__ double tile[4];\n\
           double* x = tile;\n\
           if (threadIdx.x == 0) x[-wrong] = 1;\n\
           __syncthreads(); out[threadIdx.x] = tile[threadIdx.x & 3] == 1;\n\
         }\n\
         extern \"C\" __global__ void far(int* out, int wrong) {\n\
           __shared__ float tile[8][8];\n\
           if (threadIdx.x < 8) tile[threadIdx.x + wrong][0] = 1;\n\
           __syncthreads(); out[threadIdx.x] = tile[7 - threadIdx.x / 4][0] == 1;\n\
         }\n\
         extern \"C\" __global__ void dynamic(int* out, int wrong) {\n\
           extern __shared__ int words[];\n\
           words[threadIdx.x + wrong] = 1;\n\
           __syncthreads(); out[threadIdx.x] = words[31 - threadIdx.x];\n\
         }\n\
         extern \"C\" __global__ void local(int* out, int wrong) {\n\
           int own[4] = {1, 2, 3, 4};\n\
           for (int i = 0; i < 4; i++) own[(i * threadIdx.x) & 3] += i;\n\
           out[threadIdx.x] = own[(threadIdx.x & 3) + wrong];\n\
         }\n",
    );
    let found: [(&str, &[&str]); 5] = [
        (
            "behind",
            &["kernel.cu:4", "from byte 128 of tile, which has 128"],
        ),
        ("in_front", &["kernel.cu:10", "8 bytes before tile"]),
        (
            "far",
            &["kernel.cu:15", "from byte 256 of tile, which has 256"],
        ),
        (
            "dynamic",
            &[
                "kernel.cu:20",
                "from byte 128 of dynamic shared memory, which has 128",
            ],
        ),
        ("local", &["kernel.cu:26", "of local memory"]),
    ];
    let mut ground = Ground::default();
    let out = ground.upload(&[0_i32; 32]);
    for (name, words) in found {
        let run = |wrong, seed| {
            let shot = shot(&code, name, 1, 32, &[out, wrong]).seed(seed);
            if name == "dynamic" {
                shot.dynamic(128)
            } else {
                shot
            }
        };
        for seed in 0..20 {
            run(0, seed)
                .run(&ground)
                .unwrap_or_else(|failure| panic!("{name}: {}", failure.message));
            says(&run(1, seed).expect_failure(&ground, ILLEGAL), words);
        }
    }
}

#[test]
fn variables_of_a_module_are_refused_when_their_kernel_is_loaded() {
    let code = library(
        "__device__ int counter;\n\
         extern \"C\" __global__ void counts(int* out) { out[0] = counter += 1; }\n\
         extern \"C\" __global__ void does_not(int* out) { out[0] = 1; }\n",
    );
    let refused = CUresult::CUDA_ERROR_INVALID_PTX;
    assert_eq!(code.find("counts").map(drop), Err(refused));
    assert!(code.find("does_not").is_ok());
}

/// A kernel file of the product, with one text replaced.
fn product(file: &str, from: &str, to: &str) -> Program {
    let read = |name: &str| {
        let path = format!(
            "{}/../../kernels/src/ops/{name}",
            env!("CARGO_MANIFEST_DIR")
        );
        std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
    };
    let source = read(file);
    assert!(source.contains(from), "{file} has no {from}");
    Program {
        name: file.to_owned(),
        source: source.replace(from, to),
        headers: ["common.cuh", "math.cuh", "activations.cuh", "chunks.cuh"]
            .map(|name| (name.to_owned(), read(name)))
            .into(),
        ..Program::default()
    }
}

/// Once these two passed all tests: hardware has other shared memory behind the array.
#[test]
fn the_products_shared_arrays_are_not_larger_than_needed() {
    let mut ground = Ground::default();
    let (x, out) = (ground.upload(&[1_u32; 1024]), ground.upload(&[0_u32; 1024]));
    let limit = 1_f64.to_bits();
    let partials = ground.upload(&[1_f64; 64]);
    let transpose: [u64; 4] = [out, x, 32, 32];
    let clip: [u64; 12] = [out, partials, 64, limit, 0, 0, 0, 0, 0, 0, 0, 0];
    for (file, kernel, threads, arguments, tile, smaller, words) in [
        (
            "transpose.cu",
            "transpose_4",
            256,
            &transpose[..],
            "tile[TILE][TILE + 1]",
            "tile[TILE - 1][TILE + 1]",
            ["of tile, which has 4092", "at transpose.cu:"],
        ),
        (
            "grad_norm.cu",
            "clip_scale_f32",
            512,
            &clip[..],
            "double tile[TILE]",
            "double tile[TILE - 8]",
            ["of tile, which has 32704", "at grad_norm.cu:"],
        ),
    ] {
        let right = library_with(&product(file, tile, tile));
        let wrong = library_with(&product(file, tile, smaller));
        for seed in 0..20 {
            shot(&right, kernel, 1, threads, arguments)
                .seed(seed)
                .expect(&ground);
            let message = shot(&wrong, kernel, 1, threads, arguments)
                .seed(seed)
                .expect_failure(&ground, ILLEGAL);
            says(&message, &words);
        }
    }
}
