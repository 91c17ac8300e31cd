//! How a bucket of gradients is summed: over the ranks, in one call, or over the shards of the
//! batch along their tree (`ddp_comm::SumTree`), whose additions have the same operands on any
//! number of ranks.
//!
//! After the backward of a shard, a rank adds its gradients to the partial sums that it has kept,
//! as far as the tree allows within its range (`close`). After the last shard it gives what is left
//! to the owners of the slices, which make the remaining additions. In host memory ddp-comm does
//! that. On a GPU each slice is sent to its owner, added there by one kernel, and sent to all
//! (`exchange`); all of it can be captured.
//!
//! With ZeRO-2 the memory of a bucket is used again once it is reduced: what a rank gets the sums
//! of goes to memory of its own, where those of later micro-batches are added. Earlier shards are
//! kept as soon as a bucket of theirs is complete.
//!
//! If bf16 travels, every shard's gradients and every sum are rounded to bf16, so that it does not
//! matter which of them travel.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ddp_comm::{Group, Reduce, SumTree};
use ddp_kernels::stream::Stream;
use ddp_kernels::transfer::announced;
use ddp_kernels::{Device, Tensor, ops};

use crate::error::Result;
use crate::faults::{self, FaultPoint};

/// Slices begin at multiples of this many elements.
const GRAIN: usize = 64;
/// The most messages that start together: `Group::grouped`.
const MESSAGES_MAX: usize = 64;

/// How many elements arrive on a GPU for a bucket of this many: a slice of each partial sum.
pub(super) fn received(tree: &SumTree, rank: usize, elements: usize) -> usize {
    let slice = slice(elements, 0, tree.ranks()).len().max(GRAIN);
    slice * (tree.order().len() - tree.given_by(rank))
}

/// The elements of a bucket of `count` that `rank` adds.
fn slice(count: usize, rank: usize, ranks: usize) -> Range<usize> {
    let grains = count.div_ceil(GRAIN);
    // The first slice is the longest.
    let edge = |rank: usize| ((grains * rank).div_ceil(ranks) * GRAIN).min(count);
    edge(rank)..edge(rank + 1)
}

/// How a bucket is summed.
#[derive(Debug)]
pub(super) enum Sum {
    /// Over the ranks, in one call, in the order of the transport.
    Transport,
    /// Over the shards of the batch, along their tree.
    Tree(Box<TreeSum>),
}

/// A bucket of gradients. Letters: E elements of the bucket, O that this rank gets the sums of.
#[derive(Debug)]
pub(super) struct Reduced {
    /// f32 (E).
    pub(super) gradients: Tensor,
    /// f32 (O), a part of `gradients`. The rest is left unspecified.
    own: Tensor,
    /// (E), what travels: the gradients, or their copy in another dtype.
    pub(super) travels: Tensor,
    /// (O), a part of that.
    own_travels: Tensor,
    /// f32 (O), with ZeRO-2: where the sums stay.
    own_sums: Option<Tensor>,
    /// With ZeRO-2: how often it was complete in this step.
    turn: AtomicUsize,
    pub(super) sum: Sum,
    /// If the slice has a backup, which gets the sums, too.
    backup: Option<BackupCopy>,
}

/// Sums that also go to the backup of their slice. Letters: O elements of a slice.
#[derive(Debug)]
pub(super) struct BackupCopy {
    /// f32 (O): of this rank's slice, and of the slice whose backup it is.
    pub(super) own: Tensor,
    pub(super) backed_up: Tensor,
    /// The ranks on both sides.
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) sends_first: bool,
}

impl BackupCopy {
    fn run(&self, group: &Group, stream: &Stream) -> Result<()> {
        faults::at(FaultPoint::Copy)?;
        let exchange = || {
            if self.sends_first {
                group.send(&self.own, self.to, stream)?;
            }
            group.receive(&self.backed_up, self.from, stream)?;
            if self.sends_first {
                return Ok(());
            }
            group.send(&self.own, self.to, stream)
        };
        // Slices differ in length.
        Ok(announced("copies of slices", || group.grouped(exchange))?)
    }
}

impl Reduced {
    /// This rank gets the sums of the elements in `own`. With ZeRO-2 they stay in `own_sums`.
    pub(super) fn new(
        gradients: Tensor,
        own: Range<usize>,
        travels: Tensor,
        own_sums: Option<Tensor>,
        sum: Sum,
        backup: Option<BackupCopy>,
    ) -> Result<Reduced> {
        Ok(Reduced {
            own: gradients.slice(own.clone())?,
            own_travels: travels.slice(own)?,
            own_sums,
            turn: AtomicUsize::new(0),
            sum,
            backup,
            gradients,
            travels,
        })
    }

    /// Whether each rank gets only its slice.
    pub(super) fn scatters(&self) -> bool {
        self.own.count() < self.gradients.count()
    }

    /// Whether another tensor travels.
    fn is_narrow(&self) -> bool {
        self.travels.dtype() != self.gradients.dtype()
    }

