//! Who this process is among the ranks of a job, and how ranks come together: alone, as threads, or under a launcher.
//!
//! A world gives out groups, over all ranks and independent of each other, and is itself the ranks' control plane for
//! bytes. How a job ends is in `failure.rs` and `watch.rs`.

#[cfg(feature = "mpi")]
mod bootstrap;
#[cfg(feature = "mpi")]
mod guard;

use std::panic::Location;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ddp_kernels::error::Site;
use ddp_kernels::stream::Stream;
use ddp_kernels::{Device, Tensor};

use crate::collective::Collective;
use crate::error::{Argument, Error, Result};
use crate::failure::Failure;
use crate::group::Group;
use crate::launcher;
use crate::nccl;
use crate::nccl::environment::{self, Ranks};
use crate::share::{self, Share};
use crate::shared::{Board, Segment};
use crate::single::Single;
use crate::threads::{self, ThreadRank};
use crate::watch::Watch;
#[cfg(feature = "mpi")]
pub(crate) use guard::{is_first_of_host, launcher_folder, turn};

/// How ranks of several processes move tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// Shared memory within a host, MPI between hosts.
    #[default]
    Auto,
    /// Shared memory alone: an error where ranks are on several hosts.
    SharedMemory,
    /// MPI alone, also within a host.
    Mpi,
}

/// How to connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// How long a rank waits for the others before it says which did not come.
    pub timeout: Duration,
    /// How tensors move.
    pub transport: Transport,
    /// The name that begins the line which says why a job ended: by itself that of the file that runs.
    pub program: String,
    /// Whether several ranks may have the same GPU: for tests, never for speed.
    pub share_gpus: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            timeout: Duration::from_secs(600),
            transport: Transport::Auto,
            program: own_name(),
            share_gpus: false,
        }
    }
}

/// The name of the file that this process runs.
fn own_name() -> String {
    let path = std::env::args_os().next().map(std::path::PathBuf::from).unwrap_or_default();
    path.file_name().map_or_else(|| "ddp".into(), |name| name.to_string_lossy().into_owned())
}

/// The most bytes that `all_gather_bytes` and `broadcast_bytes` bring to a rank: they are for words, not for tensors.
const BYTES_MAX: usize = 4 << 30;

/// Groups that a world can give out, one of them its own.
const GROUPS_MAX: usize = crate::shared::CHANNELS;
/// The channel of the world's own group.
const CONTROL: usize = 0;

/// This process among the ranks of its job.
///
/// Dropped, it waits for the other ranks to come to the same place, and ends MPI; a rank that ends because of an error calls
/// [`World::fail`] instead.
#[derive(Debug)]
pub struct World {
    links: Links,
    control: Group,
    timeout: Duration,
    groups: AtomicUsize,
    host_count: usize,
    share: Share,
    /// How to lift a binding to fewer cores than this rank's share.
    unbind: &'static str,
    failure: Arc<Failure>,
    watch: Mutex<Option<Watch>>,
    /// Those of its groups of GPUs.
    gpu_watches: nccl::Watches,
    /// Whether ranks are processes, which have to end together.
    of_processes: bool,
    /// Whether several ranks may have the same GPU.
    share_gpus: bool,
    #[cfg(feature = "mpi")]
    job: Option<crate::mpi::Job>,
}

/// How groups are made.
#[derive(Debug)]
enum Links {
    Alone,
    Threads(ThreadRank),
    #[cfg(feature = "mpi")]
    Mpi(bootstrap::Wide),
}

impl Links {
    fn collective(&self, channel: usize) -> Result<Arc<dyn Collective>> {
        match self {
            Links::Alone => Ok(Arc::new(Single::default())),
            Links::Threads(rank) => Ok(Arc::new(rank.collective(channel)?)),
            #[cfg(feature = "mpi")]
            Links::Mpi(wide) => wide.collective(channel),
        }
    }
}

