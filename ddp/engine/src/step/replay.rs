//! Which steps are captured, and launched as a whole from then on.
//!
//! A graph holds its operands. So there is one for each memory that batches lie in (the loader's two slots), for each size, and
//! with and without the measuring of the norm. The first step of a kind runs eagerly: it makes all the memory, plans and kernels
//! that the kind needs. The second is captured and launched, the others are launches. Batches that lie elsewhere, or whose size is
//! not the usual one (an epoch's short batch), run eagerly each time.
//!
//! Whether a step is captured is the same on all ranks: it follows from the global batch and from the steps before, never from a rank's
//! own rows, and a capture counts only if it went well on all of them. So no rank launches a graph while another runs eagerly.

use ddp_kernels::stream::{Graph, Stream};
use ddp_kernels::{Device, Error as TensorError};

use crate::error::{Error, Result};
use ddp_data::{Batch, SlotId};

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

/// Refuses graphs where there are none.
pub fn check_graph(choice: GraphChoice, device: Device) -> Result<()> {
    if choice == GraphChoice::On && !device.is_accelerator() {
        let text = "`graph` on: expected `device` cuda: graphs are CUDA's; help: leave `graph` out, or train on a GPU";
        return Err(Error::Usage(text.into()));
    }
    Ok(())
}

/// The most kinds that are kept: a loader's two slots, with and without the norm, twice over.
const KINDS_MAX: usize = 8;

/// Steps that do the same to the same memory.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Kind {
    slot: SlotId,
    rows: usize,
    micro_batches: usize,
    measures_norm: bool,
    /// A graph is launched on the stream it was captured on.
    stream: Stream,
}

/// What is known of a kind.
#[derive(Debug)]
enum Known {
    /// It has run once.
    Seen,
    Captured(Graph),
}

/// What to do with a step.
#[derive(Debug)]
pub(super) enum Way {
    Eagerly,
    /// Capture it, and call `keep`.
    Capture(Kind),
    /// It is under way: a graph of its kind was launched.
    Launched,
}

/// The graphs of a step.
#[derive(Debug)]
pub(super) struct Graphs {
    /// None where nothing is captured.
    device: Option<Device>,
    ranks: u64,
    /// Whether what cannot be captured is an error.
    insists: bool,
    known: Vec<(Kind, Known)>,
}

impl Graphs {
    /// Graphs as asked for, of steps of one of `ranks` ranks on `device`.
    pub(super) fn new(choice: GraphChoice, device: Device, ranks: usize) -> Result<Graphs> {
        check_graph(choice, device)?;
        let captures = match choice {
            GraphChoice::Auto => device.is_accelerator(),
            GraphChoice::On => true,
            GraphChoice::Off => false,
        };
        Ok(Graphs {
            device: captures.then_some(device),
            ranks: ranks as u64,
            insists: choice == GraphChoice::On,
            known: Vec::with_capacity(KINDS_MAX),
        })
    }

    /// Steps over several devices of one process are not captured: collectives of several devices in graphs may wait for each
    /// other for ever.
    pub(super) fn of_several(choice: GraphChoice, devices: usize) -> Result<Graphs> {
        if choice == GraphChoice::On {
            return Err(Error::Usage(format!(
                "a step over {devices} devices of one process: expected --graph auto or off, got on. Such steps run operation by \
                 operation; train with one device a rank to capture them"
            )));
        }
        Ok(Graphs::none())
    }

    /// No step is captured.
    pub(super) fn none() -> Graphs {
        Graphs {
            device: None,
            ranks: 1,
            insists: false,
            known: Vec::new(),
        }
    }

    /// Whether any step is captured.
    pub(super) fn is_on(&self) -> bool {
        self.device.is_some()
    }

    /// How many kinds of steps were captured.
    pub(super) fn count(&self) -> usize {
        self.known
            .iter()
            .filter(|(_, known)| matches!(known, Known::Captured(_)))
            .count()
    }

    /// What to do with a step on `batch`. `before_launch` is done before a graph is launched.
    pub(super) fn way(
        &mut self,
        batch: &Batch,
        measures_norm: bool,
        before_launch: impl FnOnce() -> Result<()>,
    ) -> Result<Way> {
        let (Some(device), Some(slot)) = (self.device, batch.slot()) else {
            return Ok(Way::Eagerly);
        };
        let stream = Stream::current(device)?;
        let (rows, micro_batches) = (batch.mine, batch.micro_count());
        let kind = Kind {
            slot,
            rows,
            micro_batches,
            measures_norm,
            stream,
        };
        match self.known.iter().find(|(other, _)| *other == kind) {
            Some((_, Known::Captured(graph))) => {
                before_launch()?;
                graph.launch()?;
                Ok(Way::Launched)
            }
            Some((_, Known::Seen)) => Ok(Way::Capture(kind)),
            None => {
                // A rank without rows does something else.
                if self.known.len() < KINDS_MAX && batch.rows >= self.ranks {
                    self.known.push((kind, Known::Seen));
                }
                Ok(Way::Eagerly)
            }
        }
    }

    /// Captures `work` as that of `kind`, and launches it. `agree` says whether all ranks could. False if it cannot be captured and nobody
    /// insists: then nothing was run, and nothing is captured any more.
    pub(super) fn capture(
        &mut self,
        kind: Kind,
        work: impl FnOnce() -> Result<()>,
        agree: impl FnOnce(bool) -> Result<bool>,
    ) -> Result<bool> {
        let why = match Graph::capture(&kind.stream, work) {
            Ok(graph) => {
                if agree(true)? {
                    graph.launch()?;
                    if let Some((_, known)) =
                        self.known.iter_mut().find(|(other, _)| *other == kind)
                    {
                        *known = Known::Captured(graph);
                    }
                    return Ok(true);
                }
                "another rank cannot capture it".to_string()
            }
            Err(error) if !self.insists && is_of_capturing(&error) => {
                agree(false)?;
                error.to_string()
            }
            Err(error) => return Err(error),
        };
        tracing::warn!(
            "the step cannot be captured, and is run operation by operation from here on: {why} (--graph off says that this is meant)"
        );
        self.device = None;
        self.known.clear();
        Ok(false)
    }

    /// Forgets all graphs: what they read has moved.
    pub(super) fn forget(&mut self) {
        self.known.clear();
    }
}

/// What a graph cannot hold, or the driver does not do. Any other error would be one of the step run eagerly too.
fn is_of_capturing(error: &Error) -> bool {
    let (Error::Tensor(error) | Error::Comm(ddp_comm::Error::Tensor(error))) = error else {
        return false;
    };
    matches!(error, TensorError::Capture { .. } | TensorError::Cuda(_))
}
