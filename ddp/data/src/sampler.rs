//! Which rows are in which batch: pure functions of the seed and the step, for any number of ranks.
//!
//! Each epoch has one permutation of all rows, keyed by seed and epoch. Global batch k is at
//! positions k·G to (k+1)·G of it, the last one shorter, and each rank takes a contiguous share. So
//! a run may continue with another number of ranks and still see every row once an epoch.
//!
//! No index is kept: a bijection turns a position into its row, in constant time and without
//! memory.
//!
//! Random numbers are pure functions of keys, too, with the same bits on every machine: only
//! integers, and floats by +, −, × and ÷.

use std::ops::Range;
use std::sync::Arc;

use crate::error::{Result, ensure};
use crate::setting::{BATCH_SIZE, DATA, DROP_LAST, VAL_SPLIT};

/// The order of rows in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampler {
    rows: u64,
    batch: u64,
    /// None leaves rows in order.
    seed: Option<u64>,
    drop_last: bool,
}

/// Where a step is in the run, and which positions of its epoch's permutation it takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchPlace {
    /// The epoch, from 0.
    pub epoch: u64,
    /// The batch within the epoch, from 0.
    pub in_epoch: u64,
    /// The positions of the global batch in the epoch's permutation.
    pub positions: Range<u64>,
}

impl Sampler {
    /// The order of `rows` rows in global batches of `batch` rows. `drop_last` skips an epoch's
    /// short batch.
    pub fn new(rows: u64, batch: u64, seed: u64, drop_last: bool) -> Result<Sampler> {
        Sampler::with_order(rows, batch, Some(seed), drop_last)
    }

    /// The same; without a seed rows stay in order.
    pub(crate) fn with_order(
        rows: u64,
        batch: u64,
        seed: Option<u64>,
        drop_last: bool,
    ) -> Result<Sampler> {
        ensure!(
            batch > 0,
            Usage,
            "{BATCH_SIZE}: expected at least 1 row in a batch, got 0; help: give a larger one"
        );
        ensure!(
            rows > 0,
            "the training data: expected at least one row, got none; help: give more {DATA}"
        );
        ensure!(
            !drop_last || rows >= batch,
            Usage,
            "{DROP_LAST} with {BATCH_SIZE} {batch}: expected at least {batch} rows to train on, got {rows}; help: set \
             {BATCH_SIZE} to {rows} or less, or leave out {DROP_LAST}"
        );
        Ok(Sampler {
            rows,
            batch,
            seed,
            drop_last,
        })
    }

    /// The number of rows.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// The rows of a full global batch: at most all rows.
    pub fn batch(&self) -> u64 {
        self.batch.min(self.rows)
    }

    /// The batches of an epoch: at least one.
    pub fn steps_per_epoch(&self) -> u64 {
        if self.drop_last {
            self.rows / self.batch
        } else {
            self.rows.div_ceil(self.batch)
        }
    }

    /// The place of step `step0`, counted from 0 over the whole run.
    pub fn at(&self, step0: u64) -> BatchPlace {
        let steps = self.steps_per_epoch();
        let (epoch, in_epoch) = (step0 / steps, step0 % steps);
        // Below `rows`, since in_epoch is below rows / batch rounded up.
        let start = in_epoch * self.batch;
        BatchPlace {
            epoch,
            in_epoch,
            positions: start..start.saturating_add(self.batch).min(self.rows),
        }
    }

    /// Where rows are sorted by length: the positions of the window of batches around `place`, and
    /// which of its rows, once they are sorted, are those of its batch. Batches of a window are in
    /// random order, and a short one has lengths between those of others.
    pub(crate) fn window(&self, place: &BatchPlace) -> (Range<u64>, Range<u64>) {
        let (number, batch) = (place.in_epoch / WINDOW, place.in_epoch % WINDOW);
        let (first, size) = (number * WINDOW, self.batch());
        let end = (first + WINDOW).min(self.steps_per_epoch());
        let positions = first * size..end.saturating_mul(size).min(self.rows);
        let rows = positions.end - positions.start;
        let (full, rest) = (rows / size, rows % size);
        let start = match self.seed {
            None => batch * size,
            Some(seed) => {
                let key = derive(
                    derive(derive(seed, place.epoch), PURPOSE_OF_WINDOWS),
                    number,
                );
                let before = derive(key, WINDOW) % (full + 1);
                if batch < full {
                    let piece = Permutation::new(full, key).row(batch);
                    piece * size + if piece < before { 0 } else { rest }
                } else {
                    before * size
                }
            }
        };
        let length = place.positions.end - place.positions.start;
        (positions, start..start + length)
    }

