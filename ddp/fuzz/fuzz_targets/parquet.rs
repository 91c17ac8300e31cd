//! Any bytes as a Parquet table: bad data or finite numbers. A panic within the reader we use ends as bad data in `ddp-train`, and is found here.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Err(error) = ddp::fuzzing::table("a.parquet", bytes) {
        assert_eq!(error.exit_code(), 65, "{error}");
    }
});
