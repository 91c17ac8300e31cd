//! How ranks with one GPU each form a group: rank 0 makes an id, the ranks compare versions, and
//! all join on a thread that is given until the deadline.

use std::ffi::{c_char, c_int};
use std::sync::mpsc::{self, RecvTimeoutError, SendError};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cudarc::nccl::sys::ncclUniqueId;
use ddp_kernels::error::Site;
use ddp_kernels::progress::DeviceProgress;
use ddp_kernels::{Device, foreign};

use super::common::Common;
use super::communicator::{Communicator, Raw};
use super::environment::{self, NcclChoice};
use super::group::{GroupState, NcclGroup};
use super::library::{self, nccl};
use super::log;
use super::warm;
use super::watch::Watches;
use crate::collective::group::Group;
use crate::collective::handshake::{Field, handshake};
use crate::collective::{Collective, StopVote};
use crate::error::{Error, Line, Problem, Remedy, Result, SAME_CALLS, Seconds};
use crate::transport::failure::Failure;
use crate::transport::shared::{JOINED, LANES};
use crate::waited::Waited;

/// The stack of the thread that joins: NCCL's own size for its threads, larger than Rust's.
const STACK_BYTES: usize = 8 << 20;

/// How often a rank that waits looks up.
const PERIOD: Duration = Duration::from_millis(50);

/// A group that all ranks make together.
pub(crate) struct Join<'a> {
    pub(crate) name: &'static str,
    /// This rank's GPU.
    pub(crate) device: Device,
    /// The ranks' group for messages.
    pub(crate) control: &'a Group,
    pub(crate) failure: &'a Arc<Failure>,
    pub(crate) watches: &'a Watches,
    /// The same ranks in host memory, on `channel`.
    pub(crate) host: Arc<dyn Collective>,
    pub(crate) channel: usize,
    pub(crate) timeout: Duration,
    /// How long NCCL may take to connect ranks that all show progress.
    pub(crate) join_timeout: Duration,
    /// Whether ranks are processes, which have to end together.
    pub(crate) of_processes: bool,
    pub(crate) choice: NcclChoice,
    pub(crate) site: Site,
}

/// Makes the group.
pub(crate) fn join(join: Join<'_>) -> Result<Group> {
    let (name, device) = (join.name, join.device);
    // The device's own errors belong to this rank: before any rank waits for another.
    foreign::bind(device, "gpu_group", join.site)?;
    // Compiles kernels if necessary: not while others wait in a call.
    let progress = DeviceProgress::new(device, LANES)?;
    let board = progress.board();
    let is_elastic = join.failure.client.is_some();
    let stop_vote = is_elastic.then(|| StopVote::new(board.stop_word(), device));
    let stop_vote = stop_vote.transpose()?;
    if join.choice == NcclChoice::Fixed {
        environment::warn_of_bits();
    }
    let (library, id) = join.agree()?;
    let common = Arc::new(Common::new(
        join.failure,
        (name, join.channel),
        (join.timeout, join.join_timeout),
        join.of_processes,
    ));
    let raw = join.initialise(library.functions, id, &common)?;
    let communicator = Arc::new(Communicator {
        functions: library.functions,
        raw: raw.0,
        of_processes: join.of_processes,
    });
    join.watches.start(&common, &communicator, board)?;
    let (rank, size) = (join.control.rank(), join.control.size());
    let nccl = NcclGroup {
        communicator,
        host: join.host,
        device,
        rank,
        size,
        progress,
        stop_vote,
        common: Arc::clone(&common),
        state: Mutex::new(GroupState::default()),
    };
    let group = Group::new(Arc::new(nccl), name, join.timeout);
    warm::warm_up(&group, device, &common)?;
    common.set_joined();
    let version = library.version;
    if size > 1 {
        log::say(&version.to_string(), rank);
    }
    tracing::debug!("group {name}: NCCL {version} joined {size} ranks, this one with {device}");
    Ok(group)
}

