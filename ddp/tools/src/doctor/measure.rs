//! Measurements: writing to the disk, bf16 on the CPU, copies to, from and between GPUs, and sums
//! over all ranks. Each takes well below a second. For simulated GPUs no rate is printed.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use ddp_comm::{Reduce, World};
use ddp_kernels::stream::{Stream, synchronize};
use ddp_kernels::transfer::{self, announced};
use ddp_kernels::{DType, Device, Tensor};

use super::finding::Finding;
use super::look::nearest;
use crate::devices::is_simulated;
use crate::error::{Error, Result};
use crate::setting::OUT;
use crate::trainer::bf16_factor;

/// Sizes of what is written, copied and summed.
const DISK_BYTES: usize = 64 << 20;
const COPY_FLOATS: usize = 16 << 20;
const SUM_FLOATS: usize = 4 << 20;
/// Attempts; the fastest counts.
const TRIES: usize = 4;

/// Whether checkpoints can be written, and how fast.
pub(super) fn disk(out: &Path) -> Finding {
    let there = nearest(out);
    let path = there.join(format!(".ddp-train-doctor-{}", std::process::id()));
    let written = (|| -> std::io::Result<Duration> {
        let mut file = File::create_new(&path)?;
        let block = vec![0xa5u8; 1 << 20];
        let began = Instant::now();
        (0..DISK_BYTES / block.len()).try_for_each(|_| file.write_all(&block))?;
        file.sync_all()?;
        Ok(began.elapsed())
    })();
    let _ = fs::remove_file(&path);
    match written {
        Ok(took) => {
            let rate = DISK_BYTES as f64 / took.as_secs_f64() / 1e6;
            Finding::fine("disk", format!("{rate:.0} MB/s written and made durable"))
        }
        Err(error) => {
            let text = format!("cannot write 64 MiB below {}: {error}", there.display());
            let help = format!("make room or change permissions, or give another {OUT}");
            Finding::bad("disk", text, help)
        }
    }
}

/// Copies to and from a rank's GPU, and to the other GPUs that it sees.
pub(super) fn rank(mine: Device) -> Vec<Finding> {
    if !mine.is_accelerator() {
        let compared = || {
            Ok(format!(
                "matmuls are {:.1} times as fast as in f32",
                bf16_factor()?
            ))
        };
        return vec![tried("bf16", mine, compared)];
    }
    let others = Device::usable().into_iter();
    let others = others.filter(|device| *device != mine && device.is_accelerator());
    let peers = others.map(|device| tried("peer", mine, || peer(mine, device)));
    let mut findings = vec![tried("pinned", mine, || pinned(mine))];
    findings.extend(peers);
    findings
}

fn tried(topic: &str, device: Device, measure: impl FnOnce() -> Result<String>) -> Finding {
    match measure() {
        Ok(text) => Finding::fine(topic, text),
        Err(error) => {
            let text = format!("{device}: {error}");
            Finding::bad(topic, text, "see nvidia-smi and dmesg")
        }
    }
}

/// `12.3 GB/s`; no rate for simulated GPUs.
fn rate(bytes: usize, took: Duration, device: Device) -> String {
    match bytes as f64 / took.as_secs_f64() / 1e9 {
        _ if is_simulated(device) => "works (simulated)".into(),
        slow @ ..0.1 => format!("{:.1} MB/s", slow * 1e3),
        rate => format!("{rate:.1} GB/s"),
    }
}

/// The fastest of a few attempts.
fn fastest(mut once: impl FnMut() -> Result<Duration>) -> Result<Duration> {
    (0..TRIES).try_fold(Duration::MAX, |least, _| Ok(least.min(once()?)))
}

/// Simulated GPUs are slow.
fn floats(device: Device, most: usize) -> usize {
    if is_simulated(device) { 1 << 10 } else { most }
}

fn pinned(device: Device) -> Result<String> {
    let stream = Stream::new(device)?;
    let count = floats(device, COPY_FLOATS);
    let here = stream.scope(|| Tensor::zeros(&[count], DType::F32, device))?;
    stream.synchronize()?;
    let host = Tensor::zeros_pinned(&[count], DType::F32)?;
    let copy = |target: &Tensor, source: &Tensor| {
        fastest(|| {
            let began = Instant::now();
            announced("doctor", || transfer::copy_async(target, source, &stream))?.wait()?;
            Ok(began.elapsed())
        })
    };
    let both = [copy(&here, &host)?, copy(&host, &here)?];
    let [up, down] = both.map(|took| rate(here.bytes(), took, device));
    Ok(format!("{device}: {up} up, {down} down"))
}

fn peer(from: Device, to: Device) -> Result<String> {
    let count = floats(from, COPY_FLOATS);
    let source = Tensor::zeros(&[count], DType::F32, from)?;
    let target = Tensor::zeros(&[count], DType::F32, to)?;
    let took = fastest(|| {
        synchronize(from)?;
        synchronize(to)?;
        let began = Instant::now();
        announced("doctor", || target.copy_from(&source))?;
        synchronize(from)?;
        synchronize(to)?;
        Ok(began.elapsed())
    })?;
    let rate = rate(source.bytes(), took, from);
    Ok(format!("{from} to {to}: {rate}"))
}

/// A finding about the job: a checked sum over all ranks. All ranks call it together.
pub(super) fn reductions(mine: Device, world: &World) -> Result<Finding> {
    let group = world.group_on(mine, "doctor")?;
    let (rank, ranks) = (world.rank(), world.size());
    let count = floats(mine, SUM_FLOATS);
    let stream = Stream::default_of(mine)?;
    let took = fastest(|| {
        let ones = Tensor::ones(&[count], DType::F32, mine)?;
        synchronize(mine)?;
        world.barrier()?;
        let began = Instant::now();
        group.all_reduce(&ones, Reduce::Sum, &stream)?;
        synchronize(mine)?;
        let took = began.elapsed();
        let sums: Vec<f32> = announced("doctor", || ones.to(Device::Cpu))?.to_vec()?;
        let wrong = sums.into_iter().find(|&sum| sum != ranks as f32);
        wrong.map_or(Ok(took), |wrong| {
            let text = format!("doctor: the sum of {ranks} ones is {wrong} on rank {rank}");
            Err(Error::Internal(text))
        })
    })?;
    // The bytes that cross each rank's link, as nccl-tests counts them.
    let crossing = 2.0 * (ranks - 1) as f64 / ranks as f64;
    let rate = rate((4.0 * count as f64 * crossing) as usize, took, mine);
    let text = format!("{rate} over {ranks} ranks, by {}", group.transport());
    Ok(Finding::fine("all-reduce", text))
}
