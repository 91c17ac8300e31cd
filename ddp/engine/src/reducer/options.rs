//! How gradients are reduced: what options are refused, and how a model's parameters become
//! buckets, the slices of them that a rank owns, and what is communicated of each.

use std::ops::Range;
use std::sync::Arc;

use ddp_comm::membership::agreement::Slicing;
use ddp_comm::{Group, SumTree, World};
use ddp_kernels::{DType, Device, Tensor};
use ddp_nn::params::{Division, Parameter, Params, Sharing, Window};

use super::job::CommJob;
use super::plan::{self, Bucket, BucketSizes};
use super::reduced::{BackupCopy, Reduced, Sum, TreeSum, received};
use crate::error::{Error, Result};
use crate::setting::SAME_BITS;

/// How gradients are reduced.
#[derive(Clone, Copy, Debug)]
pub struct ReducerOptions {
    /// The maximum size of buckets; None for that of the device.
    pub sizes: Option<BucketSizes>,
    /// The number of hosts, on which the default of `sizes` depends.
    pub hosts: usize,
    /// What travels: F32 (F64 for a model in f64, whose gradients F32 would round), or BF16, which
    /// is half the bytes and rounds each rank's gradients before they are added, and the sum again.
    pub dtype: DType,
    /// Whether to reduce while backward continues: on a separate thread, or on a GPU on a separate
    /// stream.
    pub overlap: bool,
    /// The stage of ZeRO. 1: each rank owns a slice of every bucket, and has moments only for that,
    /// and masters, if the model was made for it alone ([`ReducerOptions::sharing`]). 2: it has
    /// gradients only for that, too, and memory for those of a few buckets.
    pub zero: u64,
    /// Into how many shards each batch is cut, so that the bits are the same on any number of
    /// ranks up to it; None for a sum of what each rank adds up.
    pub shards: Option<usize>,
    /// Whether every rank makes its whole update by itself, so that the loss of a rank leaves none
    /// half updated: with Muon every rank orthogonalises all matrices.
    pub updates_alone: bool,
    /// Under ZeRO-1: the rank that many after a slice's owner gets its sums, too
    /// (`elastic/slices.rs`); 0 if none does.
    pub backup_distance: usize,
}

impl ReducerOptions {
    /// How many of `ranks` share the trained parameters: an argument of
    /// [`Model::with_shares`](ddp_nn::models::Model::with_shares).
    pub fn shares(&self, ranks: usize) -> usize {
        if self.zero > 0 { ranks } else { 1 }
    }

    /// How the trained part of a model is shared, of which this is rank `rank` of `ranks`: an
    /// argument of [`Model::with_shares`](ddp_nn::models::Model::with_shares).
    pub fn sharing(self, rank: usize, ranks: usize) -> Sharing {
        let shares = self.shares(ranks);
        let divide = move |list: &[Parameter], device: Device| {
            let buckets = plan_of(list, device, self, shares);
            let own = buckets.iter().map(|bucket| bucket.slice(rank, shares));
            Division {
                own: own.collect(),
                windows: (self.zero == 2).then(|| windows(list, &buckets)),
            }
        };
        Sharing {
            frees_gradients: self.zero == 2,
            division: match shares {
                1 => None,
                _ => Some(Arc::new(divide)),
            },
            ..shares.into()
        }
    }

    /// The maximum size of buckets on `device`.
    pub(crate) fn sizes_on(&self, device: Device) -> BucketSizes {
        let sizes = self
            .sizes
            .unwrap_or_else(|| BucketSizes::of_device(device, self.hosts));
        BucketSizes {
            cuts_parameters: sizes.cuts_parameters || self.zero == 2 || self.shards.is_some(),
            ..sizes
        }
    }

