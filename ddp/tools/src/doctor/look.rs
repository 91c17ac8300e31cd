//! What can be found without measuring: processor, memory, disk, MPI, CUDA's libraries, and which
//! rank has which GPU.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ddp_comm::{Rdma, World};
use ddp_kernels::device::{Candidate, CudaLibrary, discover};
use ddp_kernels::mapped::free_bytes;
use ddp_kernels::simd::{self, Bf16Unit};
use ddp_kernels::{DType, Device, Tensor, ops};

use super::finding::Finding;
use crate::devices::{help_for, too_old};
use crate::error::Result;
use crate::setting::{DEVICE, OUT, RANKS};
use crate::units::plural;

const GIB: u64 = 1 << 30;

/// Findings about a host.
pub(super) fn host(out: &Path) -> Vec<Finding> {
    let certain = [Some(processor()), Some(memory())];
    let others = [
        huge_pages(),
        shared_memory(),
        Some(disk(out)),
        Some(mpi()),
        rdma(),
    ];
    certain.into_iter().chain(others).flatten().collect()
}

/// The value after `name` in a file of lines `name: value`.
fn line_of(path: &str, name: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let value = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(value.trim_matches([' ', '\t', ':']).to_string())
}

fn processor() -> Finding {
    let name = line_of("/proc/cpuinfo", "model name");
    let name = name.unwrap_or_else(|| std::env::consts::ARCH.into());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let clock = line_of("/proc/cpuinfo", "cpu MHz").and_then(|mhz| mhz.parse::<f64>().ok());
    let clock = clock.map_or(String::new(), |mhz| format!(", at {mhz:.0} MHz now"));
    let (cores, level) = (plural(cores as u64, "core"), simd::level());
    let bf16 = match simd::bf16_units() {
        (Bf16Unit::None, _) => "no instruction for bf16".to_string(),
        (Bf16Unit::Dpbf16, None) => "AVX512_BF16".to_string(),
        (Bf16Unit::Dpbf16, Some(why)) => {
            format!("AVX512_BF16, and AMX, which Linux does not give to this process: {why}")
        }
        (Bf16Unit::Amx, _) => "AVX512_BF16 and AMX".to_string(),
    };
    let text = format!("{name}, {cores} for this process, {level:?}, {bf16}{clock}");
    Finding::fine("processor", text)
}

fn memory() -> Finding {
    let kib = |name| -> Option<u64> {
        let line = line_of("/proc/meminfo", name)?;
        line.split(' ').next()?.parse().ok()
    };
    let (Some(total), Some(free)) = (kib("MemTotal"), kib("MemAvailable")) else {
        return Finding::fine("memory", "unknown: the system does not say");
    };
    let of_group = |name: &str| fs::read_to_string(Path::new("/sys/fs/cgroup").join(name)).ok();
    memory_finding(total << 10, free << 10, group(of_group))
}

/// The limit of a control group, if it has one, and what is left of it. Cached files count as used
/// there, but can be evicted.
fn group(read: impl Fn(&str) -> Option<String>) -> Option<(u64, u64)> {
    let number = |text: &str| text.trim().parse::<u64>().ok();
    let stat = read("memory.stat").unwrap_or_default();
    let mut lines = stat.lines();
    let evictable = lines.find_map(|line| number(line.strip_prefix("inactive_file ")?));
    let limit = number(&read("memory.max")?)?;
    let used = number(&read("memory.current")?)?.saturating_sub(evictable.unwrap_or(0));
    Some((limit, limit.saturating_sub(used)))
}

fn memory_finding(total: u64, free: u64, group: Option<(u64, u64)>) -> Finding {
    let limited = group.map_or(String::new(), |(limit, left)| {
        let (left, limit) = (gib(left), gib(limit));
        format!("; its control group has {left} left of {limit}")
    });
    let text = format!("{} free of {}{limited}", gib(free), gib(total));
    let help = "end other programs or raise the limit: large models will not fit";
    let left = group.map_or(free, |(_, left)| left.min(free));
    Finding::note_if(left < GIB, "memory", text, help)
}

fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / GIB as f64)
}

fn huge_pages() -> Option<Finding> {
    let text = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").ok()?;
    let chosen = text.split(['[', ']']).nth(1)?;
    let help = "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled";
    let text = match chosen {
        "never" => "off: allocating large tensors takes longer",
        other => other,
    };
    let is_off = chosen == "never";
    Some(Finding::note_if(is_off, "huge pages", text.into(), help))
}

/// Shared memory, which NCCL needs between the ranks of a host.
fn shared_memory() -> Option<Finding> {
    let free = free_bytes(Path::new("/dev/shm")).ok()?;
    let text = format!("/dev/shm has {} free", gib(free));
    let help = "NCCL needs more for several GPUs: docker run --shm-size=1g, in Kubernetes an \
                emptyDir with medium: Memory";
    let is_short = free < GIB / 2 && discover().gpus.len() > 1;
    Some(Finding::note_if(is_short, "shared mem", text, help))
}

/// The nearest folder above that exists.
pub(super) fn nearest(out: &Path) -> &Path {
    let existing = out.ancestors().find(|folder| folder.is_dir());
    existing.unwrap_or(Path::new("."))
}

fn disk(out: &Path) -> Finding {
    match free_bytes(nearest(out)) {
        Ok(free) => {
            let text = format!("{} free for runs ({})", gib(free), out.display());
            let help = format!("make room, or give {OUT} on another disk: checkpoints may not fit");
            Finding::note_if(free < GIB, "disk", text, &help)
        }
        Err(error) => {
            let text = format!("{}: {error}", nearest(out).display());
            Finding::bad("disk", text, format!("give another folder with {OUT}"))
        }
    }
}

fn mpi() -> Finding {
    let starters = format!("{RANKS}, torchrun or srun start ranks");
    if !cfg!(feature = "mpi") {
        let text = format!("this program was built without it: {starters}");
        return Finding::fine("MPI", text);
    }
    let missing = format!("mpirun is not in PATH: {starters}");
    let help = "for mpirun: run launch/setup, or module load openmpi";
    match first_line("mpirun", &["--version"]) {
        Some(line) => Finding::fine("MPI", line),
        None => Finding::note("MPI", missing, help),
    }
}

/// Network cards that NCCL could use between hosts.
fn rdma() -> Option<Finding> {
    let rdma = Rdma::of_this_host()?;
    Some(match rdma.problem() {
        Some([why, help]) => {
            let text = format!("{rdma}, which may not serve NCCL between hosts: {why}");
            Finding::note("RDMA", text, help.as_str())
        }
        None => Finding::fine("RDMA", rdma.to_string()),
    })
}

/// The first line of a program's output.
fn first_line(program: &str, arguments: &[&str]) -> Option<String> {
    let mut command = Command::new(program);
    let quiet = command.stdin(Stdio::null()).stderr(Stdio::null());
    let output = quiet.args(arguments).output().ok()?;
    if !output.status.success() {
        return None;
    }
    let text = String::from_utf8_lossy(&output.stdout);
    Some(text.lines().next().unwrap_or_default().trim().to_string())
}

