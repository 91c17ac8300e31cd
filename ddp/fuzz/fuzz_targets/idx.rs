//! Any bytes as an IDX file, and as the first ones of a packed one.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    match ddp_fuzz::arrays("a-idx3-ubyte", bytes) {
        // A file may be of another format than its name says.
        Ok(_) if bytes.starts_with(&[0, 0, 8]) && bytes.get(8) != Some(&b'{') => {
            assert_eq!(ddp_fuzz::claimed(bytes), Some(bytes.len() as u64))
        }
        Ok(_) => {}
        Err(error) => assert_eq!(error.exit_code(), 65, "{error}"),
    }
});
