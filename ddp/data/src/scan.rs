//! Reads all rows once before training, for the moments of features, non-finite numbers, the
//! classes, the largest token, and a hash of the content.
//!
//! The result has the same bits for any number of ranks and threads. Blocks of rows, and segments
//! of blocks, depend only on the number and size of rows. The blocks of a segment are added one
//! after another (Chan's formula, in f64), then the segments; ranks and threads take whole
//! segments. The hash is the sum of the hashes of all blocks, of the numbers as f32, so that the
//! same rows in files of another format have the same one.
//!
//! If features are larger than `BYTES_MAX`, only some blocks are read, spread evenly over all rows,
//! which is enough for moments. Non-finite numbers elsewhere are then found during training.

use std::collections::BTreeSet;
use std::ops::Range;
use std::panic::Location;
use std::sync::{Mutex, PoisonError};

use ddp_kernels::heartbeat::{self, Work};
use ddp_kernels::panics;
use ddp_kernels::{DType, Device, Tensor, threads};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use crate::error::{Error, Result};
use crate::features::Moments;
use crate::files::Array;
use crate::labels::Labels;
use crate::ranks::Ranks;
use crate::sampler::share;
use crate::task::{CLASSES_MAX, Classes};

/// The most bytes of features, as f32, that are read before training.
pub(crate) const BYTES_MAX: u64 = 8 << 30;
/// The same for integers that need no moments: none of them can be wrong.
pub(crate) const HASHED_BYTES_MAX: u64 = 2 << 30;
/// The numbers of a block: as f32 they stay in a core's cache while they are read twice.
const BLOCK_NUMBERS: usize = 1 << 16;
/// The fewest rows of a block if rows are larger, so that merging costs less than adding; unless a
/// block would then have more numbers than the second of these.
const BLOCK_ROWS_MIN: usize = 8;
const BLOCK_NUMBERS_MAX: usize = 1 << 22;
/// As many segments as most numbers of ranks share evenly.
const SEGMENTS: u64 = 240;
/// The most bytes of the moments of all segments together.
const SEGMENTS_BYTES: u64 = 64 << 20;

/// Reads whole rows from this one on.
pub(crate) type ReadRows<'a> = &'a (dyn Fn(u64, &mut [f32]) -> Result<()> + Sync);
/// Which rows are trained on.
pub(crate) type IsTrainedOn<'a> = &'a (dyn Fn(u64) -> bool + Sync);

/// What was found in features.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Found {
    /// Of the rows that are trained on.
    pub(crate) moments: Moments,
    /// The row and the feature of the first non-finite number.
    pub(crate) bad: Option<(u64, u64)>,
    /// The sum of the hashes of all blocks; of those up to a bad one in each segment.
    pub(crate) hash: u64,
    /// The BLAKE3 of each segment, one after another.
    pub(crate) blake3: String,
    /// Whether every row was read.
    pub(crate) is_complete: bool,
}

impl Found {
    /// In no rows.
    fn none(width: usize) -> Found {
        Found {
            moments: Moments::none(width),
            bad: None,
            hash: 0,
            blake3: String::new(),
            is_complete: true,
        }
    }
}

/// Which blocks are read, and how they are cut into segments.
#[derive(Clone, Copy, Debug, PartialEq)]
struct BlockPlan {
    rows: u64,
    block_rows: u64,
    blocks: u64,
    /// How many blocks are read.
    taken: u64,
    segments: u64,
}

impl BlockPlan {
    fn new(rows: u64, width: usize, bytes_max: u64) -> BlockPlan {
        let least = BLOCK_ROWS_MIN.min(BLOCK_NUMBERS_MAX / width).max(1);
        let block_rows = (BLOCK_NUMBERS / width).max(least) as u64;
        let blocks = rows.div_ceil(block_rows);
        let block_bytes = block_rows * width as u64 * 4;
        let taken = blocks.min((bytes_max / block_bytes).max(1));
        let moments_bytes = (8 + 24 * width) as u64;
        let segments_max = SEGMENTS.min((SEGMENTS_BYTES / moments_bytes).max(1));
        BlockPlan {
            rows,
            block_rows,
            blocks,
            taken,
            segments: segments_max.min(taken),
        }
    }

    /// The rows of the blocks of a segment, in order.
    fn blocks_of(self, segment: u64) -> impl Iterator<Item = Range<u64>> {
        share(&(0..self.taken), segment as usize, self.segments as usize).map(move |index| {
            let block =
                (u128::from(index) * u128::from(self.blocks) / u128::from(self.taken)) as u64;
            let first = block * self.block_rows;
            first..(first + self.block_rows).min(self.rows)
        })
    }
}

