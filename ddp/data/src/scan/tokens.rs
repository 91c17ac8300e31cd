//! Reads all tokens: a hash of their content, the largest, and the first one that is refused. A
//! token out of the vocabulary would be read beyond the end of an embedding.

use std::panic::Location;

use ddp_kernels::heartbeat::{self, Work};
use ddp_kernels::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use super::merged;
use crate::error::{Error, Result};
use crate::files::Array;
use crate::ranks::Ranks;
use crate::sampler::share;

/// Tokens read at a time.
const BLOCK_TOKENS: u64 = 1 << 16;
/// Parts that blocks are cut into.
const SEGMENTS: u64 = 240;

/// What was found in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct TokensFound {
    pub(crate) largest: u64,
    /// The file and the position in it of the first token that is refused.
    pub(crate) bad: Option<(u64, u64)>,
    /// The sum of the hashes of all blocks; of those up to a bad one in each segment.
    pub(crate) hash: u64,
}

impl TokensFound {
    /// Adds later tokens.
    fn merge(&mut self, later: TokensFound) {
        self.largest = self.largest.max(later.largest);
        self.bad = self.bad.or(later.bad);
        self.hash = self.hash.wrapping_add(later.hash);
    }
}

/// Reads the tokens of all files, which must be below `bound` and not `refused`. All ranks share
/// the work.
pub(crate) fn tokens(
    files: &[Array],
    (bound, refused): (u64, Option<u64>),
    ranks: &dyn Ranks,
) -> Result<TokensFound> {
    // The first block of each file, then the number of all blocks. A block is in one file.
    let mut blocks = vec![0];
    for file in files {
        blocks.push(blocks[blocks.len() - 1] + file.rows().div_ceil(BLOCK_TOKENS));
    }
    let all = 0..blocks[files.len()];
    let segments = SEGMENTS.min(all.end);
    let read = |segment| {
        let mut found = TokensFound::default();
        // A tensor, because it lends its bytes.
        let block = Tensor::zeros(&[BLOCK_TOKENS as usize], DType::I64, Device::Cpu)?;
        for number in share(&all, segment as usize, segments as usize) {
            heartbeat::beat(Work::ReadsData);
            let file = blocks.partition_point(|&first| first <= number) - 1;
            let first = (number - blocks[file]) * BLOCK_TOKENS;
            let place = (file, first, number);
            found.merge(read_block(&block, files, place, (bound, refused))?);
            if found.bad.is_some() {
                break;
            }
        }
        Ok(found)
    };
    merged(segments, ranks, read, TokensFound::merge)
}

/// Reads block `number` into `block`: it begins with token `first` of file `file`.
fn read_block(
    block: &Tensor,
    files: &[Array],
    (file, first, number): (usize, u64, u64),
    (bound, refused): (u64, Option<u64>),
) -> Result<TokensFound> {
    let array = &files[file];
    let count = BLOCK_TOKENS.min(array.rows() - first) as usize;
    let (largest, bad) = block.with_slice_mut(|block: &mut [i64]| {
        let tokens = &mut block[..count];
        array.read_i64(first, tokens)?;
        // A negative number is larger than any token.
        let mut tokens = tokens.iter().map(|token| token.cast_unsigned());
        let largest = tokens.clone().fold(0, u64::max);
        let is_refused = refused.is_some_and(|refused| tokens.clone().any(|one| one == refused));
        let bad = match largest >= bound || is_refused {
            true => tokens.position(|token| token >= bound || Some(token) == refused),
            false => None,
        };
        Ok::<_, Error>((largest, bad))
    })??;
    let hash = |bytes: &[u8]| XxHash3_64::oneshot_with_seed(number, &bytes[..8 * count]);
    Ok(TokensFound {
        largest,
        bad: bad.map(|position| (file as u64, first + position as u64)),
        hash: block.with_bytes("hash", Location::caller(), hash)?,
    })
}
