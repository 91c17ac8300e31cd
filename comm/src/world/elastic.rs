//! How a rank that this program has started joins the others. In an elastic job it does so for each
//! generation.

use std::fs::File;
use std::net::TcpListener;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileTypeExt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ddp_kernels::heartbeat;
use ddp_kernels::panics;

use super::bootstrap;
use super::links::Start;
use super::options::Options;
use super::star::{ACTION, Star};
use crate::background::Background;
use crate::error::{Error, Result};
use crate::launch::limits;
use crate::launcher::{self, HOST_ADDRESSES, Launcher, OWN_JOB};
use crate::membership::client::Client;
use crate::membership::heard::MeetingOutcome;
use crate::membership::lease::RankWatch;
use crate::membership::wire::{Change, Generation};
use crate::rendezvous::Rendezvous;
use crate::transport::failure::{Failure, leave_at_once};
use crate::transport::tcp::{self, Secret};
use crate::waited::Waited;

/// How often the same ranks try to connect to each other.
const ATTEMPTS_MAX: usize = 3;

/// How often a process looks whether it must end, and how many looks later it tells of its
/// progress.
const PERIOD: Duration = Duration::from_millis(50);
const LOOKS_PER_SIGN: u64 = 5;

/// A rank's part in an elastic job.
#[derive(Clone, Debug)]
pub(super) struct Elastic {
    pub(super) client: Arc<Client>,
    /// Shows the launcher the signs of progress of this rank.
    _progress: Arc<Background>,
    pub(super) options: Options,
    /// The number of this generation; 0 for a process that waits to be taken in.
    pub(super) number: u32,
    /// The numbers with which the ranks of this generation were started.
    pub(super) job_ranks: Vec<usize>,
    pub(super) change: Change,
    /// How its latest generation fails.
    pub(super) latest: Arc<Mutex<Option<Arc<Failure>>>>,
}

/// Where this process listens for ranks of other hosts, and the port, if the job can have some.
fn listen() -> Result<(Option<TcpListener>, u16)> {
    if std::env::var_os(HOST_ADDRESSES).is_none() {
        return Ok((None, 0));
    }
    tcp::listen_for_ranks().map(|(listener, port)| (Some(listener), port))
}

/// What the world of a rank starts with in a job that ends with any of its ranks.
pub(super) fn connect_once(options: &Options, client: &Arc<Client>) -> Result<Start> {
    bootstrap::apply_settings(options, !client.heard().is_across());
    let (listener, port) = listen()?;
    match client.meet(0, port) {
        MeetingOutcome::Formed(generation) => start(client, &generation, listener, options),
        // The launcher has said why, or the rank that failed.
        MeetingOutcome::Over(code) => std::process::exit(i32::from(code)),
    }
}

/// What the first world of a rank starts with in an elastic job; None for
/// one that joins ranks that train.
pub(super) fn connect(options: &Options, client: Arc<Client>) -> Result<(Option<Start>, Elastic)> {
    // While this process has one thread.
    bootstrap::apply_settings(options, !client.heard().is_across());
    client.listen_on()?;
    let is_newcomer = client.heard().is_newcomer();
    let mut watch = RankWatch::new(options.timeout, client.is_of_agent());
    let shown = Arc::clone(&client);
    let progress = Background::start("progress", move |cancelled| {
        let (began, mut waited, mut looks) = (Instant::now(), Waited::new(), 0);
        while !cancelled.within(PERIOD) {
            let now = waited.after(PERIOD);
            let stopped = began.elapsed().saturating_sub(now);
            if let Some(code) = watch.look(&shown.heard(), now, stopped) {
                leave_at_once(code)
            }
            looks += 1;
            if looks % LOOKS_PER_SIGN == 0 {
                shown.show_progress(heartbeat::total());
            }
        }
    })?;
    let elastic = Elastic {
        _progress: Arc::new(progress),
        options: options.clone(),
        number: 0,
        job_ranks: vec![client.rank],
        client,
        change: Change::default(),
        latest: Arc::default(),
    };
    if is_newcomer {
        // The others train: this process gets ready before they wait for it.
        launcher::set_rank_0(false);
        return Ok((None, elastic));
    }
    let start = limits::check(elastic.client.ranks(), 2).and_then(|_| elastic.next());
    // Ranks that were started again would find the same.
    let start = start.inspect_err(|error| _ = elastic.client.end(error.exit_code()));
    start.map(|(start, elastic)| (Some(start), elastic))
}