    /// Bytes of partial sums over shards on a rank of several: its own of this many elements, and
    /// on a GPU what arrives from the others of the `longest` bucket.
    pub(crate) fn partial_sum_bytes(
        &self,
        (rank, ranks, device): (usize, usize, Device),
        elements: usize,
        longest: usize,
    ) -> usize {
        let Some(shards) = self.shards.filter(|shards| *shards >= ranks) else {
            return 0;
        };
        let (tree, bytes) = (SumTree::new(shards, ranks), self.dtype.bytes());
        let kept = tree.kept_by(rank) * DType::F32.bytes();
        let given = match self.dtype {
            DType::F32 => 0,
            _ => tree.given_by(rank) * bytes,
        };
        let arrives = match device {
            Device::Cpu => 0,
            Device::Cuda(_) => received(&tree, rank, longest) * bytes,
        };
        elements
            .saturating_mul(kept + given)
            .saturating_add(arrives)
    }

    /// The slices of rank `rank` of `ranks`, in this generation.
    pub(crate) fn slicing(&self, generation: u64, [rank, ranks]: [usize; 2]) -> Slicing {
        let distance = if self.zero > 0 {
            self.backup_distance
        } else {
            0
        };
        Slicing::new(generation, [rank, ranks], distance)
    }

    /// The elements of the gradients' arena in the slice that a rank owns, and in the one of which
    /// it is the backup.
    pub(crate) fn ranges(self, params: &Params, slicing: Slicing) -> [Vec<Range<usize>>; 2] {
        let of = |slice| slices(params, [slice, slicing.ranks], self);
        [of(slicing.owns), slicing.backs_up.map_or_else(Vec::new, of)]
    }
}

impl Default for ReducerOptions {
    /// f32, reduced while backward continues.
    fn default() -> ReducerOptions {
        ReducerOptions {
            sizes: None,
            hosts: 1,
            dtype: DType::F32,
            overlap: true,
            zero: 0,
            shards: None,
            updates_alone: false,
            backup_distance: 0,
        }
    }
}

ddp_kernels::choices! {
    /// Whether gradients are reduced during the backward pass.
    #[derive(Default)]
    pub enum Overlap {
        /// If there are several ranks
        #[default]
        Auto = "auto",
        /// Always
        On = "on",
        /// Never
        Off = "off",
    }
}

/// Whether to reduce while backward continues: by default if there are several ranks.
pub fn overlaps(wanted: Overlap, world: &World) -> bool {
    wanted == Overlap::On || wanted == Overlap::Auto && world.size() > 1
}

/// The most shards of a batch.
pub(crate) const SHARDS_MAX: usize = 1024;

/// Refuses shards of which some ranks would have none.
pub fn check_ranks(shards: usize, ranks: usize) -> Result<()> {
    if shards >= ranks {
        return Ok(());
    }
    Err(Error::Usage(format!(
        "{SAME_BITS} {shards}: expected at least {ranks}, a shard for each rank; help: start \
         at most {shards} ranks, or begin a run with {SAME_BITS} {ranks} or more"
    )))
}

/// Refuses shards that cannot make the same bits on any number of ranks.
pub(super) fn check_shards(params: &Params, group: &Group, shards: usize) -> Result<()> {
    if params.buffers()?.is_some() {
        return Err(Error::Usage(format!(
            "{SAME_BITS} {shards}: expected a model without buffers: what layers write to them \
             depends on a rank's rows; help: train without {SAME_BITS}"
        )));
    }
    if shards > SHARDS_MAX {
        return Err(Error::Usage(format!(
            "{SAME_BITS} {shards}: expected at most {SHARDS_MAX}; help: cut batches into fewer shards"
        )));
    }
    check_ranks(shards, group.size())
}

/// The trained parameters, in the order of the arenas.
pub(super) fn trained(list: &[Parameter]) -> Vec<&Parameter> {
    list.iter().filter(|p| p.is_trained()).collect()
}

