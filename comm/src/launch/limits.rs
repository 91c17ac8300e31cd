//! Limits of this process (ulimit) that are too low: the process would abort, or MPI would fail
//! without naming a rank or a limit.

use crate::error::{Error, Problem, Result};
use crate::transport::shared::Segment;

/// What MPI and this program need besides the memory that ranks share.
const MEMORY_BYTES_MIN: u64 = 256 << 20;
const FILES_MIN: u64 = 16;
/// The system compares this limit with all threads of the user.
const THREADS_MIN: u64 = 20;

/// An eighth of what systems give the main thread; debug builds need half as much.
const STACK_BYTES_MIN: u64 = 1 << 20;

/// A resource, the least that is needed of it, in words, and the flag of ulimit.
type Need<'a> = (libc::__rlimit_resource_t, u64, &'a str, &'a str);

/// An error if the main thread's stack is too small for this program, which would abort. Call it
/// first in `main`, in a function with few variables.
pub fn check_stack() -> Result<()> {
    let need = (libc::RLIMIT_STACK, STACK_BYTES_MIN, "bytes of stack", "-s");
    check_limit("start", need)
}

/// An error if a limit is too small for one of `local_size` ranks. Ranks that may meet again have
/// the memory and the handles of two `generations` then.
pub(crate) fn check(local_size: usize, generations: u64) -> Result<()> {
    let shared = Segment::bytes_for(local_size)? as u64;
    let files = FILES_MIN + (generations - 1) * 2 * local_size as u64;
    let needs = [
        (
            libc::RLIMIT_FSIZE,
            shared,
            "bytes of a file, which counts shared memory",
            "-f",
        ),
        (
            libc::RLIMIT_AS,
            MEMORY_BYTES_MIN + generations * shared,
            "bytes of virtual memory",
            "-v",
        ),
        (libc::RLIMIT_NOFILE, files, "open files", "-n"),
        (libc::RLIMIT_NPROC, THREADS_MIN, "threads", "-u"),
    ];
    let mut needs = needs.into_iter();
    needs.try_for_each(|need| check_limit("connect to the other ranks", need))
}

fn check_limit(action: &str, (resource, least, what, flag): Need<'_>) -> Result<()> {
    let mut limit = libc::rlimit {
        rlim_cur: libc::RLIM_INFINITY,
        rlim_max: libc::RLIM_INFINITY,
    };
    // SAFETY: the call writes one struct of ours, which says that there is no limit until then.
    unsafe { libc::getrlimit(resource, &mut limit) };
    if limit.rlim_cur >= least {
        return Ok(());
    }
    let got = limit.rlim_cur;
    let reason = format!("expected a limit of at least {least} {what}, got {got}");
    let help = format!("raise it (ulimit {flag})");
    Err(Error::Limit(Problem::new(action, reason, help)))
}
