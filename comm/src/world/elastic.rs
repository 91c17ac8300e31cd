//! A rank's part in a job that continues without lost ranks: what the world of each
//! generation starts with.

use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ddp_kernels::heartbeat;

use super::bootstrap::{self, Met};
use super::links::Start;
use super::options::Options;
use super::star::Star;
use crate::background::Background;
use crate::cores;
use crate::error::{EXIT_PEER_LOST, Error, Result};
use crate::failure::{Failure, leave_at_once};
use crate::identity::host_name;
use crate::launcher::{self, HOST_ADDRESSES, Launcher, OwnJob};
use crate::limits;
use crate::nccl::environment::{self, RankKind};
use crate::placement::Placement;
use crate::process::Process;
use crate::rendezvous::Rendezvous;
use crate::roster::{Change, Generation, Meeting, Roster};
use crate::shared::Segment;
use crate::spawn::silence;
use crate::tcp::{self, Secret};
use crate::waited::Waited;

/// How often the same ranks try to connect to each other.
const ATTEMPTS_MAX: usize = 3;

/// How long a killed process may take to end after it has closed its files.
const CLOSING_MAX: Duration = Duration::from_secs(5);

/// How often a process shows its signs of progress.
const PULSE_PERIOD: Duration = Duration::from_millis(50);

/// A rank's part in a job that continues without lost ranks.
#[derive(Debug)]
pub(super) struct Elastic {
    pub(super) roster: Arc<Roster>,
    /// Shows the other ranks the signs of progress of this one.
    _pulse: Arc<Background>,
    pub(super) seat: usize,
    pub(super) options: Options,
    /// The number of this generation; 0 for a process that waits to be taken in.
    pub(super) number: u32,
    /// The seats of the ranks of this generation.
    pub(super) seats: Vec<usize>,
    pub(super) change: Change,
    /// How its latest generation fails.
    pub(super) latest: Arc<Mutex<Option<Arc<Failure>>>>,
}

/// What the first world of a rank that the launcher started in such a job starts with; None for
/// one that joins ranks that train.
pub(super) fn connect(
    options: &Options,
    job: &OwnJob,
    fd: i32,
) -> Result<(Option<Start>, Elastic)> {
    let roster = Arc::new(Roster::inherited(fd)?);
    roster.take(job.rank, std::process::id());
    // While this process has one thread.
    let lookup = |name: &str| std::env::var(name).ok();
    let ranks = RankKind::Processes {
        share_gpus: options.share_gpus,
        are_on_one_host: !roster.is_across(),
    };
    environment::apply(environment::settings(ranks, options.nccl, &lookup));
    let (shown, seat, limit) = (Arc::clone(&roster), job.rank, silence(options.timeout));
    let is_newcomer = roster.current() > 0;
    let pulse = Background::start("pulse", move |cancelled| {
        let (mut waited, mut last) = (Waited::new(), (0, Duration::ZERO));
        let launcher = shown.launcher();
        while !cancelled.within(PULSE_PERIOD) {
            // Nothing else ends a process that has not been taken in, and may be reading its data.
            if is_newcomer && !shown.is_member(seat) {
                let lost = launcher.has_ended().then_some(EXIT_PEER_LOST);
                if let Some(code) = shown.over().or(lost) {
                    leave_at_once(code)
                }
            }
            shown.show_pulse(seat, heartbeat::total());
            let (agent, now) = (shown.agent(), waited.after(PULSE_PERIOD));
            if agent != last.0 {
                last = (agent, now);
            }
            if agent > 0 && now - last.1 > limit {
                // The others are about to continue without this host.
                shown.kill_all();
            }
        }
    })?;
    let elastic = Elastic {
        roster,
        _pulse: Arc::new(pulse),
        seat,
        options: options.clone(),
        number: 0,
        seats: Vec::new(),
        change: Change::default(),
        latest: Arc::default(),
    };
    if is_newcomer {
        // The others train: this process gets ready before they wait for it.
        launcher::set_rank_0(false);
        return Ok((
            None,
            Elastic {
                seats: vec![job.rank],
                ..elastic
            },
        ));
    }
    let start = limits::check(elastic.roster.seats(), 2)
        .and_then(|_| elastic.next(options.join_timeout.max(options.timeout)));
    // Ranks that were started again would find the same.
    let start = start.inspect_err(|error| _ = elastic.roster.end(error.exit_code()));
    start.map(|(start, elastic)| (Some(start), elastic))
}

