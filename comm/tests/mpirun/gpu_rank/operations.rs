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
