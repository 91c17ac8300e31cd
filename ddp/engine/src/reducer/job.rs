//! Jobs: what is communicated of a bucket in every step.

use std::ops::Range;
use std::sync::Arc;

use ddp_comm::{Group, Reduce};
use ddp_kernels::stream::Stream;
use ddp_kernels::trace::{Label, Lane};
use ddp_kernels::{DType, Tensor, ops};

use super::along_tree::AlongTree;
use crate::error::Result;
use crate::faults::{self, FaultPoint};

/// What is done with a bucket.
#[derive(Debug)]
pub(super) enum Job {
    /// It becomes the sum over the ranks.
    Sum(Reduced),
    /// This rank's slice of it becomes the sum over the ranks. The rest is left unspecified.
    SumSlice(Reduced),
    /// It, or this rank's slice of it, becomes the sum over the shards of the batch.
    SumAlong(Arc<AlongTree>),
    /// Each rank gives its slice and gets the others.
    Gather(Tensor),
    /// Each rank gets those of rank 0.
    Broadcast(Tensor),
}

/// A bucket of gradients. Letters: E elements of the bucket, O that this rank gets the sums of.
#[derive(Debug)]
pub(super) struct Reduced {
    /// f32 (E).
    gradients: Tensor,
    /// f32 (O), a part of `gradients`.
    own: Tensor,
    /// The same in the dtype that travels, if that is another.
    narrow: Option<(Tensor, Tensor)>,
}

impl Reduced {
    /// This rank gets the sums of the elements in `own`. `dtype` is what travels.
    pub(super) fn new(gradients: Tensor, own: Range<usize>, dtype: DType) -> Result<Reduced> {
        let narrow = if dtype == gradients.dtype() {
            None
        } else {
            let name = gradients.name().unwrap_or("gradients");
            let all = Tensor::empty(&[gradients.count()], dtype, gradients.device())?.named(name);
            let own = all.slice(own.clone())?;
            Some((all, own))
        };
        Ok(Reduced {
            own: gradients.slice(own)?,
            gradients,
            narrow,
        })
    }

    /// What travels, with the gradients in it.
    fn packed(&self, stream: &Stream) -> Result<&Tensor> {
        let Some((narrow, _)) = &self.narrow else {
            return Ok(&self.gradients);
        };
        stream.scope(|| ops::cast_into(narrow, &self.gradients))?;
        Ok(narrow)
    }

    /// Copies the sums to the gradients, if another tensor travelled.
    fn unpack(&self, stream: &Stream) -> Result<()> {
        match &self.narrow {
            Some((_, narrow)) => Ok(stream.scope(|| ops::cast_into(&self.own, narrow))?),
            None => Ok(()),
        }
    }
}

/// The sum of a small tensor, in a trace.
pub(super) const SMALL_SUM: Label = Label::new(Lane::Reductions, "sum of losses");

impl Job {
    /// What a trace shows job `index` as.
    pub(super) fn label(&self, index: usize) -> Label {
        let named = |name| Label::new(Lane::Reductions, name);
        match self {
            Job::Sum(_) => named("all-reduce bucket").at(index),
            Job::SumSlice(_) => named("reduce-scatter bucket").at(index),
            Job::SumAlong(_) => named("sum bucket over shards").at(index),
            Job::Gather(_) => named("all-gather values"),
            Job::Broadcast(_) => named("broadcast buffers"),
        }
    }

    /// Whether it sums gradients.
    pub(super) fn is_sum(&self) -> bool {
        matches!(self, Job::Sum(_) | Job::SumSlice(_) | Job::SumAlong(_))
    }

    /// Gives the job to `stream`, a sum together with those of the `small` tensors: NCCL runs such
    /// calls in one launch. On the CPU this runs it.
    pub(super) fn run(&self, group: &Group, small: &[Tensor], stream: &Stream) -> Result<()> {
        match self {
            Job::Sum(bucket) | Job::SumSlice(bucket) => {
                faults::at(FaultPoint::Reduction)?;
                faults::flip(&bucket.gradients)?;
                let packed = bucket.packed(stream)?;
                group.grouped(|| {
                    match self {
                        Job::Sum(_) => group.all_reduce(packed, Reduce::Sum, stream)?,
                        _ => group.reduce_scatter(packed, Reduce::Sum, stream)?,
                    }
                    let sum = |tensor| group.all_reduce(tensor, Reduce::Sum, stream);
                    small.iter().try_for_each(sum)
                })?;
                bucket.unpack(stream)
            }
            Job::SumAlong(bucket) => {
                faults::at(FaultPoint::Reduction)?;
                let mut small = small.iter();
                small.try_for_each(|tensor| sum(tensor, group, stream))?;
                bucket.run(group, stream)
            }
            Job::Gather(values) => Ok(group.all_gather(values, stream)?),
            Job::Broadcast(values) => Ok(group.broadcast(values, 0, stream)?),
        }
    }
}

/// Sums a small tensor over the ranks.
pub(super) fn sum(tensor: &Tensor, group: &Group, stream: &Stream) -> Result<()> {
    Ok(group.all_reduce(tensor, Reduce::Sum, stream)?)
}
