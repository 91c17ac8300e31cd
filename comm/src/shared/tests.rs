//! Ranks as threads that dawdle in every order, and ranks as real processes, against the plain loop; and what happens when
//! one goes wrong.

mod failures;
mod orders;
mod processes;
mod speed;

use std::panic::Location;
use std::time::Duration;

use ddp_kernels::stream::Stream;
use ddp_kernels::{DType, Device, Tensor};

use super::*;
use crate::group::Group;
use crate::threads::{ThreadRank, ranks_on};

/// Long enough that a test that needs it fails otherwise, on a machine that is busy with others.
const LONG: Duration = Duration::from_secs(60);
/// Long enough for all to arrive who will.
const SHORT: Duration = Duration::from_millis(400);

fn stream() -> Stream {
    Stream::default_of(Device::Cpu).unwrap()
}

/// A tensor of `bytes`.
fn tensor_of(dtype: DType, bytes: &[u8]) -> Tensor {
    let tensor = Tensor::zeros(&[bytes.len() / dtype.bytes()], dtype, Device::Cpu).unwrap();
    tensor.with_bytes_mut("test", Location::caller(), |all| all.copy_from_slice(bytes)).unwrap();
    tensor
}

fn bytes_in(tensor: &Tensor) -> Vec<u8> {
    tensor.with_bytes("test", Location::caller(), <[u8]>::to_vec).unwrap()
}

/// Runs `body` on a thread for every rank, and gives what each returned, in the order of the ranks.
fn on_all<R: Send>(ranks: &[ThreadRank], body: impl Fn(&ThreadRank) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let body = &body;
        let all: Vec<_> = ranks.iter().map(|rank| scope.spawn(move || body(rank))).collect();
        all.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Ranks over staging so small that little tensors take many pieces, counters about to wrap.
fn tiny(size: usize, seed: Option<u64>, timeout: Duration) -> Vec<ThreadRank> {
    let segment = Segment::in_process_as(layout::Layout::tiny(size)).unwrap();
    (0..CHANNELS).for_each(|index| Channel::start_all_at(&segment, index, u32::MAX - 2));
    ranks_on(&segment, seed, timeout)
}
