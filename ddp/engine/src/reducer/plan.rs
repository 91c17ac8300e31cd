//! Which gradients travel together: a pure function of the layout of the parameters.
//!
//! Buckets are ranges of the gradients' arena, in the order in which backward completes them. A
//! bucket may start when its last parameter is complete. The first is small, so that ranks start
//! early. The others are as large as allowed, because every call has a cost. The parameters of a
//! layer stay together where they fit, so that no bucket waits for a bias of the next layer. A
//! parameter larger than the limit is a bucket of its own on GPUs, since backward completes all of
//! it at once. It is cut in host memory, and where the reducer also needs memory for the largest
//! bucket.
//!
//! Under ZeRO-1 each of N ranks owns one of N equal slices of every bucket. So buckets start and
//! end at multiples of a grain of N quanta, and slices are whole quanta. The rest of a layer goes
//! with the next bucket, rather than letting a bucket wait for the next layer.

use std::ops::Range;

use ddp_kernels::Device;

/// Buckets are cut at multiples of this many elements, as the optimizer's chunks are.
pub const QUANTUM: usize = ddp_kernels::ops::QUANTUM;

/// The maximum size of buckets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketSizes {
    /// Elements of the first bucket, at most.
    pub first_elements: usize,
    /// Elements of every other bucket, at most.
    pub elements: usize,
    /// Whether a parameter that is larger than that is cut.
    pub cuts_parameters: bool,
}

impl BucketSizes {
    /// On the CPU buckets of at most 4 MB; on GPUs of 25 MB, as in PyTorch's DDP (`bucket_cap_mb`):
    /// smaller ones leave most of NVLink's bandwidth unused. On those of several `hosts` of 50 MB:
    /// a call of few bytes takes 62 µs or more there (16 hosts of H100s, NVIDIA/nccl issue 1469).
    pub fn of_device(device: Device, hosts: usize) -> BucketSizes {
        let bytes = match (device, hosts) {
            (Device::Cpu, _) => 4_000_000,
            (Device::Cuda(_), 1) => 25_000_000,
            (Device::Cuda(_), _) => 50_000_000,
        };
        BucketSizes {
            cuts_parameters: device == Device::Cpu,
            ..BucketSizes::of_bytes(bytes)
        }
    }

    /// Buckets of at most `bytes` bytes of f32; the first of at most a mebibyte.
    pub fn of_bytes(bytes: usize) -> BucketSizes {
        let elements = (bytes / 4).max(QUANTUM);
        BucketSizes {
            first_elements: elements.min((1 << 20) / 4),
            elements,
            cuts_parameters: true,
        }
    }
}

/// One bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// Its elements in the gradients' arena, including the padding between parameters.
    pub range: Range<usize>,
    /// The parameters with elements in it, as indices of the list given to `plan`.
    pub parameters: Range<usize>,
}

impl Bucket {
    /// The elements of the arena that `rank` of `ranks` owns of it, if the plan was made with the
    /// grain of that many ranks.
    pub fn slice(&self, rank: usize, ranks: usize) -> Range<usize> {
        let (elements, length) = (self.range.len(), self.range.len() / ranks);
        assert!(rank < ranks && length * ranks == elements, "{self:?}");
        let start = self.range.start + rank * length;
        start..start + length
    }
}

/// Buckets start and end at multiples of this if `shares` ranks own slices of them.
pub fn grain(shares: usize) -> usize {
    if shares > 1 { shares * QUANTUM } else { 1 }
}

/// The elements a bucket of at most `most` may have: whole units, and at least one.
fn limit(most: usize, unit: usize) -> usize {
    (most / unit * unit).max(unit)
}

