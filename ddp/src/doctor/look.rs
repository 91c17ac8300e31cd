//! What can be seen without trying: processor, memory, disk, MPI, the parts of CUDA, and which GPU is whose.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use ddp_comm::World;
use ddp_kernels::device::{Library, discover};
use ddp_kernels::mapped::free_bytes;
use ddp_kernels::{Device, simd};

use super::finding::Finding;
use crate::error::Result;

const GIB: u64 = 1 << 30;

/// Of a host.
pub(super) fn host(out: &Path) -> Vec<Finding> {
    [
        Some(processor()),
        governor(),
        Some(memory()),
        huge_pages(),
        shared_memory(),
        Some(disk(out)),
        open_files(),
        Some(mpi()),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// The value behind `name` in a file of lines `name: value`.
fn line_of(path: &str, name: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(
        line[name.len()..]
            .trim_start_matches([' ', '\t', ':'])
            .trim()
            .to_string(),
    )
}

fn processor() -> Finding {
    let name =
        line_of("/proc/cpuinfo", "model name").unwrap_or_else(|| std::env::consts::ARCH.into());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let clock = line_of("/proc/cpuinfo", "cpu MHz")
        .map_or(String::new(), |mhz| format!(", at {mhz} MHz now"));
    let cores = if cores == 1 {
        "1 core".to_string()
    } else {
        format!("{cores} cores")
    };
    Finding::fine(
        "processor",
        format!(
            "{name}, {cores} for this process, {:?}{clock}",
            simd::level()
        ),
    )
}

fn governor() -> Option<Finding> {
    let governor =
        fs::read_to_string("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").ok()?;
    let text = format!("the governor is {}", governor.trim());
    let mend = "as root: cpupower frequency-set -g performance";
    Some(if governor.trim() == "powersave" {
        Finding::note("clocks", text, mend)
    } else {
        Finding::fine("clocks", text)
    })
}

fn memory() -> Finding {
    let kib = |name| -> Option<u64> {
        line_of("/proc/meminfo", name)?
            .split(' ')
            .next()?
            .parse()
            .ok()
    };
    let (Some(total), Some(free)) = (kib("MemTotal"), kib("MemAvailable")) else {
        return Finding::note(
            "memory",
            "the system does not say how much there is",
            "nothing need be done",
        );
    };
    let of_group = |name: &str| fs::read_to_string(Path::new("/sys/fs/cgroup").join(name)).ok();
    told_memory(total << 10, free << 10, group(of_group))
}

/// Of a control group that has a limit: it, and what is left of it. Files that were read count as used there, and give way.
fn group(read: impl Fn(&str) -> Option<String>) -> Option<(u64, u64)> {
    let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
    let stat = read("memory.stat").unwrap_or_default();
    let gives_way = stat.lines().find_map(|line| {
        line.strip_prefix("inactive_file ")?
            .trim()
            .parse::<u64>()
            .ok()
    });
    let limit = number("memory.max")?;
    let used = number("memory.current")?.saturating_sub(gives_way.unwrap_or(0));
    Some((limit, limit.saturating_sub(used)))
}

fn told_memory(total: u64, free: u64, group: Option<(u64, u64)>) -> Finding {
    let limited = group.map_or(String::new(), |(limit, left)| {
        format!(
            "; its control group has {} left of {}",
            gib(left),
            gib(limit)
        )
    });
    let text = format!("{} free of {}{limited}", gib(free), gib(total));
    match group.map_or(free, |(_, left)| left.min(free)) < GIB {
        true => Finding::note(
            "memory",
            text,
            "end other programs, raise the limit, or train elsewhere: large models will not fit",
        ),
        false => Finding::fine("memory", text),
    }
}

fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / GIB as f64)
}

fn huge_pages() -> Option<Finding> {
    let text = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").ok()?;
    let chosen = text.split(['[', ']']).nth(1)?.to_string();
    let mend = "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled";
    Some(match chosen.as_str() {
        "never" => Finding::note("huge pages", "off: large tensors take longer to make", mend),
        other => Finding::fine("huge pages", other.to_string()),
    })
}

/// NCCL's between the ranks of a host; ranks on the CPU do without.
fn shared_memory() -> Option<Finding> {
    let free = free_bytes(Path::new("/dev/shm")).ok()?;
    let text = format!("/dev/shm has {} free", gib(free));
    let mend = "several GPUs of a host need more for NCCL: docker run --shm-size=1g, in Kubernetes an emptyDir with medium: Memory";
    Some(match free < GIB / 2 && discover().gpus.len() > 1 {
        true => Finding::note("shared memory", text, mend),
        false => Finding::fine("shared mem", text),
    })
}

