//! The tokens of one file, whatever its format.

use std::path::Path;
use std::sync::Arc;

use ddp_kernels::mapped::Mapped;

use super::array::{Array, ArrayPlace};
use super::io::refuse;
use crate::element::Element;
use crate::error::Result;

/// The tokens of one file, whatever its format.
#[derive(Debug)]
pub struct TokenFile {
    /// Rows of one token each.
    pub tokens: Array,
    /// What the tokens are.
    pub coding: Coding,
}

/// What the tokens of a file are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Coding {
    /// The format, for people.
    pub format: &'static str,
    /// Tokens are below this, if the file says so.
    pub vocabulary: Option<usize>,
    /// The token after each document, if the file says so.
    pub end_of_text: Option<usize>,
    /// A hash of the vocabulary, if the file says so.
    pub tokenizer: Option<String>,
    /// Whether each token is a byte of a text.
    pub are_bytes: bool,
}

impl TokenFile {
    pub(super) fn new(tokens: Array, format: &'static str, vocabulary: Option<usize>) -> TokenFile {
        let coding = Coding {
            format,
            vocabulary,
            ..Coding::default()
        };
        TokenFile { tokens, coding }
    }

    /// Format and type of the tokens, and what the file says of them.
    pub fn describe(&self) -> String {
        let coding = &self.coding;
        let vocabulary = coding
            .vocabulary
            .map(|count| format!(", vocabulary {count}"));
        let end = coding.end_of_text;
        let end = end.map(|token| format!(", documents end with {token}"));
        format!(
            "{} ({}{}{})",
            coding.format,
            self.tokens.element(),
            vocabulary.unwrap_or_default(),
            end.unwrap_or_default()
        )
    }
}

/// All bytes of a file from `offset` on as numbers of this type.
pub(super) fn whole_file(
    path: &Path,
    mapped: &Arc<Mapped>,
    element: Element,
    offset: u64,
) -> Result<Array> {
    let (bytes, size) = (mapped.len() - offset, element.bytes() as u64);
    if !bytes.is_multiple_of(size) {
        return Err(refuse(
            path,
            format!(
                "expected tokens of {size} bytes ({element}) without a header, got {bytes} bytes: it is cut short or of \
                 another format"
            ),
        ));
    }
    let place = ArrayPlace {
        key: "",
        offset,
        element,
        big_endian: false,
        shape: &[(bytes / size) as usize],
    };
    let array = Array::new(mapped, &path.display().to_string(), &place);
    array.map_err(|why| refuse(path, why))
}
