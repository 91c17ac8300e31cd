//! Any bytes as an IDX file.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Err(error) = ddp_fuzz::arrays("a-idx3-ubyte", bytes) {
        assert_eq!(error.exit_code(), 65, "{error}");
    }
});
