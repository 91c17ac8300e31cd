//! Failed allocations outside tensors, for which Rust ends the process with SIGABRT and names no
//! rank.

use std::ffi::c_int;
use std::sync::atomic::{AtomicI32, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use ddp_kernels::panics;

use crate::transport::failure::Failure;

const EXIT_MEMORY: u8 = 71;

static FAILURE: Mutex<Option<Arc<Failure>>> = Mutex::new(None);
/// The thread that reports.
static REPORTER: AtomicI32 = AtomicI32::new(0);

/// From now on a process that aborts because an allocation failed ends as a rank that fails.
pub(crate) fn report_failures_to(failure: &Arc<Failure>) {
    let mut known = panics::lock(&FAILURE);
    if known.replace(Arc::clone(failure)).is_none() {
        let handler: extern "C" fn(c_int) = on_abort;
        // SAFETY: the handler runs on the thread that aborts and argues for itself.
        unsafe { libc::signal(libc::SIGABRT, handler as libc::sighandler_t) };
    }
}

/// Runs inside `abort`, and not between the lines of other code, so it may allocate and lock. If
/// it returns, the process ends by the signal.
extern "C" fn on_abort(_: c_int) {
    // The allocator's, unless another error came after it, as a backtrace's (`World::run`).
    let error = std::io::Error::last_os_error();
    let known = FAILURE.try_lock().ok().and_then(|known| known.clone());
    let Some(failure) = known.filter(|_| error.kind() == std::io::ErrorKind::OutOfMemory) else {
        return;
    };
    // SAFETY: the call takes nothing, touches nothing and cannot fail. glibc has a function for it
    // since 2.30 only.
    let this = unsafe { libc::syscall(libc::SYS_gettid) } as libc::pid_t;
    match REPORTER.compare_exchange(0, this, SeqCst, SeqCst) {
        Ok(_) => {
            let help = "help: free memory, or raise the limit on virtual memory (ulimit -v)";
            failure.fail_alone(
                format!("out of memory outside tensors; {help}"),
                EXIT_MEMORY,
            )
        }
        // The report needs memory, too.
        Err(reporter) if reporter == this => {}
        Err(_) => loop {
            std::thread::park();
        },
    }
}
