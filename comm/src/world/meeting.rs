//! How ranks tell each other who they are before they share memory.

use serde_json::Value;

use crate::error::Result;
use crate::transport::messages::Comm;
use crate::transport::placement::Placement;

/// All ranks of a job, seen from one of them. All ranks make the same calls in the same order.
pub(super) trait Meeting {
    /// This rank.
    fn rank(&self) -> usize;

    /// The `value` of every rank. A value that is too long becomes null. Ends within the timeout;
    /// the error names the ranks that are missing.
    fn exchange(&mut self, value: &Value) -> Result<Vec<Value>>;

    /// Numbers the ranks anew: rank `order[i]` becomes rank `i`.
    fn renumber(&mut self, order: &[usize]) -> Result<()>;

    /// An error if these ranks cannot work on several hosts.
    fn check_hosts(&self, placement: &Placement) -> Result<()>;

    /// A new communicator between the ranks, which are on several hosts: `names` has each rank's.
    fn messages(&mut self, placement: &Placement, names: &[&str]) -> Result<Comm>;
}
