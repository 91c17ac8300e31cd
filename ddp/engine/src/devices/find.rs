//! What `device` and the other settings of GPUs mean on these machines: which devices a rank trains
//! on, and why it does not use others. All ranks decide alike, from what all of them see. A
//! fallback to the CPU is always logged.

use ddp_comm::gpus::{GpuTable, Shortage};
use ddp_comm::{Field, World};
use ddp_kernels::device::{CudaLibrary, FoundGpu, discover};
use ddp_kernels::stream::Stream;
use ddp_kernels::{Device, ahead};

use super::is_simulated;
use crate::config::{Config, DeviceChoice, Precision};
use crate::error::{Error, Result};
use crate::exchange;
use crate::setting::{DEVICE, DEVICES_PER_RANK, DTYPE, SHARE_GPUS};
use crate::units::plural;

/// What all ranks know of all ranks' GPUs.
struct GpuFacts {
    /// GPUs of each rank.
    per_rank: usize,
    /// The GPUs that each rank would use.
    gpus: Result<GpuTable, Shortage>,
    /// By rank: why it cannot use its devices; None if it can, or has none.
    troubles: Vec<Option<String>>,
}

/// Whether to train on GPUs, and a warning.
type DeviceDecision = (bool, Option<String>);

/// This rank's devices in a run with these settings, which the devices support. All ranks call it
/// together.
pub fn of_run(config: &Config, world: &World) -> Result<Vec<Device>> {
    let (per_rank, share) = (config.devices_per_rank, config.share_gpus);
    let devices = find_devices(config.device, per_rank, share, world)?;
    for device in &devices {
        check_device(config, *device)?;
    }
    Ok(devices)
}

/// The devices of this rank: `per_rank` GPUs, or the CPU. All ranks call it together: if one cannot
/// use its GPUs, none trains on GPUs. Rank 0 warns if `auto` does not use GPUs that exist, or
/// should.
pub fn find_devices(
    choice: DeviceChoice,
    per_rank: usize,
    share: bool,
    world: &World,
) -> Result<Vec<Device>> {
    // Ranks on the CPU do not take part in assigning GPUs, so all must want the same first.
    let kind = format!("device = {}\n", choice.kind());
    let help = "start every rank with the same flags";
    world.handshake(&[Field::must_match("the configuration", kind, help)])?;
    if choice == DeviceChoice::Cpu {
        // Without starting the driver.
        return Ok(vec![Device::Cpu]);
    }
    check_index(choice, share, world.size())?;
    let gpus = world.assign_gpus(per_rank, share)?;
    let devices = match (choice, &gpus) {
        (DeviceChoice::CudaAt(index), _) => vec![Device::Cuda(index)],
        (_, Ok(table)) => table.devices_of(world.rank()),
        (_, Err(_)) => Vec::new(),
    };
    let trouble = if !devices.is_empty() {
        devices.iter().find_map(|&device| self::trouble(device))
    } else if are_hidden() {
        None
    } else {
        discover().why_unusable().map(String::from)
    };
    let several = world.size() > 1 && !devices.is_empty();
    let trouble = trouble.or_else(|| missing(&discover().nccl).filter(|_| several));
    let facts = GpuFacts {
        per_rank,
        gpus,
        troubles: exchange::gather(world, &trouble)?,
    };

    let (on_gpus, warning) = decide(choice, &facts)?;
    if let Some(warning) = warning.filter(|_| world.rank() == 0) {
        tracing::warn!("{warning}");
    }
    if !on_gpus {
        return Ok(vec![Device::Cpu]);
    }
    if let (Ok(table), 0) = (&facts.gpus, world.rank()) {
        tracing::debug!("GPUs of all ranks:\n{table}");
    }
    compile_ahead(&devices);
    Ok(devices)
}

/// Compiles kernels on all cores, since the first step needs them one after the other.
fn compile_ahead(devices: &[Device]) {
    /// With fewer cores it would take as long for those that are never needed.
    const CORES_MIN: usize = 4;
    let gpus = discover().gpus.iter();
    let gpus = gpus.filter(|gpu| devices.contains(&Device::Cuda(gpu.index)));
    let mut capabilities: Vec<_> = gpus.map(|gpu| gpu.compute_capability).collect();
    capabilities.dedup();
    if ahead::cores() >= CORES_MIN && !devices.iter().any(|&device| is_simulated(device)) {
        let compiled = ahead::compile(&capabilities, |files, folder| {
            tracing::info!(
                "compiling {files} files of GPU kernels, once; they are kept in {folder}"
            );
        });
        if let Err(error) = compiled {
            // If a step needs what failed, it says so.
            tracing::debug!("{error}");
        }
    }
}