impl Elastic {
    /// Waits for the next generation until its ranks share memory.
    pub(super) fn next(&self) -> Result<(Start, Elastic)> {
        let (mut after, mut before) = (self.number, Change::default());
        let mut failures = Vec::new();
        loop {
            let (listener, port) = listen()?;
            let mut generation = match self.client.meet(after, port) {
                MeetingOutcome::Formed(generation) => generation,
                // The rank that failed has said why; this one has nothing left to close.
                MeetingOutcome::Over(code) => std::process::exit(i32::from(code)),
            };
            after = generation.number;
            if generation.change != Change::default() {
                failures.clear();
            } else if failures.len() == ATTEMPTS_MAX {
                return Err(failures.remove(0));
            }
            // What changed before ranks that then could not connect.
            before.extend(std::mem::take(&mut generation.change));
            generation.change = before.clone();
            match start(&self.client, &generation, listener, &self.options) {
                Ok(start) => return Ok((start, self.of(generation))),
                Err(error) if error.is_rank_lost() => {}
                Err(error) => {
                    if let Error::Timeout { missing, .. } = &error {
                        self.client.leave_out(missing, false);
                    }
                    failures.push(error);
                }
            }
        }
    }

    /// This process in `generation`.
    fn of(&self, generation: Generation) -> Elastic {
        Elastic {
            number: generation.number,
            job_ranks: generation.members.iter().map(|it| it.rank).collect(),
            change: generation.change,
            ..self.clone()
        }
    }
}

/// Connects the ranks of a generation.
fn start(
    client: &Arc<Client>,
    generation: &Generation,
    listener: Option<TcpListener>,
    options: &Options,
) -> Result<Start> {
    let (members, own) = (&generation.members, client.rank);
    let rank = members.iter().position(|it| it.rank == own);
    let rank = rank.expect("a rank is told of its own generations");
    let host_of = |rank: usize| generation.hosts[rank];
    let here = members.iter().filter(|it| host_of(it.rank) == host_of(own));
    // Ranks that meet again need what two generations need.
    let limits = limits::check(here.count(), 1 + u64::from(client.heard().is_elastic));
    let meets_again = Some(Arc::clone(client)).filter(|_| client.heard().is_elastic);
    let mut meeting = if let Some(listener) = listener {
        let first = &members[0];
        let lookup = |name: &str| std::env::var(name).ok();
        let host = first.address.map(|it| it.to_string()).or_else(|| {
            let addresses = lookup(HOST_ADDRESSES)?;
            addresses
                .split(',')
                .nth(host_of(first.rank))
                .map(String::from)
        });
        let place = Rendezvous {
            rank,
            size: members.len(),
            local_size: None,
            host: host.unwrap_or_default(),
            ports: vec![first.port],
            job: format!("generation {}", generation.number),
            is_of_torchrun: false,
        };
        let listener = Some(listener).filter(|_| rank == 0);
        let key = (Secret::read(&lookup)?, meets_again.clone());
        Star::over_tcp(place, listener, key, options)?
    } else {
        let sockets = client.take_sockets(generation.number);
        Star::on_one_host((rank, members.len()), sockets, meets_again.clone(), options)?
    };
    let mut start = bootstrap::join(options, Launcher::Own, &mut meeting, limits)?;
    if meets_again.is_some() {
        start.failure.job_ranks = members.iter().map(|it| it.rank).collect();
        launcher::set_rank_0(rank == 0);
    }
    start.failure.client = meets_again;
    start.mesh = meeting.into_mesh();
    Ok(start)
}

/// A socket that our own launcher has given to this process. A copy that programs started by this
/// process do not inherit.
pub(super) fn inherited(fd: RawFd) -> Result<OwnedFd> {
    static TAKEN: Mutex<Vec<RawFd>> = Mutex::new(Vec::new());
    let mut taken = panics::lock(&TAKEN);
    if taken.contains(&fd) {
        let help = "connect one world in a process";
        return Err(Error::setup(ACTION, "its sockets are taken already", help));
    }
    let refused = |got: String| Error::launch(OWN_JOB, "an inherited socket", got);
    let kind = std::fs::metadata(format!("/proc/self/fd/{fd}"));
    let kind = kind.map_err(|error| refused(format!("descriptor {fd}: {error}")))?;
    if !kind.file_type().is_socket() {
        return Err(refused(format!("descriptor {fd}, which is not a socket")));
    }
    taken.push(fd);
    // SAFETY: the variable gives this process the descriptor, which is open, a socket and above the
    // standard streams. Nothing else in this process owns it: it was inherited, and `TAKEN` lets
    // one call take it.
    let socket = File::from(unsafe { OwnedFd::from_raw_fd(fd) }).try_clone();
    let socket = socket.map_err(|error| Error::setup(ACTION, error, "start the job again"))?;
    Ok(OwnedFd::from(socket))
}
