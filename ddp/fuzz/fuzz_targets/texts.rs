//! Any bytes as a text, as lines of JSON, and as either of them compressed: bad data or texts.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    for name in ["a.txt", "a.jsonl", "a.txt.gz", "a.txt.zst", "a.jsonl.zst", "a.parquet"] {
        if let Err(error) = ddp_fuzz::texts(name, bytes) {
            assert_eq!(error.exit_code(), 65, "{name}: {error}");
        }
    }
});
