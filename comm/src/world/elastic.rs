//! A rank's part in a job that continues without lost ranks: what the world of each generation
//! starts with.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ddp_kernels::heartbeat;

use super::bootstrap;
use super::links::Start;
use super::options::Options;
use super::star::{Star, inherited};
use crate::background::Background;
use crate::error::{EXIT_PEER_LOST, Error, Result};
use crate::failure::{Failure, leave_at_once};
use crate::launcher::{self, HOST_ADDRESSES, Launcher, OwnJob};
use crate::limits;
use crate::membership::client::{Client, Meeting};
use crate::membership::decide::silence;
use crate::membership::wire::{Change, Generation};
use crate::nccl::environment::{self, RankKind};
use crate::process::Process;
use crate::rendezvous::Rendezvous;
use crate::tcp::{self, Secret};
use crate::waited::Waited;

/// How often the same ranks try to connect to each other.
const ATTEMPTS_MAX: usize = 3;

/// How often a process looks whether it must end, and how many looks later it tells of its
/// progress.
const PERIOD: Duration = Duration::from_millis(50);
const TOLD_EVERY: u64 = 5;

/// A rank's part in a job that continues without lost ranks.
#[derive(Debug)]
pub(super) struct Elastic {
    pub(super) client: Arc<Client>,
    /// Shows the launcher the signs of progress of this rank.
    _progress: Arc<Background>,
    pub(super) options: Options,
    /// The number of this generation; 0 for a process that waits to be taken in.
    pub(super) number: u32,
    /// The numbers with which the ranks of this generation were started.
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
    let client = Client::new(job.rank, inherited(fd)?)?;
    // While this process has one thread.
    let lookup = |name: &str| std::env::var(name).ok();
    let ranks = RankKind::Processes {
        share_gpus: options.share_gpus,
        are_on_one_host: !client.is_across(),
    };
    environment::apply(environment::settings(ranks, options.nccl, &lookup));
    client.listen_on()?;
    let (shown, limit) = (Arc::clone(&client), silence(options.timeout));
    let is_newcomer = client.is_newcomer();
    let progress = Background::start("progress", move |cancelled| {
        let (mut waited, mut last) = (Waited::new(), (0, Duration::ZERO));
        let mut looks = 0;
        while !cancelled.within(PERIOD) {
            // Nothing else ends a process that has not been taken in, and may be reading its data.
            if shown.is_newcomer()
                && let Some(code) = shown.ends()
            {
                leave_at_once(code)
            }
            looks += 1;
            if looks % TOLD_EVERY == 0 {
                shown.show_progress(heartbeat::total());
            }
            let (signs, now) = (shown.signs(), waited.after(PERIOD));
            if signs != last.0 {
                last = (signs, now);
            }
            if signs > 0 && now - last.1 > limit {
                // The others are about to continue without this host.
                leave_at_once(EXIT_PEER_LOST)
            }
        }
    })?;
    let elastic = Elastic {
        client,
        _progress: Arc::new(progress),
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
            let (listener, port) = if self.client.is_across() {
                tcp::listen_for_ranks()?
            } else {
                tcp::listen_on_this_host()?
            };
            let mut generation = match self.client.meet(after, port) {
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
            match self.start(&generation, listener) {
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

    /// Connects the ranks of a generation.
    fn start(&self, generation: &Generation, listener: TcpListener) -> Result<Start> {
        let members = &generation.members;
        let host_of = |rank: usize| generation.hosts[rank];
        let lookup = |name: &str| std::env::var(name).ok();
        let first = &members[0];
        let host = match first.address {
            _ if !self.client.is_across() => Ipv4Addr::LOCALHOST.to_string(),
            Some(address) => address.to_string(),
            None => {
                let addresses = lookup(HOST_ADDRESSES).unwrap_or_default();
                let mut addresses = addresses.split(',');
                addresses
                    .nth(host_of(first.rank))
                    .unwrap_or_default()
                    .into()
            }
        };
        let own = members.iter().position(|it| it.rank == self.client.rank);
        let place = Rendezvous {
            rank: own.expect("a rank is told of its own generations"),
            size: members.len(),
            local_size: None,
            host,
            ports: vec![first.port],
            job: format!("generation {}", generation.number),
            is_of_torchrun: false,
        };
        let is_here = |rank: usize| host_of(rank) == host_of(self.client.rank);
        let here = members.iter().filter(|it| is_here(it.rank));
        let limits = limits::check(here.count(), 2);
        let rank = place.rank;
        let listener = Some(listener).filter(|_| place.rank == 0);
        let secret = Secret::read(&lookup)?;
        let client = Some(Arc::clone(&self.client));
        let mut meeting = Star::over_tcp(place, listener, (secret, client), &self.options)?;
        let mut start = bootstrap::join(&self.options, Launcher::Own, &mut meeting, limits)?;
        start.failure.launcher = Process::parent();
        start.failure.client = Some(Arc::clone(&self.client));
        start.failure.seats = members.iter().map(|it| it.rank).collect();
        start.mesh = meeting.into_mesh();
        launcher::set_rank_0(rank == 0);
        Ok(start)
    }

    /// This process in `generation`.
    fn of(&self, generation: Generation) -> Elastic {
        Elastic {
            client: Arc::clone(&self.client),
            _progress: Arc::clone(&self._progress),
            options: self.options.clone(),
            number: generation.number,
            seats: generation.members.iter().map(|it| it.rank).collect(),
            change: generation.change,
            latest: Arc::clone(&self.latest),
        }
    }
}
