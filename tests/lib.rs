//! Helpers of the tests beside this file.

/// Whether there are `count` GPUs, real or simulated (`launch/with-simulated-gpus`); if not, the
/// test is skipped.
pub fn gpus(count: usize) -> bool {
    let enough = ddp_kernels::Device::usable().len() > count;
    if !enough {
        ddp_testing::skip(&format!("no CUDA device ({count} needed)"));
    }
    enough
}

/// The same of GPUs that do on demand what real ones do not.
pub fn simulated_gpus(count: usize) -> bool {
    let found = gpus(count);
    let is_simulated = || {
        let gpus = &ddp_kernels::device::discover().gpus;
        gpus[0].name.contains("Simulated")
    };
    if found && !is_simulated() {
        ddp_testing::skip("real GPUs do not do on demand what this needs");
        return false;
    }
    found
}
