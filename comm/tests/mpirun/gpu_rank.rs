//! What ranks with a GPU each do in these tests. Rank `r` has device `r` modulo their number.

mod operations;

use std::time::Duration;

use ddp_comm::{Error, Group, Reduce, Result, World};
use ddp_kernels::dtype::bf16;
use ddp_kernels::graph::Graph;
use ddp_kernels::stream::Stream;
use ddp_kernels::{DType, Device, Element, Tensor, ops};

use self::operations::operations;
use crate::rank::{commit, now_ms, raise, steps, tell, tell_cpu_share, wait_to_be_ended};

/// Lengths of the slices of a rank: one element, an odd number, and more than a block.
const SLICES: [usize; 3] = [1, 333, 20_000];

fn device(world: &World) -> Device {
    let usable: Vec<Device> = Device::usable()
        .into_iter()
        .filter(|device| device.is_accelerator())
        .collect();
    // By rank: also where one machine stands in for several hosts, each rank has its own.
    usable[world.rank() % usable.len()]
}

pub(crate) fn play(words: &[&str], world: &World) -> Result<()> {
    match *words {
        ["operations"] => operations(world),
        ["graphs"] => graphs(world),
        ["never", rank] => never(world, rank),
        ["stops", "joining", rank] => stops_joining(world, rank),
        ["idle"] => idle(world),
        ["names"] => names(world),
        ["apart"] => apart(world),
        ["early"] => early(world),
        ["outlive"] => outlive(world),
        ["steps"] => steps_until_told(world),
        ["fault", kind, rank, how] => {
            fault(world, kind, rank.parse().unwrap_or(0), how == "captured")
        }
        _ => panic!("no such role of a GPU: {words:?}"),
    }
}

/// Small whole numbers, different on each rank: a sum of up to 16 of them is exact in any dtype.
fn numbers<T: Element>(rank: usize, count: usize) -> Vec<T> {
    (0..count)
        .map(|index| T::from_f64(((index * 7 + rank * 5) % 16) as f64))
        .collect()
}

fn tensor<T: Element>(rank: usize, count: usize, name: &str, device: Device) -> Result<Tensor> {
    Ok(Tensor::from_slice(&numbers::<T>(rank, count), &[count], device)?.named(name))
}

/// Buckets as a step reduces them.
struct Buckets {
    stream: Stream,
    group: Group,
    buckets: Vec<Tensor>,
}

impl Buckets {
    fn new(world: &World, lengths: &[usize]) -> Result<Buckets> {
        let device = device(world);
        let group = world.gpu_group("gradients", device)?;
        let make = |(index, &length): (usize, &usize)| {
            tensor::<f32>(world.rank(), length, &format!("bucket {index}"), device)
        };
        let buckets = lengths
            .iter()
            .enumerate()
            .map(make)
            .collect::<Result<_>>()?;
        Ok(Buckets {
            stream: Stream::urgent(device)?,
            group,
            buckets,
        })
    }

    fn reduce(&self, bucket: &Tensor) -> Result<()> {
        self.group.all_reduce(bucket, Reduce::Sum, &self.stream)
    }

    /// A step: every bucket is scaled and summed. Each rank scales by another factor, so that the
    /// terms of each sum differ and its bits follow from the order of adding.
    fn step(&self) -> Result<()> {
        let followed = self.group.followed();
        let (last, others) = self.buckets.split_last().expect("there are buckets");
        let factor = 0.25 + 0.1 * self.group.rank() as f64;
        self.stream.scope(|| {
            for bucket in others {
                ops::scale_into(bucket, bucket, factor)?;
                followed.all_reduce(bucket, Reduce::Sum, &self.stream)?;
            }
            ops::scale_into(last, last, factor)?;
            self.reduce(last)
        })
    }

