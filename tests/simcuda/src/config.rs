//! The environment's settings, read once.

use std::time::Duration;

use crate::cublaslt::variant::{self, Variant};
use crate::faults::Plan;

/// An H100's.
const CAPABILITY: (u32, u32) = (9, 0);
/// 13.0.0.
const CUBLASLT_VERSION: usize = 130_000;

/// How to choose among work that may run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// By the seed, among all that may run.
    Random,
    /// As late as possible: only what a wait needs.
    Lazy,
    /// As soon as it is queued.
    Eager,
}

/// The reaction to a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnFinding {
    /// Print it, and end the process with code 86.
    Exit,
    /// Print it and continue.
    Report,
    /// Keep it without printing: for the simulator's own tests.
    Keep,
}

/// What driver and libraries take of a GPU's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnBytes {
    /// A context, with the code of kernels.
    pub context: u64,
    /// The first communicator, with NCCL's kernels.
    pub nccl: u64,
    /// What a memory pool takes at a time.
    pub piece: u64,
}

impl Default for OwnBytes {
    fn default() -> Self {
        Self {
            context: 0,
            nccl: 0,
            piece: 2 << 20,
        }
    }
}

impl OwnBytes {
    /// Reads `CONTEXT,NCCL,PIECE`, in MB; pieces are MiB.
    fn parse(text: Option<&str>, memory_bytes: u64) -> Result<Self, String> {
        let Some(text) = text else {
            return Ok(Self::default());
        };
        let numbers: Result<Vec<u64>, _> =
            text.split(',').map(|word| word.trim().parse()).collect();
        match numbers.as_deref() {
            Ok(&[context, nccl, piece @ 1..=1024]) if context <= memory_bytes / 1_000_000 => {
                Ok(Self {
                    context: context * 1_000_000,
                    nccl: nccl.saturating_mul(1_000_000),
                    piece: piece << 20,
                })
            }
            _ => Err(format!(
                "SIMCUDA_OWN_MB={text}: expected the MB of a context, which its memory has, and of NCCL, and \
                 the MiB of a pool's pieces, as in 561,604,32"
            )),
        }
    }
}

/// The requested machine.
#[derive(Clone, Debug)]
pub struct Config {
    /// How many GPUs.
    pub devices: usize,
    /// Compute capabilities by device; the last one is that of all further devices.
    pub capabilities: Vec<(u32, u32)>,
    /// Memory of each GPU.
    pub memory_bytes: u64,
    /// What is not the program's of it.
    pub own: OwnBytes,
    /// Decides every choice that CUDA leaves open.
    pub seed: u64,
    /// The schedule.
    pub schedule: Schedule,
    /// The fault plan.
    pub faults: Plan,
    /// The number (from 1) of the wait that is ignored.
    pub ignore_wait: Option<u64>,
    /// Where to list the waits at exit.
    pub count_waits: Option<std::path::PathBuf>,
    /// The reaction to a finding.
    pub on_finding: OnFinding,
    /// Whether every call is printed.
    pub trace: bool,
    /// Whether peer access is refused.
    pub no_peer: bool,
    /// Whether pending work runs at the end of the process.
    pub drain: bool,
    /// Whether memory that was never freed is reported at the end.
    pub leaks: bool,
    /// Where to list all work with simulated times.
    pub timeline: Option<std::path::PathBuf>,
    /// Whether mismatched calls of ranks are a finding; else they only hang.
    pub nccl_check: bool,
    /// Whether that finding has the stacks of other processes, which costs time in every call.
    pub nccl_stacks: bool,
    /// GPUs are connected by NVLink switches, which add in the order of arrival.
    pub nvls: bool,
    /// Captured collectives have NCCL's event nodes beside them.
    pub nccl_events: bool,
    /// How long ranks take to make a communicator, once all have come.
    pub join: Duration,
    /// What cuBLASLt's heuristic returns for a matmul, best first.
    pub algorithms: Vec<Variant>,
    /// The version of cuBLASLt.
    pub cublaslt_version: usize,
}

impl Default for Config {
    /// The defaults, except that findings are kept: for the simulator's tests.
    fn default() -> Self {
        Self {
            devices: 1,
            capabilities: vec![CAPABILITY],
            memory_bytes: 2048 << 20,
            own: OwnBytes::default(),
            seed: 0,
            schedule: Schedule::Random,
            faults: Plan::default(),
            ignore_wait: None,
            count_waits: None,
            on_finding: OnFinding::Keep,
            trace: false,
            no_peer: false,
            drain: true,
            leaks: false,
            timeline: None,
            nccl_check: true,
            nccl_stacks: false,
            nvls: false,
            nccl_events: false,
            join: Duration::ZERO,
            algorithms: vec![Variant::Sound],
            cublaslt_version: CUBLASLT_VERSION,
        }
    }
}