impl Join<'_> {
    fn action(&self) -> String {
        let (name, device, line) = (self.name, self.device, Line(self.site));
        format!("join group {name} with {device} (at {line})")
    }

    /// NCCL, if all ranks have the same and make the same group, and the id that rank 0 made.
    fn agree(&self) -> Result<(library::Nccl, ncclUniqueId)> {
        let found = library::get().map_err(|why| {
            let reason = format!(
                "rank {} on {}",
                self.control.rank(),
                self.failure.identity.host
            );
            let help = "one GPU needs no NCCL: start one rank";
            let problem = Problem::new(self.action(), format!("{reason}: {why}"), help);
            Error::Setup(problem.with_remedy(Remedy::TrainOnCpu))
        });
        let own = found.and_then(|library| {
            let mut id = ncclUniqueId { internal: [0; 128] };
            if self.control.rank() == 0 {
                // SAFETY: writes an id, to a variable of ours.
                unsafe { nccl!(library.functions, ncclGetUniqueId(&mut id)) }
                    .map_err(|fault| library.functions.error(self.action(), fault))?;
            }
            Ok((library, id))
        });
        let bytes = match &own {
            Ok((_, id)) => Ok(id.internal.map(|byte| byte.to_ne_bytes()[0])),
            Err(error) => Err((error.exit_code(), error.to_string())),
        };
        let shared = self
            .control
            .share_outcome(bytes.as_ref().map_err(Clone::clone).map(|b| &b[..]));
        let ids = match shared? {
            Ok(ids) => ids,
            Err(remote) => {
                return Err(own
                    .err()
                    .unwrap_or_else(|| self.failure.peer_failed(remote)));
            }
        };
        let (library, mut id) = own?;
        if self.failure.client.is_some() && library.version < library::OLDEST_THAT_ABORTS {
            let expected = library::OLDEST_THAT_ABORTS;
            let reason = format!(
                "a job that continues without lost ranks needs NCCL {expected}, got {}",
                library.version
            );
            return Err(Error::setup(self.action(), reason, "install a newer NCCL"));
        }
        let help = "let all ranks find the same NCCL (LD_LIBRARY_PATH, the Python environment)";
        let fields = [
            Field::must_match("the group", self.name, SAME_CALLS),
            Field::must_match("the version of NCCL", library.version, help),
        ];
        handshake(self.control, &fields)?;
        for (target, byte) in id.internal.iter_mut().zip(&ids[0]) {
            *target = c_char::from_ne_bytes([*byte]);
        }
        Ok((library, id))
    }

    /// Joins on another thread: NCCL waits for all ranks without a deadline.
    fn initialise(
        &self,
        functions: &'static library::Functions,
        id: ncclUniqueId,
        common: &Common,
    ) -> Result<Raw> {
        let (rank, size) = (self.control.rank() as c_int, self.control.size() as c_int);
        let (device, site, action) = (self.device, self.site, self.action());
        let (answer, answered) = mpsc::channel();
        let body = move || {
            let joined = foreign::bind(device, "gpu_group", site).map_err(Error::from);
            let joined = joined.and_then(|()| {
                let mut raw = std::ptr::null_mut();
                // SAFETY: the device's context is this thread's, the id is rank 0's, and the
                // pointer is to a variable of ours.
                unsafe { nccl!(functions, ncclCommInitRank(&mut raw, size, id, rank)) }
                    .map_err(|fault| functions.error(action, fault))?;
                Ok(Raw(raw))
            });
            // After the deadline, or when a rank was lost meanwhile, there is no receiver.
            if let Err(SendError(Ok(Raw(raw)))) = answer.send(joined) {
                // SAFETY: the communicator was made above, and nothing else knows it.
                _ = unsafe { nccl!(functions, ncclCommAbort(raw)) };
            }
        };
        let name = "nccl start";
        let thread = std::thread::Builder::new().name(name.into());
        let started = thread.stack_size(STACK_BYTES).spawn(body);
        started.map_err(|error| Error::no_thread(name, &error))?;
        let (mut waited, mut peers) = (Waited::new(), Vec::new());
        loop {
            common.pages.show_joining(common.local_rank());
            match answered.recv_timeout(PERIOD) {
                Ok(joined) => {
                    common.pages.set_joined(common.local_rank());
                    return joined;
                }
                Err(RecvTimeoutError::Disconnected) => {
                    let reason = "the thread that called NCCL ended without an answer";
                    let help = "look above for its messages";
                    return Err(Error::Broken(Problem::new(self.action(), reason, help)));
                }
                Err(RecvTimeoutError::Timeout) => self.failure.check()?,
            }
            let total = waited.after(PERIOD);
            let missing = self.silent(common, &mut peers, total);
            if !missing.is_empty() {
                return Err(Error::Timeout {
                    call: self.action(),
                    missing,
                    waited: self.timeout,
                    total,
                });
            }
            if total >= self.join_timeout {
                return Err(self.too_late(common));
            }
        }
    }

    /// The ranks of this host that have shown no progress for the timeout, at time `now`. `peers`
    /// are the last signs of all, and when they came.
    fn silent(
        &self,
        common: &Common,
        peers: &mut Vec<(u64, Duration)>,
        now: Duration,
    ) -> Vec<usize> {
        let mut silent = Vec::new();
        for (index, (local_rank, rank)) in common.others().enumerate() {
            let sign = common.pages.joining(local_rank);
            if peers.len() == index {
                peers.push((sign, Duration::ZERO));
            }
            if peers[index].0 != sign {
                peers[index] = (sign, now);
            }
            if sign != JOINED && now - peers[index].1 >= self.timeout {
                silent.push(rank);
            }
        }
        silent
    }

    /// The error when NCCL takes too long, though ranks show progress, as far as this host knows.
    fn too_late(&self, common: &Common) -> Error {
        let present = if common.knows_all() {
            "all ranks have come"
        } else {
            "all ranks of this host have come (nothing is known of other hosts)"
        };
        let within = Seconds(self.join_timeout);
        let reason = format!("{present}, but NCCL did not connect them within {within}");
        let help = "NCCL_DEBUG=INFO shows what it waits for: often a firewall, or an interface that \
            cannot be reached (NCCL_SOCKET_IFNAME chooses one)";
        let problem = Problem::new(self.action(), reason, help);
        Error::Setup(problem.with_remedy(Remedy::LongerTimeout))
    }
}