    fn bits(&self) -> Result<Vec<u32>> {
        self.stream.scope(|| {
            let all = self
                .buckets
                .iter()
                .map(|bucket| Ok(bucket.to_vec::<f32>()?))
                .collect::<Result<Vec<_>>>()?;
            Ok(all.concat().into_iter().map(f32::to_bits).collect())
        })
    }
}

/// The same steps eagerly and as a graph, and the same eagerly again: which of them agree.
fn graphs(world: &World) -> Result<()> {
    let lengths = [1000, 31, 4096];
    let count = 12;
    let buckets = Buckets::new(world, &lengths)?;
    for _ in 0..count {
        buckets.step()?;
    }
    let bits = buckets.bits()?;
    let captured = Buckets::new(world, &lengths)?;
    // A call that the other group does not make: where bits follow from a call's number, they
    // differ from here on.
    let more = tensor::<f32>(world.rank(), 8, "more", device(world))?;
    captured.stream.scope(|| captured.reduce(&more))?;
    // The first two eagerly: a graph cannot contain work that is done once.
    captured.step()?;
    captured.step()?;
    let graph = Graph::capture(&captured.stream, || captured.step())?;
    for _ in 2..count {
        graph.launch()?;
    }
    tell("captured has the same bits", captured.bits()? == bits);
    // And eagerly on the same group.
    captured.step()?;
    buckets.step()?;
    tell("so has another", captured.bits()? == buckets.bits()?);
    let bytes: Vec<u8> = bits.iter().flat_map(|bits| bits.to_le_bytes()).collect();
    let all = world.all_gather_bytes(&bytes)?;
    assert!(all.iter().all(|other| *other == all[0]), "ranks differ");
    tell("bits", twox_hash::XxHash3_64::oneshot(&bytes));
    if world.size() > 1 {
        works_after_a_capture_that_failed(&captured)?;
    }
    world.barrier()
}

fn works_after_a_capture_that_failed(buckets: &Buckets) -> Result<()> {
    let device = buckets.stream.device();
    // Its first use on a stream must wait for earlier work, which a graph cannot.
    let fresh = Stream::new(device)?.scope(|| tensor::<f32>(0, 100, "fresh", device))?;
    let error = Graph::capture(&buckets.stream, || {
        buckets.step()?;
        buckets.reduce(&fresh)
    });
    let error = error.expect_err("memory that a graph cannot wait for");
    assert!(
        matches!(error, Error::Tensor(ddp_kernels::Error::Capture { .. })),
        "{error}"
    );
    assert!(!buckets.group.all_agree(false)?);
    buckets.step()?;
    let graph = Graph::capture(&buckets.stream, || buckets.step())?;
    graph.launch()?;
    Ok(buckets.stream.synchronize()?)
}

fn never(world: &World, rank: &str) -> Result<()> {
    if rank == world.rank().to_string() {
        tell("fault", now_ms());
        wait_to_be_ended();
    }
    world.gpu_group("gradients", device(world)).map(drop)
}

/// A rank that stops while NCCL connects the ranks.
fn stops_joining(world: &World, rank: &str) -> Result<()> {
    if rank == world.rank().to_string() {
        std::thread::spawn(|| {
            // The thread on which NCCL connects this rank.
            while !has_thread("nccl start") {
                // Sleep: what is waited for is looked at.
                std::thread::sleep(Duration::from_millis(5));
            }
            tell("fault", now_ms());
            raise(libc::SIGSTOP);
        });
    }
    world.gpu_group("gradients", device(world)).map(drop)
}

/// Whether this process has a thread of this name.
fn has_thread(name: &str) -> bool {
    let threads = std::fs::read_dir("/proc/self/task").expect("this is Linux");
    let names = threads.flatten().map(|thread| thread.path().join("comm"));
    let mut names = names.filter_map(|path| std::fs::read_to_string(path).ok());
    names.any(|found| found.trim() == name)
}

/// Ranks that make different groups.
fn names(world: &World) -> Result<()> {
    let name = if world.rank() == 1 {
        "others"
    } else {
        "gradients"
    };
    world.gpu_group(name, device(world)).map(drop)
}