/// Reads this many rows of this width; all ranks share the work. Moments include only rows for
/// which `is_trained_on` is true.
pub(crate) fn features(
    (rows, width): (u64, usize),
    read: ReadRows<'_>,
    is_trained_on: IsTrainedOn<'_>,
    ranks: &dyn Ranks,
    bytes_max: u64,
) -> Result<Found> {
    let plan = BlockPlan::new(rows, width, bytes_max);
    let found = |segment| {
        Ok(vec![read_segment(
            plan,
            width,
            read,
            is_trained_on,
            segment,
        )?])
    };
    let add = |all: &mut Vec<Found>, mut later: Vec<Found>| all.append(&mut later);
    let mut total = Found::none(width);
    total.is_complete = plan.taken == plan.blocks;
    for segment in merged(plan.segments, ranks, found, add)? {
        total.moments.merge(&segment.moments);
        total.bad = total.bad.or(segment.bad);
        total.hash = total.hash.wrapping_add(segment.hash);
        total.blake3 += &segment.blake3;
    }
    Ok(total)
}

fn read_segment(
    plan: BlockPlan,
    width: usize,
    read: ReadRows<'_>,
    is_trained_on: IsTrainedOn<'_>,
    segment: u64,
) -> Result<Found> {
    let (mut total, mut contents) = (Found::none(width), blake3::Hasher::new());
    // A tensor, because it lends its bytes.
    let x = Tensor::zeros(&[plan.block_rows as usize * width], DType::F32, Device::Cpu)?;
    for block in plan.blocks_of(segment) {
        heartbeat::beat(Work::ReadsData);
        let count = (block.end - block.start) as usize * width;
        x.with_slice_mut(|x: &mut [f32]| read(block.start, &mut x[..count]))??;
        let hash = |bytes: &[u8]| {
            contents.update(&bytes[..4 * count]);
            XxHash3_64::oneshot_with_seed(block.start, &bytes[..4 * count])
        };
        let hash = x.with_bytes("hash", Location::caller(), hash)?;
        total.hash = total.hash.wrapping_add(hash);
        x.with_slice_mut(|x: &mut [f32]| {
            let x = &mut x[..count];
            if let Some(index) = first_nonfinite(x) {
                let row = block.start + (index / width) as u64;
                total.bad = Some((row, (index % width) as u64));
                return;
            }
            let kept = keep(x, width, block.start, is_trained_on);
            let moments = Moments::of_rows(&x[..kept * width], width);
            total.moments.merge(&moments);
        })?;
        if total.bad.is_some() {
            break;
        }
    }
    total.blake3 = contents.finalize().to_hex().to_string();
    Ok(total)
}

/// The index of the first number that is not finite.
pub(crate) fn first_nonfinite(x: &[f32]) -> Option<usize> {
    // Pieces without a branch inside are vectorized.
    const PIECE: usize = 256;
    let all_finite = |piece: &[f32]| piece.iter().fold(true, |all, x| all & x.is_finite());
    let start = PIECE * x.chunks(PIECE).position(|piece| !all_finite(piece))?;
    let index = x[start..].iter().position(|x| !x.is_finite())?;
    Some(start + index)
}

/// Moves the rows that are trained on to the front. Returns how many they are.
fn keep(x: &mut [f32], width: usize, first: u64, is_trained_on: IsTrainedOn<'_>) -> usize {
    let mut kept = 0;
    for row in 0..x.len() / width {
        if is_trained_on(first + row as u64) {
            if kept != row {
                x.copy_within(row * width..(row + 1) * width, kept * width);
            }
            kept += 1;
        }
    }
    kept
}

/// What `work` returns for each of these segments, in their order.
pub(crate) fn in_segments<T: Send>(
    segments: Range<u64>,
    work: impl Fn(u64) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let count = (segments.end - segments.start) as usize;
    let results: Mutex<Vec<Option<Result<T>>>> = Mutex::new((0..count).map(|_| None).collect());
    threads::run(count, |index| {
        let result = work(segments.start + index as u64);
        panics::lock(&results)[index] = Some(result);
    });
    let results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    let taken = |result: Option<_>| result.expect("every segment was taken");
    results.into_iter().map(taken).collect()
}

/// What `read` finds in these segments, merged in their order. All ranks share the work.
fn merged<T: Default + Send + Serialize + DeserializeOwned>(
    segments: u64,
    ranks: &dyn Ranks,
    read: impl Fn(u64) -> Result<T> + Sync,
    merge: fn(&mut T, T),
) -> Result<T> {
    let internal = |error: serde_json::Error| Error::Internal(error.to_string());
    let all = |parts: Vec<T>| {
        let mut total = T::default();
        parts.into_iter().for_each(|part| merge(&mut total, part));
        total
    };
    let mine = in_segments(share(&(0..segments), ranks.rank(), ranks.size()), read);
    let mine = mine.and_then(|found| serde_json::to_vec(&all(found)).map_err(internal));
    // Each rank's segments follow those of the rank before.
    let parts = ranks.share(mine)?;
    let parts = parts.iter().map(|bytes| serde_json::from_slice(bytes));
    Ok(all(parts.collect::<Result<_, _>>().map_err(internal)?))
}

