//! What the integration tests share: random numbers, ranks as threads, jobs of `ddp-train`, and
//! readers of a run's files. Every test binary includes this folder as its module `support` and
//! uses a part of it.

#![allow(dead_code)]

pub(crate) mod golden;
pub(crate) mod job;
pub(crate) mod lines;
pub(crate) mod metrics_log;
pub(crate) mod pass;
pub(crate) mod processes;
pub(crate) mod random;
pub(crate) mod training;

/// The name of the running test, which selects its slice. The harness names each test's thread.
pub(crate) fn test_name() -> String {
    std::thread::current().name().unwrap_or("a test").into()
}
