//! Ranks that are threads with random delays, and ranks that are processes, compared with a plain
//! loop; and what happens if one fails.

mod failures;
mod orders;
mod processes;
mod speed;

use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;

use ddp_kernels::stream::Stream;
use ddp_kernels::{DType, Device, Tensor};

use super::*;
use crate::collective::Reduce;
use crate::collective::group::Group;
use crate::error::{Cause, Error};
use crate::tests::on_threads;
use crate::world::threads::{self, ThreadRank};

/// Longer than any wait of a test that passes, also on a busy machine.
const LONG: Duration = Duration::from_secs(60);
/// Long enough for all ranks to arrive that will, also on a busy machine.
const SHORT: Duration = Duration::from_secs(20);

fn stream() -> Stream {
    Stream::default_of(Device::Cpu).unwrap()
}

/// A tensor of `bytes`.
fn tensor_of(dtype: DType, bytes: &[u8]) -> Tensor {
    let tensor = Tensor::zeros(&[bytes.len() / dtype.bytes()], dtype, Device::Cpu).unwrap();
    tensor
        .with_bytes_mut("test", Location::caller(), |all| all.copy_from_slice(bytes))
        .unwrap();
    tensor
}

fn bytes_in(tensor: &Tensor) -> Vec<u8> {
    tensor
        .with_bytes("test", Location::caller(), <[u8]>::to_vec)
        .unwrap()
}

/// Runs `body` on a thread for every rank and returns the results in rank order.
fn on_all<R: Send>(ranks: &[ThreadRank], body: impl Fn(&ThreadRank) -> R + Sync) -> Vec<R> {
    on_threads(ranks.iter().collect(), body)
}

/// Ranks with the staging of a job.
fn ranks(size: usize) -> Vec<ThreadRank> {
    threads::ranks(&Segment::in_process(size).unwrap(), None)
}

/// Ranks whose staging is so small that small tensors take many pieces, and whose counters are
/// about to wrap.
fn tiny(size: usize, seed: Option<u64>) -> Vec<ThreadRank> {
    let segment = Segment::in_process_as(layout::Layout::tiny(size)).unwrap();
    (0..CHANNELS).for_each(|index| Channel::start_all_at(&segment, index, u32::MAX - 2));
    threads::ranks(&segment, seed)
}

/// The group of all ranks on `channel`.
fn group(rank: &ThreadRank, channel: usize, name: &'static str) -> Group {
    Group::new(Arc::new(rank.collective(channel).unwrap()), name, LONG)
}
