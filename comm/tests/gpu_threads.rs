//! Ranks that are threads of one process, each with its own GPU, real or simulated
//! (`launch/with-simulated-gpus 4`). If there are too few, each test says so.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use ddp_comm::{Group, Reduce, Result, World};
use ddp_kernels::graph::Graph;
use ddp_kernels::progress::{DeviceProgress, STRIDE};
use ddp_kernels::stream::Stream;
use ddp_kernels::{Device, Tensor, memory, ops};

/// Held by the test that uses the devices. All ranks make the calls of a device in one order over
/// all its groups, and concurrent tests would make them in different orders.
static DEVICES: Mutex<()> = Mutex::new(());

/// Runs `body` on a thread and a device for each of `size` ranks, and returns the results. None if
/// there are too few devices.
fn ranks<R: Send>(
    size: usize,
    body: impl Fn(&World, Device) -> Result<R> + Sync,
) -> Option<Vec<R>> {
    let usable: Vec<Device> = Device::usable()
        .into_iter()
        .filter(|device| device.is_accelerator())
        .collect();
    if usable.len() < size {
        let why = if usable.is_empty() {
            "no CUDA device".into()
        } else {
            format!("{size} CUDA devices are needed")
        };
        ddp_testing::skip(&why);
        return None;
    }
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let worlds = World::threads(size, Some(7), Duration::from_secs(60)).unwrap();
    let outcomes = std::thread::scope(|scope| {
        let run = |(world, device): (World, Device)| {
            let body = &body;
            scope.spawn(move || body(&world, device))
        };
        let threads: Vec<_> = worlds.into_iter().zip(usable).map(run).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect::<Result<Vec<R>>>()
    });
    Some(outcomes.unwrap())
}

/// `rank + 1` everywhere.
fn own(group: &Group, device: Device, count: usize) -> Result<Tensor> {
    let value = (group.rank() + 1) as f32;
    Ok(Tensor::from_slice(&vec![value; count], &[count], device)?.named("own"))
}

#[test]
fn threads_reduce_on_their_gpus_eagerly_and_in_graphs() {
    for size in 1..=4 {
        let Some(all) = ranks(size, |world, device| {
            let group = world.gpu_group("gradients", device)?;
            let stream = Stream::urgent(device)?;
            let x = own(&group, device, 999)?;
            let step = || {
                stream.scope(|| {
                    ops::scale_into(&x, &x, 0.5)?;
                    group.all_reduce(&x, Reduce::Sum, &stream)
                })
            };
            step()?;
            assert!(group.all_agree(true)?);
            let graph = Graph::capture(&stream, step)?;
            for _ in 0..10 {
                graph.launch()?;
            }
            Ok(stream.scope(|| x.to_vec::<f32>())?)
        }) else {
            return;
        };
        // Half of 1 + 2 + …, then ten times half of the sum; exact: powers of two times small
        // numbers.
        let expected = (size * (size + 1)) as f32 / 4.0 * (size as f32 / 2.0).powi(10);
        assert!(
            all.iter().flatten().all(|&x| x == expected),
            "{size} ranks: {} for {expected}",
            all[0][0]
        );
    }
}

