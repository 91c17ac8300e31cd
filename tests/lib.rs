//! Helpers of the tests beside this file.

/// Whether there are `count` GPUs, real or simulated (`launch/with-simulated-gpus`); if not, the
/// test is skipped.
pub fn gpus(count: usize) -> bool {
    let enough = ddp_kernels::Device::usable().len() > count;
    if !enough {
        ddp_slice::skip(&format!("no CUDA device ({count} needed)"));
    }
    enough
}
