//! What a world starts with: the implementations of its groups, and its part in an elastic job.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use crate::background::Background;
use crate::collective::Collective;
use crate::collective::single::Single;
use crate::error::Result;
use crate::launch::cores::{self, Cores};
use crate::membership::Change;
use crate::membership::client::Client;
use crate::transport::failure::Failure;
use crate::transport::hosts::Hosts;
use crate::transport::messages::Members;
use crate::transport::placement::Placement;
use crate::transport::shared::{Board, Segment, Shared};
use crate::transport::tcp::{Mesh, MeshChannel};
use crate::world::options::Options;
use crate::world::threads::ThreadRank;

/// What connects this rank to the others.
#[derive(Debug)]
pub(super) enum Links {
    Alone,
    Threads(ThreadRank),
    Processes(ProcessRank),
}

impl Links {
    /// All ranks in host memory, on `channel`.
    pub(super) fn collective(&self, channel: usize) -> Result<Arc<dyn Collective>> {
        match self {
            Links::Alone => Ok(Arc::new(Single::default())),
            Links::Threads(rank) => Ok(Arc::new(rank.collective(channel)?)),
            Links::Processes(rank) => rank.collective(channel),
        }
    }
}

/// What a world starts with.
pub(super) struct Start {
    pub(super) links: Links,
    pub(super) failure: Failure,
    pub(super) host_count: usize,
    /// The cores that each rank of this host may run on.
    pub(super) masks: Vec<Cores>,
    /// How many cores the launcher has.
    pub(super) launcher_cores: Option<usize>,
    /// How to undo the launcher's binding to cores.
    pub(super) unbind: &'static str,
    #[cfg(feature = "mpi")]
    pub(super) job: Option<crate::transport::mpi::MpiJob>,
    /// The sockets between hosts, if there are any.
    pub(super) mesh: Option<Arc<Mesh>>,
}

impl Start {
    /// For ranks that are all in this process.
    pub(super) fn in_process(links: Links, failure: Failure) -> Start {
        Start {
            links,
            host_count: 1,
            masks: vec![cores::own_cores(); failure.identity.size],
            launcher_cores: None,
            unbind: "",
            failure,
            #[cfg(feature = "mpi")]
            job: None,
            mesh: None,
        }
    }
}

/// A rank that is a process.
#[derive(Debug)]
pub(super) struct ProcessRank {
    /// Connects several hosts.
    pub(super) base: Option<MeshChannel>,
    pub(super) segment: Segment,
    pub(super) placement: Placement,
    /// Whether the ranks of this host have a core each.
    pub(super) is_roomy: bool,
}

impl ProcessRank {
    fn collective(&self, channel: usize) -> Result<Arc<dyn Collective>> {
        let (segment, placement) = (self.segment.clone(), &self.placement);
        let here = placement.here().to_vec();
        let shared = Shared::new(
            segment,
            channel,
            placement.local_rank,
            here,
            self.is_roomy,
            None,
        )?;
        let Some(base) = &self.base else {
            return Ok(Arc::new(shared));
        };
        let everyone = Members::new(
            base.duplicate(),
            Board::new(&self.segment),
            placement.of_ranks(),
        );
        Ok(Arc::new(Hosts::new(shared, everyone, placement.clone())))
    }
}

/// A rank's part in an elastic job.
#[derive(Clone, Debug)]
pub(super) struct Elastic {
    pub(super) client: Arc<Client>,
    /// Shows the launcher the signs of progress of this rank.
    pub(super) _progress: Arc<Background>,
    pub(super) options: Options,
    /// The number of this generation; 0 for a process that waits to be taken in.
    pub(super) number: u32,
    pub(super) change: Change,
    /// Since when the generation before is over.
    pub(super) over_since: Option<Instant>,
    /// How its latest generation fails.
    pub(super) latest: Arc<Mutex<Option<Arc<Failure>>>>,
}
