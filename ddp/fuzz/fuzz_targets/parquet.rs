//! Any bytes as a Parquet table: bad data or finite numbers. `ddp-train` turns a panic of the
//! `parquet` crate into bad data; here it is found.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Err(error) = ddp_fuzz::table("a.parquet", bytes) {
        assert_eq!(error.exit_code(), 65, "{error}");
    }
});
