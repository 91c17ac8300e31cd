//! What N ranks compute, on the CPU: ranks are threads of this process, whose turns come in orders drawn from seeds. The same claims
//! about ranks on GPUs are in tests/cuda.

#[path = "../common/mod.rs"]
mod common;

mod claims;

use common::Way;

/// Each test may begin.
fn turn() -> Option<()> {
    common::quietly();
    Some(())
}

/// How the ranks train.
fn ways() -> Vec<Way> {
    vec![Way::Cpu]
}