    /// Bytes that this rank gives in a step.
    pub(super) fn given_bytes(&self) -> usize {
        let of_sum = match &self.sum {
            Sum::Transport => self.travels.bytes(),
            Sum::Tree(tree) => tree.given_bytes(),
        };
        of_sum + self.backup.as_ref().map_or(0, |it| it.own.bytes())
    }

    /// Whether it takes messages between pairs of ranks.
    pub(super) fn has_messages(&self) -> bool {
        matches!(self.sum, Sum::Tree(_)) || self.backup.is_some()
    }

    /// Copies the gradients to what travels, before they are summed, or the sums back.
    fn convert(&self, is_back: bool, stream: &Stream) -> Result<()> {
        let [to, from] = if is_back {
            [&self.own, &self.own_travels]
        } else {
            [&self.travels, &self.gradients]
        };
        if self.is_narrow() {
            return Ok(stream.scope(|| ops::cast_into(to, from))?);
        }
        Ok(())
    }

    /// Whether its memory is used again within a step.
    pub(super) fn is_freed(&self) -> bool {
        self.own_sums.is_some()
    }

    /// Begins a step.
    pub(super) fn begin(&self) {
        self.turn.store(0, Ordering::Relaxed);
    }

    /// What is done with complete gradients: their sum, or with ZeRO-2 one of those of a step.
    pub(super) fn run(&self, group: &Group, small: &[Tensor], stream: &Stream) -> Result<()> {
        let Some(own_sums) = &self.own_sums else {
            self.sum(group, small, stream)?;
            let backup = self.backup.as_ref();
            return backup.map_or(Ok(()), |it| it.run(group, stream));
        };
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        if let Sum::Tree(tree) = &self.sum
            && turn + 1 < tree.additions.len()
        {
            return stream.scope(|| self.close(tree, turn));
        }
        self.sum(group, small, stream)?;
        stream.scope(|| match (turn, &self.sum) {
            (1.., Sum::Transport) => Ok(ops::axpy(own_sums, 1.0, &self.own)?),
            _ => Ok(own_sums.copy_from(&self.own)?),
        })
    }

    /// The sum with other ranks' gradients, and those of the `small` tensors: NCCL runs such calls
    /// in one launch.
    fn sum(&self, group: &Group, small: &[Tensor], stream: &Stream) -> Result<()> {
        faults::at(FaultPoint::Reduction)?;
        faults::flip(&self.gradients)?;
        let sum = |tensor: &Tensor| group.all_reduce(tensor, Reduce::Sum, stream);
        if let Sum::Tree(tree) = &self.sum {
            small.iter().try_for_each(sum)?;
            return self.sum_along(tree, group, stream);
        }
        self.convert(false, stream)?;
        group.grouped(|| {
            if self.scatters() {
                group.reduce_scatter(&self.travels, Reduce::Sum, stream)?
            } else {
                sum(&self.travels)?
            }
            small.iter().try_for_each(sum)
        })?;
        self.convert(true, stream)
    }

    /// Adds the gradients of shard `index` of this rank, from 0, to the partial sums, if there are
    /// any.
    pub(super) fn close_shard(&self, index: usize) -> Result<()> {
        match &self.sum {
            Sum::Transport => Ok(()),
            Sum::Tree(tree) => self.close(tree, index),
        }
    }

    fn close(&self, tree: &TreeSum, index: usize) -> Result<()> {
        let before = tree.additions[..index].iter();
        let left = before.fold(0, |left, additions| left + 1 - additions);
        let (additions, is_last) = (tree.additions[index], index + 1 == tree.additions.len());
        self.round(&self.gradients)?;
        for number in 0..additions {
            let kept = &tree.kept[left - 1 - number];
            // The last sum stays where it is kept, unless it is about to be given.
            let stays = !is_last && number + 1 == additions;
            let [sum, added] = if stays {
                [kept, &self.gradients]
            } else {
                [&self.gradients, kept]
            };
            ops::axpy(sum, 1.0, added)?;
            self.round(sum)?;
        }
        if additions == 0 && !is_last {
            tree.kept[left].copy_from(&self.gradients)?;
        }
        Ok(())
    }

    /// Rounds to what travels.
    fn round(&self, sum: &Tensor) -> Result<()> {
        if sum.dtype() != self.travels.dtype() {
            ops::cast_into(&self.travels, sum)?;
            ops::cast_into(sum, &self.travels)?;
        }
        Ok(())
    }

    /// Closes the last shard, and completes the sum with the other ranks.
    fn sum_along(&self, tree: &TreeSum, group: &Group, stream: &Stream) -> Result<()> {
        stream.scope(|| self.close(tree, tree.additions.len() - 1))?;
        if group.size() == 1 {
            return Ok(());
        }
        if self.is_narrow() {
            let mut given = tree.given[..tree.given.len() - 1].iter().zip(&tree.kept);
            stream.scope(|| given.try_for_each(|(given, kept)| ops::cast_into(given, kept)))?;
        }
        self.convert(false, stream)?;
        let (travels, scatters) = (&self.travels, self.scatters());
        let exchange = || match travels.device() {
            Device::Cpu => Ok(group.sum_along(travels, &tree.rows, &tree.tree, scatters, stream)?),
            Device::Cuda(_) => tree.exchange(group, travels, scatters, stream),
        };
        // Ranks have different numbers of shards.
        announced("partial sums of shards", exchange)?;
        self.convert(true, stream)
    }
}

