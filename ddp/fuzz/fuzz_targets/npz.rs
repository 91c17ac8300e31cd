//! Any bytes as an `.npz` archive: nothing is unpacked that is more than its bytes can be.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Err(error) = ddp_fuzz::arrays("a.npz", bytes) {
        assert_eq!(error.exit_code(), 65, "{error}");
    }
});
