//! Any bytes as a flat `.bin`, with the checksum of the header that it has.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Err(error) = ddp_fuzz::flat(bytes) {
        assert_eq!(error.exit_code(), 65, "{error}");
    }
});
