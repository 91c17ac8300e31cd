//! How ranks tell each other who they are before they share memory.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;

use crate::error::Result;
use crate::membership::client::Client;
use crate::transport::placement::Placement;
use crate::transport::tcp::Secret;

pub(super) const ACTION: &str = "bring the ranks together";

/// All ranks of a job, seen from one of them. All ranks make the same calls in the same order.
pub(super) trait Meeting {
    fn numbers(&mut self) -> &mut Numbers;

    /// How long ranks wait for each other.
    fn timeout(&self) -> Duration;

    /// The `value` of every rank, by the number with which it came. A value that is too long
    /// becomes null. Ends within `limit`; the error names the ranks that are missing.
    fn exchange_within(&mut self, value: &Value, limit: Duration) -> Result<Vec<Value>>;

    /// An error if these ranks cannot work on several hosts.
    fn check_hosts(&self, _: &Placement) -> Result<()> {
        Ok(())
    }

    /// What this rank needs to connect to those of other hosts.
    fn network(&mut self, placement: &Placement) -> Result<Network>;

    /// The `value` of every rank, by rank.
    fn exchange(&mut self, value: &Value) -> Result<Vec<Value>> {
        let values = self.exchange_within(value, self.timeout())?;
        let order = self.numbers().order.iter();
        Ok(order.map(|&came| values[came].clone()).collect())
    }

    /// This rank.
    fn rank(&mut self) -> usize {
        let Numbers { came_as, order } = self.numbers();
        let rank = order.iter().position(|came| came == came_as);
        rank.expect("every rank has a number")
    }
}

/// How the ranks are numbered.
#[derive(Debug)]
pub(super) struct Numbers {
    /// The number with which this rank came.
    pub(super) came_as: usize,
    /// By rank, the number with which it came.
    pub(super) order: Vec<usize>,
}

impl Numbers {
    /// As they came.
    pub(super) fn new(rank: usize, size: usize) -> Numbers {
        Numbers {
            came_as: rank,
            order: (0..size).collect(),
        }
    }
}

/// What a rank needs to connect to those of other hosts.
#[derive(Debug)]
pub(super) struct Network {
    /// A text that no other job has.
    pub(super) job: String,
    pub(super) secret: Secret,
    /// Where other hosts may reach this one.
    pub(super) addresses: Vec<IpAddr>,
    /// In an elastic job.
    pub(super) client: Option<Arc<Client>>,
}