impl Config {
    /// Reads the environment. An invalid value ends the process with code 2: simulating something
    /// else than requested would be worse.
    pub fn from_environment() -> Self {
        match Self::read(|name| {
            std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
        }) {
            Ok(config) => config,
            Err(message) => {
                eprintln!("simcuda: {message}");
                std::process::exit(2);
            }
        }
    }

    /// Reads variables through `get`.
    pub fn read(get: impl Fn(&str) -> Option<String>) -> Result<Self, String> {
        let get = |name: &str| get(name).filter(|value| !value.is_empty());
        let number = |name: &str, otherwise: u64| match get(name) {
            None => Ok(otherwise),
            Some(text) => text
                .trim()
                .parse::<u64>()
                .map_err(|_| format!("{name}={text}: expected a whole number")),
        };
        let is_set = |name: &str| get(name).is_some_and(|value| value != "0");
        let devices = number("SIMCUDA_DEVICES", 1)?;
        if devices > 64 {
            return Err(format!("SIMCUDA_DEVICES={devices}: at most 64 devices"));
        }
        let memory_mb = number("SIMCUDA_MEMORY_MB", 2048)?;
        if !(1..=1 << 20).contains(&memory_mb) {
            return Err(format!(
                "SIMCUDA_MEMORY_MB={memory_mb}: expected 1 to 1048576"
            ));
        }
        let schedule = match get("SIMCUDA_SCHEDULE").as_deref() {
            None | Some("random") => Schedule::Random,
            Some("lazy") => Schedule::Lazy,
            Some("eager") => Schedule::Eager,
            Some(other) => {
                return Err(format!(
                    "SIMCUDA_SCHEDULE={other}: expected random, lazy or eager"
                ));
            }
        };
        let on_finding = match get("SIMCUDA_ON_FINDING").as_deref() {
            None | Some("exit") => OnFinding::Exit,
            Some("report") => OnFinding::Report,
            Some(other) => {
                return Err(format!(
                    "SIMCUDA_ON_FINDING={other}: expected exit or report"
                ));
            }
        };
        // How launchers tell a process its rank: `--ranks` (`1/2:8`), Open MPI, other users of
        // PMIx, torchrun, Slurm.
        let own = get("DDP_JOB").and_then(|job| Some(job.split_once('/')?.0.to_string()));
        let rank = ["OMPI_COMM_WORLD_RANK", "PMIX_RANK", "RANK", "SLURM_PROCID"]
            .iter()
            .find_map(|name| get(name));
        let rank = own.or(rank).and_then(|rank| rank.trim().parse().ok());
        let faults = Plan::parse_for(&get("SIMCUDA_FAULTS").unwrap_or_default(), rank)?;
        Ok(Self {
            devices: devices as usize,
            capabilities: capabilities(get("SIMCUDA_CAPABILITY").as_deref())?,
            memory_bytes: memory_mb << 20,
            own: OwnBytes::parse(get("SIMCUDA_OWN_MB").as_deref(), memory_mb << 20)?,
            seed: number("SIMCUDA_SEED", 0)?,
            schedule,
            ignore_wait: Some(number("SIMCUDA_IGNORE_WAIT", 0)?).filter(|wait| *wait > 0),
            count_waits: get("SIMCUDA_COUNT_WAITS").map(Into::into),
            on_finding,
            trace: is_set("SIMCUDA_TRACE"),
            no_peer: is_set("SIMCUDA_NO_PEER") || faults.refuses_peers(),
            drain: get("SIMCUDA_DRAIN").as_deref() != Some("0"),
            leaks: is_set("SIMCUDA_LEAKS"),
            timeline: get("SIMCUDA_TIMELINE").map(Into::into),
            nccl_check: get("SIMCUDA_NCCL_CHECK").as_deref() != Some("0"),
            nccl_stacks: is_set("SIMCUDA_NCCL_CHECK"),
            nvls: is_set("SIMCUDA_NVLS"),
            nccl_events: is_set("SIMCUDA_NCCL_EVENTS"),
            join: Duration::from_millis(number("SIMCUDA_JOIN_MS", 0)?),
            algorithms: get("SIMCUDA_ALGORITHMS")
                .map_or(Ok(vec![Variant::Sound]), |text| variant::parse(&text))?,
            cublaslt_version: number("SIMCUDA_CUBLASLT", CUBLASLT_VERSION as u64)? as usize,
            faults,
        })
    }
}

