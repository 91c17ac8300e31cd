//! Faults on purpose, for tests of how a job ends. Nothing happens unless these variables are set:
//!
//! - `DDP_TEST_FAULT=RANK:PLACE:STEP:KIND`, a place of [`Place`], a kind of `Kind`, as in
//!   `1:optimizer:3:kill`; several are separated by commas
//! - `DDP_TEST_ROWS=FILE`: each rank writes the rows of each batch to FILE-RANK, a line a step
//! - `DDP_TEST_DISAGREE=RANK:FIELD`: that rank sends another value in the handshake, as in `1:the
//!   plan of buckets`

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use ddp_comm::Field;

use crate::error::{Error, Result};

/// Where in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Before the data are read: step 0.
    Setup,
    Forward,
    Reduction,
    Optimizer,
    Log,
    /// Before what is saved is copied aside.
    Snapshot,
    /// While a checkpoint is written, beside training.
    Save,
}

/// What happens there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// The process is killed, as by the system when memory is out.
    Kill,
    /// The process is stopped, as by somebody's Ctrl-Z.
    Stop,
    /// The process is asked to stop, as by a scheduler.
    Term,
    /// A panic.
    Panic,
    /// An error is returned.
    Error,
    /// It never comes back.
    Hang,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Fault {
    rank: usize,
    place: Place,
    step: u64,
    kind: Kind,
}

/// The step that is being taken, where there is a fault to come.
static STEP: AtomicU64 = AtomicU64::new(0);

/// Those of this rank.
fn faults() -> &'static [Fault] {
    static FAULTS: OnceLock<Vec<Fault>> = OnceLock::new();
    let read = |text: &str| {
        let fault = parse(text);
        if fault.is_none() {
            tracing::warn!("DDP_TEST_FAULT={text} is not RANK:PLACE:STEP:KIND, and is ignored");
        }
        fault.filter(|fault| fault.rank == ddp_comm::likely_rank())
    };
    FAULTS.get_or_init(|| {
        std::env::var("DDP_TEST_FAULT").map_or(Vec::new(), |text| {
            text.split(',').filter_map(read).collect()
        })
    })
}

fn parse(text: &str) -> Option<Fault> {
    let mut parts = text.split(':');
    let mut part = || parts.next();
    let rank = part()?.parse().ok()?;
    let place = match part()? {
        "setup" => Place::Setup,
        "forward" => Place::Forward,
        "reduction" => Place::Reduction,
        "optimizer" => Place::Optimizer,
        "log" => Place::Log,
        "snapshot" => Place::Snapshot,
        "save" => Place::Save,
        _ => return None,
    };
    let step = part()?.parse().ok()?;
    let kind = match part()? {
        "kill" => Kind::Kill,
        "stop" => Kind::Stop,
        "term" => Kind::Term,
        "panic" => Kind::Panic,
        "error" => Kind::Error,
        "hang" => Kind::Hang,
        _ => return None,
    };
    part().is_none().then_some(Fault {
        rank,
        place,
        step,
        kind,
    })
}

/// Step `step` begins.
pub(crate) fn begin(step: u64) {
    if !faults().is_empty() {
        STEP.store(step, Ordering::Relaxed);
    }
}

/// Does what was asked for, if this is the place.
pub(crate) fn at(place: Place) -> Result<()> {
    at_step(place, STEP.load(Ordering::Relaxed))
}

/// As `at`, of something that belongs to step `step` whatever step is being taken.
pub(crate) fn at_step(place: Place, step: u64) -> Result<()> {
    let Some(fault) = faults()
        .iter()
        .find(|fault| fault.place == place && fault.step == step)
    else {
        return Ok(());
    };
    let text = format!("a fault on purpose in {place:?} of step {}", fault.step);
    match fault.kind {
        Kind::Kill => signal("KILL"),
        Kind::Stop => signal("STOP"),
        Kind::Term => signal("TERM"),
        Kind::Panic => panic!("{text}"),
        Kind::Error => return Err(Error::Data(text)),
        Kind::Hang => loop {
            std::thread::sleep(Duration::from_secs(3600));
        },
    }
    Ok(())
}

fn signal(name: &str) {
    // The shell's own kill: a small system has no other.
    let line = format!("kill -s {name} {}", std::process::id());
    let status = Command::new("sh").args(["-c", &line]).status();
    assert!(
        status.is_ok_and(|status| status.success()),
        "cannot run `{line}`"
    );
    // The signal is on its way.
    std::thread::sleep(Duration::from_secs(1));
}

/// Writes down which rows this rank takes in a step, if that was asked for.
pub(crate) fn rows(step: u64, rows: &[u64]) {
    static FILE: OnceLock<Option<Mutex<File>>> = OnceLock::new();
    let open = || {
        let path = format!(
            "{}-{}",
            std::env::var("DDP_TEST_ROWS").ok()?,
            ddp_comm::likely_rank()
        );
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

/// Makes this rank disagree on one field, if that was asked for.
pub(crate) fn disagree(fields: &mut [Field]) {
    let Ok(text) = std::env::var("DDP_TEST_DISAGREE") else {
        return;
    };
    let Some((rank, name)) = text.split_once(':') else {
        return;
    };
    if rank == ddp_comm::likely_rank().to_string() {
        fields
            .iter_mut()
            .filter(|field| field.name == name)
            .for_each(|field| field.value += " and something else");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_reads_as_it_is_written() {
        let fault = Fault {
            rank: 1,
            place: Place::Optimizer,
            step: 3,
            kind: Kind::Kill,
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
    fn nothing_happens_unless_asked_for() {
        begin(3);
        at(Place::Forward).unwrap();
    }
}
