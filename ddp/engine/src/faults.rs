//! Faults that tests inject at certain points of a run. A release build without the feature
//! `faults` does not contain them. Nothing happens unless these variables are set:
//!
//! - `DDP_TEST_FAULT=RANK:POINT:STEP:KIND`, as in `1:optimizer:3:kill`; several are separated by
//!   commas
//! - `DDP_TEST_ROWS=FILE`: each rank writes the rows of each batch to FILE-RANK, a line per step
//! - `DDP_TEST_DISAGREE=RANK:FIELD`: that rank sends another value in the handshake, as in
//!   `1:the plan of buckets`

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use ddp_comm::Field;
use ddp_kernels::heartbeat::{self, Work};
use ddp_kernels::{Device, Tensor};

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, Result};

/// Whether this build has faults at all.
const ARE_BUILT_IN: bool = cfg!(any(debug_assertions, feature = "faults"));

/// A point of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum FaultPoint {
    /// Before the data are read: step 0.
    Setup,
    /// Before the forward of each micro-batch.
    Forward,
    /// Before each reduction of gradients.
    Reduction,
    /// Before the sums of a slice go to its backup.
    Copy,
    /// Before the update.
    Optimizer,
    /// Before the update, when ranks that may be lost have agreed to make it: with ZeRO-1.
    Agreed,
    /// When this rank has its new slices, and others may not: the generation instead of a step.
    Slices,
    /// When ranks have met for the first time, before the command begins: the generation instead of
    /// a step.
    Command,
    /// When ranks have met, before they agree where they continue: the generation instead of a
    /// step.
    Meeting,
    /// When the metrics log says who was lost, and the other ranks do not know that yet: the
    /// generation instead of a step.
    Announced,
    /// Before a process that comes waits to be taken in: step 0.
    Joining,
    /// After a step, with the kind `hold`: if ranks are missing, it holds, but only until a process
    /// waits to be taken in.
    Newcomer,
    /// Before the log.
    Log,
    /// Before an evaluation.
    Evaluation,
    /// Before the tensors of a checkpoint are copied.
    Snapshot,
    /// While a thread writes a checkpoint.
    Save,
    /// Before the metrics log is closed.
    End,
}

/// What happens at a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum FaultKind {
    /// The process is killed, as by the system when it is out of memory.
    Kill,
    /// The process is suspended, as by Ctrl-Z.
    Stop,
    /// The process is asked to end, as by a scheduler.
    Term,
    /// A panic.
    Panic,
    /// An allocation fails.
    Memory,
    /// An error is returned.
    Error,
    /// The call never returns.
    Hang,
    /// It waits, and shows progress, until its folder has a file `go-on-STEP`.
    Hold,
    /// A bit of the first gradient of each bucket changes before its reduction: the highest that is
    /// not of the exponent.
    Flip,
    /// It takes 50 ms.
    Slow,
    /// It takes two seconds.
    Pause,
    /// It takes 22 seconds, in which it shows progress.
    Work,
    /// Once: this rank leaves the others, to meet them again.
    Leave,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct InjectedFault {
    rank: usize,
    point: FaultPoint,
    step: u64,
    kind: FaultKind,
}

/// The current step, kept only if this rank has faults.
static STEP: AtomicU64 = AtomicU64::new(0);

static HAS_LEFT: AtomicBool = AtomicBool::new(false);

/// The faults of this rank, or the first text that names no fault. Without the fault, the test that
/// asked for it would pass whatever happens.
fn read_faults() -> Result<&'static [InjectedFault], &'static str> {
    static FAULTS: OnceLock<Result<Vec<InjectedFault>, String>> = OnceLock::new();
    if !ARE_BUILT_IN {
        return Ok(&[]);
    }
    let read = FAULTS.get_or_init(|| {
        let text = std::env::var("DDP_TEST_FAULT").unwrap_or_default();
        let all = text.split(',').filter(|text| !text.is_empty());
        let all: Result<Vec<_>, String> = all.map(|it| parse(it).ok_or(it.into())).collect();
        let is_own = |fault: &InjectedFault| fault.rank == ddp_comm::likely_rank();
        all.map(|all| all.into_iter().filter(is_own).collect())
    });
    read.as_deref().map_err(String::as_str)
}