    /// Whether epochs have random orders.
    pub(crate) fn shuffles(&self) -> bool {
        self.seed.is_some()
    }

    /// The order of rows in an epoch.
    pub fn permutation(&self, epoch: u64) -> Permutation {
        match self.seed {
            Some(seed) => Permutation::new(self.rows, derive(seed, epoch)),
            None => Permutation {
                rounds: 0,
                ..Permutation::new(self.rows, 0)
            },
        }
    }
}

/// The share of `positions` that rank `rank` of `size` takes: of G positions those from
/// ⌊rank·G/size⌋ to ⌊(rank+1)·G/size⌋. Every position is in exactly one share; shares may be empty.
pub fn share(positions: &Range<u64>, rank: usize, size: usize) -> Range<u64> {
    assert!(rank < size, "rank {rank} of {size}");
    let length = u128::from(positions.end - positions.start);
    // At most 2⁶⁴ · 2⁶⁴ before the division, and at most `length` after it.
    let cut = |rank: usize| positions.start + (length * rank as u128 / size as u128) as u64;
    cut(rank)..cut(rank + 1)
}

/// The shards of every batch that a rank works on, one after the other: of `of` shards those from
/// `first` to before `end`. Shard s has the rows of rank s of `of`: see [`share`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shards {
    /// How many shards a batch has.
    pub of: usize,
    /// This rank's first one.
    pub first: usize,
    /// The one after its last.
    pub end: usize,
}

impl Shards {
    /// A shard for each rank.
    pub(crate) fn one_each(rank: usize, ranks: usize) -> Shards {
        Shards::of_rank(ranks, rank, ranks)
    }

    /// Those of rank `rank` of `ranks`, of `of` shards.
    pub fn of_rank(of: usize, rank: usize, ranks: usize) -> Shards {
        let own = share(&(0..of as u64), rank, ranks);
        Shards {
            of,
            first: own.start as usize,
            end: own.end as usize,
        }
    }

    /// Refuses numbers of ranks with which one would have no shard.
    pub(crate) fn check(&self) -> Result<()> {
        ensure!(
            self.count() > 0,
            Usage,
            "a loader: expected a shard for each rank, got {} shards for more ranks; help: \
             give as many shards as ranks, or more",
            self.of
        );
        Ok(())
    }

    /// How many.
    pub fn count(&self) -> usize {
        self.end - self.first
    }

    /// Their numbers.
    pub fn numbers(&self) -> Range<usize> {
        self.first..self.end
    }

    /// The positions among `positions` that they have.
    pub fn share(&self, positions: &Range<u64>) -> Range<u64> {
        let first = share(positions, self.first, self.of);
        first.start..share(positions, self.end - 1, self.of).end
    }

    /// The most rows that they have of `rows`.
    pub(crate) fn most_of(&self, rows: u64) -> u64 {
        (u128::from(rows) * self.count() as u128).div_ceil(self.of as u128) as u64
    }
}

/// Rounds of the Feistel network. Four are the minimum for a strong pseudorandom permutation; small
/// halves need more to reach all orders evenly: the tests fail with six.
const ROUNDS: usize = 12;

/// A random order of `rows` rows: a bijection between positions and rows.
///
/// A Feistel network permutes the 2ᵇ numbers of the fewest bits b that hold every row. A result
/// outside the rows is permuted again (cycle walking) until it is inside: less than twice on
/// average.
#[derive(Clone, Debug)]
pub struct Permutation {
    rows: u64,
    /// The bits of the two halves; the high half may have one less.
    high_bits: u32,
    low_bits: u32,
    keys: [u64; ROUNDS],
    /// How many of the keys are used: without any, rows stay in order.
    rounds: usize,
}

