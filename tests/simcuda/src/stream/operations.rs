//! Operations: what a stream was asked to do or a host call did, kept so that a finding can name it
//! long afterwards.

use std::collections::{HashSet, VecDeque};
use std::fmt;
use std::sync::Arc;

use crate::handle::{OperationId, StreamId};
use crate::report::Stack;

/// One thing that was asked for.
#[derive(Clone, Debug)]
pub struct Operation {
    /// Given out in the order of the calls.
    pub id: OperationId,
    /// What it is: `kernel relu_f32<<<4, 256>>>`.
    pub describe: Arc<str>,
    /// Where it was queued; None for what a host call did itself.
    pub stream: Option<StreamId>,
    /// The device that it is for.
    pub device: usize,
    /// Of its stream; a node of a graph has that of the stream it was captured in only if the graph
    /// was instantiated with USE_NODE_PRIORITY.
    pub priority: i32,
    /// The host call that queued it: for a graph node, the launch.
    pub stack: Stack,
    /// For a node of a graph, the operation that was captured.
    pub captured: Option<Arc<Operation>>,
}

impl Operation {
    /// The call that queued it, and for a graph node also the captured call.
    pub fn origin(&self) -> String {
        match &self.captured {
            None => format!("queued in {}", self.stack),
            Some(captured) => format!(
                "launched in {}\n  captured in {}",
                self.stack, captured.stack
            ),
        }
    }
}

impl fmt::Display for Operation {
    /// One line: what, where.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "operation {}, {}", self.id, self.describe)?;
        match (self.stream, &self.captured) {
            (Some(stream), None) => {
                write!(formatter, ", on stream {stream} of device {}", self.device)
            }
            (Some(stream), Some(captured)) => write!(
                formatter,
                ", a node of a graph (captured as operation {}) launched on stream {stream}, on device {}",
                captured.id, self.device
            ),
            (None, _) => write!(formatter, ", by a host call for device {}", self.device),
        }
    }
}

/// How many operations are remembered: a finding names two, which are rarely further apart.
const REMEMBERED: usize = 1 << 19;

/// The last operations. Equal descriptions are kept once, since training loops repeat them for
/// hours.
#[derive(Debug, Default)]
pub(super) struct Operations {
    // Consecutive ids: the first is `next - kept.len()`.
    kept: VecDeque<Arc<Operation>>,
    next: OperationId,
    descriptions: HashSet<Arc<str>>,
}

impl Operations {
    pub(super) fn make(
        &mut self,
        describe: &str,
        stream: Option<StreamId>,
        (device, priority): (usize, i32),
        stack: Stack,
        captured: Option<Arc<Operation>>,
    ) -> Arc<Operation> {
        let describe = self.shared(describe);
        let operation = Arc::new(Operation {
            id: self.next,
            describe,
            stream,
            device,
            priority,
            stack,
            captured,
        });
        self.next += 1;
        if self.kept.len() == REMEMBERED {
            self.kept.pop_front();
        }
        self.kept.push_back(operation.clone());
        operation
    }

    pub(super) fn get(&self, id: OperationId) -> Option<Arc<Operation>> {
        let first = self.next - self.kept.len() as u64;
        self.kept
            .get(usize::try_from(id.checked_sub(first)?).ok()?)
            .cloned()
    }

    fn shared(&mut self, describe: &str) -> Arc<str> {
        if let Some(known) = self.descriptions.get(describe) {
            return known.clone();
        }
        // Descriptions with addresses never repeat: the set must not grow without bound.
        if self.descriptions.len() >= 1 << 16 {
            self.descriptions.clear();
        }
        let new: Arc<str> = describe.into();
        self.descriptions.insert(new.clone());
        new
    }
}
