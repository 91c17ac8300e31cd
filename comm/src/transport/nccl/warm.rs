//! Runs every operation once, on small tensors with known results, before anything depends on it.
//! This connects sends and receives and loads kernels before any step or capture, and a machine
//! that adds wrongly is found at the start.

use std::sync::Arc;
use std::time::Duration;

use ddp_kernels::dtype::bf16;
use ddp_kernels::stream::{Event, Stream};
use ddp_kernels::transfer::{self, Ledger};
use ddp_kernels::{Device, Element, Tensor};

use super::common::{Common, OTHER_HOSTS_GRACE};
use crate::collective::Reduce;
use crate::collective::group::Group;
use crate::error::{Error, Problem, Remedy, Result, Seconds};
use crate::waited::wait_until;

/// Elements of a rank's slice.
const SLICE: usize = 1024;

/// How much longer than the watch, which knows more, this waits.
const MARGIN: Duration = Duration::from_secs(2).saturating_add(OTHER_HOSTS_GRACE);

/// One group's warm-up.
struct WarmUp<'a> {
    group: &'a Group,
    device: Device,
    stream: &'a Stream,
    common: &'a Common,
}

/// Runs every operation, and checks the results.
pub(super) fn warm_up(group: &Group, device: Device, common: &Common) -> Result<()> {
    // Not a part of the training: not in its ledger, and allowed where transfers are not.
    let body = || {
        let stream = &Stream::urgent(device)?;
        let warm_up = WarmUp {
            group,
            device,
            stream,
            common,
        };
        stream.scope(|| {
            warm_up.sums::<f32>()?;
            warm_up.sums::<bf16>()?;
            warm_up.moves()
        })
    };
    transfer::with_ledger(&Arc::new(Ledger::default()), || {
        transfer::announced("warm-up of a group", body)
    })
}

impl WarmUp<'_> {
    /// Each element is 1 on one rank and 0 on the others, in turn, so that a rank that is left out
    /// or counted twice shows exactly, in any dtype.
    fn sums<T: Element>(&self) -> Result<()> {
        let (group, rank, size) = (self.group, self.group.rank(), self.group.size());
        let own = (0..SLICE * size).map(|i| T::from_f64(f64::from(u8::from(i % size == rank))));
        let own: Vec<T> = own.collect();
        let ones = vec![T::from_f64(1.0); SLICE];
        let all = self.tensor("warm-up all_reduce", &own)?;
        let scattered = self.tensor("warm-up reduce_scatter", &own)?;
        group.all_reduce(&all, Reduce::Sum, self.stream)?;
        group.reduce_scatter(&scattered, Reduce::Sum, self.stream)?;
        wait(&self.stream.record()?, self.common)?;
        for slice in 0..size {
            check(&slice_of(&all, slice)?, &ones, "all_reduce")?;
        }
        check(&slice_of(&scattered, rank)?, &ones, "reduce_scatter")
    }

    fn moves(&self) -> Result<()> {
        let (group, stream) = (self.group, self.stream);
        let (rank, size) = (group.rank(), group.size());
        let of = |rank: usize| vec![rank as f32 + 0.5; SLICE];
        let gathered = self.tensor("warm-up all_gather", &of(rank).repeat(size))?;
        let broadcast = self.tensor("warm-up broadcast", &of(rank))?;
        let sent = self.tensor("warm-up send", &of(rank))?;
        let received = self.tensor("warm-up receive", &of(rank))?;
        let (next, previous, last) = ((rank + 1) % size, (rank + size - 1) % size, size - 1);
        group.all_gather(&gathered, stream)?;
        group.broadcast(&broadcast, last, stream)?;
        group.grouped(|| {
            group.send(&sent, next, stream)?;
            group.receive(&received, previous, stream)
        })?;
        wait(&stream.record()?, self.common)?;
        for other in 0..size {
            check(&slice_of(&gathered, other)?, &of(other), "all_gather")?;
        }
        check(&broadcast, &of(last), "broadcast")?;
        check(&received, &of(previous), "send and receive")
    }

    fn tensor<T: Element>(&self, name: &str, elements: &[T]) -> Result<Tensor> {
        Ok(Tensor::from_slice(elements, &[elements.len()], self.device)?.named(name))
    }
}

/// The slice of a rank.
fn slice_of(tensor: &Tensor, rank: usize) -> Result<Tensor> {
    Ok(tensor.slice(rank * SLICE..(rank + 1) * SLICE)?)
}

fn check<T: Element>(tensor: &Tensor, expected: &[T], operation: &str) -> Result<()> {
    let got = tensor.to_vec::<T>()?;
    let mut pairs = got.iter().zip(expected);
    let Some(index) = pairs.position(|(got, expected)| got.to_f64() != expected.to_f64()) else {
        return Ok(());
    };
    let action = format!("use NCCL: its {operation} of {} is wrong", T::DTYPE);
    let (expected, got) = (expected[index].to_f64(), got[index].to_f64());
    let reason = format!("element {index}: expected {expected}, got {got}");
    let help = "A link or a GPU may be broken, or NCCL and the driver may not match: run nccl-tests \
        and dcgmi diag; NCCL_P2P_DISABLE=1 avoids direct links";
    Err(Error::Broken(Problem::new(action, reason, help)))
}

/// Waits for the device up to the deadline, or until the job fails.
fn wait(event: &Event, common: &Common) -> Result<()> {
    let is_done = || common.failure.check().map(|()| event.is_done());
    if !wait_until(common.timeout().saturating_add(MARGIN), is_done)? {
        let action = format!("warm up group {}", common.group);
        let reason = format!(
            "the device is not done within {}",
            Seconds(common.timeout())
        );
        let help = "NCCL_DEBUG=INFO shows what NCCL does";
        let problem = Problem::new(action, reason, help);
        return Err(Error::Setup(problem.with_remedy(Remedy::LongerTimeout)));
    }
    Ok(event.synchronize()?)
}