fn disk(out: &Path) -> Finding {
    let there = out
        .ancestors()
        .find(|folder| folder.is_dir())
        .unwrap_or(Path::new("."));
    match free_bytes(there) {
        Ok(free) if free < GIB => {
            let text = format!(
                "{} free where runs are saved ({})",
                gib(free),
                out.display()
            );
            Finding::note(
                "disk",
                text,
                "make room, or give --out on another disk: checkpoints may not fit",
            )
        }
        Ok(free) => Finding::fine(
            "disk",
            format!(
                "{} free where runs are saved ({})",
                gib(free),
                out.display()
            ),
        ),
        Err(error) => Finding::bad(
            "disk",
            format!("{}: {error}", there.display()),
            "give another folder with --out",
        ),
    }
}

fn open_files() -> Option<Finding> {
    let limits = line_of("/proc/self/limits", "Max open files")?;
    let soft = limits.split_ascii_whitespace().next()?.to_string();
    let few = soft.parse::<u64>().is_ok_and(|count| count < 256);
    let text = format!("{soft} open files at a time");
    Some(if few {
        Finding::note("limits", text, "ulimit -n 1024")
    } else {
        Finding::fine("limits", text)
    })
}

fn mpi() -> Finding {
    if !cfg!(feature = "mpi") {
        let mend = "for several ranks build with it: cargo build --release -p ddp (launch/setup installs what that needs)";
        return Finding::note(
            "MPI",
            "this program was built without (--no-default-features)",
            mend,
        );
    }
    match first_line("mpirun", &["--version"]) {
        Some(line) => Finding::fine("MPI", line),
        None => Finding::note(
            "MPI",
            "mpirun is not in PATH: one process alone can train",
            "launch/setup, or module load openmpi",
        ),
    }
}

/// The first line that a program says.
fn first_line(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    output
        .status
        .success()
        .then(|| text.lines().next().unwrap_or_default().trim().to_string())
}

/// Of a host: the parts of CUDA and the GPUs.
pub(super) fn cuda(ranks: usize) -> Vec<Finding> {
    let found = discover();
    let several = ranks > 1 || found.gpus.len() > 1;
    let mut findings = vec![match &found.why_no_gpu {
        None => library(&found.driver, true),
        // A machine without GPUs is well; one whose GPUs cannot be reached is not.
        Some(why) if Path::new("/proc/driver/nvidia").exists() || found.driver.found.is_some() => {
            Finding::bad(
                "GPU",
                format!("none can be used: {why}"),
                "mend the driver, or train with --device cpu",
            )
        }
        Some(_) => Finding::fine("GPU", "none, and no driver: training runs on the CPU"),
    }];
    if found.gpus.is_empty() {
        return findings;
    }
    if let Some((major, minor)) = found.driver_version {
        findings.push(Finding::fine(
            "CUDA",
            format!("the driver supports {major}.{minor} at most"),
        ));
    }
    findings.push(library(&found.cublaslt, true));
    findings.push(library(&found.nvrtc, true));
    findings.push(library(&found.nccl, several));
    findings.extend(found.gpus.iter().map(|gpu| {
        let simulated = if gpu.name.contains("Simulated") {
            " (SIMULATED: no rate of it means anything)"
        } else {
            ""
        };
        Finding::fine("GPU", format!("{gpu}{simulated}"))
    }));
    findings.extend(clocks());
    findings
}

fn library(library: &Library, needed: bool) -> Finding {
    let version = library
        .version
        .as_ref()
        .map_or(String::new(), |version| format!(" ({version})"));
    let place = library
        .found
        .as_ref()
        .map_or("not found".to_string(), |path| path.display().to_string());
    let text = format!("{}: {place}{version}", library.what);
    match &library.advice {
        Some(advice) if needed => Finding::bad("library", text, advice.clone()),
        Some(advice) => Finding::note("library", text, advice.clone()),
        None => Finding::fine("library", text),
    }
}

/// What the GPUs' own tool says of clocks, of what holds them down and of errors in memory.
fn clocks() -> Vec<Finding> {
    let query = "--query-gpu=index,clocks.sm,clocks.max.sm,clocks_throttle_reasons.active,ecc.errors.uncorrected.volatile.total";
    let command = Command::new("nvidia-smi")
        .args([query, "--format=csv,noheader,nounits"])
        .stdin(Stdio::null())
        .output();
    let Some(output) = command.ok().filter(|output| output.status.success()) else {
        return Vec::new();
    };
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(clock)
        .collect()
}

