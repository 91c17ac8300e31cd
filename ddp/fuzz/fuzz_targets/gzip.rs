//! Any bytes as a gzip file, of a table and of an array.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Err(error) = ddp_fuzz::table("a.csv.gz", bytes) {
        assert_eq!(error.exit_code(), 65, "{error}");
    }
    if let Err(error) = ddp_fuzz::arrays("a.gz", bytes) {
        assert_eq!(error.exit_code(), 65, "{error}");
    }
});
