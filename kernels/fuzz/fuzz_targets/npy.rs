//! Any bytes as an `.npy` file: never a panic, never more elements than bytes, and what was read is
//! read again from what is saved.
#![no_main]

use std::sync::LazyLock;

use ddp_kernels::{Device, Tensor, memory, npy};
use libfuzzer_sys::fuzz_target;

/// Most inputs are a few hundred bytes: more memory than this can only come from a claim that was
/// believed.
const MEMORY_BYTES_MAX: usize = 64 << 20;

fuzz_target!(|bytes: &[u8]| {
    static PREPARED: LazyLock<std::path::PathBuf> = LazyLock::new(|| {
        memory::set_limit_bytes(Device::Cpu, Some(MEMORY_BYTES_MAX));
        // Saving makes its file durable: in memory that costs nothing.
        std::path::PathBuf::from(format!("/dev/shm/ddp-fuzz-{}.npy", std::process::id()))
    });
    let path = &*PREPARED;
    let Ok(tensor) = npy::parse(bytes, Device::Cpu) else {
        return;
    };
    assert!(tensor.bytes() <= bytes.len());
    let first = saved(&tensor, path);
    let again = npy::parse(&first, Device::Cpu).expect("what is saved can be read");
    assert_eq!(
        (again.dtype(), again.shape()),
        (tensor.dtype(), tensor.shape())
    );
    assert_eq!(first, saved(&again, path));
});

fn saved(tensor: &Tensor, path: &std::path::Path) -> Vec<u8> {
    tensor
        .save_npy(path)
        .expect("every dtype that is read can be saved");
    let bytes = std::fs::read(path).expect("it was just saved");
    std::fs::remove_file(path).expect("it was just saved");
    bytes
}