/// Whether the user hides all GPUs.
fn are_hidden() -> bool {
    let visible = std::env::var_os("CUDA_VISIBLE_DEVICES");
    visible.is_some_and(|visible| visible.is_empty() || visible == "-1")
}

/// Why the device cannot be used, if it cannot.
fn trouble(device: Device) -> Option<String> {
    if let Some(why) = &discover().why_no_gpu {
        return Some(why.clone());
    }
    match (Stream::default_of(device), device) {
        (Ok(_), Device::Cpu) => None,
        (Ok(_), Device::Cuda(index)) => discover().gpus.get(index).and_then(too_old),
        (Err(ddp_kernels::Error::DeviceAbsent { why, .. }), _) => Some(why),
        (Err(other), _) => Some(other.to_string()),
    }
}

/// Why kernels do not run on this GPU, if it is too old. An unknown capability is 0.0.
pub fn too_old(gpu: &FoundGpu) -> Option<String> {
    let (major, minor) = gpu.compute_capability;
    (major > 0 && (major, minor) < (7, 5)).then(|| {
        let (index, name) = (gpu.index, &gpu.name);
        format!(
            "cuda:{index} ({name}) has compute capability {major}.{minor}, and 7.5 is needed \
             (beside a newer GPU, set CUDA_VISIBLE_DEVICES to leave it out)"
        )
    })
}

/// What is wrong with a required library.
fn missing(library: &CudaLibrary) -> Option<String> {
    let (what, advice) = (&library.what, library.advice.as_deref());
    let advice = advice.unwrap_or("it cannot be used");
    match &library.found {
        _ if library.is_sound() => None,
        Some(path) => Some(format!("{what} ({}) is {advice}", path.display())),
        None => Some(format!("{what} is not found: {advice}")),
    }
}

/// Refuses one named GPU for several ranks, unless they share it.
fn check_index(choice: DeviceChoice, share: bool, ranks: usize) -> Result<()> {
    if matches!(choice, DeviceChoice::CudaAt(_)) && ranks > 1 && !share {
        return Err(Error::Usage(format!(
            "{DEVICE} {choice}: expected {DEVICE} cuda for {ranks} ranks: each then has its own \
             GPU; help: give {DEVICE} cuda, or start one process; {SHARE_GPUS} puts all ranks on \
             this one, for tests"
        )));
    }
    Ok(())
}

fn decide(choice: DeviceChoice, facts: &GpuFacts) -> Result<DeviceDecision> {
    let is_named = matches!(choice, DeviceChoice::CudaAt(_));
    let trouble = trouble_of_ranks(facts);
    let trouble = trouble.map(|why| (why.trim_end_matches('.').to_string(), None));
    let found = match &facts.gpus {
        // A named GPU needs no assignment.
        Err(shortage) if !is_named => {
            let is_bare = choice == DeviceChoice::Auto && !shortage.table.has_gpus();
            if is_bare && trouble.is_none() {
                return Ok((false, None));
            }
            let trouble = trouble.filter(|_| is_bare);
            Some(trouble.unwrap_or_else(|| describe(shortage)))
        }
        _ => trouble,
    };
    let Some((problem, help)) = found else {
        return Ok((true, sharing(choice, facts)));
    };
    // The CPU cannot take the place of several GPUs.
    if choice == DeviceChoice::Auto && facts.per_rank == 1 {
        let help = help.unwrap_or_else(|| format!("; help: {DEVICE} cpu says that this is meant"));
        let why = match &facts.gpus {
            Err(shortage) if !shortage.table.has_gpus() => "because no GPU can be used",
            _ => "although there are GPUs",
        };
        let warning = format!("training on the CPU {why}: {problem}{help}");
        return Ok((false, Some(warning)));
    }
    let expected = match facts.troubles.len() {
        1 => "a device that can be used here".to_string(),
        ranks => format!("GPUs that all {ranks} ranks can use"),
    };
    let help = help.unwrap_or_else(|| format!("; help: give {DEVICE} cpu"));
    Err(Error::Usage(format!(
        "{DEVICE} {choice}: expected {expected}, but {problem}{help}"
    )))
}

