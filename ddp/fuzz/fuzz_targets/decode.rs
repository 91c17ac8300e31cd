//! Any tokens, one by one, of a tokenizer of bytes and of a `tokenizer.json`: the parts are the
//! text of all tokens, and none ends within a character.
#![no_main]

use std::sync::LazyLock;

use ddp::data::text::{Encoder, Vocabulary};
use libfuzzer_sys::fuzz_target;

static TOKENIZER: LazyLock<(Encoder, usize)> = LazyLock::new(|| {
    let file = include_bytes!("../../../tests/golden/tokenizer/tokenizer.json");
    let vocabulary = Vocabulary::of_bytes(file.to_vec()).unwrap();
    (Encoder::of(&vocabulary).unwrap(), vocabulary.size)
});

fuzz_target!(|bytes: &[u8]| {
    ddp_fuzz::decoded(&Encoder::Bytes, 257, bytes).unwrap();
    ddp_fuzz::decoded(&TOKENIZER.0, TOKENIZER.1, bytes).unwrap();
});
