//! A rank's view of its job: who it is, groups of all ranks, messages, and how it ends.
//!
//! `connect.rs` finds out what started this rank. Ranks of this program's own launcher meet in
//! `generations.rs`, in elastic jobs once for each generation; ranks of other launchers meet over
//! MPI (`over_mpi.rs`) or TCP. `star.rs` is a meeting over sockets, `meeting.rs` what both kinds
//! have in common, `bootstrap.rs` connects the ranks once they have met, and `between_hosts.rs`
//! those of several hosts. `groups.rs` makes groups of all ranks, `links.rs` has what a world
//! starts with, `options.rs` holds the settings, and `ending.rs` is how the process stops and
//! fails.

mod allocation;
mod between_hosts;
mod bootstrap;
mod connect;
mod ending;
mod generations;
mod groups;
mod links;
mod meeting;
mod options;
#[cfg(feature = "mpi")]
mod over_mpi;
mod star;
pub(crate) mod threads;
mod watch;

use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use ddp_kernels::device::discover;
use ddp_kernels::panics;
use ddp_kernels::stream::Stream;
use ddp_kernels::{Device, Member};

pub use self::ending::HasExitCode;
use self::links::{Elastic, Links, Start};
pub use self::options::Options;
use crate::background::Background;
use crate::collective::group::Group;
use crate::collective::handshake::{Field, handshake};
use crate::error::{RemoteError, Result};
use crate::identity::RankIdentity;
use crate::launch::cores::CoreShare;
use crate::launch::gpus::{GpuTable, Shortage, VisibleGpus, assign};
use crate::say;
use crate::transport::failure::Failure;
use crate::transport::nccl;
use crate::transport::nccl::environment::{self, NcclChoice, RankKind};
use crate::transport::shared::{Board, Segment};
use crate::transport::tcp::Mesh;

/// The channel of the world's own group.
const CONTROL: usize = 0;

/// This process among the ranks of its job.
///
/// Dropped, it waits for the other ranks to end as well, and ends MPI. A rank that ends because of
/// an error calls [`World::fail`] instead.
#[derive(Debug)]
pub struct World {
    links: Links,
    control: Group,
    /// All groups that were made. One that no rank uses any more is given to who asks next.
    made: Mutex<Vec<Group>>,
    timeout: Duration,
    /// At least as long.
    join_timeout: Duration,
    next_channel: AtomicUsize,
    host_count: usize,
    cores: CoreShare,
    /// How to undo a binding to fewer cores than this rank's share.
    unbind: &'static str,
    failure: Arc<Failure>,
    watch: Mutex<Option<Background>>,
    /// The watches of its groups of GPUs.
    gpu_watches: nccl::Watches,
    /// Whether ranks are processes, which have to end together.
    of_processes: bool,
    share_gpus: bool,
    nccl: NcclChoice,
    /// As `device` has found it.
    device: OnceLock<Device>,
    #[cfg(feature = "mpi")]
    job: Option<crate::transport::mpi::MpiJob>,
    mesh: Option<Arc<Mesh>>,
    /// In an elastic job.
    elastic: Option<Elastic>,
}

impl From<&World> for Member {
    fn from(world: &World) -> Member {
        Member {
            rank: world.rank(),
            size: world.size(),
            device: world.device.get().copied(),
        }
    }
}

impl World {
    /// A world of one.
    pub fn single() -> Result<World> {
        World::alone(&Options::default(), Vec::new())
    }

    fn alone(options: &Options, job_ranks: Vec<usize>) -> Result<World> {
        let identity = RankIdentity::in_process(options.program.clone(), 0, 1);
        let board = Board::new(&Segment::in_process(1)?);
        let mut failure = Failure::in_process(identity, board, options.remedy_text);
        failure.job_ranks = job_ranks;
        World::new(Start::in_process(Links::Alone, failure), options)
    }

    /// Ranks that are threads of this process, for tests: give each thread one. With a seed they
    /// have random delays, the same each time. Called while the process has one thread, it makes
    /// NCCL's settings for such ranks.
    pub fn threads(size: usize, seed: Option<u64>, timeout: Duration) -> Result<Vec<World>> {
        let options = Options {
            timeout,
            ..Options::default()
        };
        let world = |rank: threads::ThreadRank| {
            let identity = RankIdentity::in_process(options.program.clone(), rank.rank, size);
            let failure = Failure::in_process(identity, rank.board(), options.remedy_text);
            World::new(Start::in_process(Links::Threads(rank), failure), &options)
        };
        let lookup = |name: &str| std::env::var(name).ok();
        environment::apply(environment::settings(
            RankKind::Threads,
            options.nccl,
            &lookup,
        ));
        let ranks = threads::ranks(&Segment::in_process(size)?, seed);
        ranks.into_iter().map(world).collect()
    }