/// The plan of buckets for parameters on `device` that `shares` ranks share.
pub(super) fn plan_of(
    list: &[Parameter],
    device: Device,
    options: ReducerOptions,
    shares: usize,
) -> Vec<Bucket> {
    let trained = trained(list);
    let ranges: Vec<_> = trained.iter().map(|p| p.range.clone()).collect();
    let layer_of = |p: &Parameter| p.name.rsplit_once('.').map(|(layer, _)| layer.to_string());
    let layers: Vec<usize> = trained
        .chunk_by(|a, b| layer_of(a) == layer_of(b))
        .map(<[_]>::len)
        .collect();
    let sizes = options.sizes_on(device);
    plan::plan(&ranges, &layers, sizes, plan::grain(shares))
}

/// While a window is written, up to this many before it may still be written or reduced.
const WINDOWS_AT_ONCE: usize = 2;

/// Windows of gradients: as many buckets as have whole parameters. Those with a parameter that
/// several layers use are in use for most of a backward, and have memory for themselves.
fn windows(list: &[Parameter], buckets: &[Bucket]) -> Vec<Window> {
    let trained = trained(list);
    let mut all: Vec<(Range<usize>, bool)> = Vec::new();
    for bucket in buckets {
        let parameters = &trained[bucket.parameters.clone()];
        let is_long = parameters.iter().any(|p| p.is_shared);
        match all.last_mut() {
            Some((range, was_long)) if parameters[0].range.start < bucket.range.start => {
                range.end = bucket.range.end;
                *was_long |= is_long;
            }
            _ => all.push((bucket.range.clone(), is_long)),
        }
    }
    // The largest first, so that others use their memory.
    let mut order: Vec<usize> = (0..all.len()).collect();
    order.sort_by_key(|&at| std::cmp::Reverse(all[at].0.len()));
    let mut slots = vec![usize::MAX; all.len()];
    for at in order {
        let meets =
            |other: &usize| all[at].1 || all[*other].1 || at.abs_diff(*other) <= WINDOWS_AT_ONCE;
        let taken: Vec<_> = (0..all.len())
            .filter(meets)
            .map(|other| slots[other])
            .collect();
        slots[at] = (0..).find(|slot| !taken.contains(slot)).unwrap_or_default();
    }
    let window = |((range, _), slot)| Window { range, slot };
    all.into_iter().zip(slots).map(window).collect()
}

/// The elements of the gradients' arena of `params` that this rank of `group` owns: see
/// [`Reducer::owned`](super::Reducer::owned).
pub fn owned(params: &Params, group: &Group, options: ReducerOptions) -> Vec<Range<usize>> {
    slices(params, [group.rank(), group.size()], options)
}

/// The slices with the number `slice` if `ranks` share the buckets.
fn slices(
    params: &Params,
    [slice, ranks]: [usize; 2],
    options: ReducerOptions,
) -> Vec<Range<usize>> {
    match options.shares(ranks) {
        1 => std::iter::once(params.trained_part()).collect(),
        shares => {
            let of_bucket = |bucket: &Bucket| bucket.slice(slice, shares);
            plan_of(params.list(), params.device(), options, shares)
                .iter()
                .map(of_bucket)
                .collect()
        }
    }
}

