//! Any bytes as a file of prompts: bad data, or prompts that are parts of their lines.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Err(error) = ddp_fuzz::prompts(bytes) {
        assert_eq!(error.exit_code(), 65, "{error}");
    }
});
