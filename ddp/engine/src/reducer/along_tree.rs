//! Sums of gradients along the tree of shards (`ddp_comm::SumTree`): the additions have the same
//! operands on any number of ranks.
//!
//! After the backward of a shard, a rank adds its gradients to the partial sums that it has kept,
//! as far as the tree allows within its range (`close`). After the last shard it gives what is left
//! to the owners of the slices, which make the remaining additions (`exchange`). In host memory
//! ddp-comm does that. On a GPU each slice is sent to its owner, added there, and sent to all; all
//! of it can be captured.
//!
//! If bf16 travels, every shard's gradients and every sum are rounded to bf16, so that it does not
//! matter which of them travel.

use std::ops::Range;
use std::sync::Arc;

use ddp_comm::{Group, SumTree};
use ddp_kernels::stream::Stream;
use ddp_kernels::{DType, Device, Tensor, ops};

use crate::error::Result;
use crate::faults;

/// Slices begin at multiples of so many elements.
const GRAIN: usize = 64;
/// The most messages that start together: `Group::grouped`.
const MESSAGES_MAX: usize = 64;

/// Memory for what arrives on a GPU, for the longest bucket: buckets are summed one at a time.
pub(super) fn received(
    tree: &SumTree,
    rank: usize,
    longest: usize,
    dtype: DType,
    device: Device,
) -> Result<Tensor> {
    let slice = slice(longest, 0, tree.ranks()).len().max(GRAIN);
    let others = (0..tree.ranks()).filter(|&other| other != rank && device.is_accelerator());
    let rows: usize = others.map(|other| tree.given_by(other)).sum();
    Ok(Tensor::empty(&[rows * slice], dtype, device)?.named("partial sums of others"))
}

/// The elements of a bucket of so many that `rank` adds.
fn slice(count: usize, rank: usize, ranks: usize) -> Range<usize> {
    if count.is_multiple_of(ranks * GRAIN) {
        return rank * count / ranks..(rank + 1) * count / ranks;
    }
    let grains = count.div_ceil(GRAIN);
    // The first slice is the longest.
    let edge = |rank: usize| ((grains * rank).div_ceil(ranks) * GRAIN).min(count);
    edge(rank)..edge(rank + 1)
}

/// A bucket of gradients. Letters: E elements of the bucket, K partial sums that are kept, G that
/// are given.
#[derive(Debug)]
pub(super) struct AlongTree {
    tree: Arc<SumTree>,
    rank: usize,
    /// f32 (E), a part of the gradients' arena.
    gradients: Tensor,
    /// f32 (E) each, K of them: the partial sums so far, in order.
    kept: Vec<Tensor>,
    /// f32 (K·E), the memory of these.
    all_kept: Tensor,
    /// (G·E), what travels if that is not f32; at least one row, to round with.
    narrow: Option<Tensor>,
    /// Whether each rank gets only its slice.
    scatters: bool,
    received: Tensor,
    /// By shard of this rank: how many additions follow it.
    additions: Vec<usize>,
}

impl AlongTree {
    /// The sum of `gradients` over the shards. Each rank gets all of it or, if it `scatters`, its
    /// slice.
    pub(super) fn new(
        tree: &Arc<SumTree>,
        rank: usize,
        gradients: Tensor,
        dtype: DType,
        scatters: bool,
        received: &Tensor,
    ) -> Result<AlongTree> {
        let (count, device) = (gradients.count(), gradients.device());
        let (kept, given) = (tree.kept_by(rank), tree.given_by(rank));
        let all_kept = Tensor::empty(&[kept * count], gradients.dtype(), device)?;
        let row = |row: usize| all_kept.slice(row * count..(row + 1) * count);
        let narrow = match dtype == gradients.dtype() {
            true => None,
            false => Some(Tensor::empty(&[given * count], dtype, device)?),
        };
        Ok(AlongTree {
            kept: (0..kept).map(row).collect::<Result<_, _>>()?,
            all_kept: all_kept.named("partial sums of gradients"),
            additions: tree.additions(rank),
            tree: Arc::clone(tree),
            rank,
            gradients,
            narrow: narrow.map(|narrow| narrow.named("gradients that travel")),
            scatters,
            received: received.clone(),
        })
    }

    /// Bytes that it takes besides the gradients, without what arrives.
    pub(super) fn bytes(&self) -> usize {
        self.all_kept.bytes() + self.narrow.as_ref().map_or(0, Tensor::bytes)
    }

    /// Bytes that this rank gives for the sum in a step.
    pub(super) fn given_bytes(&self) -> usize {
        let of_one = self
            .narrow
            .as_ref()
            .map_or(self.gradients.bytes(), |narrow| {
                self.gradients.count() * narrow.dtype().bytes()
            });
        self.tree.given_by(self.rank) * of_one
    }

    /// Adds the gradients of shard `index` of this rank, from 0, to the partial sums.
    pub(super) fn close(&self, index: usize) -> Result<()> {
        let before = self.additions[..index].iter();
        let left = before.fold(0, |left, additions| left + 1 - additions);
        let (additions, is_last) = (self.additions[index], index + 1 == self.additions.len());
        self.round(&self.gradients)?;
        for number in 0..additions {
            let kept = &self.kept[left - 1 - number];
            // The last sum stays where it is kept, unless it is about to be given.
            let stays = !is_last && number + 1 == additions;
            let [sum, added] = match stays {
                true => [kept, &self.gradients],
                false => [&self.gradients, kept],
            };
            ops::axpy(sum, 1.0, added)?;
            self.round(sum)?;
        }
        if additions == 0 && !is_last {
            self.kept[left].copy_from(&self.gradients)?;
        }
        Ok(())
    }

