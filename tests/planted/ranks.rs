//! The programs of several ranks: threads of one process with a GPU each, which use only the public
//! interfaces of ddp-kernels and ddp-comm. The mistakes are those that a trainer could make with
//! streams, events and collectives.
//!
//! The ranks wait for each other before any of them waits for a device: to the simulator all
//! threads are one host, so a wait by one thread would count for the others.

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
        told: &[
            "RACE",
            "kernel",
            "ncclAllReduce",
            "bucket_started_one_event_too_early",
            "allocat",
        ],
    },
    Bug {
        name: "gathered_values_read_too_early",
        devices: RANKS,
        program: gathered_values_read_too_early,
        told: &[
            "RACE",
            "kernel",
            "ncclAllGather",
            "gathered_values_read_too_early",
            "allocat",
        ],
    },
];

/// A mistake that ddp-comm finds while it runs, on any GPU.
pub(crate) struct Apart {
    /// What ddp-comm prints about it: both calls.
    pub(crate) bug: Bug,
    /// What the simulator prints, unless SIMCUDA_NCCL_CHECK is 0. None for calls that are the same
    /// to NCCL, where tensors have no names.
    pub(crate) checked: Option<&'static [&'static str]>,
}

/// Collectives in which ranks make different calls.
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
/// One slice per rank.
const COUNT: usize = 3000;
/// In the first step a stream uses each tensor's memory for the first time, which orders the
/// streams.
const STEPS: usize = 3;
/// The end of patience with the watch of ddp-comm, which looks for different calls ten times a
/// second and ends the process.
const FOUND_WITHIN: Duration = Duration::from_secs(60);

/// Runs `body` as each rank, with a group of all ranks and a stream for communication.
fn on_ranks(body: impl Fn(&World, &Group, &Stream) -> Result<()> + Sync) {
    let worlds = World::threads(RANKS, None, FOUND_WITHIN).expect("ranks can be threads");
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

/// Asserts that each element is `value`, after all ranks have submitted their work.
fn expect(world: &World, value: f32, tensor: &Tensor) -> Result<()> {
    world.barrier()?;
    let got = tensor.to_vec::<f32>()?;
    assert_eq!(
        got.iter().position(|&got| got != value),
        None,
        "{tensor}: expected {value} everywhere"
    );
    Ok(())
}

/// A bucket of two layers' gradients is reduced after an event, which must follow the last
/// gradient.
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

/// Each rank updates its slice of the values, and the next step reads all: layers wait for the
/// gather.
fn gathered_values_read_too_early(version: Version) {
    on_ranks(|world, group, communication| {
        let device = communication.device();
        let compute = Stream::current(device)?;
        let (values, output) = (
            ones(device, COUNT, "values, bucket 0")?,
            ones(device, COUNT, "output")?,
        );
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
        // Read before the last update, after two halvings.
        expect(world, 0.5, &output)
    });
}

fn counts_that_differ_by_one_element(version: Version) {
    on_ranks(|world, group, communication| {
        let short = usize::from(version == Wrong && world.rank() == 1);
        let gradients =
            communication.scope(|| ones(communication.device(), COUNT - short, "gradients"))?;
        group.all_reduce(&gradients, Reduce::Sum, communication)?;
        communication.scope(|| expect(world, RANKS as f32, &gradients))
    });
}

/// Two buckets of one length: NCCL cannot tell them apart, so it adds the one to the other.
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
        communication.scope(|| {
            buckets
                .iter()
                .try_for_each(|bucket| expect(world, RANKS as f32, bucket))
        })?;
        if version == Wrong {
            // Sleep: the watch checks meanwhile, and ends this process.
            std::thread::sleep(FOUND_WITHIN);
        }
        Ok(())
    });
}
