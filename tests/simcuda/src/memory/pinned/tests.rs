//! The host's touches of pinned memory, through the entry points. A finding ends the process, so each case is a process of
//! its own: the test starts itself again and says which case it is to play.

use std::ffi::c_void;
use std::process::Command;
use std::ptr::null_mut;

use cudarc::driver::sys::{CUresult, CUstream};

use crate::context::{cuCtxSetCurrent, cuDevicePrimaryCtxRetain};
use crate::copy::{cuMemcpyDtoHAsync_v2, cuMemcpyHtoDAsync_v2, cuMemsetD8Async};
use crate::device::cuInit;
use crate::machine::Out;
use crate::memory::calls::{cuMemAllocAsync, cuMemFreeHost, cuMemHostAlloc};
use crate::report::EXIT_CODE;
use crate::scheduler;
use crate::stream;

const CASE: &str = "SIMCUDA_TEST_CASE";
const BYTES: usize = 8192;
/// The copy covers half a page more than one: the rest of the second page is not in flight.
const COPIED: usize = 6144;

fn made<T>(call: impl FnOnce(Out<'_, T>) -> CUresult) -> T {
    let mut place = std::mem::MaybeUninit::uninit();
    assert_eq!(call(Some(&mut place)), CUresult::CUDA_SUCCESS);
    // SAFETY: a call that succeeds has written its result.
    unsafe { place.assume_init() }
}

struct Product {
    stream: CUstream,
    device: u64,
    pinned: *mut u8,
}

impl Product {
    fn new() -> Self {
        assert_eq!(cuInit(0), CUresult::CUDA_SUCCESS);
        let context = made(|context| cuDevicePrimaryCtxRetain(context, 0));
        assert_eq!(cuCtxSetCurrent(context), CUresult::CUDA_SUCCESS);
        let pinned: *mut c_void = made(|pointer| cuMemHostAlloc(pointer, BYTES, 0));
        // The null stream: nobody else is there.
        let stream = null_mut();
        Self { stream, device: made(|pointer| cuMemAllocAsync(pointer, BYTES, stream)), pinned: pinned.cast() }
    }

    fn read(&self, byte: usize) -> u8 {
        // SAFETY: `byte` is below BYTES in all cases; whether it is the time for it is what is tested.
        unsafe { self.pinned.add(byte).read_volatile() }
    }

    fn write(&self, byte: usize) {
        // SAFETY: as in `read`.
        unsafe { self.pinned.add(byte).write_volatile(9) }
    }

    fn download(&self) {
        assert_eq!(cuMemsetD8Async(self.device, 5, BYTES, self.stream), CUresult::CUDA_SUCCESS);
        // SAFETY: pinned memory of BYTES bytes.
        let code = unsafe { cuMemcpyDtoHAsync_v2(self.pinned.cast(), self.device, COPIED, self.stream) };
        assert_eq!(code, CUresult::CUDA_SUCCESS);
    }

    fn upload(&self) {
        // SAFETY: pinned memory of BYTES bytes.
        let code = unsafe { cuMemcpyHtoDAsync_v2(self.device, self.pinned.cast(), COPIED, self.stream) };
        assert_eq!(code, CUresult::CUDA_SUCCESS);
    }

    fn synchronize(&self) {
        let code = crate::machine::call_waiting("cuStreamSynchronize", |held| {
            let stream = stream::resolve(held, self.stream)?;
            scheduler::synchronize_stream(held, stream)
        });
        assert_eq!(code, CUresult::CUDA_SUCCESS);
    }
}

/// What the process does that plays a case. Whoever comes to the end has done nothing wrong.
fn play(case: &str) {
    let product = Product::new();
    match case {
        "reads what a copy still writes" => {
            product.download();
            product.read(COPIED - 1);
        }
        "overwrites what a copy still reads" => {
            product.upload();
            product.write(0);
        }
        "frees what a copy still writes" => {
            product.download();
            cuMemFreeHost(product.pinned.cast());
        }
        "reads what was freed" => {
            cuMemFreeHost(product.pinned.cast());
            product.read(7);
        }
        "keeps to the rules" => {
            product.write(0);
            product.download();
            // On the page of the copy, but not of it.
            assert_eq!(product.read(BYTES - 1), 0xff);
            product.write(BYTES - 1);
            product.synchronize();
            assert_eq!([0, COPIED - 1, COPIED, BYTES - 1].map(|byte| product.read(byte)), [5, 5, 0xff, 9]);
            product.upload();
            // A copy that only reads lets the host read.
            assert_eq!(product.read(1), 5);
            product.synchronize();
            product.write(1);
            assert_eq!(cuMemFreeHost(product.pinned.cast()), CUresult::CUDA_SUCCESS);
        }
        other => panic!("no case {other}"),
    }
    println!("came to the end");
}

/// Plays a case in a process of its own; gives its exit code and what it printed.
fn played(test: &str, case: &str) -> (Option<i32>, String) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args([&format!("memory::pinned::tests::{test}"), "--exact", "--nocapture"])
        .env(CASE, case)
        .env("SIMCUDA_SCHEDULE", "lazy")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    (output.status.code(), text)
}

fn is_found(test: &str, case: &str, parts: &[&str]) {
    if let Ok(case) = std::env::var(CASE) {
        play(&case);
        return;
    }
    let (code, text) = played(test, case);
    assert_eq!(code, Some(EXIT_CODE), "{text}");
    for part in parts {
        assert!(text.contains(part), "`{part}` is not in:\n{text}");
    }
}

#[test]
fn reading_what_a_copy_still_writes_is_found() {
    let parts = [
        "HOST ACCESS: the host reads byte 6143 of the 8192-byte allocation made by cuMemHostAlloc",
        "cuMemcpyDtoHAsync_v2 of 6144 bytes",
        "which writes bytes 0..6144 of it",
        "it has not run yet",
    ];
    is_found("reading_what_a_copy_still_writes_is_found", "reads what a copy still writes", &parts);
}

#[test]
fn overwriting_what_a_copy_still_reads_is_found() {
    let parts = [
        "HOST ACCESS: the host writes to byte 0",
        "cuMemcpyHtoDAsync_v2 of 6144 bytes",
        "which reads bytes 0..6144 of it",
    ];
    is_found("overwriting_what_a_copy_still_reads_is_found", "overwrites what a copy still reads", &parts);
}

#[test]
fn freeing_what_a_copy_still_writes_is_found() {
    let parts = ["HOST ACCESS: cuMemFreeHost frees", "while it is in flight", "cuMemcpyDtoHAsync_v2 of 6144 bytes"];
    is_found("freeing_what_a_copy_still_writes_is_found", "frees what a copy still writes", &parts);
}

#[test]
fn reading_what_was_freed_is_found() {
    let parts = ["USE AFTER FREE: the host reads byte 7 of the 8192-byte allocation", "freed by cuMemFreeHost"];
    is_found("reading_what_was_freed_is_found", "reads what was freed", &parts);
}

#[test]
fn a_product_that_keeps_to_the_rules_hears_nothing() {
    if let Ok(case) = std::env::var(CASE) {
        play(&case);
        return;
    }
    let (code, text) = played("a_product_that_keeps_to_the_rules_hears_nothing", "keeps to the rules");
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("came to the end") && !text.contains("simcuda:"), "{text}");
}