impl Elastic {
    /// Waits for the next generation until its ranks share memory.
    pub(super) fn next(&self, timeout: Duration) -> Result<(Start, Elastic)> {
        let (mut after, mut before) = (self.number, Change::default());
        let mut failures = Vec::new();
        loop {
            let is_across = self.roster.is_across();
            let listener = is_across.then(tcp::listen_for_ranks).transpose()?;
            let port = listener.as_ref().map_or(0, |(_, port)| *port);
            self.roster.listen_at(self.seat, port);
            let mut generation = match self.roster.meet(self.seat, after, timeout)? {
                Meeting::Formed(generation) => generation,
                // The rank that failed has said why; this one has nothing left to close.
                Meeting::Over(code) => std::process::exit(i32::from(code)),
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
            let Some((listener, _)) = listener else {
                if let Some(segment) = self.segment(&generation, timeout)? {
                    return Ok(self.start(generation, segment));
                }
                continue;
            };
            match self.start_across(&generation, listener) {
                Ok(start) => return Ok((start, self.of(generation))),
                Err(error) if error.is_rank_lost() => {}
                Err(error) => {
                    if let Error::Timeout { missing, .. } = &error {
                        self.roster.leave_out_ranks(missing);
                    }
                    failures.push(error);
                }
            }
        }
    }

    /// Connects the ranks of a generation that may be on several hosts.
    fn start_across(&self, generation: &Generation, listener: TcpListener) -> Result<Start> {
        let (roster, members) = (&self.roster, &generation.members);
        let lookup = |name: &str| std::env::var(name).ok();
        let addresses = lookup(HOST_ADDRESSES).unwrap_or_default();
        let first = members[0].0;
        let host = match roster.address_of(first) {
            Some(address) => address.to_string(),
            None => addresses
                .split(',')
                .nth(roster.host_of(first))
                .unwrap_or_default()
                .into(),
        };
        let place = Rendezvous {
            rank: own_rank(members, self.seat),
            size: members.len(),
            local_size: None,
            host,
            ports: vec![roster.port_of(first)],
            job: format!("generation {}", generation.number),
            is_of_torchrun: false,
        };
        let here = members.iter().filter(|(seat, _)| roster.is_here(*seat));
        let limits = limits::check(here.count(), 2);
        let rank = place.rank;
        let listener = Some(listener).filter(|_| place.rank == 0);
        let secret = Secret::read(&lookup)?;
        let roster = Some(Arc::clone(&self.roster));
        let mut meeting = Star::over_tcp(place, listener, (secret, roster), &self.options)?;
        let mut start = bootstrap::join(&self.options, Launcher::Own, &mut meeting, limits)?;
        start.failure.launcher = Some(self.roster.launcher());
        start.failure.roster = Some(Arc::clone(&self.roster));
        start.failure.seats = members.iter().map(|&(seat, _)| seat).collect();
        start.mesh = meeting.into_mesh();
        launcher::set_rank_0(rank == 0);
        Ok(start)
    }

    /// This process in `generation`.
    fn of(&self, generation: Generation) -> Elastic {
        Elastic {
            roster: Arc::clone(&self.roster),
            _pulse: Arc::clone(&self._pulse),
            seat: self.seat,
            options: self.options.clone(),
            number: generation.number,
            seats: generation.members.iter().map(|&(seat, _)| seat).collect(),
            change: generation.change,
            latest: Arc::clone(&self.latest),
        }
    }

    /// The memory of a generation's ranks, which the first one makes. None if that one was lost; it
    /// is killed if it takes longer than `timeout`.
    fn segment(&self, generation: &Generation, timeout: Duration) -> Result<Option<Segment>> {
        let (number, size) = (generation.number, generation.members.len());
        let (first, first_pid) = generation.members[0];
        if first == self.seat {
            let segment = Segment::create(size)?;
            self.roster.publish_segment(number, segment.fd());
            return Ok(Some(segment));
        }
        let (first_process, began) = (Process::open(first_pid), Instant::now());
        let (mut failed, launcher) = (None, self.roster.launcher());
        loop {
            if launcher.has_ended() {
                self.roster.end(EXIT_PEER_LOST);
            }
            if let Some(code) = self.roster.over() {
                std::process::exit(i32::from(code));
            }
            if let Some((pid, fd)) = self.roster.segment(number) {
                let error = match Segment::open(pid, fd, size) {
                    Ok(segment) => return Ok(Some(segment)),
                    Err(error) => error,
                };
                // A process that is killed closes its files some time before it has ended.
                if failed.get_or_insert_with(Instant::now).elapsed() > CLOSING_MAX {
                    return Err(error);
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            if first_process.has_ended() {
                return Ok(None);
            }
            if began.elapsed() > timeout {
                self.roster.leave_out(&[generation.members[0]], false);
            }
        }
    }

    fn start(&self, generation: Generation, segment: Segment) -> (Start, Elastic) {
        let members = &generation.members;
        let size = members.len();
        let rank = own_rank(members, self.seat);
        let pids: Vec<u32> = members.iter().map(|&(_, pid)| pid).collect();
        let mut start = bootstrap::start(
            &self.options,
            Launcher::Own,
            Met {
                placement: Placement::new(&vec!["here"; size], rank),
                segment,
                pids: &pids,
                host: host_name(),
                // The launcher binds no rank to cores.
                masks: vec![cores::own_cores(); size],
                between_hosts: None,
            },
        );
        start.failure.launcher = Some(self.roster.launcher());
        start.failure.roster = Some(Arc::clone(&self.roster));
        start.failure.seats = members.iter().map(|&(seat, _)| seat).collect();
        launcher::set_rank_0(rank == 0);
        (start, self.of(generation))
    }
}

fn own_rank(members: &[(usize, u32)], own: usize) -> usize {
    let rank = members.iter().position(|&(seat, _)| seat == own);
    rank.expect("the roster gives a rank its own generation")
}
