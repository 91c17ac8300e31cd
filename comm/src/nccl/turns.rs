//! One at a time on each device: what the groups of one GPU in this process share.
//!
//! NCCL's calls on several communicators of one device must not be made at the same time, and before NCCL 2.26 their work needs one order over all
//! of them, the same on all ranks: two collectives that each hold a part of the device may else wait for each other for ever. So
//! the table below has a lock a device, held around each call of NCCL's, and remembers where the last call's work went: the next one waits
//! for it on the device, whichever group's it is.
//!
//! What is captured is put in order within its capture alone. A capture's streams mean nothing outside it, and eager work that it waited for would
//! be no part of the graph: where a graph as a whole stands among eager work its launch says.

use std::sync::{Mutex, MutexGuard, PoisonError};

use ddp_kernels::stream::Stream;
use ddp_kernels::{Device, foreign};

use crate::error::Result;

/// The devices that groups were made for. They stay: a process has few.
static DEVICES: Mutex<Vec<(Device, &'static Mutex<Turn>)>> = Mutex::new(Vec::new());

/// Captures of one device that are remembered. One a thread is under way, and one that ended is never met again.
const CAPTURES_MAX: usize = 8;

/// Held by the one whose turn it is.
#[derive(Debug, Default)]
pub(super) struct Turn {
    /// The stream of the last eager call.
    last: Option<Stream>,
    /// That of the last call of each capture, by the capture's number.
    captured: Vec<(u64, Stream)>,
}

/// Waits for this thread's turn to call NCCL for `device`.
pub(super) fn of(device: Device) -> MutexGuard<'static, Turn> {
    let turn = {
        let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
        match devices.iter().find(|(known, _)| *known == device) {
            Some((_, turn)) => *turn,
            None => {
                let turn: &'static Mutex<Turn> = Box::leak(Box::default());
                devices.push((device, turn));
                turn
            }
        }
    };
    // What it protects is whole at any time; a group whose call panicked knows that by itself.
    turn.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Turn {
    /// The work that `stream` is given next comes after that of the last call, of whichever group.
    pub(super) fn follow(&mut self, stream: &Stream) -> Result<()> {
        let last = match foreign::capture(stream) {
            None => &mut self.last,
            Some(capture) => match self.captured.iter().position(|(known, _)| *known == capture) {
                Some(index) => {
                    if self.captured[index].1 != *stream {
                        stream.wait(&self.captured[index].1.record()?)?;
                        self.captured[index].1 = stream.clone();
                    }
                    return Ok(());
                }
                None => {
                    if self.captured.len() == CAPTURES_MAX {
                        self.captured.remove(0);
                    }
                    self.captured.push((capture, stream.clone()));
                    return Ok(());
                }
            },
        };
        if last.as_ref() != Some(stream) {
            // One that this thread captures by now would draw this stream into its capture.
            if let Some(last) = last.as_ref().filter(|last| foreign::capture(last).is_none()) {
                stream.wait(&last.record()?)?;
            }
            *last = Some(stream.clone());
        }
        Ok(())
    }
}
