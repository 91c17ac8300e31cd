//! Any bytes as a CSV table: no panic, at most as many numbers as bytes, all of them finite. The
//! same bytes packed by gzip give the same table.
#![no_main]

use std::io::Write;

use flate2::{Compression, write::GzEncoder};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let plain = ddp_fuzz::table("a.csv", bytes);
    match &plain {
        // Each cell is read twice: as a feature and as a label.
        Ok(count) => assert!(*count <= 2 * bytes.len()),
        Err(error) => assert_eq!(error.exit_code(), 65, "{error}"),
    }
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).expect("a Vec takes everything");
    let packed = encoder.finish().expect("a Vec takes everything");
    let packed = ddp_fuzz::table("a.csv.gz", &packed);
    if let Ok(plain) = plain {
        assert_eq!(plain, packed.expect("the packed table is read too"));
    }
});