/// Findings about CUDA's libraries and the GPUs of a host.
pub(super) fn cuda(ranks: usize) -> Vec<Finding> {
    let found = discover();
    let several = ranks > 1 || found.gpus.len() > 1;
    let repair = format!("repair the driver, or train with {DEVICE} cpu");
    let mut findings = vec![match (&found.why_no_gpu, found.why_unusable()) {
        (None, _) => library(&found.driver, true, &[]),
        // No GPU is fine; a GPU that cannot be used is not.
        (_, Some(why)) => Finding::bad("GPU", format!("none can be used: {why}"), repair),
        _ => Finding::fine("GPU", "none, and no driver: training runs on the CPU"),
    }];
    if found.gpus.is_empty() {
        return findings;
    }
    if let Some((major, minor)) = found.driver_version {
        let text = format!("the driver supports {major}.{minor} at most");
        findings.push(Finding::fine("CUDA", text));
    }
    // Loads the libraries, so that those that fail are known.
    let usable = found.gpus.iter().find(|gpu| too_old(gpu).is_none());
    let device = Device::Cuda(usable.map_or(0, |gpu| gpu.index));
    let matmul = Tensor::ones(&[16, 16], DType::F32, device)
        .and_then(|ones| ops::addmm(&ones, &ones, &ones, 1.0, 0.0)?.to_vec::<f32>());
    let refused = ddp_kernels::foreign::Library::refused();
    findings.push(library(&found.cublaslt, true, &refused));
    findings.push(library(&found.nvrtc, true, &refused));
    findings.push(library(&found.nccl, several, &refused));
    if let Some(error) = matmul.err().filter(|_| usable.is_some()) {
        let help = "install versions of the libraries that fit the driver";
        findings.push(Finding::bad("GPU", error.to_string(), help));
    }
    findings.extend(found.gpus.iter().map(|gpu| {
        if let Some(why) = too_old(gpu) {
            let help = format!("train on another GPU, or with {DEVICE} cpu");
            return match usable {
                Some(_) => Finding::note("GPU", why, help),
                None => Finding::bad("GPU", why, help),
            };
        }
        let simulated = if gpu.is_simulated() {
            " (SIMULATED: its speed means nothing)"
        } else {
            ""
        };
        Finding::fine("GPU", format!("{gpu}{simulated}"))
    }));
    findings
}

/// A library: the file that is used, and why others are not.
fn library(library: &CudaLibrary, needed: bool, refused: &[(PathBuf, String)]) -> Finding {
    let line = |path: &Path, version: &Option<String>| match version {
        Some(version) => format!("{} ({version})", path.display()),
        None => path.display().to_string(),
    };
    let why = |file: &Candidate| {
        let failed = refused.iter().find(|(path, _)| *path == file.path);
        file.skipped.clone().or(failed.map(|(_, why)| why.clone()))
    };
    let used = library.candidates.iter().find(|file| why(file).is_none());
    let place = match (used, &library.found) {
        (Some(file), _) => line(&file.path, &file.version),
        (None, Some(path)) => line(path, &library.version),
        (None, None) => "not found".to_string(),
    };
    let mut text = format!("{}: {place}", library.what);
    for file in &library.candidates {
        match why(file) {
            Some(why) => text += &format!("\nskipped {}: {why}", line(&file.path, &file.version)),
            None if used == Some(file) => {}
            None => text += &format!("\nnot needed: {}", line(&file.path, &file.version)),
        }
    }
    match &library.advice {
        Some(advice) if needed => Finding::bad("library", text, advice.clone()),
        Some(advice) => Finding::note("library", text, advice.clone()),
        None => Finding::fine("library", text),
    }
}

/// Findings about a rank.
pub(super) fn rank(world: &World) -> Vec<Finding> {
    let (threads, transport) = (world.default_threads(), world.transport());
    let help = "let the launcher bind each rank to its share of the cores, or none (mpirun --bind-to none)";
    let share = || format!("{threads}, its share of this host's cores");
    let note = world.affinity_note();
    let is_note = note.is_some();
    let text = note.map_or_else(share, |note| note.to_string());
    let mut findings = vec![Finding::note_if(is_note, "threads", text, help)];
    if world.size() > 1 {
        let (rank, ranks) = (world.rank(), world.size());
        let text = format!("{rank} of {ranks}, connected by {transport}");
        findings.push(Finding::fine("rank", text));
    }
    findings
}

