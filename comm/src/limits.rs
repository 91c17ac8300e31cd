//! Limits of this process (ulimit) that are too small for ranks of one host: MPI would fail on them
//! without naming a rank or a limit.

use crate::error::{Error, Problem, Result};
use crate::shared::Segment;

/// What MPI and this program need besides the memory that ranks share.
const MEMORY_BYTES_MIN: u64 = 256 << 20;
const FILES_MIN: u64 = 16;
/// The system compares this limit with all threads of the user.
const THREADS_MIN: u64 = 20;

/// An error if a limit is too small for one of `local_size` ranks.
pub(crate) fn check(local_size: usize) -> Result<()> {
    let shared = Segment::bytes_for(local_size)? as u64;
    let needs = [
        (
            libc::RLIMIT_FSIZE,
            shared,
            "bytes of a file, which counts shared memory",
            "-f",
        ),
        (
            libc::RLIMIT_AS,
            MEMORY_BYTES_MIN + shared,
            "bytes of virtual memory",
            "-v",
        ),
        (libc::RLIMIT_NOFILE, FILES_MIN, "open files", "-n"),
        (libc::RLIMIT_NPROC, THREADS_MIN, "threads", "-u"),
    ];
    for (resource, least, what, flag) in needs {
        let mut limit = libc::rlimit {
            rlim_cur: libc::RLIM_INFINITY,
            rlim_max: libc::RLIM_INFINITY,
        };
        // SAFETY: the call writes one struct of ours, which says that there is no limit until then.
        unsafe { libc::getrlimit(resource, &mut limit) };
        if limit.rlim_cur < least {
            let reason = format!(
                "expected a limit of at least {least} {what}, got {}",
                limit.rlim_cur
            );
            let help = format!("raise it (ulimit {flag})");
            return Err(Error::Limit(Problem::new(
                "connect to the other ranks",
                reason,
                help,
            )));
        }
    }
    Ok(())
}
