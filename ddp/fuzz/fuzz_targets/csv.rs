//! Any bytes as a table of text: never a panic, never more numbers than bytes, never one that is not finite; and the same as a table that gzip has
//! packed.
#![no_main]

use std::io::Write;

use flate2::{Compression, write::GzEncoder};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let plain = ddp::fuzzing::table("a.csv", bytes);
    match &plain {
        // Each is read twice, as a feature or a label.
        Ok(count) => assert!(*count <= 2 * bytes.len()),
        Err(error) => assert_eq!(error.exit_code(), 65, "{error}"),
    }
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).expect("a Vec takes everything");
    let packed = ddp::fuzzing::table("a.csv.gz", &encoder.finish().expect("a Vec takes everything"));
    // A file that begins as an array does is none of the tables' business.
    if let (Ok(plain), packed) = (plain, packed) {
        assert_eq!(plain, packed.expect("what is a table is one when it is packed"));
    }
});
