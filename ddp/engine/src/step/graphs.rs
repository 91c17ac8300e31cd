//! Which steps are captured as CUDA graphs, and launched from then on.
//!
//! A graph holds its operands. So there is one graph for each memory that batches are in (the
//! loader's two slots), for each number of rows and their length, and with and without measuring
//! the norm. The first step of a kind runs eagerly and makes all memory, plans and kernels that the
//! kind needs. The second is captured and launched, and later ones are launched. Other batches,
//! such as an epoch's short last one, run eagerly each time.
//!
//! Ranks decide alike: what is captured follows from the global batch and from earlier steps, never
//! from a rank's own rows, and a capture counts only if it succeeded on all ranks.

use ddp_comm::Group;
use ddp_data::{Batch, SlotId};
use ddp_kernels::graph::Graph;
use ddp_kernels::stream::Stream;
use ddp_kernels::trace::{self, Label, Lane};
use ddp_kernels::{Device, Error as TensorError};

use crate::error::{Error, Result};
use crate::setting::{DEVICE, GRAPH};

ddp_kernels::choices! {
    /// Whether steps are captured as CUDA graphs.
    #[derive(Default)]
    pub enum GraphChoice {
        /// On a GPU, unless the layers are split over several
        #[default]
        Auto = "auto",
        /// Always; it is an error if a step cannot be captured
        On = "on",
        /// Never
        Off = "off",
    }
}

/// What a trace shows of a step that is launched as a graph.
pub(super) const CAPTURED: Label = Label::new(Lane::Captured, "captured step");

/// Refuses graphs on the CPU.
pub fn check_graph(choice: GraphChoice, device: Device) -> Result<()> {
    if choice == GraphChoice::On && !device.is_accelerator() {
        let text = format!(
            "{GRAPH} on: expected {DEVICE} cuda: graphs are CUDA's; help: leave {GRAPH} out, or train on a GPU"
        );
        return Err(Error::Usage(text));
    }
    Ok(())
}

/// The most kinds of steps that are kept: the loader's two slots, with and without the norm, for
/// 16 sizes. Rows of 8,192 tokens that are cut short have as many lengths.
const KINDS_MAX: usize = 64;

/// Steps that do the same work on the same memory.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct StepKind {
    slot: SlotId,
    rows: usize,
    /// The elements of their inputs.
    elements: usize,
    /// This rank's, and the most of any rank: ranks may reduce each.
    micro_batches: [usize; 2],
    measures_norm: bool,
    /// A graph is launched on the stream it was captured on.
    stream: Stream,
}

/// How to run a step.
#[derive(Debug)]
pub(super) enum StepMode<'a> {
    Eager,
    /// With `StepGraphs::capture`.
    Capture(StepKind),
    Launch(&'a Graph),
}

/// The graphs of a model's steps.
#[derive(Debug)]
pub(super) struct StepGraphs {
    /// None if nothing is captured.
    device: Option<Device>,
    ranks: u64,
    /// Whether a step that cannot be captured is an error.
    insists: bool,
    /// The kinds that have run eagerly, with their graphs once captured.
    known: Vec<(StepKind, Option<Graph>)>,
}

impl StepGraphs {
    /// Graphs of steps on `device`, the last of `devices`, on one of `ranks` ranks.
    pub(super) fn new(
        choice: GraphChoice,
        device: Device,
        devices: usize,
        ranks: usize,
    ) -> Result<StepGraphs> {
        // Captured collectives of several devices of one process can deadlock in NCCL.
        if devices > 1 && choice == GraphChoice::On {
            return Err(Error::Usage(format!(
                "{GRAPH} on: expected a step on one device, got {devices} devices in one process; \
                 help: use {GRAPH} auto, which runs such steps eagerly, or one device per rank"
            )));
        }
        check_graph(choice, device)?;
        let captures = devices == 1 && device.is_accelerator() && choice != GraphChoice::Off;
        Ok(StepGraphs {
            device: captures.then_some(device),
            ranks: ranks as u64,
            insists: choice == GraphChoice::On,
            known: Vec::with_capacity(KINDS_MAX),
        })
    }

    /// How many kinds of steps are captured. None if steps are not captured at all.
    pub(super) fn count(&self) -> Option<usize> {
        let captured = self.known.iter().filter(|(_, graph)| graph.is_some());
        self.device.map(|_| captured.count())
    }

    /// A graph of a step, if there is one yet.
    pub(super) fn any(&self) -> Option<&Graph> {
        self.known.iter().find_map(|(_, graph)| graph.as_ref())
    }

    /// How to run the next step, which is on `batch`.
    pub(super) fn mode(&mut self, batch: &Batch, measures_norm: bool) -> Result<StepMode<'_>> {
        let (Some(device), Some(slot)) = (self.device, batch.slot()) else {
            return Ok(StepMode::Eager);
        };
        let kind = StepKind {
            slot,
            rows: batch.mine,
            elements: batch.x.count(),
            micro_batches: [
                batch.micro_count(),
                batch.micro_count_max(self.ranks as usize),
            ],
            measures_norm,
            stream: Stream::current(device)?,
        };
        let Some(index) = self.known.iter().position(|(known, _)| *known == kind) else {
            // A step in which a rank has no rows does different work there.
            if self.known.len() < KINDS_MAX && batch.rows >= self.ranks {
                self.known.push((kind, None));
            }
            return Ok(StepMode::Eager);
        };
        Ok(match &self.known[index].1 {
            Some(graph) => StepMode::Launch(graph),
            None => StepMode::Capture(kind),
        })
    }

    /// Captures `work` as the graph of `kind` and launches it. If a rank of `group` cannot capture
    /// it, and that is not an error, runs `work` eagerly and captures nothing any more.
    pub(super) fn capture(
        &mut self,
        kind: StepKind,
        group: &Group,
        mut work: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        let why = match Graph::capture(&kind.stream, &mut work) {
            Ok(graph) if group.all_agree(true)? => {
                trace::record_on(kind.stream.device(), CAPTURED, || graph.launch())?;
                let known = self.known.iter_mut().find(|(known, _)| *known == kind);
                if let Some((_, known)) = known {
                    *known = Some(graph);
                }
                return Ok(());
            }
            Ok(_) => "another rank cannot capture it".to_string(),
            Err(error) if !self.insists && is_of_capturing(&error) => {
                group.all_agree(false)?;
                error.to_string()
            }
            Err(error) => return Err(error),
        };
        tracing::warn!(
            "the step cannot be captured as a graph and runs eagerly from here on: {why}; \
             help: use {GRAPH} off if that is intended"
        );
        self.device = None;
        self.known.clear();
        work()
    }

    /// Forgets all graphs, because memory that they read has moved.
    pub(super) fn forget(&mut self) {
        self.known.clear();
    }
}

/// Whether a graph cannot hold the work, or the driver cannot capture it. Any other error would
/// happen in an eager step too.
fn is_of_capturing(error: &Error) -> bool {
    let (Error::Tensor(error) | Error::Comm(ddp_comm::Error::Tensor(error))) = error else {
        return false;
    };
    matches!(error, TensorError::Capture { .. } | TensorError::Cuda(_))
}
