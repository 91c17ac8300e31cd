//! "Each block writes, fences and counts; the block that counts last reads": what a fence and an
//! atomic publish to later blocks, and what they do not.

use super::{Ground, library, shot};
use crate::error::CUresult;

/// One version of the scheme: 100 blocks, and the last adds what they have written.
struct Scheme {
    name: &'static str,
    is_right: bool,
    /// The body up to where `is_last` is known.
    body: &'static str,
}

const SCHEMES: &[Scheme] = &[
    Scheme {
        name: "one thread writes, fences and counts",
        is_right: true,
        body: "if (t == 0) { parts[b] = v; __threadfence(); is_last = atomicAdd(count, 1u) == gridDim.x - 1; __threadfence(); }",
    },
    Scheme {
        name: "all write, a barrier, one fences and counts",
        is_right: true,
        body: "if (t < 4) parts[4 * b + t] = v; __syncthreads();
               if (t == 0) { __threadfence(); is_last = atomicAdd(count, 1u) == gridDim.x - 1; __threadfence(); }",
    },
    Scheme {
        // ISA: a release pattern is a fence and a strong write of one thread.
        name: "all write and fence, a barrier, one counts",
        is_right: false,
        body: "if (t < 4) parts[4 * b + t] = v; __threadfence(); __syncthreads();
               if (t == 0) { is_last = atomicAdd(count, 1u) == gridDim.x - 1; __threadfence(); }",
    },
    Scheme {
        name: "a warp writes, one of it fences and counts",
        is_right: true,
        body: "if (t < 4) parts[4 * b + t] = v; __syncwarp();
               if (t == 0) { __threadfence(); is_last = atomicAdd(count, 1u) == gridDim.x - 1; __threadfence(); }",
    },
    Scheme {
        name: "a flag for each block, and whoever sees all of them",
        is_right: true,
        body: "if (t == 0) {
                 parts[b] = v; __threadfence(); atomicExch(flags + b, 1u); is_last = true;
                 for (int i = 0; i < gridDim.x; i++) is_last = is_last && atomicAdd(flags + i, 0u) == 1;
                 __threadfence();
               }",
    },
    Scheme {
        name: "no fence after the count",
        is_right: false,
        body: "if (t == 0) { parts[b] = v; __threadfence(); is_last = atomicAdd(count, 1u) == gridDim.x - 1; }",
    },
    Scheme {
        name: "a fence after the barrier, by all",
        is_right: false,
        body: "if (t == 0) { parts[b] = v; __threadfence(); is_last = atomicAdd(count, 1u) == gridDim.x - 1; }
               __syncthreads(); if (t > 0) __threadfence();",
    },
    Scheme {
        name: "fences for the block alone",
        is_right: false,
        body: "if (t == 0) {
                 parts[b] = v; __threadfence_block(); is_last = atomicAdd(count, 1u) == gridDim.x - 1; __threadfence_block();
               }",
    },
    Scheme {
        name: "no fence",
        is_right: false,
        body: "if (t == 0) { parts[b] = v; is_last = atomicAdd(count, 1u) == gridDim.x - 1; __threadfence(); }",
    },
    Scheme {
        name: "the fence before the write",
        is_right: false,
        body: "if (t == 0) { __threadfence(); parts[b] = v; is_last = atomicAdd(count, 1u) == gridDim.x - 1; __threadfence(); }",
    },
    Scheme {
        name: "written after the release",
        is_right: false,
        body: "if (t == 0) { __threadfence(); is_last = atomicAdd(count, 1u) == gridDim.x - 1; __threadfence(); parts[b] = v; }",
    },
    Scheme {
        name: "the fence of another thread",
        is_right: false,
        body: "if (t < 4) parts[4 * b + t] = v; if (t == 0) __threadfence(); __syncthreads();
               if (t == 0) { is_last = atomicAdd(count, 1u) == gridDim.x - 1; __threadfence(); }",
    },
    Scheme {
        name: "no barrier before fence and atomic",
        is_right: false,
        body: "if (t < 4) parts[4 * b + t] = v;
               if (t == 0) { __threadfence(); is_last = atomicAdd(count, 1u) == gridDim.x - 1; __threadfence(); }",
    },
    Scheme {
        name: "a flag for each block, set before the fence",
        is_right: false,
        body: "if (t == 0) {
                 parts[b] = v; atomicExch(flags + b, 1u); __threadfence(); is_last = true;
                 for (int i = 0; i < gridDim.x; i++) is_last = is_last && atomicAdd(flags + i, 0u) == 1;
                 __threadfence();
               }",
    },
    Scheme {
        name: "a flag for each block, and the last looks at one",
        is_right: false,
        body: "if (t == 0) {
                 is_last = atomicAdd(count, 1u) == gridDim.x - 1;
                 parts[b] = v; __threadfence(); atomicExch(flags + b, 1u);
                 if (is_last) atomicAdd(flags + (b + 1) % gridDim.x, 0u);
               }",
    },
];

#[test]
fn the_last_block_may_read_what_the_others_published() {
    let kernels: String = SCHEMES
        .iter()
        .enumerate()
        .map(|(number, scheme)| {
            format!(
                "extern \"C\" __global__ void sum_{number}(float* parts, unsigned* count, unsigned* flags, float* out) {{
                   __shared__ bool is_last;
                   const int t = threadIdx.x, b = blockIdx.x;
                   const float v = 1;
                   if (t == 0) is_last = false;
                   __syncthreads();
                   {}
                   __syncthreads();
                   if (!is_last || t > 0) return;
                   float sum = 0;
                   for (int i = 0; i < 4 * gridDim.x; i++) sum += parts[i];
                   *out = sum;
                 }}\n",
                scheme.body
            )
        })
        .collect();
    let code = library(&kernels);
    for (number, scheme) in SCHEMES.iter().enumerate() {
        // The names of kernels live as long as the test program.
        let name: &'static str = format!("sum_{number}").leak();
        for seed in 0..20 {
            let mut ground = Ground::default();
            let (parts, out) = (ground.upload(&[0_f32; 400]), ground.upload(&[0_f32]));
            let (count, flags) = (ground.upload(&[0_u32]), ground.upload(&[0_u32; 100]));
            let shot = shot(&code, name, 100, 32, &[parts, count, flags, out]).seed(seed);
            if scheme.is_right {
                shot.expect(&ground);
                let sum = ground.download::<f32>(out, 1)[0];
                assert!(sum == 100.0 || sum == 400.0, "{}: {sum}", scheme.name);
                continue;
            }
            let failure = shot.run(&ground).expect_err(scheme.name);
            assert_eq!(failure.code, CUresult::CUDA_ERROR_LAUNCH_FAILED);
            let words = ["race inside kernel sum_", "nothing orders the blocks"];
            for word in words {
                let message = &failure.message;
                assert!(message.contains(word), "{}: {message}", scheme.name);
            }
        }
    }
}
