use std::os::unix::net::UnixStream;
use std::panic::Location;
use std::sync::Arc;

use ddp_kernels::Element;
use ddp_kernels::dtype::bf16;
use ddp_kernels::stream::Stream;
use twox_hash::XxHash3_64;

use super::*;
use crate::collective::group::Group;
use crate::tests::on_threads;
use crate::transport::frames::Frames;
use crate::transport::shared::{Board, Segment};
use crate::transport::tcp::{FRAME_BYTES_MAX, Mesh, MeshChannel};

#[test]
fn a_prefix_comes_first() {
    // 2²⁴ + 1 is not an f32: the order of the sum shows.
    let own = Tensor::from_slice(&[1.0f32, f32::NAN], &[2], ddp_kernels::Device::Cpu).unwrap();
    let before: Vec<u8> = [16_777_216.0f32, 1.0]
        .iter()
        .flat_map(|x| x.to_le_bytes())
        .collect();
    let (stream, site) = (
        ddp_kernels::stream::Stream::default_of(ddp_kernels::Device::Cpu).unwrap(),
        Location::caller(),
    );
    let (operation, timeout) = (Operation::AllReduce(Reduce::Sum), Duration::from_secs(1));
    let call = Call {
        operation,
        tensor: Some(&own),
        stream: &stream,
        sequence: 0,
        timeout,
        is_followed: false,
        sum: Sum::Transport,
        group: "main",
        site,
    };
    add_before(&call, &before, &own, Reduce::Sum).unwrap();
    assert_eq!(own.to_vec::<f32>().unwrap()[0], 16_777_216.0);
    add_before(&call, &before, &own, Reduce::Max).unwrap();
    assert!(own.to_vec::<f32>().unwrap()[1].is_nan());
}

const LONG: Duration = Duration::from_secs(60);

/// The results of `body` on each rank, a thread, of hosts with these many ranks each.
fn on_hosts<R: Send>(sizes: &[usize], body: impl Fn(&Group) -> R + Sync) -> Vec<R> {
    let keys: Vec<String> = (0..sizes.len()).map(|host| host.to_string()).collect();
    let keys = keys.iter().zip(sizes);
    let keys: Vec<&str> = keys.flat_map(|(key, &size)| vec![&**key; size]).collect();
    let segments = sizes.iter().map(|&size| Segment::in_process(size).unwrap());
    let segments: Vec<Segment> = segments.collect();
    let none = || (0..keys.len()).map(|_| None).collect::<Vec<_>>();
    let mut peers: Vec<_> = (0..keys.len()).map(|_| none()).collect();
    for (low, high) in (0..keys.len()).flat_map(|high| (0..high).map(move |low| (low, high))) {
        if keys[low] != keys[high] {
            let ends = UnixStream::pair().unwrap();
            let frames = |end: UnixStream| Frames::new(end.into(), FRAME_BYTES_MAX).unwrap();
            peers[low][high] = Some((frames(ends.0), keys[high].to_string()));
            peers[high][low] = Some((frames(ends.1), keys[low].to_string()));
        }
    }
    let group = |(rank, peers)| {
        let placement = Placement::new(&keys, rank);
        let segment = segments[placement.host].clone();
        let board = Board::new(&segment);
        let (local_rank, here) = (placement.local_rank, placement.here().to_vec());
        let shared = Shared::new(segment, 0, local_rank, here, false, None).unwrap();
        if sizes.len() == 1 {
            return Group::new(Arc::new(shared), "main", LONG);
        }
        let channel = MeshChannel::new(&Arc::new(Mesh::new(rank, peers)));
        let everyone = Members::new(channel, board, placement.of_ranks());
        Group::new(
            Arc::new(Hosts::new(shared, everyone, placement)),
            "main",
            LONG,
        )
    };
    on_threads(
        peers.into_iter().enumerate().map(group).collect(),
        |group| body(&group),
    )
}

fn stream() -> Stream {
    Stream::default_of(Device::Cpu).unwrap()
}

/// Numbers of all magnitudes, so that the bits of a sum depend on its order.
fn random<T: Element>(rank: usize, count: usize) -> Tensor {
    let mut state = 0x9e37_79b9_7f4a_7c15u64.wrapping_mul(rank as u64 + 1);
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let mantissa = (state >> 40) as f64 / f64::from(1 << 23) - 1.0;
        T::from_f64(mantissa * f64::from(1 << ((state >> 33) % 12)))
    };
    let all: Vec<T> = (0..count).map(|_| next()).collect();
    Tensor::from_slice(&all, &[count], Device::Cpu)
        .unwrap()
        .named("x")
}

/// What each operation gave this rank: digests, the same on all ranks.
fn every_operation<T: Element>(group: &Group, count: usize, reductions: &[Reduce]) -> Vec<u64> {
    let (rank, size, stream) = (group.rank(), group.size(), stream());
    let mut all = Vec::new();
    let mut add = |tensor: &Tensor| {
        let digest = tensor.with_bytes("test", Location::caller(), XxHash3_64::oneshot);
        all.push(digest.unwrap());
    };
    for &reduce in reductions {
        let tensor = random::<T>(rank, count);
        group.all_reduce(&tensor, reduce, &stream).unwrap();
        add(&tensor);
        let tensor = random::<T>(rank, count * size);
        group.reduce_scatter(&tensor, reduce, &stream).unwrap();
        // Only this rank's slice is specified: the others are fetched from their owners.
        group.all_gather(&tensor, &stream).unwrap();
        add(&tensor);
    }
    let tensor = random::<T>(rank, count * size);
    group.all_gather(&tensor, &stream).unwrap();
    add(&tensor);
    for root in [0, size - 1] {
        let tensor = random::<T>(rank, count);
        group.broadcast(&tensor, root, &stream).unwrap();
        add(&tensor);
    }
    // A message goes round: every rank ends with rank 0's.
    let letter = random::<T>(rank, count);
    if rank > 0 {
        group.receive(&letter, rank - 1, &stream).unwrap();
    }
    if rank + 1 < size {
        group.send(&letter, rank + 1, &stream).unwrap();
    }
    group.barrier(&stream).unwrap();
    add(&letter);
    all
}

#[test]
fn every_operation_has_the_same_bits_on_any_hosts() {
    let digests = |sizes: &[usize]| {
        let all = on_hosts(sizes, |group| {
            let reductions = [Reduce::Sum, Reduce::Max, Reduce::Min];
            let mut all = Vec::new();
            for count in [1, 12, 5_000] {
                all.extend(every_operation::<f32>(group, count, &reductions));
                all.extend(every_operation::<f64>(group, count, &reductions));
                all.extend(every_operation::<i64>(group, count, &reductions));
                all.extend(every_operation::<bf16>(group, count, &reductions));
            }
            // More than one message of 1 MiB, also in the f32 that bf16 is added in.
            all.extend(every_operation::<f64>(group, 140_012, &[Reduce::Sum]));
            all.extend(every_operation::<bf16>(group, 300_012, &[Reduce::Sum]));
            // More than one for each leader.
            all.extend(every_operation::<f64>(group, 540_012, &[]));
            all.extend(every_operation::<u8>(group, 1_100_000, &[]));
            all
        });
        assert!(
            all.iter().all(|other| *other == all[0]),
            "{sizes:?}: ranks differ"
        );
        all.into_iter().next().unwrap()
    };
    let alone = digests(&[4]);
    for sizes in [&[2, 2][..], &[1, 2, 1], &[3, 1]] {
        assert_eq!(digests(sizes), alone, "{sizes:?}");
    }
}