/// Numbers read at a time.
const LABEL_NUMBERS: u64 = 1 << 13;
/// Parts that labels are cut into. Counts are the same in whatever order they are added.
const LABEL_SEGMENTS: u64 = 64;

/// What was found in labels. The task is a guess where `whole`, `fractions` and `one_hot` count.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct LabelsFound {
    /// Rows of each class; empty if labels are numbers.
    pub(crate) counts: Vec<u64>,
    /// Of these, the rows that are trained on.
    pub(crate) trained: Vec<u64>,
    /// The least and the greatest number, if labels are numbers.
    pub(crate) range: Option<(f32, f32)>,
    /// The different whole numbers, up to `CLASSES_MAX`.
    pub(crate) whole: BTreeSet<i64>,
    /// Labels with a fraction.
    pub(crate) fractions: u64,
    /// Labels that are a single 1 among zeros.
    pub(crate) one_hot: u64,
    /// The sum of the hashes of all blocks.
    pub(crate) hash: u64,
    /// The BLAKE3 of each segment, one after another.
    pub(crate) blake3: String,
    /// Why the first wrong label is wrong.
    pub(crate) bad: Option<String>,
}

impl LabelsFound {
    /// Adds later rows.
    fn merge(&mut self, later: LabelsFound) {
        let width = self.counts.len().max(later.counts.len());
        let trained = (&mut self.trained, later.trained);
        for (counts, later) in [(&mut self.counts, later.counts), trained] {
            counts.resize(width, 0);
            for (count, later) in counts.iter_mut().zip(later) {
                *count += later;
            }
        }
        if let Some((least, greatest)) = later.range {
            self.widen(least, greatest);
        }
        self.whole.extend(later.whole);
        self.fractions += later.fractions;
        self.one_hot += later.one_hot;
        self.hash = self.hash.wrapping_add(later.hash);
        self.blake3 += &later.blake3;
        self.bad = self.bad.take().or(later.bad);
    }

    fn widen(&mut self, least: f32, greatest: f32) {
        let (a, b) = self.range.unwrap_or((least, greatest));
        self.range = Some((a.min(least), b.max(greatest)));
    }

    /// Adds the hash of the block that begins with row `first`.
    fn hash_block<const N: usize>(&mut self, first: u64, numbers: impl Iterator<Item = [u8; N]>) {
        let bytes: Vec<u8> = numbers.flatten().collect();
        let hash = XxHash3_64::oneshot_with_seed(first, &bytes);
        self.hash = self.hash.wrapping_add(hash);
        self.blake3 += &blake3::hash(&bytes).to_hex();
    }
}

/// Reads all labels. All ranks share the work. Classes have to be among the `known` ones, if given.
pub(crate) fn labels(
    labels: &Labels,
    known: Option<&Classes>,
    is_trained_on: IsTrainedOn<'_>,
    ranks: &dyn Ranks,
) -> Result<LabelsFound> {
    let rows = labels.rows.rows();
    let block_rows = (LABEL_NUMBERS / labels.rows.width as u64).max(1);
    let segments = LABEL_SEGMENTS.min(rows.div_ceil(block_rows)).max(1);
    let read = |segment| {
        let rows = share(&(0..rows), segment as usize, segments as usize);
        let mut found = LabelsFound::default();
        let mut first = rows.start;
        while first < rows.end && found.bad.is_none() {
            let block = first..(first + block_rows).min(rows.end);
            first = block.end;
            heartbeat::beat(Work::ReadsData);
            if labels.are_classes() {
                read_classes(labels, block, known, is_trained_on, &mut found)?
            } else {
                read_values(labels, block, &mut found)?
            }
        }
        found.blake3 = blake3::hash(found.blake3.as_bytes()).to_hex().to_string();
        Ok(found)
    };
    merged(segments, ranks, read, LabelsFound::merge)
}

fn read_classes(
    labels: &Labels,
    rows: Range<u64>,
    known: Option<&Classes>,
    is_trained_on: IsTrainedOn<'_>,
    found: &mut LabelsFound,
) -> Result<()> {
    let mut classes = vec![0; (rows.end - rows.start) as usize];
    labels.classes(rows.start, &mut classes)?;
    found.hash_block(rows.start, classes.iter().map(|class| class.to_le_bytes()));
    let most = known.map_or(CLASSES_MAX, Classes::count);
    for (row, &class) in rows.zip(&classes) {
        let class = usize::try_from(class).ok().filter(|&class| class < most);
        let Some(class) = class else {
            found.bad = Some(labels.why_no_class(row, known)?);
            return Ok(());
        };
        if class >= found.counts.len() {
            found.counts.resize(class + 1, 0);
            found.trained.resize(class + 1, 0);
        }
        found.counts[class] += 1;
        found.trained[class] += u64::from(is_trained_on(row));
    }
    Ok(())
}