/// Of one GPU's line: `0, 1980, 1980, 0x0000000000000000, 0`.
fn clock(line: &str) -> Option<Finding> {
    let [index, now, most, held, errors] = line.split(',').map(str::trim).collect::<Vec<_>>()[..]
    else {
        return None;
    };
    let text = format!("cuda:{index} at {now} of {most} MHz");
    if errors.parse::<u64>().is_ok_and(|errors| errors > 0) {
        let text = format!("{text}, {errors} uncorrected memory errors since the driver started");
        return Some(Finding::bad(
            "clocks",
            text,
            "take this GPU out: nvidia-smi -q -d ECC; reset or replace it",
        ));
    }
    let held = u64::from_str_radix(held.trim_start_matches("0x"), 16).ok()?;
    // Idle (1) is no hindrance; power caps (4), slow-downs of the hardware (8, 64, 128) and heat (32) are.
    Some(match held & (4 | 8 | 32 | 64 | 128) {
        0 => Finding::fine("clocks", text),
        _ => Finding::note(
            "clocks",
            format!("{text}, held down ({held:#x})"),
            "nvidia-smi -q -d PERFORMANCE says by what: power, heat",
        ),
    })
}

/// Of a rank.
pub(super) fn rank(world: &World) -> Vec<Finding> {
    let (threads, transport) = (world.default_threads(), world.transport());
    let mut findings = vec![match world.affinity_note() {
        None => Finding::fine(
            "threads",
            format!("{threads}, its share of this host's cores"),
        ),
        Some(note) => Finding::note(
            "threads",
            note,
            "launch/mpirun binds ranks so that each has its share",
        ),
    }];
    if world.size() > 1 {
        let text = format!(
            "{} of {}, reaches the others by {transport}",
            world.rank(),
            world.size()
        );
        findings.push(Finding::fine("rank", text));
    }
    findings
}

/// Which device each rank would train on, or why there are too few GPUs.
pub(super) struct Devices {
    /// This rank's.
    pub(super) mine: Device,
    /// Whether all ranks have a GPU.
    pub(super) on_gpus: bool,
    /// A line a rank.
    table: String,
    /// What is missing, where there are GPUs and not enough.
    shortage: Option<(String, String)>,
}

pub(super) fn devices(world: &World) -> Result<Devices> {
    Ok(match world.assign_gpus(1, world.share_gpus())? {
        Ok(table) => {
            let mine = table
                .devices_of(world.rank())
                .first()
                .copied()
                .unwrap_or(Device::Cpu);
            Devices {
                mine,
                on_gpus: mine.is_accelerator(),
                table: table.to_string(),
                shortage: None,
            }
        }
        Err(shortage) => {
            let told = shortage.table.has_gpus().then(|| {
                (
                    shortage.to_string(),
                    crate::config::device::help_for(&shortage),
                )
            });
            Devices {
                mine: Device::Cpu,
                on_gpus: false,
                table: String::new(),
                shortage: told,
            }
        }
    })
}

/// Of the job: who has which GPU.
pub(super) fn assignment(devices: &Devices, ranks: usize) -> Finding {
    match &devices.shortage {
        Some((text, mend)) => Finding::bad("GPU of rank", text.clone(), mend.clone()),
        None if devices.on_gpus => {
            Finding::fine("GPU of rank", devices.table.trim_end().to_string())
        }
        None => Finding::fine(
            "GPU of rank",
            format!(
                "none: {} on the CPU",
                if ranks == 1 {
                    "trains"
                } else {
                    "all ranks train"
                }
            ),
        ),
    }
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
        let finding = told_memory(16 * GIB, 8 * GIB, group(read));
        assert_eq!(finding.health, Health::Note);
        assert_eq!(
            finding.text,
            "8.0 GiB free of 16.0 GiB; its control group has 0.2 GiB left of 2.0 GiB"
        );
        assert_eq!(told_memory(16 * GIB, 8 * GIB, None).health, Health::Fine);
    }

    #[test]
    fn a_gpus_line_tells_clocks_hindrances_and_errors() {
        let health = |line: &str| clock(line).map(|finding| finding.health);
        assert_eq!(
            health("0, 1980, 1980, 0x0000000000000001, 0"),
            Some(Health::Fine)
        );
        assert_eq!(
            health("0, 1200, 1980, 0x0000000000000024, 0"),
            Some(Health::Note)
        );
        assert_eq!(
            health("0, 1980, 1980, 0x0000000000000000, 3"),
            Some(Health::Bad)
        );
        // A GPU without ECC says so in words.
        assert_eq!(
            health("0, 1980, 1980, 0x0000000000000000, [N/A]"),
            Some(Health::Fine)
        );
        assert_eq!(health("nonsense"), None);
    }

    #[test]
    fn a_library_that_is_needed_and_missing_is_bad() {
        let missing = Library {
            what: "NCCL",
            found: None,
            version: None,
            advice: Some("install it".into()),
        };
        assert_eq!(
            (
                library(&missing, true).health,
                library(&missing, false).health
            ),
            (Health::Bad, Health::Note)
        );
        let there = Library {
            found: Some("x/libnccl.so.2".into()),
            advice: None,
            ..missing
        };
        assert_eq!(library(&there, true).health, Health::Fine);
    }
}
