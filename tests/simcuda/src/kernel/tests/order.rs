//! The orders in which threads and blocks run: all of them, by the seed, and reproducible.

use super::{Ground, library, shot};

/// Every thread takes a number.
const TICKETS: &str = r#"
extern "C" __global__ void tickets(unsigned* next, unsigned* order) {
  order[blockIdx.x * blockDim.x + threadIdx.x] = atomicAdd(next, 1u);
}
extern "C" __global__ void dimensions(unsigned* out) {
  unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  out[block * blockDim.x * blockDim.y * blockDim.z + thread] = blockIdx.z * 100 + threadIdx.z * 10 + threadIdx.y;
}
"#;

fn order(code: &std::sync::Arc<super::Library>, seed: u64, grid: u32, block: u32) -> Vec<u32> {
    let mut ground = Ground::default();
    let threads = (grid * block) as usize;
    let (next, order) = (ground.upload(&[0_u32]), ground.allocate(threads as u64 * 4));
    shot(code, "tickets", grid, block, &[next, order])
        .seed(seed)
        .expect(&ground);
    ground.download(order, threads)
}

#[test]
fn every_order_is_a_permutation_that_the_seed_decides() {
    let code = library(TICKETS);
    let mut seen = std::collections::HashSet::new();
    for seed in 0..40 {
        let first = order(&code, seed, 7, 33);
        assert_eq!(first, order(&code, seed, 7, 33), "seed {seed}");
        let mut sorted = first.clone();
        sorted.sort_unstable();
        assert_eq!(
            sorted,
            (0..7 * 33).collect::<Vec<_>>(),
            "every thread runs once"
        );
        seen.insert(first);
    }
    assert!(seen.len() > 15, "40 seeds give {} orders only", seen.len());
    assert!(
        seen.contains(&(0..7 * 33).collect::<Vec<_>>()),
        "forward is one of them"
    );
    assert!(
        seen.contains(&(0..7 * 33).rev().collect::<Vec<_>>()),
        "backward is one of them"
    );
}

#[test]
fn indices_of_three_dimensions_are_right() {
    let code = library(TICKETS);
    let mut ground = Ground::default();
    let out = ground.allocate(2 * 3 * 4 * 24 * 4);
    let mut launch = shot(&code, "dimensions", 1, 1, &[out]).seed(3);
    (launch.grid, launch.block) = ([2, 3, 4], [4, 3, 2]);
    launch.expect(&ground);
    let got = ground.download::<u32>(out, 2 * 3 * 4 * 24);
    for (at, value) in got.iter().enumerate() {
        let (block, thread) = (at / 24, at % 24);
        assert_eq!(
            *value as usize,
            block / 6 * 100 + thread / 12 * 10 + thread / 4 % 3,
            "{at}"
        );
    }
}