/// A shortage of GPUs in words, and its help if it has one.
fn describe(shortage: &Shortage) -> (String, Option<String>) {
    let help = help_for(shortage).trim_end_matches('.').to_string();
    match &shortage.table.ranks[..] {
        // There is nothing to show in a table.
        [only] if only.visible.uuids.is_empty() => {
            let why = only.visible.why_none.as_deref();
            let why = why.unwrap_or("this process sees no GPU");
            (why.trim_end_matches('.').to_string(), None)
        }
        _ => (format!("{shortage}\n"), Some(help)),
    }
}

/// What to do about a shortage of GPUs: a sentence.
pub fn help_for(shortage: &Shortage) -> String {
    let (fit, per_rank) = (shortage.ranks_that_fit(), shortage.per_rank);
    let fewer = match (fit, shortage.lacking.len() == shortage.table.ranks.len()) {
        (0, _) => None,
        (1, true) => Some("start one rank".into()),
        (_, true) => Some(format!("start {fit} ranks (-n {fit})")),
        (_, false) => Some(format!("start at most {fit} of these ranks there")),
    };
    let smaller = (per_rank > 1).then(|| format!("lower {DEVICES_PER_RANK} {per_rank}"));
    let share = (shortage.seen > 0 && shortage.lacking.len() > 1)
        .then(|| format!("let ranks share GPUs with {SHARE_GPUS}, which is for tests"));
    let cpu = Some(format!("train without GPUs with {DEVICE} cpu"));
    let all = [fewer, smaller, cpu, share];
    let mut text = all.into_iter().flatten().collect::<Vec<_>>().join(", or ");
    text[..1].make_ascii_uppercase();
    text + "."
}

/// Which ranks cannot use their devices, and why.
fn trouble_of_ranks(facts: &GpuFacts) -> Option<String> {
    let all = facts.troubles.iter().enumerate();
    let mut others = all.filter_map(|(rank, trouble)| Some((rank, trouble.as_ref()?)));
    let (rank, first) = others.next()?;
    let others: Vec<&String> = others.map(|(_, other)| other).collect();
    match facts.troubles.len() {
        1 => return Some(first.clone()),
        ranks if others.len() + 1 == ranks && others.iter().all(|other| *other == first) => {
            return Some(format!("on every rank: {first}"));
        }
        _ => {}
    }
    let table = facts.gpus.as_ref();
    let table = table.unwrap_or_else(|shortage| &shortage.table);
    let more = (!others.is_empty()).then(|| plural(others.len() as u64, "rank"));
    let more = more.map_or(String::new(), |more| format!(", and {more} more"));
    let host = &table.ranks[rank].visible.host;
    Some(format!("on rank {rank} ({host}{more}): {first}"))
}

/// The warning if several ranks share a GPU.
fn sharing(choice: DeviceChoice, facts: &GpuFacts) -> Option<String> {
    let named = matches!(choice, DeviceChoice::CudaAt(_)) && facts.troubles.len() > 1;
    let gpus = facts.gpus.as_ref();
    let in_turn = gpus.is_ok_and(|table| !table.sharing.is_empty());
    (named || in_turn).then(|| {
        format!("several ranks have the same GPU ({SHARE_GPUS}): this is for tests, and slow")
    })
}

/// Refuses bf16 on a GPU whose matmuls have none. An unknown capability is 0.0.
fn check_dtype(dtype: Precision, gpu: &FoundGpu) -> Result<()> {
    let (major, minor) = gpu.compute_capability;
    let (index, name) = (gpu.index, &gpu.name);
    if dtype != Precision::Bf16 || major == 0 || major >= 8 {
        return Ok(());
    }
    Err(Error::Usage(format!(
        "{DTYPE} bf16: expected {DTYPE} f32: bf16 needs compute capability 8.0, and cuda:{index}, \
         {name}, has {major}.{minor}; help: leave {DTYPE} out"
    )))
}

/// Refuses settings that `device` does not support. What `auto` means is known only after
/// `find_devices`.
fn check_device(config: &Config, device: Device) -> Result<()> {
    match device {
        Device::Cpu => config.check_cpu(),
        Device::Cuda(index) => {
            let gpu = discover().gpus.get(index);
            gpu.map_or(Ok(()), |gpu| check_dtype(config.dtype, gpu))
        }
    }
}

#[cfg(test)]
mod tests;
