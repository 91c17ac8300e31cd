//! Each wait and each barrier of the kernels on tensor cores is needed.

use super::*;

const ATTENTION: &str = include_str!("../../../src/ops/attention_bf16.cu");

/// Sources that wait in another way at one place each, and the kernels that do. Forward and dq go
/// over tiles of keys by one function, of which dq gets a copy.
fn wrong_waits(wait: &str) -> Vec<(&'static str, String)> {
    const CALL: &str = "finish_copies();\n";
    const KERNELS: [&str; 4] = ["", "", "dq_", "dkv_"];
    let planted = |source: &str, (at, _): (usize, &str)| {
        [&source[..at], wait, &source[at + CALL.len()..]].concat()
    };
    let places: Vec<_> = ATTENTION.match_indices(CALL).collect();
    assert_eq!(places.len(), KERNELS.len(), "each has one kernel");
    let of_place = |(&place, kernel)| (kernel, planted(ATTENTION, place));
    let mut wrong: Vec<_> = places.iter().zip(KERNELS).map(of_place).collect();
    let (from, to) = (
        "template <u32 WIDTH, u32 STEP, class Block",
        "extern __shared__",
    );
    let [from, to] = [from, to].map(|text| ATTENTION.find(text).unwrap());
    let copy = ATTENTION[from..to].replace("each_tile", "each_tile_of_dq");
    let copy = planted(&copy, copy.match_indices(CALL).next().unwrap());
    let (forward, backward) = ATTENTION[to..].split_once("void query_gradient").unwrap();
    let backward = backward.replacen("each_tile<", "each_tile_of_dq<", 1);
    let parts = [
        &ATTENTION[..to],
        &copy,
        forward,
        "void query_gradient",
        &backward,
    ];
    wrong.push(("dq_", parts.concat()));
    wrong
}

/// A third of the wrong versions of each kernel on tensor cores; with DDP_CASES=all all of
/// them, in the orders of 20 seeds, on Hopper and an older GPU in turn: the simulator must find
/// that bytes are used before they are copied.
#[test]
#[ignore = "launch/search runs it"]
fn a_missing_wait_or_barrier_is_found_in_every_order() {
    if !discover().gpus.iter().all(is_simulated) || devices().is_empty() {
        return skip("no simulated GPU");
    }
    let commit = "asm volatile(\"cp.async.commit_group;\" ::: \"memory\");";
    let wait = "asm volatile(\"cp.async.wait_group 0;\" ::: \"memory\");";
    let seeds = if ddp_testing::all_cases() { 20 } else { 1 };
    let folder = std::env::temp_dir().join(format!("ddp-attention-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let wrong = [
        format!("{wait} __syncthreads();\n"),
        format!("{commit} __syncthreads();\n"),
        format!("{commit} {wait}\n"),
    ];
    let wrong = wrong.iter().flat_map(|planted| wrong_waits(planted));
    for (index, (kernel, source)) in a_third("wrong waits of attention", wrong.enumerate()) {
        std::fs::write(folder.join("attention_bf16.cu"), source).unwrap();
        for seed in 0..seeds {
            // In forward only heads of 64 columns have the first wait, and not on Hopper.
            let (test, width) = if (index + seed) % 2 == 0 || index % 5 == 1 {
                ("several_tiles", 64)
            } else {
                ("several_wide_tiles", 128)
            };
            let is_old = index % 5 == 1 || (index + seed) / 2 % 2 == 1;
            let capability = if is_old { "8.0" } else { "9.0" };
            let seed = seed.to_string();
            let variables = [
                ("SIMCUDA_CAPABILITY", capability.as_ref()),
                ("DDP_TEST_KERNELS", folder.as_os_str()),
                ("DDP_KERNEL_CACHE", "off".as_ref()),
                ("SIMCUDA_SEED", seed.as_ref()),
                ("SIMCUDA_INTRA", "1".as_ref()),
            ];
            let output = child(test, &variables);
            let said = String::from_utf8_lossy(&output.stderr);
            let expected = format!("race inside kernel attention_tensor_{kernel}{width}_bf16");
            let is_found = output.status.code() == Some(86) && said.contains(&expected);
            assert!(
                is_found,
                "{expected}, wrong version {index}, seed {seed}: {said}"
            );
        }
    }
    std::fs::remove_dir_all(&folder).unwrap();
}
