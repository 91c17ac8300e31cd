//! Any bytes as a tokenizer.json: bad data or a vocabulary. The crate `tokenizers` panics on some;
//! ddp-train turns that into bad data, so the crate is not called here.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Err(error) = ddp_fuzz::tokenizer(bytes) {
        assert_eq!(error.exit_code(), 65, "{error}");
    }
});
