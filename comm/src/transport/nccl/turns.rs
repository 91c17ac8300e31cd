//! What the groups of one GPU in this process share: they call NCCL one at a time.
//!
//! NCCL's calls on several communicators of one device must not be made at the same time. Before
//! NCCL 2.26 their work also needs one order over all of them, the same on all ranks: two
//! collectives that each hold a part of the device may otherwise wait for each other. So there is
//! a lock a device, held around each call of NCCL, which remembers the stream of the last call; the
//! next call waits for that stream on the device.
//!
//! Captured calls are ordered within their capture only: eager work that a capture waited for would
//! not be part of the graph. The launch of a graph decides where it stands among eager work.

use std::sync::{Mutex, MutexGuard};

use ddp_kernels::panics;
use ddp_kernels::stream::Stream;
use ddp_kernels::{Device, foreign};

use crate::error::Result;

/// The devices that groups were made for. A process has few, and they stay.
static DEVICES: Mutex<Vec<(Device, &'static Mutex<Turn>)>> = Mutex::new(Vec::new());

/// How many captures of one device are remembered: one a thread is under way, and one that ended
/// never comes again.
const CAPTURES_MAX: usize = 8;

/// Held while a thread calls NCCL.
#[derive(Debug, Default)]
pub(super) struct Turn {
    /// The stream of the last eager call.
    last: Option<Stream>,
    /// The stream of the last call of each capture, by the capture's number.
    captured: Vec<(u64, Stream)>,
}

/// Waits for this thread's turn to call NCCL for `device`.
pub(super) fn of(device: Device) -> MutexGuard<'static, Turn> {
    let turn = {
        let mut devices = panics::lock(&DEVICES);
        match devices.iter().find(|(known, _)| *known == device) {
            Some((_, turn)) => *turn,
            None => {
                let turn: &'static Mutex<Turn> = Box::leak(Box::default());
                devices.push((device, turn));
                turn
            }
        }
    };
    // A turn is valid at any time; a group whose call panicked knows that itself.
    panics::lock(turn)
}

impl Turn {
    /// Makes the next work of `stream` follow that of the last call of any group.
    pub(super) fn follow(&mut self, stream: &Stream) -> Result<()> {
        let Some(capture) = foreign::capture(stream) else {
            if self.last.as_ref() != Some(stream) {
                // A stream that this thread captures by now would draw this one into its capture.
                let is_eager = |last: &&Stream| foreign::capture(last).is_none();
                if let Some(last) = self.last.as_ref().filter(is_eager) {
                    stream.wait(&last.record()?)?;
                }
                self.last = Some(stream.clone());
            }
            return Ok(());
        };
        let known = self
            .captured
            .iter_mut()
            .find(|(known, _)| *known == capture);
        match known {
            Some((_, last)) if last == stream => {}
            Some((_, last)) => {
                stream.wait(&last.record()?)?;
                *last = stream.clone();
            }
            None => {
                if self.captured.len() == CAPTURES_MAX {
                    self.captured.remove(0);
                }
                self.captured.push((capture, stream.clone()));
            }
        }
        Ok(())
    }
}
