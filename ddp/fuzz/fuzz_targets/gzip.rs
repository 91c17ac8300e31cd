//! Any bytes as a gzip file, of a table and of an array: bad data, or as many bytes as the array's
//! header claims.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Err(error) = ddp_fuzz::table("a.csv.gz", bytes) {
        assert_eq!(error.exit_code(), 65, "{error}");
    }
    match ddp_fuzz::unpacked(bytes) {
        Ok(unpacked) => assert!(unpacked <= 1033 * bytes.len() as u64),
        Err(error) => assert_eq!(error.exit_code(), 65, "{error}"),
    }
});
