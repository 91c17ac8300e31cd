//! How to connect.

use std::time::Duration;

use crate::error::Remedy;
use crate::identity::program_name;
use crate::transport::nccl::environment::NcclChoice;

/// How to connect.
#[derive(Clone, Debug)]
pub struct Options {
    /// How long a rank waits for others that show no progress (`ddp_kernels::heartbeat`) before it
    /// reports which are missing.
    pub timeout: Duration,
    /// How long MPI may take to start, and NCCL to connect the ranks of a group and to make its
    /// first calls, if that is longer than `timeout`. 8 GPUs of one host take 2.4 s (NCCL issue
    /// 534), ranks that share a GPU longer.
    pub join_timeout: Duration,
    /// The name that begins the line which says why a job ended. By default the name of the
    /// program's file.
    pub program: String,
    /// Whether several ranks may have the same GPU: for tests, never for speed.
    pub share_gpus: bool,
    /// Whether the program calls [`crate::World::catch_stop`]: a request to stop that comes earlier
    /// then waits for it, and does not end the process.
    pub catches_stop: bool,
    /// How NCCL adds up gradients.
    pub nccl: NcclChoice,
    /// A sentence on what the program's users type to change a setting, added to errors; empty for
    /// none.
    pub remedy_text: fn(Remedy) -> &'static str,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            timeout: Duration::from_secs(600),
            join_timeout: Duration::from_secs(60),
            program: program_name(),
            share_gpus: false,
            catches_stop: false,
            nccl: NcclChoice::default(),
            remedy_text: |_| "",
        }
    }
}
