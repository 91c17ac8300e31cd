//! Helpers of the tests beside this file.

/// Whether there are `count` GPUs, real or simulated (`launch/with-simulated-gpus`); if not, prints
/// that the test is skipped.
pub fn gpus(count: usize) -> bool {
    use std::io::Write as _;
    let enough = ddp_kernels::Device::usable().len() > count;
    if !enough {
        // Not eprintln: the harness hides the output of tests that pass. A closed stderr is no
        // failure.
        let _ = writeln!(
            std::io::stderr(),
            "skipped: no CUDA device ({count} needed)"
        );
    }
    enough
}
