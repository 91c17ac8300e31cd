//! The worlds of a job that this program has started, one for each generation: how a rank meets the
//! others. A job that is not elastic has one.

use std::fmt::Display;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ddp_kernels::heartbeat;
use ddp_kernels::panics;

use super::World;
use super::bootstrap;
use super::links::{Elastic, Start};
use super::meeting::Meeting;
use super::options::Options;
use super::star::Star;
use crate::background::Background;
use crate::error::{Error, Result};
use crate::launch::limits;
use crate::launcher::{self, HOST_ADDRESSES, JOB_NUMBER, Launcher};
use crate::membership::Change;
use crate::membership::client::{Client, MeetingOutcome};
use crate::membership::lease::RankWatch;
use crate::membership::wire::Generation;
use crate::rendezvous::Rendezvous;
use crate::transport::failure::{GRACE, leave_at_once};
use crate::transport::tcp::{self, Secret};
use crate::waited::Waited;
use crate::world::allocation;

/// How often the same ranks try to connect to each other.
const ATTEMPTS_MAX: usize = 3;

/// How often a process looks whether it must end, and how many looks later it tells of its
/// progress.
const PERIOD: Duration = Duration::from_millis(50);
const LOOKS_PER_SIGN: u64 = 5;

/// Where this process listens for ranks of other hosts, and the port, if the job can have some.
fn listen() -> Result<(Option<TcpListener>, u16)> {
    if std::env::var_os(HOST_ADDRESSES).is_none() {
        return Ok((None, 0));
    }
    tcp::listen_for_ranks(&[]).map(|(listener, port)| (Some(listener), port))
}