/// This rank's device, and a finding about the job: which rank has which GPU, or why there are too
/// few.
pub(super) fn devices(world: &World) -> Result<(Device, Finding)> {
    const TOPIC: &str = "GPU of rank";
    let on_cpu = match world.size() {
        1 => "none: it trains on the CPU",
        _ => "none: all ranks train on the CPU",
    };
    let assigned = world.assign_gpus(1, world.share_gpus())?;
    let mine = assigned
        .as_ref()
        .ok()
        .map(|table| table.devices_of(world.rank()));
    Ok(match (assigned, mine.as_deref()) {
        (Ok(table), Some([mine, ..])) => {
            (*mine, Finding::fine(TOPIC, table.to_string().trim_end()))
        }
        (Err(shortage), _) if shortage.table.has_gpus() => {
            let help = help_for(&shortage);
            (Device::Cpu, Finding::bad(TOPIC, shortage.to_string(), help))
        }
        _ => (Device::Cpu, Finding::fine(TOPIC, on_cpu)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Health;

    #[test]
    fn a_control_groups_limit_counts() {
        let read = |name: &str| {
            let text = match name {
                "memory.max" => "2147483648\n",
                "memory.current" => "2040109466\n",
                "memory.stat" => "anon 5\ninactive_file 107374182\n",
                _ => return None,
            };
            Some(text.to_string())
        };
        assert_eq!(group(read), Some((2 << 30, 214_748_364)));
        // The root has no limit, and others may have none.
        assert_eq!(group(|_| None), None);
        assert_eq!(
            group(|name| Some(if name == "memory.max" { "max\n" } else { "5\n" }.to_string())),
            None
        );
        let finding = memory_finding(16 * GIB, 8 * GIB, group(read));
        assert_eq!(finding.health, Health::Note);
        assert_eq!(
            finding.text,
            "8.0 GiB free of 16.0 GiB; its control group has 0.2 GiB left of 2.0 GiB"
        );
        assert_eq!(memory_finding(16 * GIB, 8 * GIB, None).health, Health::Fine);
    }

    #[test]
    fn a_library_that_is_needed_and_missing_is_bad() {
        let missing = CudaLibrary {
            what: "NCCL",
            found: None,
            version: None,
            advice: Some("install it".into()),
            candidates: Vec::new(),
        };
        assert_eq!(
            (
                library(&missing, true, &[]).health,
                library(&missing, false, &[]).health
            ),
            (Health::Bad, Health::Note)
        );
        let there = CudaLibrary {
            found: Some("x/libnccl.so.2".into()),
            advice: None,
            ..missing
        };
        assert_eq!(library(&there, true, &[]).health, Health::Fine);
    }

    #[test]
    fn every_file_of_a_library_is_shown_with_why_it_is_not_used() {
        let file = |path: &str, version: &str, skipped: Option<&str>| Candidate {
            path: path.into(),
            version: Some(version.into()),
            skipped: skipped.map(str::to_string),
        };
        let found = CudaLibrary {
            what: "cuBLASLt",
            found: Some("b/libcublasLt.so.13".into()),
            version: Some("13".into()),
            advice: None,
            candidates: vec![
                file("a/libcublasLt.so.14", "14", Some("too new")),
                file("b/libcublasLt.so.13", "13", None),
                file("c/libcublasLt.so.13", "13.1", None),
                file("d/libcublasLt.so.12", "12.8", None),
            ],
        };
        let refused = [("b/libcublasLt.so.13".into(), "cublasLtCreate failed".into())];
        let finding = library(&found, true, &refused);
        assert_eq!(
            (finding.health, finding.text.as_str()),
            (
                Health::Fine,
                "cuBLASLt: c/libcublasLt.so.13 (13.1)\n\
                 skipped a/libcublasLt.so.14 (14): too new\n\
                 skipped b/libcublasLt.so.13 (13): cublasLtCreate failed\n\
                 not needed: d/libcublasLt.so.12 (12.8)"
            )
        );
    }
}