impl World {
    /// Brings the ranks of this job together. A process that no MPI launcher started, or that was started alone, is a world
    /// of one, and is warned if a scheduler started several like it.
    ///
    /// Call it first in `main`, before there are other threads: under Open MPI on one host it keeps MPI's sockets off the
    /// network and its files out of /dev/shm by settings that it may only make then.
    ///
    /// An error that all ranks find is told on rank 0; the others get [`Error::PeerFailed`], which nobody need print.
    pub fn connect(options: &Options) -> Result<World> {
        let lookup = |name: &str| std::env::var(name).ok();
        let launch = launcher::Launch::detect(&lookup);
        #[cfg(feature = "mpi")]
        let mpi_started = if let Some(launch) = launch.filter(|launch| !launch.is_of_one()) {
            if let Some(world) = bootstrap::connect(options, &launch)? {
                return Ok(world);
            }
            true
        } else {
            false
        };
        #[cfg(not(feature = "mpi"))]
        let mpi_started = false;
        if let Some(warning) = launcher::alone_warning(&lookup, cfg!(feature = "mpi"), mpi_started) {
            tracing::warn!("{warning}");
        }
        environment::apply(environment::settings(Ranks::Alone, &lookup));
        let mut world = World::alone(options)?;
        if let Some(launch) = launch {
            world.share = share::share(&[share::own_cores()], 0, share::launcher_cores());
            world.unbind = launch.unbind(&lookup);
        }
        world.warn_of_narrow_cores();
        Ok(world)
    }

    /// A world of one.
    pub fn single() -> Result<World> {
        World::alone(&Options::default())
    }

    fn alone(options: &Options) -> Result<World> {
        let segment = Segment::in_process(1)?;
        let failure = Failure { program: options.program.clone(), ..local_failure(Board::new(&segment), 0, 1) };
        let mut world = World::new(Links::Alone, options.timeout, 1, failure, vec![share::own_cores()])?;
        world.share_gpus = options.share_gpus;
        Ok(world)
    }

    /// Ranks that are threads of this process, for tests: give each thread one. With a seed they dawdle at random, the same
    /// way each time. Called while the process has one thread, it makes NCCL's settings for such ranks.
    pub fn threads(size: usize, seed: Option<u64>, timeout: Duration) -> Result<Vec<World>> {
        let world = |rank: ThreadRank| {
            let failure = local_failure(rank.board().clone(), rank.rank(), size);
            World::new(Links::Threads(rank), timeout, 1, failure, vec![share::own_cores(); size])
        };
        let lookup = |name: &str| std::env::var(name).ok();
        environment::apply(environment::settings(Ranks::Threads, &lookup));
        threads::ranks(size, seed, timeout)?.into_iter().map(world).collect()
    }

    /// A world whose ranks on this host may run on the cores `masks`.
    fn new(
        links: Links,
        timeout: Duration,
        host_count: usize,
        failure: Failure,
        masks: Vec<share::Cores>,
    ) -> Result<World> {
        let control = Group::new(links.collective(CONTROL)?, "control", timeout);
        Ok(World {
            links,
            control,
            timeout,
            groups: AtomicUsize::new(CONTROL + 1),
            host_count,
            share: share::share(&masks, failure.local_rank, None),
            unbind: "",
            failure: Arc::new(failure),
            watch: Mutex::new(None),
            gpu_watches: nccl::Watches::default(),
            of_processes: false,
            share_gpus: false,
            #[cfg(feature = "mpi")]
            job: None,
        })
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.failure.rank
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.failure.size
    }

    /// This rank among those of its host, from 0.
    pub fn local_rank(&self) -> usize {
        self.failure.local_rank
    }

    /// How many ranks this host has.
    pub fn local_size(&self) -> usize {
        self.failure.local_size
    }

    /// This host's name.
    pub fn host(&self) -> &str {
        &self.failure.host
    }

    /// How many hosts there are.
    pub fn hosts(&self) -> usize {
        self.host_count
    }

    /// How long its groups wait for a rank.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Whether several ranks may have the same GPU ([`Options::share_gpus`]).
    pub fn share_gpus(&self) -> bool {
        self.share_gpus
    }