impl Permutation {
    /// The order of `rows` rows for this key.
    pub(crate) fn new(rows: u64, key: u64) -> Permutation {
        assert!(rows > 0, "an order of no rows");
        let bits = (u64::BITS - (rows - 1).leading_zeros()).max(2);
        let keys = std::array::from_fn(|round| derive(key, round as u64));
        Permutation {
            rows,
            high_bits: bits / 2,
            low_bits: bits - bits / 2,
            keys,
            rounds: ROUNDS,
        }
    }

    /// The row at `position`.
    pub fn row(&self, position: u64) -> u64 {
        assert!(position < self.rows, "position {position} of {}", self.rows);
        self.walk(position, Permutation::forth)
    }

    /// The position of `row`: the inverse of `row`.
    pub fn position(&self, row: u64) -> u64 {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        self.walk(row, Permutation::back)
    }

    /// Ends because a bijection's cycle returns to its start, which is inside.
    fn walk(&self, mut number: u64, turn: impl Fn(&Permutation, u64) -> u64) -> u64 {
        loop {
            number = turn(self, number);
            if number < self.rows {
                return number;
            }
        }
    }

    fn forth(&self, number: u64) -> u64 {
        let (mut high, mut low) = (number >> self.low_bits, number & ones(self.low_bits));
        for pair in self.keys[..self.rounds].chunks_exact(2) {
            high ^= half(low, pair[0], self.high_bits);
            low ^= half(high, pair[1], self.low_bits);
        }
        high << self.low_bits | low
    }

    fn back(&self, number: u64) -> u64 {
        let (mut high, mut low) = (number >> self.low_bits, number & ones(self.low_bits));
        for pair in self.keys[..self.rounds].chunks_exact(2).rev() {
            low ^= half(high, pair[1], self.low_bits);
            high ^= half(low, pair[0], self.high_bits);
        }
        high << self.low_bits | low
    }
}

/// `bits` random bits (1 to 32) from one half of a number and a round's key.
#[inline]
fn half(value: u64, key: u64, bits: u32) -> u64 {
    mix(value ^ key) >> (u64::BITS - bits)
}

fn ones(bits: u32) -> u64 {
    (1 << bits) - 1
}

/// Keeps the order of the split unrelated to those of epochs.
const PURPOSE: u64 = 0x7661_6c2d_7370_6c69;
/// The same for batches of windows.
const PURPOSE_OF_WINDOWS: u64 = 0x7769_6e64_6f77_732d;

/// Batches among which rows of similar length are looked for: enough that batches differ in length,
/// few enough that an epoch has many.
const WINDOW: u64 = 64;

/// Rows in a random order, the first of which are held out.
#[derive(Clone, Debug)]
pub(crate) struct Split {
    order: Permutation,
    /// Another order, of a stratified split, whose first rows are sorted.
    listed: Option<Arc<[u64]>>,
    rows: u64,
    held_out: u64,
}

impl Split {
    /// Holds out `fraction` of `rows` rows, rounded, and at least one row on either side.
    pub(crate) fn new(rows: u64, fraction: f64, seed: u64) -> Result<Split> {
        ensure!(
            rows >= 2,
            "{VAL_SPLIT} {fraction}: expected at least 2 rows to split, got {rows}; help: give more data, or leave out \
             {VAL_SPLIT}"
        );
        let held_out = ((rows as f64 * fraction).round() as u64).clamp(1, rows - 1);
        Ok(Split {
            order: Permutation::new(rows, derive(derive(seed, PURPOSE), 0)),
            listed: None,
            rows,
            held_out,
        })
    }

