//! Reads all tokens: a hash of their content, the largest, and the first that is not below the
//! vocabulary. A token out of it would be read beyond the end of an embedding.

use std::panic::Location;

use ddp_kernels::heartbeat::{self, Work};
use ddp_kernels::{DType, Device, Tensor};
use twox_hash::XxHash3_64;

use super::segments::in_segments;
use crate::error::{Error, Result};
use crate::files::Array;
use crate::ranks::Ranks;
use crate::sampler::share;

/// Tokens read at a time.
const BLOCK_TOKENS: u64 = 1 << 16;
/// Parts that blocks are cut into.
const SEGMENTS: u64 = 240;

/// What was found in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct TokensFound {
    pub(crate) largest: u64,
    /// The file and the position in it of the first token that is refused.
    pub(crate) bad: Option<(u64, u64)>,
    /// The sum of the hashes of all blocks; of those up to a bad one in each segment.
    pub(crate) hash: u64,
}

/// The numbers of `to_words`.
const WORDS: usize = 5;

impl TokensFound {
    /// Adds later tokens.
    fn merge(&mut self, later: &TokensFound) {
        self.largest = self.largest.max(later.largest);
        self.bad = self.bad.or(later.bad);
        self.hash = self.hash.wrapping_add(later.hash);
    }

    /// For other ranks.
    fn to_words(self) -> [u64; WORDS] {
        let (file, position) = self.bad.unwrap_or_default();
        [
            self.hash,
            self.largest,
            u64::from(self.bad.is_some()),
            file,
            position,
        ]
    }

    /// The opposite of `to_words`.
    fn of_words([hash, largest, is_bad, file, position]: [u64; WORDS]) -> TokensFound {
        TokensFound {
            largest,
            bad: (is_bad != 0).then_some((file, position)),
            hash,
        }
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
    let mine = share(&(0..segments), ranks.rank(), ranks.size());
    let found = in_segments(mine, |segment| {
        let mut found = TokensFound::default();
        // A tensor, because it lends its bytes.
        let block = Tensor::zeros(&[BLOCK_TOKENS as usize], DType::I64, Device::Cpu)?;
        for number in share(&all, segment as usize, segments as usize) {
            heartbeat::beat(Work::ReadsData);
            let file = blocks.partition_point(|&first| first <= number) - 1;
            let first = (number - blocks[file]) * BLOCK_TOKENS;
            let place = (first, number);
            let limits = (bound, refused);
            let bad = read_block(&block, &files[file], place, limits, &mut found)?;
            if let Some(position) = bad {
                found.bad = Some((file as u64, position));
                break;
            }
        }
        Ok(found)
    });
    let mine = found.map(|segments| {
        let mut mine = TokensFound::default();
        segments.iter().for_each(|segment| mine.merge(segment));
        mine.to_words()
            .map(u64::to_le_bytes)
            .as_flattened()
            .to_vec()
    });
    let mut total = TokensFound::default();
    // Each rank's segments follow those of the rank before.
    for bytes in ranks.share(mine)? {
        let (words, _) = bytes.as_chunks();
        let words: Vec<u64> = words.iter().copied().map(u64::from_le_bytes).collect();
        let words = words.try_into();
        let words = words.map_err(|_| Error::Internal("another rank's tokens".into()))?;
        total.merge(&TokensFound::of_words(words));
    }
    Ok(total)
}

/// Reads block `number`, which begins with token `first` of `file`, into `block`. Returns the
/// position of the first token that is not below `bound` or that is `refused`.
fn read_block(
    block: &Tensor,
    file: &Array,
    (first, number): (u64, u64),
    (bound, refused): (u64, Option<u64>),
    found: &mut TokensFound,
) -> Result<Option<u64>> {
    let count = BLOCK_TOKENS.min(file.rows() - first) as usize;
    let (largest, is_refused) = block.with_slice_mut(|block: &mut [i64]| {
        let tokens = &mut block[..count];
        file.read_i64(first, tokens)?;
        // A negative number is larger than any token.
        let tokens = tokens.iter().map(|token| token.cast_unsigned());
        let is_refused = refused.is_some_and(|refused| tokens.clone().any(|one| one == refused));
        Ok::<_, Error>((tokens.fold(0, u64::max), is_refused))
    })??;
    let hash = |bytes: &[u8]| XxHash3_64::oneshot_with_seed(number, &bytes[..8 * count]);
    let hash = block.with_bytes("hash", Location::caller(), hash)?;
    found.hash = found.hash.wrapping_add(hash);
    if largest < bound && !is_refused {
        found.largest = found.largest.max(largest);
        return Ok(None);
    }
    let position = block.with_slice(|block: &[i64]| {
        let mut tokens = block.iter();
        tokens.position(|token| {
            let token = token.cast_unsigned();
            token >= bound || Some(token) == refused
        })
    })?;
    Ok(position.map(|position| first + position as u64))
}
