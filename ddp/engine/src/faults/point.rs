//! Where faults can be injected.

/// A point of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FaultPoint {
    /// Before the data are read: step 0.
    Setup,
    /// Before the forward of each micro-batch.
    Forward,
    /// Before each reduction of gradients.
    Reduction,
    /// Before the update.
    Optimizer,
    /// Before the log.
    Log,
    /// Before the tensors of a checkpoint are copied aside.
    Snapshot,
    /// While a thread writes a checkpoint.
    Save,
}