    fn of_processes(start: Start, options: &Options) -> Result<World> {
        let mut world = World::new(start, options)?;
        world.of_processes = true;
        world.warn_of_narrow_cores();
        Ok(world)
    }

    fn of_generation(start: Start, elastic: Elastic) -> Result<World> {
        let mut world = World::new(start, &elastic.options)?;
        world.of_processes = true;
        *panics::lock(&elastic.latest) = Some(Arc::clone(&world.failure));
        world.elastic = Some(elastic);
        Ok(world)
    }

    /// How this process's job fails: as its latest generation does.
    fn latest_failure(&self) -> Arc<Failure> {
        let latest = self.elastic.as_ref().map(|it| panics::lock(&it.latest));
        let latest = latest.and_then(|it| it.clone());
        latest.unwrap_or_else(|| Arc::clone(&self.failure))
    }

    fn new(start: Start, options: &Options) -> Result<World> {
        let control = start.links.collective(CONTROL)?;
        let local_rank = start.failure.identity.local_rank;
        Ok(World {
            links: start.links,
            control: Group::new(control, "control", options.timeout),
            made: Mutex::default(),
            timeout: options.timeout,
            join_timeout: options.join_timeout.max(options.timeout),
            next_channel: AtomicUsize::new(CONTROL + 1),
            host_count: start.host_count,
            cores: CoreShare::new(&start.masks, local_rank, start.launcher_cores),
            unbind: start.unbind,
            failure: Arc::new(start.failure),
            watch: Mutex::new(None),
            gpu_watches: nccl::Watches::default(),
            of_processes: false,
            share_gpus: options.share_gpus,
            nccl: options.nccl,
            device: OnceLock::new(),
            #[cfg(feature = "mpi")]
            job: start.job,
            mesh: start.mesh,
            elastic: None,
        })
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.failure.identity.rank
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.failure.identity.size
    }

    /// The name of the program ([`Options::program`]).
    pub fn program(&self) -> &str {
        &self.failure.identity.program
    }

    /// This rank among those of its host, from 0.
    pub fn local_rank(&self) -> usize {
        self.failure.identity.local_rank
    }

    /// How many ranks this host has.
    pub fn local_size(&self) -> usize {
        self.failure.identity.local_size
    }

    /// This host's name.
    pub fn host(&self) -> &str {
        &self.failure.identity.host
    }

    /// How many hosts there are.
    pub fn hosts(&self) -> usize {
        self.host_count
    }

    /// How long its groups wait for a rank that shows no progress (`ddp_kernels::heartbeat`).
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Whether several ranks may have the same GPU ([`Options::share_gpus`]).
    pub fn share_gpus(&self) -> bool {
        self.share_gpus
    }