/// The faults of this rank. Wrong ones are refused at the first point.
fn faults() -> &'static [InjectedFault] {
    read_faults().unwrap_or_default()
}

fn parse(text: &str) -> Option<InjectedFault> {
    fn named<T: DeserializeOwned>(name: &str) -> Option<T> {
        serde_json::from_value(name.into()).ok()
    }
    let [rank, point, step, kind] = text.split(':').collect::<Vec<_>>().try_into().ok()?;
    Some(InjectedFault {
        rank: rank.parse().ok()?,
        point: named(point)?,
        step: step.parse().ok()?,
        kind: named(kind)?,
    })
}

/// Begins step `step`.
pub(crate) fn begin(step: u64) {
    if !faults().is_empty() {
        STEP.store(step, Ordering::Relaxed);
    }
}

/// Injects the fault of this point in the current step, if there is one.
pub(crate) fn at(point: FaultPoint) -> Result<()> {
    at_step(point, STEP.load(Ordering::Relaxed))
}

/// As `at_step`, for the program: before its command begins.
pub fn at_command(generation: u64) -> Result<()> {
    at_step(FaultPoint::Command, generation)
}

/// As `at` for the points of a step that is launched as a graph: before the launch.
pub(crate) fn at_launch() -> Result<()> {
    use FaultPoint::{Forward, Optimizer, Reduction};
    [Forward, Reduction, Optimizer].into_iter().try_for_each(at)
}

/// As `at`, in step `step` instead of the current one.
pub(crate) fn at_step(point: FaultPoint, step: u64) -> Result<()> {
    let all = read_faults().map_err(|wrong| {
        Error::Usage(format!(
            "DDP_TEST_FAULT {wrong}: expected RANK:POINT:STEP:KIND, as in 1:optimizer:3:kill; help: the points and kinds \
             are in the engine's faults.rs"
        ))
    })?;
    let is_here = |fault: &&InjectedFault| fault.point == point && fault.step == step;
    let Some(fault) = all.iter().find(is_here) else {
        return Ok(());
    };
    let text = format!("a fault on purpose in {point:?} of step {}", fault.step);
    match fault.kind {
        FaultKind::Kill => signal("KILL"),
        FaultKind::Stop => {
            say(fault);
            signal("STOP");
        }
        FaultKind::Term => signal("TERM"),
        FaultKind::Panic => panic!("{text}"),
        FaultKind::Memory => drop(std::hint::black_box(Vec::<u8>::with_capacity(1 << 62))),
        FaultKind::Error => return Err(Error::Data(text)),
        FaultKind::Hang => {
            say(fault);
            loop {
                std::thread::sleep(Duration::from_secs(3600));
            }
        }
        FaultKind::Hold => {
            say(fault);
            hold_until(fault.step, || false);
        }
        FaultKind::Flip => {}
        FaultKind::Slow => std::thread::sleep(Duration::from_millis(50)),
        FaultKind::Pause => std::thread::sleep(Duration::from_secs(2)),
        FaultKind::Work => (0..220).for_each(|_| {
            heartbeat::beat(Work::ReadsData);
            std::thread::sleep(Duration::from_millis(100));
        }),
        FaultKind::Leave if HAS_LEFT.swap(true, Ordering::Relaxed) => {}
        FaultKind::Leave => {
            let [waited, total] = [Duration::ZERO; 2];
            return Err(Error::Comm(ddp_comm::Error::Timeout {
                call: text,
                missing: Vec::new(),
                waited,
                total,
            }));
        }
    }
    Ok(())
}

/// Says where this rank is, for tests that wait for it.
fn say(fault: &InjectedFault) {
    let point = format!("{:?}", fault.point).to_lowercase();
    // In one piece: other ranks write to the same pipe.
    let line = format!("at {}:{point}:{}\n", fault.rank, fault.step);
    _ = std::io::stderr().write_all(line.as_bytes());
}

