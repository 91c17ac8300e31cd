//! Every operation once, on small tensors with known results, before anything depends on it: connections are made, kernels are loaded (neither
//! could happen while a graph is captured), and a machine that adds up wrongly says so at the start.

use std::sync::Arc;
use std::time::Duration;

use ddp_kernels::dtype::bf16;
use ddp_kernels::stream::{Event, Stream};
use ddp_kernels::transfer::{self, Ledger};
use ddp_kernels::{Device, Element, Tensor};

use super::watch::{Common, ELSEWHERE};
use crate::collective::Reduce;
use crate::error::{Error, Result, Seconds};
use crate::group::Group;
use crate::waited::Waited;

/// Elements of a rank's slice.
const SLICE: usize = 1024;

/// How much longer than the watch, which knows better whom to name, this waits.
const MARGIN: Duration = Duration::from_secs(2).saturating_add(ELSEWHERE);

/// Runs every operation, and checks what comes of it.
pub(super) fn warm_up(group: &Group, device: Device, common: &Common) -> Result<()> {
    // Not a part of what is being trained: not in its book, and not forbidden where transfers are.
    let body = || {
        let stream = Stream::urgent(device)?;
        stream.scope(|| {
            sums::<f32>(group, device, &stream, common)?;
            sums::<bf16>(group, device, &stream, common)?;
            moves(group, device, &stream, common)
        })
    };
    transfer::with_ledger(&Arc::new(Ledger::default()), || transfer::announced("warm-up of a group", body))
}

/// Each element is 1 on one rank and 0 on the others, in turn: whoever is left out or counted twice shows, exactly in any dtype.
fn sums<T: Element>(group: &Group, device: Device, stream: &Stream, common: &Common) -> Result<()> {
    let (rank, size) = (group.rank(), group.size());
    let own: Vec<T> = (0..SLICE * size).map(|i| T::from_f64(f64::from(u8::from(i % size == rank)))).collect();
    let ones = vec![T::from_f64(1.0); SLICE];
    let given = |name: &str| Ok::<Tensor, Error>(Tensor::from_slice(&own, &[own.len()], device)?.named(name));
    let (all, scattered) = (given("warm-up all_reduce")?, given("warm-up reduce_scatter")?);
    group.all_reduce(&all, Reduce::Sum, stream)?;
    group.reduce_scatter(&scattered, Reduce::Sum, stream)?;
    wait(&stream.record()?, common)?;
    for slice in 0..size {
        check(&all.slice(slice * SLICE..(slice + 1) * SLICE)?, &ones, "all_reduce")?;
    }
    check(&scattered.slice(rank * SLICE..(rank + 1) * SLICE)?, &ones, "reduce_scatter")
}

fn moves(group: &Group, device: Device, stream: &Stream, common: &Common) -> Result<()> {
    let (rank, size) = (group.rank(), group.size());
    let of = |rank: usize| vec![rank as f32 + 0.5; SLICE];
    let full = |name: &str, elements: &[f32]| {
        Ok::<Tensor, Error>(Tensor::from_slice(elements, &[elements.len()], device)?.named(name))
    };
    let gathered = full("warm-up all_gather", &of(rank).repeat(size))?;
    let broadcast = full("warm-up broadcast", &of(rank))?;
    let (letter, received) = (full("warm-up send", &of(rank))?, full("warm-up receive", &of(rank))?);
    let (next, previous, last) = ((rank + 1) % size, (rank + size - 1) % size, size - 1);
    group.all_gather(&gathered, stream)?;
    group.broadcast(&broadcast, last, stream)?;
    group.grouped(|| {
        group.send(&letter, next, stream)?;
        group.receive(&received, previous, stream)
    })?;
    wait(&stream.record()?, common)?;
    for other in 0..size {
        check(&gathered.slice(other * SLICE..(other + 1) * SLICE)?, &of(other), "all_gather")?;
    }
    check(&broadcast, &of(last), "broadcast")?;
    check(&received, &of(previous), "send and receive")
}

fn check<T: Element>(tensor: &Tensor, expected: &[T], operation: &str) -> Result<()> {
    let got = tensor.to_vec::<T>()?;
    match got.iter().zip(expected).position(|(got, expected)| got.to_f64() != expected.to_f64()) {
        None => Ok(()),
        Some(index) => Err(Error::Broken {
            action: format!("use NCCL: its {operation} of {} is wrong", T::DTYPE),
            reason: format!("element {index} is {}, and should be {}", got[index].to_f64(), expected[index].to_f64()),
            way_out: "A link or a GPU may be broken, or NCCL and the driver do not fit: nccl-tests and dcgmi diag tell more; \
                      NCCL_P2P_DISABLE=1 keeps off direct links."
                .into(),
        }),
    }
}

/// Waits for the device, up to the deadline, and no longer than the job lives.
fn wait(event: &Event, common: &Common) -> Result<()> {
    let (mut waited, mut pause) = (Waited::new(), Duration::from_micros(50));
    while !event.is_done() {
        if let Some(cause) = common.failure.cause() {
            return Err(Error::PeerFailed(Box::new(cause)));
        }
        std::thread::sleep(pause);
        if waited.after(pause) >= common.timeout.saturating_add(MARGIN) {
            return Err(Error::Setup {
                action: format!("warm up group {}", common.group),
                reason: format!("the device is not done within {}", Seconds(common.timeout)),
                way_out: "NCCL_DEBUG=INFO shows what NCCL does; --timeout-s sets how long to wait.".into(),
            });
        }
        pause = (pause * 3 / 2).min(Duration::from_millis(2));
    }
    Ok(event.synchronize()?)
}
