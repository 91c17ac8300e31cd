//! Sends tensors from rank to rank: in pairs, and around a ring.
//!
//! ```sh
//! cargo build --release -p ddp-examples --example send_receive
//! mpirun -n 4 target/release/examples/send_receive
//! ```
//!
//! If every rank has a GPU, the tensors are there and travel by NCCL; otherwise they are in host
//! memory. The calls are the same.

use std::process::ExitCode;

use ddp::comm::{Group, Options, Result, World};
use ddp::kernels::stream::Stream;
use ddp::kernels::{Device, Tensor, ops};

/// A group of all ranks and the device of its tensors. All ranks decide alike.
fn group(world: &World) -> Result<(Group, Device)> {
    let device = world.device()?;
    Ok((world.group_on(device, "neighbours")?, device))
}

/// Ranks 0 and 1, 2 and 3 …: the even rank asks, the odd rank answers. A last even rank does
/// nothing.
fn pair(group: &Group, device: Device, stream: &Stream) -> Result<()> {
    let (rank, size) = (group.rank(), group.size());
    let numbers = Tensor::from_slice(&[1.0f32, 2.0, 3.0], &[3], device)?.named("numbers");
    if rank % 2 == 1 {
        group.receive(&numbers, rank - 1, stream)?;
        ops::scale_into(&numbers, &numbers, 10.0 * rank as f64)?;
        group.send(&numbers, rank - 1, stream)?;
    } else if rank + 1 < size {
        group.send(&numbers, rank + 1, stream)?;
        let answer = numbers.zeros_like()?.named("answer");
        group.receive(&answer, rank + 1, stream)?;
        println!(
            "rank {rank} on {device}: rank {} made of [1, 2, 3] {:?}",
            rank + 1,
            answer.to_vec::<f32>()?
        );
        assert_eq!(
            answer.to_vec::<f32>()?,
            [1.0, 2.0, 3.0].map(|x| x * 10.0 * (rank + 1) as f32)
        );
    }
    Ok(())
}

/// An all-gather by hand: every rank passes on what it received until all have everything.
fn ring(group: &Group, device: Device, stream: &Stream) -> Result<()> {
    let (rank, size) = (group.rank(), group.size());
    let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
    let mut travels = Tensor::from_slice(&[rank as f32], &[1], device)?.named("mine");
    let sum = travels.zeros_like()?;
    for _ in 0..size {
        ops::axpy(&sum, 1.0, &travels)?;
        let arrives = travels.zeros_like()?.named("from the rank before");
        // On a GPU a send and a receive that depend on each other must be issued as a group.
        group.grouped(|| {
            group.send(&travels, next, stream)?;
            group.receive(&arrives, before, stream)
        })?;
        travels = arrives;
    }
    // Each rank's number has come back to it.
    assert_eq!(travels.to_vec::<f32>()?, [rank as f32]);
    assert_eq!(sum.to_vec::<f32>()?, [(size * (size - 1) / 2) as f32]);
    if rank == 0 {
        println!(
            "around the ring: each of {size} ranks saw the numbers of all; they sum to {}",
            sum.to_vec::<f32>()?[0]
        );
    }
    Ok(())
}

fn exchange(world: &World) -> Result<()> {
    if world.size() == 1 {
        println!(
            "a single rank has no other to send to. Start several: mpirun -n 4 target/release/examples/send_receive"
        );
        return Ok(());
    }
    let (group, device) = group(world)?;
    let stream = Stream::current(device)?;
    pair(&group, device, &stream)?;
    ring(&group, device, &stream)
}

fn main() -> ExitCode {
    // An error on one rank ends all ranks and is printed once.
    World::run(&Options::default(), exchange)
}
