//! nanoGPT's files of tokens: numbers without a header.

use super::array::Array;
use super::format::{DataFile, Format, Holds, PLAIN, TokenFile, whole_file};
use super::llm_c;
use crate::element::Element;
use crate::error::{Result, ensure};

/// Not in the list of formats: only where tokens are asked for, a file without a header holds some.
pub(super) static NANOGPT: Format = Format {
    name: "tokens without a header",
    holds: Holds::Tokens(open),
    ..PLAIN
};

fn open(file: &DataFile<'_>) -> Result<TokenFile> {
    let mapped = file.map()?;
    let tokens = whole_file(file.path, &mapped, file.stated.unwrap_or(Element::U16), 0)?;
    if file.stated.is_none() {
        llm_c::check_no_header(&mapped).map_err(|why| file.bad(why))?;
        check_not_u32(&tokens)?;
    }
    Ok(TokenFile::new(tokens, "without a header", None))
}

/// Numbers below this are tiny: the upper halves of u32 tokens are, in vocabularies of 4 million.
const TINY: i64 = 64;

/// An error if nearly all numbers at odd places are tiny and many others are not, as if the tokens
/// were u32, or i64: of those three in four 16-bit numbers are 0.
fn check_not_u32(array: &Array) -> Result<()> {
    let mut first = vec![0; array.rows().min(4096) as usize];
    array.read_i64(0, &mut first)?;
    let pairs = first.as_chunks::<2>().0;
    let tiny = |half: usize| pairs.iter().filter(|pair| pair[half] < TINY).count();
    let (all, low, high) = (pairs.len(), tiny(0), tiny(1));
    ensure!(
        all < 32 || high * 10 < all * 9 || low * 4 > all * 3,
        "cannot read {}: expected u16 tokens without a header, got numbers of which every second one is small, as in u32 \
         tokens or wider ones ({high} of {all} at odd places are below {TINY}, {low} at even places); help: give \
         tokens:FILE,type=u32 if they are u32, type=u16 if they are u16, or save them with np.save, as int64 must be",
        array.name()
    );
    Ok(())
}
