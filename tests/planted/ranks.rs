//! The programs of several ranks: threads of one process with a GPU each, through the product's public interfaces alone. What is wrong is
//! what a trainer could do wrong with streams, events and collectives, not what the product itself does.
//!
//! The ranks wait for one another before any of them waits for a device: the simulator takes all threads of the host for one, so that what one
//! of them has waited for would count as known to the others.

use std::time::Duration;

use ddp_comm::{Group, Reduce, Result, World};
use ddp_kernels::stream::Stream;
use ddp_kernels::{DType, Device, Tensor, ops};

use crate::Version::{self, Right, Wrong};
use crate::bugs::Bug;

/// Mistakes that the simulator finds.
pub(crate) const RACES: &[Bug] = &[
    Bug {
        name: "bucket_started_one_event_too_early",
        devices: RANKS,
        program: bucket_started_one_event_too_early,
        told: &["RACE", "kernel", "ncclAllReduce", "bucket_started_one_event_too_early", "allocat"],
    },
    Bug {
        name: "gathered_values_read_too_early",
        devices: RANKS,
        program: gathered_values_read_too_early,
        told: &["RACE", "kernel", "ncclAllGather", "gathered_values_read_too_early", "allocat"],
    },
];

/// A mistake that the product finds while it runs, on any GPU.
pub(crate) struct Apart {
    /// What the product says of it: both calls.
    pub(crate) bug: Bug,
    /// What the simulator says of it if it is asked to compare calls (SIMCUDA_NCCL_CHECK). Nothing of calls that are the same to NCCL, to which
    /// tensors have no names.
    pub(crate) checked: Option<&'static [&'static str]>,
}

/// Collectives in which ranks do not do the same.
pub(crate) const APART: &[Apart] = &[
    Apart {
        bug: Bug {
            name: "counts_that_differ_by_one_element",
            devices: RANKS,
            program: counts_that_differ_by_one_element,
            told: &[
                "all_reduce sum of \"gradients\" f32[3000]",
                "all_reduce sum of \"gradients\" f32[2999]",
                "rank 0",
                "rank 1",
            ],
        },
        checked: Some(&["NCCL MISMATCH", "3000", "2999"]),
    },
    Apart {
        bug: Bug {
            name: "collectives_in_another_order",
            devices: RANKS,
            program: collectives_in_another_order,
            told: &[
                "all_reduce sum of \"bucket 0\" f32[3000]",
                "all_reduce sum of \"bucket 1\" f32[3000]",
                "rank 0",
                "rank 1",
            ],
        },
        checked: None,
    },
];

const RANKS: usize = 2;
/// A slice for each rank.
const COUNT: usize = 3000;
/// In the first, streams meet the tensors' memory for the first time, which orders them as far as safety needs it.
const STEPS: usize = 3;
/// Within this the product finds calls that differ: its watch looks ten times a second.
const FOUND_WITHIN: Duration = Duration::from_secs(10);

/// Runs `body` as each rank, with a group of all and a stream for communication.
fn on_ranks(body: impl Fn(&World, &Group, &Stream) -> Result<()> + Sync) {
    let worlds = World::threads(RANKS, None, Duration::from_secs(30)).expect("ranks can be threads");
    std::thread::scope(|scope| {
        for world in worlds {
            let body = &body;
            scope.spawn(move || {
                let device = Device::Cuda(world.rank());
                let group = world.gpu_group("gradients", device).expect("there is NCCL");
                let communication = Stream::urgent(device).expect("a device has streams");
                body(&world, &group, &communication).expect("nothing is refused");
            });
        }
    });
}

fn ones(device: Device, count: usize, name: &str) -> Result<Tensor> {
    Ok(Tensor::full(&[count], 1.0, DType::F32, device)?.named(name))
}

/// That each element is `value`, once all ranks have given their work to their devices.
fn expect(world: &World, value: f32, tensor: &Tensor) -> Result<()> {
    world.barrier()?;
    let got = tensor.to_vec::<f32>()?;
    assert_eq!(got.iter().position(|&got| got != value), None, "{tensor}: expected {value} everywhere");
    Ok(())
}

/// A bucket of two layers' gradients is reduced behind an event: that after the last of them, not one before.
fn bucket_started_one_event_too_early(version: Version) {
    on_ranks(|world, group, communication| {
        let device = communication.device();
        let compute = Stream::current(device)?;
        let bucket = ones(device, COUNT, "gradients, bucket 0")?;
        let layers = [bucket.slice(COUNT / 2..COUNT)?, bucket.slice(0..COUNT / 2)?];
        for _ in 0..STEPS {
            ops::scale_into(&layers[0], &layers[0], 0.5)?;
            let early = compute.record()?;
            ops::scale_into(&layers[1], &layers[1], 0.5)?;
            let complete = compute.record()?;
            communication.wait(if version == Right { &complete } else { &early })?;
            group.all_reduce(&bucket, Reduce::Sum, communication)?;
            compute.wait(&communication.record()?)?;
        }
        expect(world, 1.0, &bucket)
    });
}

/// Each rank updates its slice of the values, and the next step begins with all of them: layers wait for the gather.
fn gathered_values_read_too_early(version: Version) {
    on_ranks(|world, group, communication| {
        let device = communication.device();
        let compute = Stream::current(device)?;
        let (values, output) = (ones(device, COUNT, "values, bucket 0")?, ones(device, COUNT, "output")?);
        let slice = COUNT / RANKS;
        let own = values.slice(world.rank() * slice..(world.rank() + 1) * slice)?;
        for _ in 0..STEPS {
            communication.wait(&compute.record()?)?;
            group.all_gather(&values, communication)?;
            let gathered = communication.record()?;
            if version == Right {
                compute.wait(&gathered)?;
            }
            ops::scale_into(&output, &values, 2.0)?;
            ops::scale_into(&own, &own, 0.5)?;
        }
        // Read before the last update, and halved twice before that.
        expect(world, 0.5, &output)
    });
}

fn counts_that_differ_by_one_element(version: Version) {
    on_ranks(|world, group, communication| {
        let short = usize::from(version == Wrong && world.rank() == 1);
        let gradients = communication.scope(|| ones(communication.device(), COUNT - short, "gradients"))?;
        group.all_reduce(&gradients, Reduce::Sum, communication)?;
        communication.scope(|| expect(world, RANKS as f32, &gradients))
    });
}

/// Two buckets of one length: to NCCL it is all the same, and so it adds the one to the other.
fn collectives_in_another_order(version: Version) {
    on_ranks(|world, group, communication| {
        let bucket = |name| communication.scope(|| ones(communication.device(), COUNT, name));
        let mut buckets = [bucket("bucket 0")?, bucket("bucket 1")?];
        if version == Wrong && world.rank() == 1 {
            buckets.reverse();
        }
        for bucket in &buckets {
            group.all_reduce(bucket, Reduce::Sum, communication)?;
        }
        communication.scope(|| buckets.iter().try_for_each(|bucket| expect(world, RANKS as f32, bucket)))?;
        if version == Wrong {
            // The end of a program may come before anybody has looked.
            std::thread::sleep(FOUND_WITHIN);
        }
        Ok(())
    });
}