/// The partial sums of a bucket. Letters: E elements of the bucket, K partial sums that are kept, G
/// that are given.
#[derive(Debug)]
pub(super) struct TreeSum {
    tree: Arc<SumTree>,
    /// f32 (E) each, K of them: the partial sums so far, in order.
    kept: Vec<Tensor>,
    /// (E) each, G of them: what travels. The last is that of the bucket, the others are `rows`.
    given: Vec<Tensor>,
    /// ((G - 1) · E): kept ones, if f32 travels.
    rows: Tensor,
    /// What arrives on a GPU, which all buckets share: they are summed one at a time.
    received: Tensor,
    /// By shard of this rank: how many additions follow it.
    additions: Vec<usize>,
    /// What the owner of a slice adds on a GPU.
    add_order: ops::AddOrder,
}

impl TreeSum {
    /// For the sum of `gradients`, of which `travels` is what travels of the last partial sum.
    pub(super) fn new(
        tree: &Arc<SumTree>,
        rank: usize,
        [gradients, travels]: [&Tensor; 2],
        received: &Tensor,
    ) -> Result<TreeSum> {
        let (count, before_last) = (gradients.count(), tree.given_by(rank) - 1);
        let rows_of = |rows: usize, like: &Tensor| -> Result<Tensor> {
            let all = Tensor::empty(&[rows * count], like.dtype(), like.device())?;
            Ok(all.named("partial sums of gradients"))
        };
        let all_kept = rows_of(tree.kept_by(rank), gradients)?;
        let rows = if gradients.dtype() == travels.dtype() {
            all_kept.slice(0..before_last * count)?
        } else {
            rows_of(before_last, travels)?
        };
        let each = |all: &Tensor| -> Result<Vec<Tensor>> {
            let starts = (0..all.count()).step_by(count);
            Ok(starts
                .map(|start| all.slice(start..start + count))
                .collect::<Result<_, _>>()?)
        };
        let given = [each(&rows)?, vec![travels.clone()]].concat();
        let order = tree.order().iter();
        let order: Vec<_> = order.map(|it| (it.rank == rank, it.additions)).collect();
        Ok(TreeSum {
            tree: Arc::clone(tree),
            kept: each(&all_kept)?,
            given,
            rows,
            received: received.clone(),
            additions: tree.additions(rank),
            add_order: ops::AddOrder::new(&order, travels.device())?,
        })
    }

    /// Bytes that this rank gives in a step.
    fn given_bytes(&self) -> usize {
        self.given.iter().map(Tensor::bytes).sum()
    }

    /// On GPUs: `last`, what this rank gives last, becomes the sum or, if it `scatters`, this
    /// rank's slice of it. Ranks at the same distance exchange at the same time.
    fn exchange(
        &self,
        group: &Group,
        last: &Tensor,
        scatters: bool,
        stream: &Stream,
    ) -> Result<()> {
        let (order, me) = (self.tree.order(), group.rank());
        let slice = |rank: usize| slice(last.count(), rank, group.size());
        let mine = slice(me);
        // Partial sums of others arrive in the order of the tree.
        let others = order.iter().map(|part| part.rank);
        let others: Vec<usize> = others.filter(|rank| *rank != me).collect();
        let most = order.iter().map(|part| part.row + 1).max().unwrap_or(1);
        self.by_distance(group, most, &|to, from| {
            for given in &self.given {
                group.send(&given.slice(slice(to))?, to, stream)?;
            }
            for (row, _) in others.iter().enumerate().filter(|it| *it.1 == from) {
                let start = row * mine.len();
                let place = self.received.slice(start..start + mine.len())?;
                group.receive(&place, from, stream)?;
            }
            Ok(())
        })?;
        let others = self.received.slice(0..others.len() * mine.len())?;
        let out = last.slice(mine.clone())?;
        let add = || ops::add_in_order(&out, &others, &self.rows, mine.start, &self.add_order);
        stream.scope(add)?;
        if scatters {
            return Ok(());
        }
        self.by_distance(group, 1, &|to, from| {
            group.send(&last.slice(mine.clone())?, to, stream)?;
            group.receive(&last.slice(slice(from))?, from, stream)
        })
    }

    /// Calls `exchange` with every other rank to send to and to receive from: at most `each`
    /// messages each way, as many of them at a time as may start together.
    fn by_distance(
        &self,
        group: &Group,
        each: usize,
        exchange: &dyn Fn(usize, usize) -> ddp_comm::Result<()>,
    ) -> Result<()> {
        let (ranks, me) = (group.size(), group.rank());
        let distances: Vec<usize> = (1..ranks).collect();
        for distances in distances.chunks((MESSAGES_MAX / (2 * each)).max(1)) {
            group.grouped(|| {
                let mut distances = distances.iter();
                distances.try_for_each(|at| exchange((me + at) % ranks, (me + ranks - at) % ranks))
            })?;
        }
        Ok(())
    }
}