/// `7.5`, or `7.0,9.0`: one for each device.
fn capabilities(text: Option<&str>) -> Result<Vec<(u32, u32)>, String> {
    let Some(text) = text else {
        return Ok(vec![CAPABILITY]);
    };
    let one = |of_device: &str| {
        let (major, minor) = of_device.trim().split_once('.')?;
        Some((major.parse().ok()?, minor.parse().ok()?)).filter(|(_, minor)| *minor < 10)
    };
    let all: Option<Vec<_>> = text.split(',').map(one).collect();
    all.ok_or_else(|| {
        format!(
            "SIMCUDA_CAPABILITY={text}: expected a compute capability, as in 7.5, or one for each \
             device, as in 7.0,9.0"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Config, String> {
        Config::read(|name| {
            variables
                .iter()
                .find(|(known, _)| *known == name)
                .map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn an_empty_environment_is_one_device_that_ends_the_process_at_a_finding() {
        let config = read(&[]).unwrap();
        assert_eq!(
            (config.devices, config.memory_bytes, config.seed),
            (1, 2 << 30, 0)
        );
        assert_eq!(
            (config.schedule, config.on_finding),
            (Schedule::Random, OnFinding::Exit)
        );
        assert!(
            config.ignore_wait.is_none()
                && config.count_waits.is_none()
                && !config.no_peer
                && !config.trace
        );
        assert!(config.drain && !config.leaks && config.nccl_check && !config.nvls);
        assert!(!config.nccl_events);
    }

    #[test]
    fn every_variable_is_read() {
        let config = read(&[
            ("SIMCUDA_DEVICES", "4"),
            ("SIMCUDA_CAPABILITY", "7.0,9.0"),
            ("SIMCUDA_MEMORY_MB", "16"),
            ("SIMCUDA_OWN_MB", "9,8,1"),
            ("SIMCUDA_SEED", "7"),
            ("SIMCUDA_SCHEDULE", "lazy"),
            ("SIMCUDA_FAULTS", "no_peer"),
            ("SIMCUDA_IGNORE_WAIT", "3"),
            ("SIMCUDA_COUNT_WAITS", "waits"),
            ("SIMCUDA_ON_FINDING", "report"),
            ("SIMCUDA_TRACE", "1"),
            ("SIMCUDA_DRAIN", "0"),
            ("SIMCUDA_LEAKS", "1"),
            ("SIMCUDA_NCCL_CHECK", "1"),
            ("SIMCUDA_NVLS", "1"),
            ("SIMCUDA_NCCL_EVENTS", "1"),
            ("SIMCUDA_JOIN_MS", "2500"),
            ("SIMCUDA_ALGORITHMS", "sound,nan,refused"),
            ("SIMCUDA_CUBLASLT", "120900"),
            ("SIMCUDA_TIMELINE", "timeline"),
        ])
        .unwrap();
        assert_eq!(
            (config.devices, config.memory_bytes, config.seed),
            (4, 16 << 20, 7)
        );
        assert_eq!(
            (config.schedule, config.on_finding),
            (Schedule::Lazy, OnFinding::Report)
        );
        assert_eq!(
            (config.ignore_wait, config.count_waits),
            (Some(3), Some("waits".into()))
        );
        assert_eq!(config.capabilities, [(7, 0), (9, 0)]);
        assert_eq!(config.timeline, Some("timeline".into()));
        assert_eq!(config.join, Duration::from_millis(2500));
        let algorithms = [Variant::Sound, Variant::HidesNan, Variant::Refused];
        assert_eq!(config.algorithms, algorithms);
        assert_eq!(config.cublaslt_version, 120_900);
        assert!(config.nvls && config.nccl_events);
        assert!(
            config.no_peer && config.trace && !config.drain && config.leaks && config.nccl_stacks
        );
    }

    #[test]
    fn what_cannot_be_read_names_the_variable_and_what_was_expected() {
        for (name, value, expected) in [
            ("SIMCUDA_DEVICES", "many", "a whole number"),
            ("SIMCUDA_DEVICES", "65", "at most 64"),
            ("SIMCUDA_CAPABILITY", "75", "expected a compute capability"),
            ("SIMCUDA_MEMORY_MB", "0", "expected 1 to"),
            ("SIMCUDA_OWN_MB", "561,604", "expected the MB of a context"),
            ("SIMCUDA_OWN_MB", "9000,604,32", "which its memory has"),
            ("SIMCUDA_SCHEDULE", "fast", "random, lazy or eager"),
            ("SIMCUDA_ON_FINDING", "ignore", "exit or report"),
            ("SIMCUDA_FAULTS", "oops", "SIMCUDA_FAULTS"),
            ("SIMCUDA_ALGORITHMS", "sound,fast", "expected as in"),
        ] {
            let message = read(&[(name, value)]).unwrap_err();
            assert!(
                message.contains(name) && message.contains(expected),
                "{message}"
            );
        }
    }
}
