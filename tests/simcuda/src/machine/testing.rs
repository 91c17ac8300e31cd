//! For tests through the entry points. These share one machine per process, and a finding ends it,
//! so each case runs in a separate process: the test starts itself again.

use std::process::Command;

use cudarc::driver::sys::CUcontext;

use super::Out;
use crate::context::{cuCtxSetCurrent, cuDevicePrimaryCtxRetain};
use crate::device::calls::cuInit;
use crate::error::CUresult;

pub(crate) const CASE: &str = "SIMCUDA_TEST_CASE";

/// What a call writes to its out-parameter.
pub(crate) fn made<T>(call: impl FnOnce(Out<'_, T>) -> CUresult) -> T {
    let mut place = std::mem::MaybeUninit::uninit();
    assert_eq!(call(Some(&mut place)), CUresult::CUDA_SUCCESS);
    // SAFETY: a call that succeeds has written its result.
    unsafe { place.assume_init() }
}

/// The result of a call that must fail.
pub(crate) fn refused<T>(call: impl FnOnce(Out<'_, T>) -> CUresult) -> CUresult {
    call(Some(&mut std::mem::MaybeUninit::uninit()))
}

/// A call that must succeed.
#[track_caller]
pub(crate) fn ok(code: CUresult) {
    assert_eq!(code, CUresult::CUDA_SUCCESS);
}

/// Makes the context of a device, and makes it current.
pub(crate) fn device(ordinal: i32) -> CUcontext {
    ok(cuInit(0));
    let context = made(|context| cuDevicePrimaryCtxRetain(context, ordinal));
    ok(cuCtxSetCurrent(context));
    context
}

/// How a case ended.
pub(crate) struct Ended {
    /// The exit code; None for a signal.
    pub(crate) code: Option<i32>,
    /// Everything it printed.
    pub(crate) text: String,
}

impl Ended {
    /// A finding ended it, and its report has these parts.
    #[track_caller]
    pub(crate) fn is_found(&self, parts: &[&str]) {
        assert_eq!(self.code, Some(crate::report::EXIT_CODE), "{}", self.text);
        for part in parts {
            assert!(
                self.text.contains(part),
                "`{part}` is not in:\n{}",
                self.text
            );
        }
    }

    /// It ended normally without findings.
    #[track_caller]
    pub(crate) fn is_clean(&self) {
        assert_eq!(self.code, Some(0), "{}", self.text);
        assert!(!self.text.contains("simcuda:"), "{}", self.text);
    }

    /// It ended normally.
    #[track_caller]
    pub(crate) fn came_to_its_end(&self) {
        assert_eq!(self.code, Some(0), "{}", self.text);
    }
}

/// Runs `case` in a separate process with these variables. `test` is the full path of the calling
/// test. In that process it runs the case and ends the test.
pub(crate) fn played(test: &str, variables: &[(&str, &str)], case: impl FnOnce()) -> Option<Ended> {
    if std::env::var_os(CASE).is_some() {
        case();
        return None;
    }
    let test = test.strip_prefix("ddp_simcuda::").unwrap_or(test);
    let output = Command::new(std::env::current_exe().expect("a test knows its program"))
        .args([test, "--exact", "--nocapture"])
        .env(CASE, "1")
        .env("SIMCUDA_SCHEDULE", "lazy")
        .envs(variables.iter().copied())
        .output()
        .expect("a test can start its program again");
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(
        text.contains("running 1 test"),
        "no test is called {test}:\n{text}"
    );
    Some(Ended {
        code: output.status.code(),
        text,
    })
}

/// Declares tests that run a case: `name, [(variable, value)…], { what the product does }, |ended|
/// { what must show }`.
macro_rules! cases {
    ($($name:ident, [$($variable:expr),*], $body:block, |$ended:ident| $check:expr;)*) => {$(
        #[test]
        fn $name() {
            let test = concat!(module_path!(), "::", stringify!($name));
            if let Some($ended) = $crate::machine::testing::played(test, &[$($variable),*], || $body) {
                $check;
            }
        }
    )*};
}
pub(crate) use cases;
