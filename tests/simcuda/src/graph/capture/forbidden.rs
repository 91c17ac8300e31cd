//! What a capture forbids to its streams and to others, and how it breaks.

use std::collections::BTreeSet;
use std::thread::{self, ThreadId};

use cudarc::driver::sys::CUstreamCaptureMode;

use super::super::Capture;
use crate::error::CUresult;
use crate::handle::{CaptureId, StreamId};
use crate::machine::Machine;
use crate::report::{self, Stack};
use crate::stream::{self, Order};

/// The capture of a stream that is capturing, unless it is broken.
pub(super) fn valid(machine: &Machine, stream: StreamId) -> Result<CaptureId, CUresult> {
    let own = machine.streams.all[stream]
        .capture
        .as_ref()
        .expect("the caller knows that it is capturing");
    match machine.graphs.captures.ongoing[&own.capture].invalid {
        None => Ok(own.capture),
        Some(_) => Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED),
    }
}

/// For a call that a capturing `stream` cannot take: breaks the capture, reports a finding, and
/// returns the code (900, or 901 if it was broken before). `describe` names the call and may
/// suggest an alternative.
pub(crate) fn unsupported(machine: &mut Machine, stream: StreamId, describe: &str) -> CUresult {
    match valid(machine, stream) {
        Err(code) => code,
        Ok(id) => refuse(
            machine,
            &[id],
            describe,
            CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
        ),
    }
}

/// Breaks captures because of a forbidden call, which is a finding.
fn refuse(machine: &mut Machine, captures: &[CaptureId], call: &str, code: CUresult) -> CUresult {
    let capture = &machine.graphs.captures.ongoing[&captures[0]];
    let others = if capture.thread == thread::current().id() {
        "(its thread may switch to the relaxed mode for a call that has nothing to do with the capture: cuThreadExchangeStreamCaptureMode)"
    } else {
        "(another thread captures, in the mode GLOBAL: THREAD_LOCAL would let this thread alone)"
    };
    let message = format!(
        "{call} is forbidden while stream {} captures, and breaks the capture\n  the capture ({:?}) was begun in {}\n  what it means: the work of a capture is recorded and has not run, so it cannot be waited for, queried, or ordered with what happens now; the call returns {code:?}, and cuStreamEndCapture will return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED\n  help: make the call before cuStreamBeginCapture or after cuStreamEndCapture {others}",
        capture.origin, capture.mode, capture.begun
    );
    for id in captures {
        if let Some(capture) = machine.graphs.captures.ongoing.get_mut(id) {
            capture.invalid.get_or_insert_with(|| call.to_owned());
        }
    }
    report::finding(machine, report::FindingKind::Capture, message);
    code
}

pub(super) fn invalidate(machine: &mut Machine, id: CaptureId, why: &str) {
    if let Some(capture) = machine.graphs.captures.ongoing.get_mut(&id)
        && capture.invalid.is_none()
    {
        eprintln!(
            "simcuda: the capture of stream {} is broken by {why}\n  the capture ({:?}) was begun in {}\n  broken in {}",
            capture.origin,
            capture.mode,
            capture.begun,
            Stack::capture()
        );
        capture.invalid = Some(why.to_owned());
    }
}

/// Refuses the potentially unsafe call `name` (CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED and a finding)
/// while a capture forbids it to the calling thread: its own capture unless relaxed, and global
/// captures of other threads, depending on the thread's mode.
pub(crate) fn forbid(machine: &mut Machine, name: &'static str) -> Result<(), CUresult> {
    use CUstreamCaptureMode as Mode;
    let thread = thread::current().id();
    let own_mode = mode_of(machine, thread);
    if machine.graphs.captures.ongoing.is_empty()
        || own_mode == Mode::CU_STREAM_CAPTURE_MODE_RELAXED
    {
        return Ok(());
    }
    let forbids = |capture: &Capture| {
        if capture.thread == thread {
            capture.mode != Mode::CU_STREAM_CAPTURE_MODE_RELAXED
        } else {
            capture.mode == Mode::CU_STREAM_CAPTURE_MODE_GLOBAL
                && own_mode == Mode::CU_STREAM_CAPTURE_MODE_GLOBAL
        }
    };
    let ongoing = machine.graphs.captures.ongoing.iter();
    let captures: Vec<CaptureId> = ongoing
        .filter(|(_, capture)| forbids(capture))
        .map(|(id, _)| *id)
        .collect();
    if captures.is_empty() {
        return Ok(());
    }
    Err(refuse(
        machine,
        &captures,
        name,
        CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
    ))
}

fn mode_of(machine: &Machine, thread: ThreadId) -> CUstreamCaptureMode {
    let known = machine.graphs.captures.modes.get(&thread).copied();
    known.unwrap_or(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL)
}

/// Sets the mode of the calling thread, and returns the old one.
pub(crate) fn exchange_mode(
    machine: &mut Machine,
    mode: CUstreamCaptureMode,
) -> CUstreamCaptureMode {
    let thread = thread::current().id();
    let before = mode_of(machine, thread);
    machine.graphs.captures.modes.insert(thread, mode);
    before
}

/// The captures in which the given streams take part.
fn of_streams(machine: &Machine, streams: impl Iterator<Item = StreamId>) -> Vec<CaptureId> {
    let captures = streams.filter_map(|stream| machine.streams.all[stream].capture.as_ref());
    let captures: BTreeSet<CaptureId> = captures.map(|own| own.capture).collect();
    captures.into_iter().collect()
}

/// Whether a use of `stream` affects capturing streams: it is the null stream of their device.
pub(crate) fn is_implicit(machine: &Machine, stream: StreamId) -> bool {
    !machine.graphs.captures.ongoing.is_empty()
        && !of_streams(
            machine,
            stream::blocking_of_null(machine, stream).into_iter(),
        )
        .is_empty()
}

/// The null stream cannot be used while a blocking stream of its device captures, since it would
/// depend on work that never runs.
pub(crate) fn check_implicit(machine: &mut Machine, stream: StreamId) -> Result<(), CUresult> {
    if machine.graphs.captures.ongoing.is_empty()
        || machine.streams.all[stream].order != Order::Legacy
    {
        return Ok(());
    }
    let captures = of_streams(
        machine,
        stream::blocking_of_null(machine, stream).into_iter(),
    );
    for id in &captures {
        invalidate(machine, *id, "a use of the null stream");
    }
    if captures.is_empty() {
        Ok(())
    } else {
        Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
    }
}

/// A capturing stream cannot be waited for or queried.
pub(crate) fn check_not_capturing(
    machine: &mut Machine,
    stream: StreamId,
    call: &'static str,
) -> Result<(), CUresult> {
    check_implicit(machine, stream)?;
    if stream::is_capturing(machine, stream) {
        Err(unsupported(machine, stream, call))
    } else {
        Ok(())
    }
}

/// A device with a capturing stream cannot be waited for.
pub(crate) fn check_device_not_capturing(
    machine: &mut Machine,
    device: usize,
    call: &'static str,
) -> Result<(), CUresult> {
    if machine.graphs.captures.ongoing.is_empty() {
        return Ok(());
    }
    let streams = (0..machine.streams.all.len())
        .filter(|stream| stream::device_of(machine, *stream) == device);
    let captures = of_streams(machine, streams);
    if captures.is_empty() {
        return Ok(());
    }
    Err(refuse(
        machine,
        &captures,
        call,
        CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
    ))
}
