//! From texts to shards of tokens, and back: `documents` reads files, `encoder` turns text into
//! tokens, `vocabulary` says which tokens a tokenizer has, `shards` fills a `folder`.

mod documents;
mod encoder;
mod folder;
mod shards;
mod vocabulary;

pub use self::documents::{Piece, ReadOptions, documents};
pub use self::encoder::{Encoder, TextStream};
pub use self::folder::Side;
pub(crate) use self::folder::check_whole;
pub use self::shards::{Progress, Sizes, TokenizeOptions, Tokenized, TokenizerChoice, tokenize};
pub use self::vocabulary::{TOKENIZER_FILE, Vocabulary};

#[cfg(test)]
mod tests;