    /// How tensors move: "shared memory", "mpi", "shared memory and mpi", "alone".
    pub fn transport(&self) -> &'static str {
        self.control.transport()
    }

    /// How many threads this rank should use: the cores it may run on, divided by the ranks that may run on them too.
    pub fn default_threads(&self) -> usize {
        self.share.threads
    }

    /// The place of this rank's first core among those it may run on: ranks that may run on the same cores and each keep to
    /// `default_threads` cores from there on do not meet.
    pub fn core_offset(&self) -> usize {
        self.share.first_core
    }

    /// What a launcher did that makes this rank slow, and how to undo it: none if it left the rank its share of cores.
    pub fn affinity_note(&self) -> Option<String> {
        let (cores, fair) = self.share.narrower?;
        let plural = |count: usize| if count == 1 { "1 core".to_string() } else { format!("{count} cores") };
        Some(format!(
            "rank {} may run on {} only, and its share of this host is {}: the launcher binds ranks to cores. Lift it \
             with {}.",
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

    /// A new group over all ranks, independent of every other, for tensors in host memory. All ranks call this in the same order,
    /// with the same names.
    pub fn group(&self, name: &'static str) -> Result<Group> {
        Ok(Group::new(self.links.collective(self.next_channel(name)?)?, name, self.timeout))
    }

    /// A new group over all ranks for tensors on GPUs, `device` being this rank's. All ranks call this in the same order, with the same
    /// names, each with a GPU of its own. Several ranks need NCCL; one needs nothing.
    ///
    /// A process may have several groups on one GPU. Their calls are made one at a time, and their work on the device is one after the other, in the
    /// order of the calls: so all ranks make them in the same order, over all these groups. Work in a graph is in order within the graph.
    /// Launch a graph that holds collectives while the stream of the last eager call is current, or is the one that the graph was captured on: that is
    /// what puts it among the eager calls.
    ///
    /// A thread of the group watches over what its calls come to on the device, and ends the process, and with it the job, where ranks make
    /// different calls or do not come within the timeout: an error that no call could return, for each has returned long before. Calls that differ
    /// are seen within a host; between hosts only time tells, and `Group::all_agree`. The watch ends with this world.
    #[track_caller]
    pub fn gpu_group(&self, name: &'static str, device: Device) -> Result<Group> {
        let at = Location::caller();
        if !device.is_accelerator() {
            return Err(Error::Argument(Box::new(Argument {
                operation: "gpu_group".into(),
                what: "device".into(),
                expected: "a GPU".into(),
                got: device.to_string(),
                way_out: "World::group makes groups for tensors in host memory.".into(),
                at,
            })));
        }
        if self.size() == 1 {
            return Ok(Group::new(Arc::new(Single { device: Some(device) }), name, self.timeout));
        }
        let channel = self.next_channel(name)?;
        let host = self.links.collective(channel)?;
        nccl::join(self, name, device, (channel, host), self.of_processes, at)
    }

    /// The channel of the next group.
    fn next_channel(&self, name: &str) -> Result<usize> {
        let channel = self.groups.fetch_add(1, Ordering::Relaxed);
        if channel < GROUPS_MAX {
            return Ok(channel);
        }
        self.groups.fetch_sub(1, Ordering::Relaxed);
        Err(Error::Setup {
            action: format!("make the group {name}"),
            reason: format!("a world has {GROUPS_MAX} groups at most, one of them its own"),
            way_out: "Make each group once, and clone it where it is used.".into(),
        })
    }

    /// Returns when all ranks have come here.
    #[track_caller]
    pub fn barrier(&self) -> Result<()> {
        self.control.barrier(&host_stream()?)
    }

    /// Returns when all ranks have come here, for which they have until `limit` in place of this world's timeout: while one
    /// rank does something long, as saving. That a rank has ended is still noticed at once where ranks `watch`.
    #[track_caller]
    pub fn barrier_within(&self, limit: Duration) -> Result<()> {
        self.control.with_timeout(limit).barrier(&host_stream()?)
    }

    /// The bytes that each rank brings, in the order of ranks, on every rank. They may differ in length.
    #[track_caller]
    pub fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let (size, rank, stream) = (self.size(), self.rank(), host_stream()?);
        let mut lengths = vec![0i64; size];
        lengths[rank] = bytes.len() as i64;
        let lengths = Tensor::from_slice(&lengths, &[size], Device::Cpu)?.named("lengths");
        self.control.all_gather(&lengths, &stream)?;
        let lengths =
            checked_lengths("all_gather_bytes", &lengths.to_vec::<i64>()?, BYTES_MAX / size, Location::caller())?;
        let longest = lengths.iter().copied().max().unwrap_or(0);
        if longest == 0 {
            return Ok(vec![Vec::new(); size]);
        }
        let all = Tensor::zeros(&[size, longest], ddp_kernels::DType::U8, Device::Cpu)?.named("bytes");
        all.with_slice_mut::<u8, _>(|all| all[rank * longest..][..bytes.len()].copy_from_slice(bytes))?;
        self.control.all_gather(&all, &stream)?;
        let all = all.to_vec::<u8>()?;
        Ok(all.chunks(longest).zip(lengths).map(|(slice, length)| slice[..length].to_vec()).collect())
    }

    /// `bytes` becomes that of rank `root`, on every rank.
    #[track_caller]
    pub fn broadcast_bytes(&self, bytes: &mut Vec<u8>, root: usize) -> Result<()> {
        let stream = host_stream()?;
        let length = Tensor::scalar(bytes.len() as i64, Device::Cpu)?.named("length");
        self.control.broadcast(&length, root, &stream)?;
        let length = checked_lengths("broadcast_bytes", &length.to_vec::<i64>()?, BYTES_MAX, Location::caller())?[0];
        if length == 0 {
            bytes.clear();
            return Ok(());
        }
        bytes.resize(length, 0);
        let all = Tensor::from_slice(&bytes[..], &[length], Device::Cpu)?.named("bytes");
        self.control.broadcast(&all, root, &stream)?;
        *bytes = all.to_vec::<u8>()?;
        Ok(())
    }

    /// From now on this process ends within a second after any rank of its host has ended without a word, or any rank of the
    /// job has failed, whatever it is doing: one thread that sleeps. Nothing to do for ranks of one process.
    pub fn watch(&self) -> Result<()> {
        let mut watch = self.watch.lock().unwrap_or_else(PoisonError::into_inner);
        if watch.is_none() && self.of_processes {
            let started = Watch::start(Arc::clone(&self.failure)).map_err(|error| Error::Setup {
                action: "watch over the other ranks".into(),
                reason: error.to_string(),
                way_out: "Raise the limit on threads or open files (ulimit -u, ulimit -n).".into(),
            })?;
            *watch = Some(started);
        }
        Ok(())
    }

    pub(crate) fn gpu_watches(&self) -> &nccl::Watches {
        &self.gpu_watches
    }

    pub(crate) fn failure(&self) -> &Arc<Failure> {
        &self.failure
    }
}

/// Lengths that other ranks have told, if memory may be laid out by them.
fn checked_lengths(operation: &str, lengths: &[i64], bytes_max: usize, at: Site) -> Result<Vec<usize>> {
    let checked = |(index, &length): (usize, &i64)| match usize::try_from(length) {
        Ok(length) if length <= bytes_max => Ok(length),
        _ => Err(Error::Argument(Box::new(Argument {
            operation: operation.into(),
            what: if lengths.len() > 1 { format!("what rank {index} brings") } else { "what the root brings".into() },
            expected: format!("at most {bytes_max} bytes"),
            got: length.to_string(),
            way_out: "Move much as a tensor, with a group.".into(),
            at,
        }))),
    };
    lengths.iter().enumerate().map(checked).collect()
}

fn host_stream() -> Result<Stream> {
    Ok(Stream::default_of(Device::Cpu)?)
}

/// What a rank of one process needs: nobody dies alone here.
fn local_failure(board: Board, rank: usize, size: usize) -> Failure {
    Failure {
        program: own_name(),
        rank,
        size,
        local_rank: rank,
        local_size: size,
        host: host_name(),
        board,
        peers: Vec::new(),
        launcher: None,
        must_kill: false,
        #[cfg(feature = "mpi")]
        lifeline: None,
    }
}

/// The name of this machine.
fn host_name() -> String {
    let mut name = [0u8; 256];
    // SAFETY: the call writes at most the length it is given, less one, so that a zero byte stays at the end.
    unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len() - 1) };
    let length = name.iter().position(|&byte| byte == 0).unwrap_or(0);
    match String::from_utf8_lossy(&name[..length]).into_owned() {
        name if name.is_empty() => "localhost".into(),
        name => name,
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if !self.of_processes {
            self.gpu_watches.stop();
            return;
        }
        if let Some(cause) = self.failure.cause() {
            self.failure.end(cause.exit_code);
        }
        if std::thread::panicking() {
            self.failure.fail("ended by a panic".into(), 70);
        }
        if let Err(error) = self.barrier() {
            self.failure.fail(error.to_string(), error.exit_code());
        }
        // They speak through MPI, which ends below.
        self.gpu_watches.stop();
        self.failure.board.leave(self.failure.local_rank);
        drop(self.watch.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        #[cfg(feature = "mpi")]
        if let Some(job) = self.job.take() {
            bootstrap::end(job, &self.failure, self.timeout);
        }
    }
}

#[cfg(test)]
mod tests;
