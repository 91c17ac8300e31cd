//! Any bytes as a flat `.bin`, with the checksum of the header that it has.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    match ddp_fuzz::flat(bytes) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.exit_code(), 65, "{error}"),
    }
});
