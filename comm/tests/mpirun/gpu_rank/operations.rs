//! Every operation, in every dtype, compared with the expected results.

use super::*;

/// Every operation in every dtype, compared with the expected results.
pub(super) fn operations(world: &World) -> Result<()> {
    let device = device(world);
    let group = world.gpu_group("gradients", device)?;
    assert_eq!(
        (group.device(), group.rank(), group.size()),
        (Some(device), world.rank(), world.size())
    );
    assert_eq!(
        group.transport(),
        if world.size() == 1 { "alone" } else { "nccl" }
    );
    let stream = Stream::urgent(device)?;
    stream.scope(|| {
        for slice in SLICES {
            sums::<f32>(&group, slice, device, &stream)?;
            sums::<bf16>(&group, slice, device, &stream)?;
            sums::<f64>(&group, slice, device, &stream)?;
            sums::<i64>(&group, slice, device, &stream)?;
            moves::<f32>(&group, slice, device, &stream)?;
            moves::<u8>(&group, slice, device, &stream)?;
            moves::<i32>(&group, slice, device, &stream)?;
        }
        Ok::<(), ddp_comm::Error>(())
    })?;
    rounded(world, &group, device)?;
    if world.size() > 1 {
        let hosts = world.group("hosts")?;
        rings(&group, device)?;
        agree([&group, &hosts, &Group::alone()])?;
        misuse(world, &group, &hosts, device)?;
    }
    tell("operations", world.rank());
    group.barrier(&stream)
}

fn sums<T: Element>(group: &Group, slice: usize, device: Device, stream: &Stream) -> Result<()> {
    let (rank, size) = (group.rank(), group.size());
    let count = slice * size;
    let all: Vec<Vec<T>> = (0..size).map(|rank| numbers(rank, count)).collect();
    let expected: Vec<f64> = (0..count)
        .map(|index| all.iter().map(|of| of[index].to_f64()).sum())
        .collect();
    let (sum, scattered) = (
        tensor::<T>(rank, count, "sum", device)?,
        tensor::<T>(rank, count, "scattered", device)?,
    );
    group.all_reduce(&sum, Reduce::Sum, stream)?;
    group.reduce_scatter(&scattered, Reduce::Sum, stream)?;
    let got = |tensor: &Tensor| {
        Ok::<_, ddp_comm::Error>(
            tensor
                .to_vec::<T>()?
                .iter()
                .map(|x| x.to_f64())
                .collect::<Vec<_>>(),
        )
    };
    assert_eq!(got(&sum)?, expected, "all_reduce of {}", T::DTYPE);
    let mine = rank * slice..(rank + 1) * slice;
    assert_eq!(
        got(&scattered)?[mine.clone()],
        expected[mine],
        "reduce_scatter of {}",
        T::DTYPE
    );
    Ok(())
}

fn moves<T: Element + PartialEq>(
    group: &Group,
    slice: usize,
    device: Device,
    stream: &Stream,
) -> Result<()> {
    let (rank, size) = (group.rank(), group.size());
    let count = slice * size;
    let gathered = tensor::<T>(rank, count, "gathered", device)?;
    group.all_gather(&gathered, stream)?;
    let of = |owner: usize| numbers::<T>(owner, count)[owner * slice..(owner + 1) * slice].to_vec();
    let expected: Vec<T> = (0..size).flat_map(of).collect();
    assert!(
        gathered.to_vec::<T>()? == expected,
        "all_gather of {}",
        T::DTYPE
    );
    for root in [0, size - 1] {
        // The root names its tensor differently from the others.
        let told = tensor::<T>(
            rank,
            count,
            if rank == root { "given" } else { "taken" },
            device,
        )?;
        group.broadcast(&told, root, stream)?;
        assert!(
            told.to_vec::<T>()? == numbers::<T>(root, count),
            "broadcast of {}",
            T::DTYPE
        );
    }
    Ok(())
}

/// Sums of numbers of all magnitudes: within the rounding of any order of adding, and the same bits
/// on all ranks.
fn rounded(world: &World, group: &Group, device: Device) -> Result<()> {
    let (count, size) = (5000, group.size());
    let stream = Stream::default_of(device)?;
    let of = |rank: usize| -> Vec<f32> {
        let value = |index: usize| {
            ((index * 2_654_435_761 + rank * 40_503) % 65_536) as f32 / 256.0 - 128.0
        };
        (0..count)
            .map(|index| value(index) * f32::powi(2.0, (index % 20) as i32 - 10))
            .collect()
    };
    let sum = Tensor::from_slice(&of(group.rank()), &[count], device)?.named("rounded");
    group.all_reduce(&sum, Reduce::Sum, &stream)?;
    let got = sum.to_vec::<f32>()?;
    let all: Vec<Vec<f32>> = (0..size).map(of).collect();
    for (index, got) in got.iter().enumerate() {
        let terms = || all.iter().map(|of| f64::from(of[index]));
        let (expected, magnitude): (f64, f64) = (terms().sum(), terms().map(f64::abs).sum());
        // size − 1 additions, each off by at most half a unit in the last place of the sum of
        // magnitudes.
        let bound = (size - 1) as f64 * f64::from(f32::EPSILON) / 2.0 * magnitude * 1.01;
        assert!(
            (f64::from(*got) - expected).abs() <= bound,
            "element {index}: {got}, expected {expected} ± {bound}"
        );
    }
    let bytes: Vec<u8> = got.iter().flat_map(|x| x.to_le_bytes()).collect();
    let all = world.all_gather_bytes(&bytes)?;
    assert!(
        all.iter().all(|other| *other == all[0]),
        "ranks have other bits"
    );
    Ok(())
}