/// Cuts the arena. `parameters` are the ranges of the trained ones in the arena's order, and
/// `layers` tells how many of them each layer completes together. With the `grain` of several
/// ranks the last bucket also ends at a multiple of it, after the last parameter.
pub fn plan(
    parameters: &[Range<usize>],
    layers: &[usize],
    sizes: BucketSizes,
    grain: usize,
) -> Vec<Bucket> {
    let in_layers: usize = layers.iter().sum();
    assert_eq!(in_layers, parameters.len(), "each is some layer's");
    let layer_ends: Vec<usize> = layers
        .iter()
        .scan(0, |count, &length| {
            *count += length;
            Some(*count)
        })
        .collect();
    let end = parameters
        .last()
        .map_or(0, |last| last.end.next_multiple_of(grain));
    let unit = grain.max(QUANTUM);
    let mut buckets: Vec<Bucket> = Vec::new();
    let mut start = 0;
    while start < end {
        let most = match buckets.len() {
            0 => sizes.first_elements,
            _ => sizes.elements,
        };
        let limit = start.saturating_add(limit(most, unit));
        // The number of parameters that end before the limit.
        let fitting = parameters.partition_point(|p| p.end <= limit);
        let done = parameters.partition_point(|p| p.end <= start);
        let whole_layers = layer_ends
            .iter()
            .rev()
            .find(|&&count| count <= fitting && count > done);
        let stop = match whole_layers.copied().unwrap_or(fitting) {
            count if count == parameters.len() => end,
            // The padding goes with the parameter before it.
            count if count > done => parameters[count].start,
            _ if sizes.cuts_parameters => limit.min(end),
            _ => parameters.get(done + 1).map_or(end, |next| next.start),
        };
        let stop = match stop / grain * grain {
            whole if whole > start => whole,
            // Less than a grain: take parameters until it is full, and what else is whole.
            _ => {
                let touched = parameters.partition_point(|p| p.start < start + grain);
                let most = if sizes.cuts_parameters { limit } else { end };
                (parameters[touched - 1].end / grain * grain).clamp(start + grain, most)
            }
        };
        let last = parameters.partition_point(|p| p.start < stop);
        buckets.push(Bucket {
            range: start..stop,
            parameters: done..last,
        });
        start = stop;
    }
    buckets
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Parameters of these lengths, each on a multiple of 64 elements, as `Params` lays them out.
    fn laid_out(lengths: &[usize]) -> Vec<Range<usize>> {
        laid_out_at(lengths, 64)
    }

    fn laid_out_at(lengths: &[usize], multiple: usize) -> Vec<Range<usize>> {
        let mut start = 0usize;
        let place = |&length: &usize| {
            let range = start..start + length;
            start = range.end.next_multiple_of(multiple);
            range
        };
        lengths.iter().map(place).collect()
    }

    fn sizes(first: usize, rest: usize) -> BucketSizes {
        BucketSizes {
            first_elements: first,
            elements: rest,
            cuts_parameters: true,
        }
    }

    /// Whether a bucket ends with a parameter that may not be cut and is longer than `limit`.
    fn is_uncut(
        sizes: BucketSizes,
        parameters: &[Range<usize>],
        bucket: &Bucket,
        limit: usize,
    ) -> bool {
        !sizes.cuts_parameters && parameters[bucket.parameters.end - 1].len() > limit
    }

    #[test]
    fn the_first_bucket_is_small_and_the_rest_fill_up() {
        let parameters = laid_out(&[10, 10_240, 1024, 1024 * 1024, 1024, 1024 * 784]);
        let plan = plan(&parameters, &[2, 2, 2], BucketSizes::of_bytes(25 << 20), 1);
        let ranges: Vec<_> = plan
            .iter()
            .map(|bucket| bucket.parameters.clone())
            .collect();
        assert_eq!(ranges, [0..2, 2..6]);
    }

    #[test]
    fn buckets_of_gpus_are_larger_and_the_first_is_small_everywhere() {
        let layers = [vec![1 << 17; 60], vec![30_000_000, 64]].concat();
        let of = |device, hosts| {
            let (parameters, each) = (laid_out(&layers), vec![1; layers.len()]);
            plan(&parameters, &each, BucketSizes::of_device(device, hosts), 1)
        };
        let lengths = |device, hosts| -> Vec<usize> {
            of(device, hosts).iter().map(|b| b.range.len()).collect()
        };
        let (cpu, gpu) = (lengths(Device::Cpu, 1), lengths(Device::Cuda(0), 1));
        let of_hosts = lengths(Device::Cuda(0), 2);
        assert_eq!((cpu[0], cpu[1]), (1 << 18, 7 << 17));
        // The large parameter is one bucket there.
        assert_eq!(gpu, [1 << 18, 47 << 17, 11 << 17, 30_000_000, 64]);
        assert_eq!(of_hosts, [1 << 18, 58 << 17, 30_000_000, 64]);
        assert!(cpu.iter().all(|&length| length <= 1_000_000));
    }

    #[test]
    fn a_parameter_larger_than_the_cap_is_cut() {
        let plan = plan(&laid_out(&[5000]), &[1], sizes(1024, 2048), 1);
        let ranges: Vec<_> = plan.iter().map(|bucket| bucket.range.clone()).collect();
        assert_eq!(ranges, [0..1024, 1024..3072, 3072..5000]);
        assert!(plan.iter().all(|bucket| bucket.parameters == (0..1)));
    }

    #[test]
    fn a_model_without_trained_parameters_has_no_buckets() {
        assert_eq!(plan(&[], &[], BucketSizes::of_bytes(1 << 20), 1), []);
        assert_eq!(plan(&[], &[], BucketSizes::of_bytes(1 << 20), grain(3)), []);
    }

    #[test]
    fn a_layer_stays_together_where_it_fits() {
        let parameters = laid_out(&[64, 4096, 64, 4096, 64, 9000]);
        let plan = plan(&parameters, &[2, 2, 2], sizes(2048, 8192), 1);
        let ranges: Vec<_> = plan
            .iter()
            .map(|bucket| bucket.parameters.clone())
            .collect();
        // The first layer is cut; later layers are whole where they fit.
        assert_eq!(ranges, [0..1, 1..2, 2..4, 4..5, 5..6, 5..6]);
    }

    #[test]
    fn with_a_grain_what_is_left_of_a_layer_goes_with_the_next_bucket() {
        // Two ranks: multiples of 2048. The first layer has 5 quanta, the second 3, the third 1.
        let parameters = laid_out_at(&[64, 4096, 64, 2048, 9], QUANTUM);
        let plan = plan(&parameters, &[2, 2, 1], sizes(6000, 5000), grain(2));
        let parts: Vec<_> = plan
            .iter()
            .map(|bucket| (bucket.range.clone(), bucket.parameters.clone()))
            .collect();
        // Limits of 4096. Not 0..6144: that would wait for the second layer's bias.
        assert_eq!(
            parts,
            [(0..4096, 0..2), (4096..8192, 1..4), (8192..10_240, 4..5)]
        );
        let slices: Vec<_> = plan
            .iter()
            .map(|bucket| [bucket.slice(0, 2), bucket.slice(1, 2)])
            .collect();
        assert_eq!(
            slices,
            [
                [0..2048, 2048..4096],
                [4096..6144, 6144..8192],
                [8192..9216, 9216..10_240]
            ]
        );
    }

    #[test]
    fn a_model_smaller_than_a_quantum_a_rank_is_one_bucket_of_a_grain() {
        let plan = plan(&laid_out_at(&[3], QUANTUM), &[1], sizes(1, 1), grain(5));
        assert_eq!(
            plan,
            [Bucket {
                range: 0..5 * QUANTUM,
                parameters: 0..1
            }]
        );
        assert_eq!(plan[0].slice(4, 5), 4 * QUANTUM..5 * QUANTUM);
    }

    proptest! {
        #[test]
        fn with_a_grain_slices_are_whole_quanta_and_cover_every_element_once(
            lengths in prop::collection::vec(1usize..9000, 1..40),
            in_layer in 1usize..5,
            first in 0usize..6000,
            rest in 0usize..20_000,
            shares in 2usize..6,
            cuts_parameters in any::<bool>(),
        ) {
            let parameters = laid_out_at(&lengths, QUANTUM);
            let layers: Vec<usize> = lengths.chunks(in_layer).map(<[usize]>::len).collect();
            let grain = grain(shares);
            let sizes = BucketSizes { cuts_parameters, ..sizes(first, rest) };
            let plan = plan(&parameters, &layers, sizes, grain);
            let mut end = 0;
            for (index, bucket) in plan.iter().enumerate() {
                prop_assert!(!bucket.range.is_empty());
                let limit = limit(if index == 0 { first } else { rest }, grain);
                prop_assert!(
                    bucket.range.len() <= limit || is_uncut(sizes, &parameters, bucket, limit),
                    "{:?} is larger than {}", bucket, limit
                );
                for rank in 0..shares {
                    let slice = bucket.slice(rank, shares);
                    prop_assert_eq!(slice.start, end);
                    prop_assert!(slice.len() * shares == bucket.range.len() && slice.len().is_multiple_of(QUANTUM));
                    end = slice.end;
                }
                prop_assert_eq!(end, bucket.range.end);
                for (place, p) in parameters.iter().enumerate() {
                    let touches = p.start < bucket.range.end && bucket.range.start < p.end;
                    prop_assert_eq!(touches, bucket.parameters.contains(&place));
                }
            }
            prop_assert_eq!(end, parameters.last().unwrap().end.next_multiple_of(grain));
        }

        #[test]
        fn buckets_cover_every_element_once_in_order_within_the_cap(
            lengths in prop::collection::vec(1usize..9000, 1..40),
            in_layer in 1usize..5,
            first in 0usize..6000,
            rest in 0usize..20_000,
            cuts_parameters in any::<bool>(),
        ) {
            let parameters = laid_out(&lengths);
            let layers: Vec<usize> = lengths.chunks(in_layer).map(<[usize]>::len).collect();
            let sizes = BucketSizes { cuts_parameters, ..sizes(first, rest) };
            let plan = plan(&parameters, &layers, sizes, 1);
            let mut end = 0;
            for (index, bucket) in plan.iter().enumerate() {
                prop_assert_eq!(bucket.range.start, end);
                prop_assert!(!bucket.range.is_empty());
                end = bucket.range.end;
                let limit = limit(if index == 0 { first } else { rest }, QUANTUM);
                if is_uncut(sizes, &parameters, bucket, limit) {
                    prop_assert_eq!(bucket.parameters.len(), 1);
                } else {
                    // With the padding after the last parameter, fewer than 64 elements.
                    prop_assert!(bucket.range.len() < limit + 64, "{:?} is larger than {}", bucket, limit);
                }
                for (place, p) in parameters.iter().enumerate() {
                    let touches = p.start < bucket.range.end && bucket.range.start < p.end;
                    prop_assert_eq!(touches, bucket.parameters.contains(&place));
                }
            }
            prop_assert_eq!(end, parameters.last().unwrap().end);
        }
    }
}