/// Ranks that made different calls of equal sizes, and then meet.
fn apart(world: &World) -> Result<()> {
    let (device, group) = (device(world), world.gpu_group("gradients", device(world))?);
    let stream = Stream::default_of(device)?;
    assert!(group.all_agree(true)?);
    let name = if world.rank() == 1 { "second" } else { "first" };
    group.all_reduce(&tensor::<f32>(0, 8, name, device)?, Reduce::Sum, &stream)?;
    group.all_agree(true).map(drop)
}

/// One rank fails and drops its group while the others wait for it on their devices.
fn early(world: &World) -> Result<()> {
    let buckets = Buckets::new(world, &[100])?;
    buckets.step()?;
    buckets.stream.synchronize()?;
    if world.rank() == 1 {
        // Sleep: the other rank waits by then, or comes to it.
        std::thread::sleep(Duration::from_millis(300));
        // No rank receives this, so its device is never done.
        buckets
            .group
            .send(&buckets.buckets[0], 0, &buckets.stream)?;
        // Refused: this rank's own error.
        return buckets
            .group
            .all_reduce(&buckets.buckets[0], Reduce::Max, &buckets.stream);
    }
    buckets.step()?;
    Ok(buckets.stream.synchronize()?)
}

/// A graph outlives the group whose calls it holds, and one rank does not launch it.
fn outlive(world: &World) -> Result<()> {
    let buckets = Buckets::new(world, &[1000])?;
    buckets.step()?;
    let graph = Graph::capture(&buckets.stream, || buckets.step())?;
    let Buckets {
        stream,
        group,
        buckets,
    } = buckets;
    drop(group);
    graph.launch()?;
    stream.synchronize()?;
    if world.rank() == 1 {
        wait_to_be_ended();
    }
    tell("fault", now_ms());
    graph.launch()?;
    stream.synchronize()?;
    drop(buckets);
    Ok(())
}

/// Two groups without calls.
fn idle(world: &World) -> Result<()> {
    let (first, second) = (
        world.gpu_group("first", device(world))?,
        world.gpu_group("second", device(world))?,
    );
    world.barrier()?;
    // Sleep: what the groups' threads use meanwhile is measured.
    tell_cpu_share(|| std::thread::sleep(Duration::from_secs(2)));
    drop((first, second));
    world.barrier()
}

/// Steps, until `faulty` does something else in the sixth.
fn fault(world: &World, kind: &str, faulty: usize, captured: bool) -> Result<()> {
    let buckets = Buckets::new(world, &[1000, 1000, 500])?;
    buckets.step()?;
    let graph = if captured {
        Some(Graph::capture(&buckets.stream, || buckets.step())?)
    } else {
        None
    };
    let step = || match &graph {
        Some(graph) => Ok(graph.launch()?),
        None => buckets.step(),
    };
    for number in 1..if kind == "none" { 100 } else { 600 } {
        if number == 5 && world.rank() == faulty && kind != "none" {
            tell("fault", now_ms());
            let Buckets {
                stream,
                buckets: all,
                ..
            } = &buckets;
            match kind {
                "skip" => {
                    buckets.reduce(&all[0])?;
                    buckets.reduce(&all[2])?;
                    stream.synchronize()?;
                    // The watch remembers only so many calls: no others follow.
                    wait_to_be_ended();
                }
                "host" => {
                    buckets.reduce(&all[0])?;
                    stream.synchronize()?;
                    wait_to_be_ended();
                }
                _ => commit(world, kind)?,
            }
        }
        step()?;
        buckets.stream.synchronize()?;
    }
    Ok(())
}

/// Steps until the test lets the job end.
fn steps_until_told(world: &World) -> Result<()> {
    let buckets = Buckets::new(world, &[1000, 1000, 500])?;
    steps(&buckets.group, || {
        buckets.step()?;
        Ok(buckets.stream.synchronize()?)
    })
}