fn read_values(labels: &Labels, rows: Range<u64>, found: &mut LabelsFound) -> Result<()> {
    let width = labels.rows.width;
    let mut values = vec![0f32; (rows.end - rows.start) as usize * width];
    labels.rows.read_f32(rows.start, &mut values)?;
    found.hash_block(rows.start, values.iter().map(|value| value.to_le_bytes()));
    if let Some(index) = first_nonfinite(&values) {
        let row = rows.start + (index / width) as u64;
        found.bad = Some(labels.why_no_value(row, index % width)?);
        return Ok(());
    }
    values.iter().for_each(|&value| found.widen(value, value));
    if !labels.is_guessed {
        return Ok(());
    }
    for label in values.chunks_exact(width) {
        let ones = label.iter().filter(|&&value| value == 1.0).count();
        let zeros = label.iter().filter(|&&value| value == 0.0).count();
        found.one_hot += u64::from(ones == 1 && zeros == width - 1);
        if label[0].fract() != 0.0 {
            found.fractions += 1;
        } else if found.whole.len() < CLASSES_MAX {
            found.whole.insert(label[0] as i64);
        }
    }
    Ok(())
}

/// Tokens read at a time.
const BLOCK_TOKENS: u64 = 1 << 16;
/// What was found in tokens.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct TokensFound {
    pub(crate) largest: u64,
    /// The file and the position in it of the first token that is refused.
    pub(crate) bad: Option<(u64, u64)>,
    /// The sum of the hashes of all blocks; of those up to a bad one in each segment.
    pub(crate) hash: u64,
    /// The BLAKE3 of each segment, one after another.
    pub(crate) blake3: String,
}

impl TokensFound {
    /// Adds later tokens.
    fn merge(&mut self, later: TokensFound) {
        self.largest = self.largest.max(later.largest);
        self.bad = self.bad.or(later.bad);
        self.hash = self.hash.wrapping_add(later.hash);
        self.blake3 += &later.blake3;
    }
}

/// Reads the tokens of all files, which must be below `bound`. All ranks share the work.
pub(crate) fn tokens(files: &[Array], bound: u64, ranks: &dyn Ranks) -> Result<TokensFound> {
    // The first block of each file, then the number of all blocks. A block is in one file.
    let mut blocks = vec![0];
    for file in files {
        blocks.push(blocks[blocks.len() - 1] + file.rows().div_ceil(BLOCK_TOKENS));
    }
    let all = 0..blocks[files.len()];
    let segments = SEGMENTS.min(all.end);
    let read = |segment| {
        let (mut found, mut contents) = (TokensFound::default(), blake3::Hasher::new());
        // A tensor, because it lends its bytes.
        let block = Tensor::zeros(&[BLOCK_TOKENS as usize], DType::I64, Device::Cpu)?;
        for number in share(&all, segment as usize, segments as usize) {
            heartbeat::beat(Work::ReadsData);
            let file = blocks.partition_point(|&first| first <= number) - 1;
            let (array, first) = (&files[file], (number - blocks[file]) * BLOCK_TOKENS);
            let count = BLOCK_TOKENS.min(array.rows() - first) as usize;
            block.with_slice_mut(|block: &mut [i64]| {
                let tokens = &mut block[..count];
                array.read_i64(first, tokens)?;
                // A negative number is larger than any token.
                let mut tokens = tokens.iter().map(|token| token.cast_unsigned());
                let largest = tokens.clone().fold(0, u64::max);
                found.largest = found.largest.max(largest);
                if largest >= bound {
                    let position = tokens.position(|token| token >= bound);
                    found.bad = position.map(|position| (file as u64, first + position as u64));
                }
                Ok::<_, Error>(())
            })??;
            let hash = |bytes: &[u8]| {
                contents.update(&bytes[..8 * count]);
                XxHash3_64::oneshot_with_seed(number, &bytes[..8 * count])
            };
            let hash = block.with_bytes("hash", Location::caller(), hash)?;
            found.hash = found.hash.wrapping_add(hash);
            if found.bad.is_some() {
                break;
            }
        }
        found.blake3 = contents.finalize().to_hex().to_string();
        Ok(found)
    };
    merged(segments, ranks, read, TokensFound::merge)
}

#[cfg(test)]
mod tests;
