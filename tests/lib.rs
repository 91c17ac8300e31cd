//! The whole seen from outside. The test programs lie beside this file; what is here makes the README's example one.

/// The README's first program, run as a documentation test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;

/// Whether there are `count` GPUs to test on; says so where there are not. GPUs of the simulator count (`launch/with-simulated-gpus`).
pub fn gpus(count: usize) -> bool {
    use std::io::Write as _;
    let enough = ddp_kernels::Device::usable().len() > count;
    if !enough {
        // Past the test harness, which keeps what a passing test prints to itself. A closed standard error is no reason to fail.
        let _ = writeln!(std::io::stderr(), "skipped: no CUDA device ({count} needed)");
    }
    enough
}