    /// Rounds to what travels.
    fn round(&self, sum: &Tensor) -> Result<()> {
        if let Some(narrow) = &self.narrow {
            let narrow = narrow.slice(0..sum.count())?;
            ops::cast_into(&narrow, sum)?;
            ops::cast_into(sum, &narrow)?;
        }
        Ok(())
    }

    /// Closes the last shard, and completes the sum with the other ranks.
    pub(super) fn run(&self, group: &Group, stream: &Stream) -> Result<()> {
        let count = self.gradients.count();
        faults::flip(&self.gradients)?;
        stream.scope(|| self.close(self.additions.len() - 1))?;
        if group.size() == 1 {
            return Ok(());
        }
        let before_last = self.tree.given_by(self.rank) - 1;
        let kept = self.all_kept.slice(0..before_last * count)?;
        let (rows, last) = match &self.narrow {
            None => (kept, self.gradients.clone()),
            Some(narrow) => {
                let rows = narrow.slice(0..before_last * count)?;
                let last = narrow.slice(before_last * count..(before_last + 1) * count)?;
                stream.scope(|| {
                    ops::cast_into(&rows, &kept)?;
                    ops::cast_into(&last, &self.gradients)
                })?;
                (rows, last)
            }
        };
        match last.device() {
            Device::Cpu => group.sum_along(&last, &rows, &self.tree, self.scatters, stream)?,
            _ => self.exchange(group, [&rows, &last], stream)?,
        }
        if self.narrow.is_some() {
            let mine = match self.scatters {
                true => slice(count, self.rank, group.size()),
                false => 0..count,
            };
            let (gradients, last) = (self.gradients.slice(mine.clone())?, last.slice(mine)?);
            stream.scope(|| ops::cast_into(&gradients, &last))?;
        }
        Ok(())
    }

    /// On GPUs: `last` becomes the sum. Ranks at the same distance exchange at the same time.
    fn exchange(&self, group: &Group, [rows, last]: [&Tensor; 2], stream: &Stream) -> Result<()> {
        let (count, ranks, me, tree) = (last.count(), group.size(), self.rank, &self.tree);
        let slice = |rank: usize| slice(count, rank, ranks);
        let own = |row: usize, range: Range<usize>| match row + 1 == tree.given_by(me) {
            true => last.slice(range),
            false => rows.slice(row * count + range.start..row * count + range.end),
        };
        let mine = slice(me);
        let theirs = |rank: usize, row: usize| {
            let before = (0..rank).filter(|&other| other != me);
            let before: usize = before.map(|other| tree.given_by(other)).sum();
            let start = (before + row) * mine.len();
            self.received.slice(start..start + mine.len())
        };
        let most = (0..ranks)
            .map(|rank| tree.given_by(rank))
            .max()
            .unwrap_or(1);
        self.by_distance(group, most, &mut |to, from| {
            for row in 0..tree.given_by(me) {
                group.send(&own(row, slice(to))?, to, stream)?;
            }
            for row in 0..tree.given_by(from) {
                group.receive(&theirs(from, row)?, from, stream)?;
            }
            Ok(())
        })?;
        stream.scope(|| self.add(&mine, &own, &theirs, last))?;
        if self.scatters {
            return Ok(());
        }
        self.by_distance(group, 1, &mut |to, from| {
            group.send(&last.slice(mine.clone())?, to, stream)?;
            Ok(group.receive(&last.slice(slice(from))?, from, stream)?)
        })
    }

    /// Adds the partial sums of all ranks in the order of the tree, into this rank's slice of
    /// `last`.
    fn add(
        &self,
        mine: &Range<usize>,
        own: &PartialSum<'_, Range<usize>>,
        theirs: &dyn Fn(usize, usize) -> ddp_kernels::Result<Tensor>,
        last: &Tensor,
    ) -> Result<()> {
        let mut left: Vec<Tensor> = Vec::new();
        for (rank, row, additions) in self.tree.steps() {
            let mut sum = match rank == self.rank {
                true => own(row, mine.clone())?,
                false => theirs(rank, row)?,
            };
            for _ in 0..additions {
                let before = left.pop().expect("the tree adds what is left");
                ops::axpy(&before, 1.0, &sum)?;
                sum = before;
            }
            left.push(sum);
        }
        let (sum, target) = (left.remove(0), last.slice(mine.clone())?);
        match sum.shares_memory_with(&target) {
            true => Ok(()),
            false => Ok(target.copy_from(&sum)?),
        }
    }

    /// Calls `exchange` with every other rank to send to and to receive from: at most `each`
    /// messages each way, as many of them at a time as may start together.
    fn by_distance(
        &self,
        group: &Group,
        each: usize,
        exchange: &mut dyn FnMut(usize, usize) -> Result<()>,
    ) -> Result<()> {
        let (ranks, me) = (group.size(), self.rank);
        let at_once = (MESSAGES_MAX / (2 * each)).max(1);
        let distances: Vec<usize> = (1..ranks).collect();
        for distances in distances.chunks(at_once) {
            let mut outcome = Ok(());
            group.grouped(|| {
                outcome = distances.iter().try_for_each(|distance| {
                    exchange((me + distance) % ranks, (me + ranks - distance) % ranks)
                });
                Ok(())
            })?;
            outcome?;
        }
        Ok(())
    }
}

/// A range of one of this rank's partial sums.
type PartialSum<'a, R> = dyn Fn(usize, R) -> ddp_kernels::Result<Tensor> + 'a;