/// A sum for each bucket, and all jobs: these sums. If ranks share buckets, also a gather of what
/// layers read for each bucket, and if that is a bf16 copy and ranks have all masters, a gather of
/// these for each bucket.
/// If slices have a backup, the sums go there, too.
pub(super) fn jobs(
    params: &Params,
    buckets: &[Bucket],
    group: &Group,
    options: ReducerOptions,
) -> Result<(Vec<Arc<Reduced>>, Vec<CommJob>)> {
    let shares = options.shares(group.size());
    let dtype = match (options.dtype, params.master_dtype()) {
        (DType::F32, DType::F64) => DType::F64,
        (dtype, _) => dtype,
    };
    let rank = group.rank();
    let tree = |shards: usize| -> Result<_> {
        let tree = Arc::new(SumTree::new(shards, group.size()));
        let longest = buckets.iter().map(|bucket| bucket.range.len()).max();
        let count = match params.device() {
            Device::Cpu => 0,
            Device::Cuda(_) => received(&tree, rank, longest.unwrap_or(0)),
        };
        let received = Tensor::empty(&[count], dtype, params.device())?;
        Ok((tree, received.named("partial sums of others")))
    };
    let tree = options.shards.map(tree).transpose()?;
    let frees = params.windows().is_some();
    let shared = match (frees, dtype == params.master_dtype()) {
        (true, false) => {
            let longest = buckets.iter().map(|bucket| bucket.range.len()).max();
            Some(Tensor::empty(
                &[longest.unwrap_or(0)],
                dtype,
                params.device(),
            )?)
        }
        _ => None,
    };
    let backed_up = options.slicing(0, [rank, shares]).backs_up;
    let backup = |bucket: &Bucket, from: usize| -> Result<_> {
        let slice = |of: usize| params.gradients().slice(bucket.slice(of, shares));
        Ok(BackupCopy {
            own: slice(rank)?,
            backed_up: slice(from)?,
            from,
            to: (rank + options.backup_distance) % shares,
            // In a ring of ranks that all send first, none would receive.
            sends_first: (rank / options.backup_distance).is_multiple_of(2),
        })
    };
    let sum = |(index, bucket): (usize, &Bucket)| -> Result<Arc<Reduced>> {
        let gradients = params.written_gradients(bucket.range.clone())?;
        let name = format!("gradients, bucket {index}");
        let gradients = gradients.named(&name);
        let travels = match &shared {
            _ if dtype == gradients.dtype() => gradients.clone(),
            Some(shared) => shared.slice(0..gradients.count())?.named(&name),
            None => Tensor::empty(&[gradients.count()], dtype, gradients.device())?.named(&name),
        };
        let own = match shares {
            1 => bucket.range.clone(),
            _ => bucket.slice(rank, shares),
        };
        let own_sums = frees.then(|| params.gradients_of(own.clone()));
        let own = own.start - bucket.range.start..own.end - bucket.range.start;
        let backup = backed_up.map(|from| backup(bucket, from)).transpose()?;
        let sum = match &tree {
            None => Sum::Transport,
            Some((tree, received)) => {
                let sum = TreeSum::new(tree, rank, [&gradients, &travels], received)?;
                Sum::Tree(Box::new(sum))
            }
        };
        let own_sums = own_sums.transpose()?;
        let sum = Reduced::new(gradients, own, travels, own_sums, sum, backup)?;
        Ok(Arc::new(sum))
    };
    let sums = buckets.iter().enumerate().map(sum);
    let sums = sums.collect::<Result<Vec<_>>>()?;
    let mut jobs: Vec<CommJob> = sums.iter().cloned().map(CommJob::Sum).collect();
    let mut gather = |arena: &Tensor, name: &str| -> Result<()> {
        for (index, bucket) in buckets.iter().enumerate() {
            let part = arena.slice(bucket.range.clone())?;
            let part = part.named(&format!("{name}, bucket {index}"));
            jobs.push(CommJob::Gather(part));
        }
        Ok(())
    };
    if shares > 1 {
        gather(params.read_arena(), "values")?;
        if params.dtype() != params.master_dtype() && !params.is_divided() {
            gather(params.values(), "masters")?;
        }
    }
    Ok((sums, jobs))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of five shards, rank 1 of 2 has three: it keeps one sum, gives two, and gets one of rank 0.
    #[test]
    fn partial_sums_are_what_a_rank_keeps_gives_in_bf16_and_gets_on_a_gpu() {
        let bytes = |dtype, device| {
            let options = ReducerOptions {
                dtype,
                shards: Some(5),
                ..ReducerOptions::default()
            };
            options.partial_sum_bytes((1, 2, device), 1000, 640)
        };
        let (kept, given, slice) = (4 * 1000, 2 * 2 * 1000, 320);
        assert_eq!(bytes(DType::F32, Device::Cpu), kept);
        assert_eq!(bytes(DType::F32, Device::Cuda(0)), kept + 4 * slice);
        assert_eq!(
            bytes(DType::BF16, Device::Cuda(0)),
            kept + given + 2 * slice
        );
    }
}