    /// How tensors move: "shared memory", "shared memory and tcp", "alone".
    pub fn transport(&self) -> &'static str {
        self.control.transport()
    }

    /// How many threads this rank should use: the cores it may run on, divided by the number of
    /// ranks that may run on them too.
    pub fn default_threads(&self) -> usize {
        self.cores.threads
    }

    /// The index of this rank's first core among those it may run on. Ranks that may run on the
    /// same cores, and each use `default_threads` cores from there on, do not overlap.
    pub fn core_offset(&self) -> usize {
        self.cores.first_core
    }

    /// How the launcher's binding slows this rank down, and how to undo it; None if the rank has
    /// its share of cores.
    pub fn affinity_note(&self) -> Option<String> {
        let (cores, fair) = self.cores.narrower?;
        let plural = |count: usize| match count {
            1 => "1 core".to_string(),
            _ => format!("{count} cores"),
        };
        Some(format!(
            "rank {} may run on {} only, and its share of this host is {}: the launcher binds ranks \
             to cores; help: undo it with {}",
            self.rank(),
            plural(cores),
            plural(fair),
            self.unbind
        ))
    }

    fn warn_of_narrow_cores(&self) {
        if let Some(note) = self.affinity_note().filter(|_| self.local_rank() == 0) {
            tracing::warn!("{note}");
        }
    }

    /// Returns when all ranks have arrived.
    #[track_caller]
    pub fn barrier(&self) -> Result<()> {
        self.control.barrier(&Stream::default_of(Device::Cpu)?)
    }

    /// Every rank's bytes, in rank order. Lengths may differ.
    #[track_caller]
    pub fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.control.all_gather_bytes(bytes)
    }

    /// Copies rank `root`'s `bytes` to every rank.
    #[track_caller]
    pub fn broadcast_bytes(&self, bytes: &mut Vec<u8>, root: usize) -> Result<()> {
        self.control.broadcast_bytes(bytes, root)
    }

    /// One outcome for all ranks, as in [`Group::share_outcome`].
    #[track_caller]
    pub fn share_outcome(
        &self,
        outcome: Result<&[u8], (u8, String)>,
    ) -> Result<Result<Vec<Vec<u8>>, RemoteError>> {
        self.control.share_outcome(outcome)
    }

    /// Compares `fields` on all ranks. [`crate::Error::Disagree`], the same on all of them, names
    /// the first field that differs, the rank and both values. Every rank calls this at the same
    /// place.
    #[track_caller]
    pub fn handshake(&self, fields: &[Field]) -> Result<()> {
        handshake(&self.control, fields)
    }

    /// The device that this rank trains on: its own GPU if all ranks have one that can be used,
    /// else the CPU, with a warning if there are GPUs. All ranks call this together the first time.
    #[track_caller]
    pub fn device(&self) -> Result<Device> {
        if let Some(device) = self.device.get() {
            return Ok(*device);
        }
        let gpus = self.assign_gpus(1, self.share_gpus)?;
        let own = match &gpus {
            Ok(table) => Ok(table.devices_of(self.rank())[0]),
            Err(shortage) => Err(shortage.to_string()),
        };
        let lacks_nccl = self.size() > 1 && !discover().nccl.is_sound();
        let usable = own.and_then(|device| match Stream::default_of(device) {
            Ok(_) if lacks_nccl => Err("NCCL, which sums over several GPUs, is not found".into()),
            Ok(_) => Ok(device),
            Err(error) => Err(error.to_string()),
        });
        let why = usable.as_ref().err().cloned().unwrap_or_default();
        let troubles = self.all_gather_bytes(why.as_bytes())?;
        let trouble = troubles.iter().find(|trouble| !trouble.is_empty());
        let has_gpus = gpus.map_or_else(|shortage| shortage.table.has_gpus(), |_| true);
        if let (Some(trouble), true, 0) = (trouble, has_gpus, self.rank()) {
            let trouble = String::from_utf8_lossy(trouble);
            let warning = format!("training on the CPU although there are GPUs: {trouble}");
            say::warn(self.program(), &warning);
        }
        let device = match (usable, trouble) {
            (Ok(device), None) => device,
            _ => Device::Cpu,
        };
        Ok(*self.device.get_or_init(|| device))
    }

    /// Which rank has which GPUs, `per_rank` for each: the same table on all ranks, which all call
    /// this at the same place with the same arguments. With `share`, several ranks may have the
    /// same GPU if there are too few.
    ///
    /// The inner error is the same on all ranks. `?` twice makes it an error of this crate.
    #[track_caller]
    pub fn assign_gpus(&self, per_rank: usize, share: bool) -> Result<Result<GpuTable, Shortage>> {
        let help = "ask for the same on all ranks";
        self.handshake(&[
            Field::must_match("the number of GPUs a rank", per_rank, help),
            Field::must_match("whether ranks may share GPUs", share, help),
        ])?;
        let visible = self.all_gather_bytes(&VisibleGpus::own(self.host()).encode())?;
        let visible: Vec<VisibleGpus> = visible.iter().map(|it| VisibleGpus::decode(it)).collect();
        let Some(elastic) = &self.elastic else {
            return Ok(assign(visible, per_rank, share));
        };
        // As if all places on these hosts were taken: each keeps its GPUs, whoever else is lost.
        let ranks = &self.failure.job_ranks;
        let host_of = |rank| elastic.client.host_of(rank);
        let seen_from = |rank: usize| {
            let own = ranks.iter().position(|&it| it == rank);
            let near = || ranks.iter().position(|&it| host_of(it) == host_of(rank));
            own.or_else(near).map(|own| visible[own].clone())
        };
        let all = (0..elastic.client.ranks()).filter_map(|rank| Some((rank, seen_from(rank)?)));
        let (all, seen): (Vec<usize>, Vec<VisibleGpus>) = all.unzip();
        let places = all.iter().enumerate();
        let places = places.filter(|(_, rank)| ranks.contains(rank));
        let places: Vec<usize> = places.map(|(place, _)| place).collect();
        Ok(assign(seen, per_rank, share).map(|table| table.of(&places)))
    }
}

#[cfg(test)]
mod tests;