/// The fault of the point `Newcomer` after step `step`: waits for `has_come`.
pub(crate) fn await_newcomer(step: u64, has_come: impl Fn() -> bool) {
    let is_now = |fault: &InjectedFault| fault.point == FaultPoint::Newcomer && fault.step == step;
    if faults().iter().any(is_now) {
        hold_until(step, has_come);
    }
}

/// Shows progress until `is_so`, or a test lets ranks of this step continue.
fn hold_until(step: u64, is_so: impl Fn() -> bool) {
    let go_on = format!("go-on-{step}");
    while !is_so() && !Path::new(&go_on).exists() {
        heartbeat::beat(Work::ReadsData);
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Changes the first of these f32 gradients, if that is the fault of this step.
pub(crate) fn flip(gradients: &Tensor) -> Result<()> {
    let step = STEP.load(Ordering::Relaxed);
    let is_now = |fault: &&InjectedFault| fault.kind == FaultKind::Flip && fault.step == step;
    if faults().iter().find(is_now).is_none() {
        return Ok(());
    }
    let first = gradients.slice(0..1)?;
    let bits = first.to_vec::<f32>()?[0].to_bits() ^ 1 << 22;
    let flipped = Tensor::from_slice(&[f32::from_bits(bits)], &[1], Device::Cpu)?;
    Ok(first.copy_from(&flipped)?)
}

fn signal(name: &str) {
    // The shell's builtin: small systems have no program `kill`.
    let line = format!("kill -s {name} {}", std::process::id());
    // Without variables: tests find a rank's process by those of the job.
    let mut shell = Command::new("sh");
    let status = shell.env_clear().args(["-c", &line]).status();
    assert!(
        status.is_ok_and(|status| status.success()),
        "cannot run `{line}`"
    );
    // The signal may take a moment.
    std::thread::sleep(Duration::from_secs(1));
}

/// Writes the rows that this rank takes in a step to the file of `DDP_TEST_ROWS`.
pub(crate) fn rows(step: u64, rows: &[u64]) {
    static FILE: OnceLock<Option<Mutex<File>>> = OnceLock::new();
    if !ARE_BUILT_IN {
        return;
    }
    let open = || {
        let name = std::env::var("DDP_TEST_ROWS").ok()?;
        let path = format!("{name}-{}", ddp_comm::likely_rank());
        let file = OpenOptions::new().append(true).create(true).open(&path);
        Some(Mutex::new(file.unwrap_or_else(|error| {
            panic!("cannot open {path}: {error}")
        })))
    };
    if let Some(file) = FILE.get_or_init(open) {
        let rows: Vec<String> = rows.iter().map(u64::to_string).collect();
        let mut file = file.lock().expect("nothing panics under this lock");
        writeln!(file, "{step}: {}", rows.join(" ")).expect("a test has room for its rows");
    }
}

/// Makes this rank disagree on the field of `DDP_TEST_DISAGREE`.
pub(crate) fn disagree(fields: &mut [Field]) {
    if !ARE_BUILT_IN {
        return;
    }
    let text = std::env::var("DDP_TEST_DISAGREE").unwrap_or_default();
    for field in fields {
        if text == format!("{}:{}", ddp_comm::likely_rank(), field.name) {
            field.value += " and something else";
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_parsed() {
        let fault = InjectedFault {
            rank: 1,
            point: FaultPoint::Optimizer,
            step: 3,
            kind: FaultKind::Kill,
        };
        assert_eq!(parse("1:optimizer:3:kill"), Some(fault));
        for wrong in [
            "",
            "1",
            "1:optimizer:3",
            "1:lunch:3:kill",
            "x:log:3:kill",
            "1:log:3:kill:4",
            "1:log:-3:kill",
        ] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn nothing_happens_unless_requested() {
        begin(3);
        at(FaultPoint::Forward).unwrap();
    }
}
