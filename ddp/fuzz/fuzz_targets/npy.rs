//! Any bytes as an `.npy` file of data, and as the first ones of a packed one.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    match ddp_fuzz::arrays("a.npy", bytes) {
        // A file may be of another format than its name says.
        Ok(_) if bytes.starts_with(b"\x93NUMPY") => {
            assert_eq!(ddp_fuzz::claimed(bytes), Some(bytes.len() as u64))
        }
        Ok(_) => {}
        Err(error) => assert_eq!(error.exit_code(), 65, "{error}"),
    }
});