/// A process in which ranks come and go used to keep the memory of all their connections.
#[test]
fn ranks_that_are_gone_leave_no_connections() {
    let free = || memory::free_bytes(Device::Cuda(0));
    let join = || {
        ranks(2, |world, device| {
            world.gpu_group("gradients", device).map(drop)
        })
    };
    if join().is_none() {
        return;
    }
    // The first group's connections are gone, or go while the others come: in the background.
    let before = free();
    for _ in 0..8 {
        join();
    }
    let deadline = Instant::now() + Duration::from_secs(60);
    while free() < before {
        assert!(Instant::now() < deadline, "{} of {before} bytes", free());
        // Sleep: between two looks at what threads in the background free.
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn groups_are_apart_and_end_one_after_the_other() {
    let Some(all) = ranks(2, |world, device| {
        let (first, second) = (
            world.gpu_group("first", device)?,
            world.gpu_group("second", device)?,
        );
        let (a, b) = (Stream::new(device)?, Stream::new(device)?);
        let (x, y) = (own(&first, device, 64)?, own(&second, device, 64)?);
        let big = own(&first, device, 1 << 20)?;
        b.scope(|| ops::scale_into(&y, &y, 1.0))?;
        // Enough that the second group's call would otherwise finish first.
        for _ in 0..20 {
            ops::scale_into(&big, &big, 1.0)?;
        }
        a.wait(&Stream::default_of(device)?.record()?)?;
        first.all_reduce(&x, Reduce::Sum, &a)?;
        let is_first_done = a.record()?;
        second.all_reduce(&y, Reduce::Sum, &b)?;
        b.synchronize()?;
        assert!(
            is_first_done.is_done(),
            "calls of two groups are not in order on their device"
        );
        let sums = (
            a.scope(|| x.to_vec::<f32>())?[0],
            b.scope(|| y.to_vec::<f32>())?[63],
        );
        drop(first);
        second.all_reduce(&y, Reduce::Sum, &b)?;
        Ok((sums, b.scope(|| y.to_vec::<f32>())?[0]))
    }) else {
        return;
    };
    assert_eq!(all, [((3.0, 3.0), 6.0); 2]);
}

#[test]
fn a_capture_leaves_the_order_of_eager_calls_alone() {
    ranks(2, |world, device| {
        let group = world.gpu_group("gradients", device)?;
        let [a, b, captured] = [
            Stream::new(device)?,
            Stream::new(device)?,
            Stream::new(device)?,
        ];
        let [x, y, z] = [
            own(&group, device, 64)?,
            own(&group, device, 64)?,
            own(&group, device, 64)?,
        ];
        let big = own(&group, device, 1 << 20)?;
        let step = || group.all_reduce(&z, Reduce::Sum, &captured);
        step()?;
        b.scope(|| ops::scale_into(&y, &y, 1.0))?;
        captured.synchronize()?;
        for _ in 0..20 {
            ops::scale_into(&big, &big, 1.0)?;
        }
        a.wait(&Stream::default_of(device)?.record()?)?;
        group.all_reduce(&x, Reduce::Sum, &a)?;
        let is_first_done = a.record()?;
        let graph = Graph::capture(&captured, step)?;
        group.all_reduce(&y, Reduce::Sum, &b)?;
        b.synchronize()?;
        assert!(
            is_first_done.is_done(),
            "a call that was captured took the place of the last eager one"
        );
        b.scope(|| graph.launch())?;
        let sums = b.scope(|| {
            Ok::<_, ddp_comm::Error>([
                x.to_vec::<f32>()?[0],
                y.to_vec::<f32>()?[0],
                z.to_vec::<f32>()?[0],
            ])
        });
        assert_eq!(sums?, [3.0, 3.0, 6.0]);
        Ok(())
    });
}

#[test]
fn every_so_many_pieces_of_work_are_told_for_longer() {
    ranks(1, |_, device| {
        let (stream, at) = (Stream::new(device)?, std::panic::Location::caller());
        let lanes = [
            DeviceProgress::new(device, 1)?,
            DeviceProgress::new(device, 1)?,
        ];
        for (progress, first) in lanes.iter().zip([1, 2]) {
            for number in 1..=2 * STRIDE as u32 + 100 {
                // They differ only in the first piece.
                progress.begin(0, if number == 1 { first } else { 7 }, 0, &stream, at)?;
                progress.end(0, &stream, at)?;
            }
        }
        stream.synchronize()?;
        for number in [STRIDE as u32, 2 * STRIDE as u32] {
            let told = |progress: &DeviceProgress| {
                progress
                    .board()
                    .ring(0)
                    .find(|told| told.number == number)
                    .unwrap()
            };
            let [one, other] = [told(&lanes[0]), told(&lanes[1])];
            assert!(
                one.call == 7 && other.call == 7 && one.chain != other.chain,
                "{one:?} {other:?}"
            );
        }
        Ok(())
    });
}

#[test]
fn the_memory_of_tensors_that_are_dropped_while_they_are_reduced_stays() {
    let Some(all) = ranks(2, |world, device| {
        let group = world.gpu_group("gradients", device)?;
        let stream = Stream::urgent(device)?;
        let total = Tensor::zeros(&[5000], ddp_kernels::DType::F32, device)?.named("total");
        for _ in 0..20 {
            let x = own(&group, device, 5000)?;
            group.all_reduce(&x, Reduce::Sum, &stream)?;
            stream.scope(|| ops::axpy(&total, 1.0, &x))?;
            drop(x);
            // The next user of the memory must not disturb the sum.
            drop(Tensor::full(&[5000], 1e9, ddp_kernels::DType::F32, device)?);
        }
        Ok(stream.scope(|| total.to_vec::<f32>())?)
    }) else {
        return;
    };
    assert!(all.iter().flatten().all(|&x| x == 60.0));
}
