//! The host's touches of pinned memory, through the entry points.

use std::ffi::c_void;
use std::ptr::null_mut;

use cudarc::driver::sys::CUstream;

use crate::copy::{cuMemcpyDtoHAsync_v2, cuMemcpyHtoDAsync_v2, cuMemsetD8Async};
use crate::error::CUresult;
use crate::machine::testing::{cases, device, made, ok};
use crate::memory::calls::{cuMemAllocAsync, cuMemFreeHost, cuMemHostAlloc};
use crate::memory::pinned::mapping;
use crate::scheduler;
use crate::stream;

const BYTES: usize = 8192;
/// The copy covers half a page more than one: the rest of the second page is not in flight.
const COPIED: usize = 6144;

/// Who has a device buffer and pinned memory, and copies in the null stream, where nobody else is.
struct Product {
    stream: CUstream,
    device: u64,
    pinned: *mut u8,
}

impl Product {
    fn new() -> Self {
        device(0);
        let pinned: *mut c_void = made(|pointer| cuMemHostAlloc(pointer, BYTES, 0));
        let stream = null_mut();
        Self {
            stream,
            device: made(|pointer| cuMemAllocAsync(pointer, BYTES, stream)),
            pinned: pinned.cast(),
        }
    }

    fn read(&self, byte: usize) -> u8 {
        // SAFETY: `byte` is within the mapping in all cases; whether it is the time for it is what
        // is tested.
        unsafe { self.pinned.add(byte).read_volatile() }
    }

    fn write(&self, byte: usize) {
        // SAFETY: as in `read`.
        unsafe { self.pinned.add(byte).write_volatile(9) }
    }

    fn download(&self) {
        ok(cuMemsetD8Async(self.device, 5, BYTES, self.stream));
        // SAFETY: pinned memory of BYTES bytes.
        ok(unsafe { cuMemcpyDtoHAsync_v2(self.pinned.cast(), self.device, COPIED, self.stream) });
    }

    fn upload(&self) {
        // SAFETY: pinned memory of BYTES bytes.
        ok(unsafe { cuMemcpyHtoDAsync_v2(self.device, self.pinned.cast(), COPIED, self.stream) });
    }

    fn synchronize(&self) -> CUresult {
        crate::machine::call_waiting("cuStreamSynchronize", |held| {
            let stream = stream::resolve(held, self.stream)?;
            scheduler::synchronize_stream(held, stream)
        })
    }

    fn free(&self) -> CUresult {
        cuMemFreeHost(self.pinned.cast())
    }
}

cases! {
    reading_what_a_copy_still_writes_is_found, [], {
        let product = Product::new();
        product.download();
        product.read(COPIED - 1);
    }, |ended| ended.is_found(&[
        "HOST ACCESS: the host reads byte 6143 of the 8192-byte allocation made by cuMemHostAlloc",
        "cuMemcpyDtoHAsync_v2 of 6144 bytes, on stream 0 of device 0",
        "which writes bytes 0..6144 of it",
        "it has not run yet",
    ]);

    overwriting_what_a_copy_still_reads_is_found, [], {
        let product = Product::new();
        product.upload();
        product.write(0);
    }, |ended| ended.is_found(&[
        "HOST ACCESS: the host writes to byte 0",
        "cuMemcpyHtoDAsync_v2 of 6144 bytes",
        "which reads bytes 0..6144 of it",
    ]);

    freeing_what_a_copy_still_writes_is_found, [], {
        let product = Product::new();
        product.download();
        product.free();
    }, |ended| ended.is_found(&[
        "HOST ACCESS: cuMemFreeHost frees",
        "while it is in flight",
        "cuMemcpyDtoHAsync_v2 of 6144 bytes",
    ]);

    reading_what_was_freed_is_found, [], {
        let product = Product::new();
        ok(product.free());
        product.read(7);
    }, |ended| ended.is_found(&["USE AFTER FREE: the host reads byte 7 of the 8192-byte allocation", "freed by cuMemFreeHost"]);

    writing_behind_the_end_is_found, [], {
        Product::new().write(BYTES);
    }, |ended| ended.is_found(&["OUT OF BOUNDS: the host writes to byte 8192 of the 8192-byte allocation"]);

    a_copy_that_runs_past_the_end_is_found, [], {
        let product = Product::new();
        // SAFETY: the copy is not done: what is tested is that it is refused.
        unsafe { cuMemcpyHtoDAsync_v2(product.device, product.pinned.add(16).cast(), BYTES, product.stream) };
    }, |ended| ended.is_found(&["OUT OF BOUNDS", "16 bytes past the end of the 8192-byte allocation made by cuMemHostAlloc"]);

    a_product_that_keeps_to_the_rules_hears_nothing, [], {
        let product = Product::new();
        product.write(0);
        product.download();
        // On the page of the copy, but not of it.
        assert_eq!(product.read(BYTES - 1), 0xff);
        product.write(BYTES - 1);
        ok(product.synchronize());
        assert_eq!([0, COPIED - 1, COPIED, BYTES - 1].map(|byte| product.read(byte)), [5, 5, 0xff, 9]);
        product.upload();
        // A copy that only reads lets the host read.
        assert_eq!(product.read(1), 5);
        ok(product.synchronize());
        product.write(1);
        ok(product.free());
    }, |ended| ended.is_clean();

    after_the_loss_of_a_device_its_copies_are_in_flight_no_more, [("SIMCUDA_FAULTS", "copy@1=launch_failure")], {
        let product = Product::new();
        product.download();
        assert_eq!(product.synchronize(), CUresult::CUDA_ERROR_LAUNCH_FAILED);
        product.write(0);
        product.read(0);
    }, |ended| ended.came_to_its_end();

    a_wait_on_a_device_that_hangs_opens_nothing, [("SIMCUDA_FAULTS", "copy@1=hang")], {
        let product = Product::new();
        product.download();
        std::thread::spawn(move || crate::machine::call("cuStreamQuery", |machine| {
            stream::resolve(machine, null_mut()).map(|_| ())
        }));
        product.read(0);
    }, |ended| ended.is_found(&["HOST ACCESS", "it has not run yet"]);

    a_closed_page_that_a_kernel_touches_is_opened_for_it, [], {
        let product = Product::new();
        product.download();
        ok(crate::machine::call("cuStreamQuery", |_| {
            // With the lock held, as a kernel runs.
            assert_eq!(product.read(3), 0xff);
            Ok(())
        }));
        assert!(!mapping::open_page(16), "an address of nobody");
    }, |ended| ended.is_clean();
}

#[test]
fn what_pages_allow_is_known_without_asking_the_system() {
    const PAGE: u64 = 4096;
    let memory = mapping::Mapping::new(4 * PAGE).unwrap();
    let pages = |from: u64, to: u64| memory.product + from * PAGE..memory.product + to * PAGE;
    memory.protect(
        &(memory.product + PAGE..memory.product + PAGE + 1),
        mapping::Protection::Closed,
    );
    let (open, closed) = (libc::PROT_READ | libc::PROT_WRITE, libc::PROT_NONE);
    assert_eq!(
        mapping::protections(&pages(0, 4)),
        [
            (pages(0, 1), open),
            (pages(1, 2), closed),
            (pages(2, 4), open)
        ]
    );
    assert!(mapping::open_page(memory.product + PAGE + 7));
    assert_eq!(mapping::protections(&pages(1, 3)), [(pages(1, 3), open)]);
    memory.close(false);
    assert_eq!(mapping::protections(&pages(1, 3)), []);
}