    /// Holds out this fraction of the rows of each class, rounded up or down.
    pub(crate) fn stratified(classes: &[i64], fraction: f64, seed: u64) -> Result<Split> {
        let mut split = Split::new(classes.len() as u64, fraction, seed)?;
        let key = |row: &u64| (classes[*row as usize], split.order.position(*row));
        let mut rows: Vec<u64> = (0..split.rows).collect();
        rows.sort_by_cached_key(key);
        // Classes follow one another in `rows`, and every so many rows one is held out.
        let share =
            |rows: usize| rows as u128 * u128::from(split.held_out) / u128::from(split.rows);
        let is_held_out = |place: &usize| share(place + 1) > share(*place);
        let (mut listed, trained): (Vec<_>, Vec<_>) = (0..rows.len()).partition(is_held_out);
        listed.extend(trained);
        split.listed = Some(listed.into_iter().map(|place| rows[place]).collect());
        Ok(split.sorted())
    }

    /// The same split, with the rows that are held out in their order in the data.
    pub(crate) fn sorted(mut self) -> Split {
        let mut listed: Vec<u64> = (0..self.rows).map(|place| self.row(true, place)).collect();
        listed[..self.held_out as usize].sort_unstable();
        self.listed = Some(listed.into());
        self
    }

    /// How many rows are held out, or are not.
    pub(crate) fn rows(&self, are_held_out: bool) -> u64 {
        if are_held_out {
            self.held_out
        } else {
            self.rows - self.held_out
        }
    }

    /// Row `index` of these.
    pub(crate) fn row(&self, is_held_out: bool, index: u64) -> u64 {
        let place = index + if is_held_out { 0 } else { self.held_out };
        match &self.listed {
            Some(rows) => rows[place as usize],
            None => self.order.row(place),
        }
    }

    /// Whether this row is trained on.
    pub(crate) fn is_trained_on(&self, row: u64) -> bool {
        match &self.listed {
            Some(rows) => rows[..self.held_out as usize].binary_search(&row).is_err(),
            None => self.order.position(row) >= self.held_out,
        }
    }
}

/// The odd number nearest to 2⁶⁴ over the golden ratio: steps of it spread over all 64 bits.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The finalizer of SplitMix64: a bijection in which every result bit depends on every bit of
/// `value`.
#[inline]
pub(crate) fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// A key derived from `key`, different for every `part`.
#[inline]
pub(crate) fn derive(key: u64, part: u64) -> u64 {
    // The key is mixed first, so that (key, part) and (part, key) are unrelated.
    mix(mix(key.wrapping_add(STEP)) ^ part)
}

/// The sequence of random numbers of a key.
#[derive(Clone, Debug)]
pub(crate) struct Draws(pub(crate) u64);

impl Draws {
    /// 64 random bits.
    #[inline]
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mix(self.0)
    }

    /// A number below `bound`, uniform up to bound / 2⁶⁴.
    #[inline]
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(bound)) >> 64) as u64
    }

    /// A number in [-1, 1) with 24 bits.
    #[inline]
    pub(crate) fn signed(&mut self) -> f32 {
        (self.bits() >> 40) as f32 * (1.0 / 8_388_608.0) - 1.0
    }

    /// A number in [0, 1) with 24 bits.
    #[inline]
    pub(crate) fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 * (1.0 / 16_777_216.0)
    }

    /// Nearly standard normal: mean 0, variance 1, within ±3.47.
    #[inline]
    pub(crate) fn normal(&mut self) -> f32 {
        normal_of(self.bits())
    }
}

/// Nearly standard normal from 64 random bits: the sum of four uniforms of 16 bits has variance 4 /
/// 12 in units of 2¹⁶, so that √3 scales it to 1.
#[inline]
fn normal_of(bits: u64) -> f32 {
    let sum = (bits & 0xffff) + ((bits >> 16) & 0xffff) + ((bits >> 32) & 0xffff) + (bits >> 48);
    // Centred as an integer, so that the result is exactly symmetric: the mean of the sum is 2 ×
    // 65,535.
    let centred = sum as i32 - 2 * 65_535;
    centred as f32 * (1.732_050_8 / 65_536.0)
}

#[cfg(test)]
mod tests;