/// What the world of a rank starts with in a job that ends with any of its ranks.
pub(super) fn connect_once(options: &Options, client: &Arc<Client>) -> Result<Start> {
    bootstrap::apply_settings(options, !client.heard().is_across());
    let (listener, port) = listen()?;
    match client.meet(0, port) {
        MeetingOutcome::Formed(generation) => start(client, &generation, listener, options),
        // The launcher has said why, or the rank that failed.
        MeetingOutcome::JobEnds(code) => std::process::exit(i32::from(code)),
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
        client,
        change: Change::default(),
        over_since: None,
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
        let (mut after, mut before, mut over_since) = (self.number, Change::default(), None);
        let mut failures = Vec::new();
        loop {
            let (listener, port) = listen()?;
            let mut generation = match self.client.meet(after, port) {
                MeetingOutcome::Formed(generation) => generation,
                // The rank that failed has said why; this one has nothing left to close.
                MeetingOutcome::JobEnds(code) => std::process::exit(i32::from(code)),
            };
            after = generation.number;
            let since = Instant::now().checked_sub(generation.over_for);
            over_since = over_since.or(since.filter(|_| after > 1));
            if generation.change != Change::default() {
                failures.clear();
            } else if failures.len() == ATTEMPTS_MAX {
                return Err(failures.remove(0));
            }
            // What changed before ranks that then could not connect.
            before.extend(std::mem::take(&mut generation.change));
            generation.change = before.clone();
            match start(&self.client, &generation, listener, &self.options) {
                Ok(start) => {
                    let elastic = Elastic {
                        number: after,
                        change: generation.change,
                        over_since,
                        ..self.clone()
                    };
                    return Ok((start, elastic));
                }
                Err(error) if error.is_rank_lost() => {}
                Err(mut error) => {
                    if let Error::Timeout { missing, .. } = &mut error {
                        let members = &generation.members;
                        missing.iter_mut().for_each(|it| *it = members[*it].rank);
                        self.client.leave_out(missing.clone(), false);
                    }
                    failures.push(error);
                }
            }
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
    let rank = rank.expect("the launcher tells a rank only of generations that it belongs to");
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
            // Jobs with the same secret do not meet.
            job: format!(
                "job {} generation {}",
                lookup(JOB_NUMBER).unwrap_or_default(),
                generation.number
            ),
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
    if let Some(client) = &meets_again {
        let order = meeting.numbers().order.iter();
        start.failure.job_ranks = order.map(|&it| members[it].rank).collect();
        launcher::set_job_ranks(&start.failure.job_ranks);
        launcher::set_rank_0(rank == 0);
        let board = start.failure.board.clone();
        client.set_end_calls(move |cause| _ = board.fail(cause));
    }
    start.failure.client = meets_again;
    start.failure.link = Some(Arc::clone(client));
    Ok(start)
}

impl World {
    /// Whether the job is elastic: it continues without lost ranks.
    pub fn is_elastic(&self) -> bool {
        self.elastic.is_some()
    }

    /// Whether this process joins a job that runs already. It is alone until `next_generation`.
    pub fn is_newcomer(&self) -> bool {
        self.elastic.as_ref().is_some_and(|it| it.number == 0)
    }

    /// How often the ranks have met: 1 at the start. 0 for a newcomer.
    pub fn generation(&self) -> u64 {
        self.elastic.as_ref().map_or(1, |it| u64::from(it.number))
    }

    /// Who was lost and who came since the generation before.
    pub fn change(&self) -> Change {
        let elastic = self.elastic.as_ref();
        elastic.map(|it| it.change.clone()).unwrap_or_default()
    }

    /// Since when the generation before is over; None in the first one.
    pub fn over_since(&self) -> Option<Instant> {
        self.elastic.as_ref()?.over_since
    }

    /// A rank's number in the job, which is the same in all generations.
    pub fn job_rank(&self, rank: usize) -> usize {
        self.failure.job_rank(rank)
    }

    /// The most ranks that any of its generations can have.
    pub fn ranks_max(&self) -> usize {
        let elastic = self.elastic.as_ref();
        elastic.map_or(self.size(), |it| it.client.ranks())
    }

    /// With fewer ranks the job saves and ends.
    pub fn min_ranks(&self) -> usize {
        let elastic = self.elastic.as_ref();
        elastic.map_or(1, |it| it.client.heard().min_ranks)
    }

    /// Whether a process waits to be taken in. Ranks may see it at different times.
    pub fn has_newcomers(&self) -> bool {
        let elastic = self.elastic.as_ref();
        elastic.is_some_and(|it| it.number > 0 && it.client.heard().newcomers)
    }

    /// Ends all calls of this world's groups. On GPUs they end soon, without a result, and their
    /// graphs have to be destroyed before `next_generation`. The launcher kills the ranks that
    /// `why` names as too late.
    pub fn end_generation(&self, why: Option<&Error>) {
        panics::lock(&self.made).clear();
        match why {
            Some(error @ Error::Timeout { missing, .. }) => self.failure.lose(error, missing),
            Some(error @ Error::Nccl(_)) => self.failure.lose(error, &[]),
            _ => self.failure.end_generation("the ranks meet again".into()),
        }
    }

    /// Whether this generation ends, or does so soon: another rank may not have been missed yet.
    pub fn ends_generation(&self) -> bool {
        let cause = self.failure.board.wait_for_abort(GRACE);
        cause.is_some_and(|cause| cause.ends_generation())
    }

    /// The job's work is done: losing a rank changes nothing from now on.
    pub fn finish(&self) {
        self.elastic.iter().for_each(|it| _ = it.client.end(0));
    }

    /// Ends this process because it cannot continue, for example because its GPU has failed. The
    /// other ranks continue. After an exit code of 78 it is not started again.
    pub fn leave(&self, error: &dyn Display, exit_code: u8) -> ! {
        self.failure.leave(&error.to_string(), exit_code)
    }

    /// Meets the ranks that are left and those that came, after [`Error::is_rank_lost`], after
    /// `why`, a call that timed out, or because all ranks have agreed to. All groups of this world
    /// are useless from now on. Ranks are numbered anew, host by host, and on each host in the
    /// order of their numbers in the job. A rank that makes no progress is killed.
    ///
    /// If the job ends meanwhile, this ends the process.
    pub fn next_generation(&self, why: Option<&Error>) -> Result<World> {
        let Some(elastic) = &self.elastic else {
            let help = "start the job with the fewest ranks with which it may continue";
            let reason = "this job ends when a rank is lost";
            return Err(Error::setup("meet again", reason, help));
        };
        self.end_generation(why);
        self.gpu_watches.stop();
        let (start, elastic) = elastic.next()?;
        let world = World::of_generation(start, elastic)?;
        world.install_panic_hook();
        allocation::report_failures_to(&world.failure);
        world.watch()?;
        Ok(world)
    }
}
