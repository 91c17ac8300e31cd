//! Any bytes as a `.safetensors` file of data.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    match ddp_fuzz::arrays("a.safetensors", bytes) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.exit_code(), 65, "{error}"),
    }
});