/// Messages between neighbours: all at once, and from one to the next.
fn rings(group: &Group, device: Device) -> Result<()> {
    let (rank, size, count) = (group.rank(), group.size(), 70_000);
    let stream = Stream::new(device)?;
    stream.scope(|| {
        let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
        let (mine, theirs) = (
            tensor::<f32>(rank, count, "mine", device)?,
            tensor::<f32>(rank, count, "theirs", device)?,
        );
        group.grouped(|| {
            group.send(&mine, next, &stream)?;
            group.receive(&theirs, previous, &stream)
        })?;
        assert!(theirs.to_vec::<f32>()? == numbers::<f32>(previous, count));
        // Without a group, as a pipeline does it: the last rank begins by waiting.
        if rank > 0 {
            group.receive(&mine, rank - 1, &stream)?;
        }
        if rank + 1 < size {
            group.send(&mine, rank + 1, &stream)?;
        }
        assert!(mine.to_vec::<f32>()? == numbers::<f32>(0, count));
        Ok::<(), Error>(())
    })?;
    // Two streams in one group are refused before anything starts, and leave the group as it was.
    let other = Stream::new(device)?;
    let (x, y) = (
        tensor::<f32>(rank, 8, "x", device)?,
        tensor::<f32>(rank, 8, "y", device)?,
    );
    let error = group.grouped(|| {
        group.all_reduce(&x, Reduce::Sum, &stream)?;
        group.all_reduce(&y, Reduce::Sum, &other)
    });
    let error = error.expect_err("two streams").to_string();
    assert!(error.contains("stream: expected that of the first call"));
    // From one stream to another: the group's own order is kept.
    group.all_reduce(&x, Reduce::Sum, &stream)?;
    group.all_reduce(&y, Reduce::Sum, &other)?;
    other.synchronize()?;
    Ok(stream.synchronize()?)
}

fn agree(groups: [&Group; 3]) -> Result<()> {
    for group in groups {
        assert!(group.all_agree(true)?);
        assert!(!group.all_agree(false)?);
        assert!(!group.all_agree(group.rank() != 0)?);
    }
    Ok(())
}

/// Calls that are refused, and their errors.
fn misuse(world: &World, gpus: &Group, hosts: &Group, device: Device) -> Result<()> {
    let there = tensor::<f32>(0, 8, "there", device)?;
    let here = tensor::<f32>(0, 8, "here", Device::Cpu)?;
    let bytes = Tensor::zeros(&[8], DType::U8, device)?;
    let of_gpu = Stream::default_of(device)?;
    let of_host = Stream::default_of(Device::Cpu)?;
    for (outcome, expected) in [
        (
            hosts.all_reduce(&there, Reduce::Sum, &of_gpu),
            "all_reduce sum: tensor: expected a tensor in host memory, which group hosts is for, got \"there\" f32[8] on cuda:",
        ),
        (
            gpus.all_reduce(&here, Reduce::Sum, &of_host),
            "which group gradients is for, got \"here\" f32[8] on cpu",
        ),
        (
            gpus.all_reduce(&there, Reduce::Max, &of_gpu),
            "all_reduce max: reduction: expected sum, on GPUs, got max",
        ),
        (
            gpus.all_reduce(&bytes, Reduce::Sum, &of_gpu),
            "all_reduce sum: tensor: expected f32, bf16, f64 or i64",
        ),
        (
            world.gpu_group("none", Device::Cpu).map(drop),
            "gpu_group: device: expected a GPU, got cpu",
        ),
    ] {
        let error = outcome.expect_err(expected);
        let text = error.to_string();
        assert!(
            text.contains(expected) && text.contains("operations.rs:"),
            "{text}"
        );
        assert_eq!(error.exit_code(), 70, "{text}");
    }
    // None of these counted as a call.
    gpus.all_reduce(&there, Reduce::Sum, &of_gpu)?;
    assert_eq!(there.to_vec::<f32>()?[1], 7.0 * world.size() as f32);
    Ok(())
}
