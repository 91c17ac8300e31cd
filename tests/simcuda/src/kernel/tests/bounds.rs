//! Accesses outside of shared variables, arrays and constants, which are no allocations.

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
           x[threadIdx.x + wrong] = before[0] = after[0] = 1;\n\
         }\n\
         extern \"C\" __global__ void in_front(int* out, int wrong) {\n\
           __shared__ double tile[4];\n\
           double* x = tile;\n\
           if (threadIdx.x == 0) x[-wrong] = 1;\n\
         }\n\
         extern \"C\" __global__ void far(int* out, int wrong) {\n\
           __shared__ float tile[8][8];\n\
           if (threadIdx.x < 8) tile[threadIdx.x + wrong][0] = 1;\n\
         }\n\
         extern \"C\" __global__ void dynamic(int* out, int wrong) {\n\
           extern __shared__ int words[];\n\
           words[threadIdx.x + wrong] = 1;\n\
         }\n\
         extern \"C\" __global__ void local(int* out, int wrong) {\n\
           int own[4] = {1, 2, 3, 4};\n\
           for (int i = 0; i < 4; i++) own[(i * threadIdx.x) & 3] += i;\n\
           out[threadIdx.x] = own[(threadIdx.x & 3) + wrong];\n\
         }\n\
         struct Row { int v[4]; int after; };\n\
         extern \"C\" __global__ void member(Row* out, int wrong) {\n\
           if (threadIdx.x < 4) out->v[threadIdx.x + wrong] = 1;\n\
         }\n\
         static int counter;\n\
         extern \"C\" __global__ void global(int* out, int wrong) {\n\
           if (threadIdx.x == 0 && wrong) out[0] = counter += wrong;\n\
         }\n\
         constexpr int table[4] = {5, 6, 7, 8};\n\
         extern \"C\" __global__ void constant(int* out, int wrong) {\n\
           const uint3& own = threadIdx;\n\
           out[threadIdx.x] = table[(own.x & 3) + wrong];\n\
         }\n",
    );
    let found: [(&str, &[&str]); 8] = [
        (
            "behind",
            &[
                "kernel.cu:4",
                "0 bytes past the end of the 128 bytes of shared variable `tile`",
            ],
        ),
        (
            "in_front",
            &[
                "kernel.cu:9",
                "8 bytes before the 32 bytes of shared variable `tile`",
            ],
        ),
        (
            "far",
            &[
                "kernel.cu:13",
                "index 8",
                "float [8][8]",
                "shared variables in this line: `tile`",
            ],
        ),
        (
            "dynamic",
            &[
                "kernel.cu:17",
                "0 bytes past the end of the 128 bytes of dynamic shared memory",
            ],
        ),
        ("local", &["kernel.cu:22", "index 4", "int [4]"]),
        ("member", &["kernel.cu:26", "index 4", "int [4]"]),
        (
            "global",
            &[
                "kernel.cu:30",
                "a variable of the module, which is not simulated",
            ],
        ),
        ("constant", &["kernel.cu:35", "index 4", "int [4]"]),
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
        headers: vec![("common.cuh".to_owned(), read("common.cuh"))],
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
            [
                "index 31 of an array 'unsigned int [31][33]' at transpose.cu:",
                "`tile`",
            ],
        ),
        (
            "grad_norm.cu",
            "clip_scale_f32",
            512,
            &clip[..],
            "double tile[TILE]",
            "double tile[TILE - 8]",
            ["of an array 'double [4088]' at grad_norm.cu:", "`tile`"],
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
