//! A job that runs: which rank is where, which have ended and how, and why the job ends.

use std::ffi::c_int;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use super::agent::{Greeting, News, Order, Setup};
use super::children::{Children, cannot_start};
use super::door::Door;
use super::elastic::Elastic;
use super::hosts::Host;
use super::remote::{Remote, text_of};
use super::task::{
    ENDING, EXIT_STOPPED, Losses, PERIOD, SILENCE_MARGIN, Seating, Task, VERSION, of_signal,
    silence,
};
use crate::error::{EXIT_PEER_LOST, Ranks, Result, Seconds};
use crate::identity::host_name;
use crate::roster::SLOW;
use crate::say::{print_line, warn};
use crate::stop::STOPS;
use crate::tcp::{self, SECRET};
use crate::waited::Waited;

/// How long other hosts may take to answer.
const ANSWER_MAX: Duration = Duration::from_secs(30);
/// How often the launcher looks whether a lost host is there again.
const CALLED_EVERY: Duration = Duration::from_secs(5);
/// How long agents that others start may take to come, at least.
const GATHERING_MAX: Duration = Duration::from_secs(60);
/// How long other hosts may take to say their last words once their ranks have ended.
const LEAVING: Duration = Duration::from_secs(1);
/// Beginnings and names of variables that ranks of other hosts get, too.
const PASSED: [&str; 4] = ["DDP_", "NCCL_", "CUDA_", "RUST_"];
const PASSED_NAMES: [&str; 4] = ["PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX"];

/// News, with the number of the connection on which they came.
type Arrived = (usize, News);

/// A job that runs.
pub(super) struct Job {
    /// The program's name, for messages.
    program: String,
    task: Task,
    ranks: Vec<Rank>,
    /// The ranks of this host.
    here: Children,
    others: Vec<Remote>,
    /// Hosts without ranks, each by its index, and how many they have room for.
    spares: Vec<(usize, usize)>,
    /// What other hosts say, each by its number.
    news: Receiver<Arrived>,
    sender: Sender<Arrived>,
    /// Where agents come that others start.
    door: Option<Door>,
    /// How many connections to other hosts there were.
    connections: usize,
    /// The exit code of the first rank that failed.
    pub(super) first_failure: Option<u8>,
    pub(super) stopped_by: Option<c_int>,
    /// A signal to stop that an agent got.
    pub(super) asked_by: Option<c_int>,
    /// When ranks that are left are killed, and how long they had by then.
    end_by: Option<(Instant, Duration)>,
    /// Whether they were.
    has_killed: bool,
    elastic: Option<Elastic>,
    /// How long the job has lasted, without the time in which this process was stopped.
    waited: Waited,
    now: Duration,
    /// How long ranks have to save.
    grace: Duration,
    /// How long ranks have to end after one has ended well.
    timeout: Duration,
}

struct Rank {
    /// The index of its host, None for this one.
    other: Option<usize>,
    /// How many ranks its host has.
    local_size: usize,
    is_running: bool,
}

impl Job {
    pub(super) fn new(
        program: &str,
        here: Children,
        [grace, timeout]: [Duration; 2],
        task: &Task,
        (sender, news): (Sender<Arrived>, Receiver<Arrived>),
    ) -> Job {
        Job {
            program: program.to_string(),
            task: task.clone(),
            ranks: Vec::new(),
            here,
            others: Vec::new(),
            spares: Vec::new(),
            news,
            sender,
            door: None,
            connections: 0,
            first_failure: None,
            stopped_by: None,
            asked_by: None,
            end_by: None,
            elastic: None,
            waited: Waited::new(),
            now: Duration::ZERO,
            has_killed: false,
            grace,
            timeout,
        }
    }

    /// Adds the ranks of `host`; `other` is its index, None for this one.
    pub(super) fn add(&mut self, host: &Host, other: Option<usize>) {
        if host.is_spare {
            self.spares.extend(other.map(|index| (index, host.ranks)));
            return;
        }
        self.ranks.extend((0..host.ranks).map(|_| Rank {
            other,
            local_size: host.ranks,
            is_running: false,
        }));
    }

    /// Starts an agent on each of the other hosts, or waits for those that others start.
    pub(super) fn connect(&mut self, others: &[&Host]) -> Result<()> {
        self.door = self.task.place.as_ref().map(Door::open).transpose()?;
        if self.door.is_some() && std::env::var_os(SECRET).is_none() {
            let text = format!(
                "MASTER_PORT stays open for the whole job, and whoever reaches it can take the \
                 place of a lost process; help: give all processes the same {SECRET}"
            );
            warn(&self.program, &text);
        }
        self.connections = others.len();
        for (index, host) in others.iter().enumerate() {
            let (setup, sender) = (self.setup(index)?, self.sender.clone());
            let other = match &self.door {
                None => Remote::connect(&host.name, index, &self.task, setup, sender)?,
                Some(_) => Remote::absent(host.name.clone(), index),
            };
            self.others.push(other);
        }
        Ok(())
    }

    fn setup(&self, index: usize) -> Result<Setup> {
        let directory = std::env::current_dir().unwrap_or_default();
        let arguments = self.task.arguments.iter().map(|word| text_of(word));
        Ok(Setup {
            version: VERSION.into(),
            directory: text_of(directory.as_os_str())?,
            arguments: arguments.collect::<Result<_>>()?,
            environment: match &self.task.place {
                None => passed_variables(),
                // What starts the agents gives each its own.
                Some(_) => Vec::new(),
            },
            size: self.ranks.len(),
            has_rank_0: self.ranks[0].other == Some(index),
            grace: self.grace,
            timeout: self.timeout,
            seating: self.task.losses.map(|losses| Seating {
                hosts: self.hosts(),
                own: index + 1,
                min_ranks: losses.min_ranks,
                silence: silence(self.timeout),
            }),
        })
    }

    /// Lets agents in that others have started, for the first time or again.
    fn let_in(&mut self) -> Result<()> {
        let Some(door) = &mut self.door else {
            return self.call_again();
        };
        let others = &self.others;
        let (guests, launcher) = (
            door.guests(|number| others[number - 1].is_free())?,
            door.host(),
        );
        for guest in guests {
            let (index, number) = (guest.number - 1, self.connections);
            self.connections += 1;
            let (setup, sender) = (self.setup(index)?, self.sender.clone());
            self.others[index] = Remote::of_guest(guest, number, launcher.clone(), setup, sender)?;
            self.others[index].heard = self.now;
        }
        Ok(())
    }

    /// Starts an agent again on a host that was lost, if it is there again.
    fn call_again(&mut self) -> Result<()> {
        let restarts = self.elastic.as_ref().is_some_and(Elastic::restarts);
        if !restarts || self.stopped_by.is_some() {
            return Ok(());
        }
        let now = self.now;
        for index in 0..self.others.len() {
            let has_ranks = self.ranks.iter().any(|rank| rank.other == Some(index));
            let other = &mut self.others[index];
            let silent = now - other.heard;
            if !has_ranks || !other.is_lost || silent < CALLED_EVERY {
                continue;
            }
            // A call that is under way may take longer.
            if other.answer.is_none() && silent < ANSWER_MAX && !other.has_left() {
                continue;
            }
            other.heard = now;
            let (name, refusal) = (other.name.clone(), std::mem::take(&mut other.refusal));
            let number = self.connections;
            self.connections += 1;
            let (setup, sender) = (self.setup(index)?, self.sender.clone());
            let mut other = Remote::connect(&name, number, &self.task, setup, sender)?;
            (other.heard, other.is_lost, other.refusal) = (now, true, refusal);
            self.others[index] = other;
        }
        Ok(())
    }

    /// The index of the host whose news have this number. None if it has come again since.
    fn other_of(&self, number: usize) -> Option<usize> {
        self.others.iter().position(|other| other.number == number)
    }

    /// Whether all other hosts have answered. An error if one cannot start ranks; the others that
    /// cannot are printed.
    pub(super) fn are_all_ready(&mut self, waited: Duration) -> Result<bool> {
        self.let_in()?;
        while let Ok((number, news)) = self.news.try_recv() {
            let Some(index) = self.other_of(number) else {
                continue;
            };
            let other = &mut self.others[index];
            match news {
                News::Ready(greeting) => other.is_ready(greeting),
                News::Refused(why) => other.answer = Some(Err(other.refused(&why))),
                News::Alive(time) => other.send(&Order::Heard(time)),
                News::Signal(signal) => self.asked_by = Some(signal),
                // It may come again.
                News::Gone if self.door.is_some() => other.leave(),
                News::Gone if other.answer.is_none() => {
                    other.answer = Some(Err(other.why_no_answer(&self.task)));
                }
                _ => {}
            }
        }
        let others = self.others.iter_mut().enumerate();
        let mut silent = others.filter(|(_, other)| other.answer.is_none());
        let limit = match &self.task.place {
            None => ANSWER_MAX,
            Some(_) => self.timeout.max(GATHERING_MAX),
        };
        match (waited > limit, &self.door) {
            (true, Some(door)) => {
                let missing: Vec<usize> = silent.map(|(index, _)| index + 1).collect();
                if !missing.is_empty() {
                    return Err(door.too_late(&missing, limit));
                }
            }
            (true, None) => silent.for_each(|(_, it)| it.answer = Some(Err(it.silent(limit)))),
            _ if silent.next().is_some() => return Ok(false),
            _ => {}
        }
        let answers = self
            .others
            .iter_mut()
            .filter_map(|other| other.answer.take_if(|it| it.is_err()));
        let mut failures = answers.filter_map(Result::err);
        let Some(first) = failures.next() else {
            return Ok(true);
        };
        failures.for_each(|error| print_line(&format!("{}: {error}\n", self.program)));
        Err(first)
    }

    /// Starts all ranks on this host, each with its sockets.
    pub(super) fn start_here(&mut self) -> Result<()> {
        let size = self.ranks.len();
        let mut sockets: Vec<Vec<OwnedFd>> = vec![Vec::new()];
        for rank in 1..size {
            let pair = UnixStream::pair();
            let (hub, own) = pair.map_err(|error| cannot_start(rank, size, &error))?;
            sockets[0].push(hub.into());
            sockets.push(vec![own.into()]);
        }
        for (rank, sockets) in sockets.into_iter().enumerate() {
            let command = self.task.command();
            self.here.start(rank, size, ':', &sockets, command)?;
            self.ranks[rank].is_running = true;
        }
        Ok(())
    }

    /// The host of each rank: 0 for this one, else 1 + its index.
    fn hosts(&self) -> Vec<usize> {
        let number = |rank: &Rank| rank.other.map_or(0, |index| index + 1);
        self.ranks.iter().map(number).collect()
    }

    /// Starts all ranks on their hosts, in a job that continues without lost ranks.
    pub(super) fn start_elastic(&mut self, losses: Losses) -> Result<()> {
        let hosts = || std::iter::once(None).chain((0..self.others.len()).map(Some));
        let reached_from = |from| {
            let places = hosts().map(|host| self.address_of(host, from));
            places.collect::<Vec<_>>().join(",")
        };
        let addresses = hosts().map(reached_from).collect();
        let elastic = Elastic::new(self.hosts(), &self.task, losses, addresses)?;
        self.elastic = Some(elastic);
        (0..self.others.len()).for_each(|index| self.seat(index));
        (0..self.ranks.len()).try_for_each(|rank| self.start_seat(rank))
    }

    /// Tells the roster where the ranks of a host are.
    fn seat(&mut self, index: usize) {
        let address = self.others[index].address();
        let ranks = self.ranks.iter().enumerate();
        for (seat, _) in ranks.filter(|(_, rank)| rank.other == Some(index)) {
            if let Some(elastic) = &mut self.elastic {
                elastic.seat(seat, index + 1, &address);
            }
        }
    }

    fn start_seat(&mut self, rank: usize) -> Result<()> {
        if let Some(elastic) = &self.elastic {
            elastic.start(rank, &mut self.here, &mut self.others)?;
            self.ranks[rank].is_running = true;
        }
        Ok(())
    }

    /// A rank has ended. Whether the job continues: it is an elastic one and has not ended, so the
    /// rank is started again, or the others continue without it.
    fn continue_without(&mut self, rank: usize, status: ExitStatus) -> bool {
        let Some(elastic) = &mut self.elastic else {
            return false;
        };
        elastic.roster.has_ended(rank, status);
        if elastic.roster.over().is_some() || status.success() {
            return false;
        }
        let has_others = self.ranks.iter().any(|rank| rank.is_running);
        // One that was asked to stop and had nothing to save: so is the job.
        let asked = match status.code().map(|code| code as u8) {
            Some(EXIT_STOPPED) => Some(libc::SIGTERM),
            _ => status.signal().filter(|signal| STOPS.contains(signal)),
        };
        self.asked_by = self.asked_by.or(asked);
        if self.stopped_by.or(asked).is_some() {
            // The others save.
            elastic.roster.stays_empty(rank);
            return has_others;
        }
        let mut how = elastic.roster.how_ended(rank, status);
        if status.signal() == Some(libc::SIGKILL) && how.ends_with('9') {
            how += " (kill -9, or no memory was left: see dmesg)";
        }
        self.start_again(rank, status.code(), &how, "") || has_others
    }

    /// A lost rank is to be started again, if the job may, perhaps `on_host`: whether it is.
    fn start_again(&mut self, rank: usize, code: Option<i32>, how: &str, on_host: &str) -> bool {
        let now = self.now;
        let Some(elastic) = &mut self.elastic else {
            return false;
        };
        let count = elastic.again(rank, code, now);
        self.ranks[rank].is_running = count.is_ok();
        let is_again = count.is_ok();
        let again = count.map(|count| format!(": starting it again{on_host} {count}"));
        let again = again.unwrap_or_else(|why| why);
        print_line(&format!("{}: rank {rank} {how}{again}\n", self.program));
        is_again
    }

    /// Starts the lost ranks for which it is time, unless the job ends.
    fn start_waiting(&mut self) {
        let Some(elastic) = &mut self.elastic else {
            return;
        };
        let is_ending = self.stopped_by.is_some() || elastic.roster.over().is_some();
        for rank in elastic.due(self.now, is_ending) {
            self.ranks[rank].is_running = false;
            let started = (!is_ending).then(|| self.start_seat(rank));
            if let Some(Err(error)) = &started {
                print_line(&format!("{}: {error}\n", self.program));
            }
            if let (Some(elastic), false) = (&self.elastic, self.ranks[rank].is_running) {
                elastic.roster.stays_empty(rank);
                let is_over = !self.ranks.iter().any(|rank| rank.is_running);
                let lost = (is_over && !self.is_done()).then_some(EXIT_PEER_LOST);
                self.first_failure = self.first_failure.or(lost);
            }
        }
    }

    /// In a job that continues without lost ranks: takes note of hosts that are out of reach, and
    /// forms the next generation when its ranks are there.
    fn arbitrate(&mut self) {
        let silence = silence(self.timeout) + SILENCE_MARGIN;
        for index in 0..self.others.len() {
            let other = &self.others[index];
            let is_silent = !other.is_lost && self.now - other.heard > silence;
            if self.elastic.is_some() && is_silent {
                self.lost(index, &format!("it was silent for {}", Seconds(silence)));
            }
        }
        if let Some(elastic) = &mut self.elastic {
            elastic.arbitrate(&mut self.others, self.now, self.timeout);
        }
    }

    /// Starts all ranks on their hosts.
    pub(super) fn start_across(&mut self) -> Result<()> {
        let size = self.ranks.len();
        let mut listener = None;
        let port = match self.ranks[0].other {
            Some(index) => self.others[index].greeting().port,
            None => {
                let (made, port) = tcp::listen_for_ranks()?;
                listener = Some(OwnedFd::from(made));
                port
            }
        };
        let secret = tcp::job_secret()?;
        for rank in 0..size {
            let Rank {
                other, local_size, ..
            } = self.ranks[rank];
            let variables = [
                ("RANK", rank.to_string()),
                ("WORLD_SIZE", size.to_string()),
                ("LOCAL_WORLD_SIZE", local_size.to_string()),
                ("MASTER_ADDR", self.address_of(self.ranks[0].other, other)),
                ("MASTER_PORT", port.to_string()),
                (SECRET, secret.clone()),
            ];
            match other {
                None => {
                    let mut command = self.task.command();
                    command.envs(variables);
                    let sockets: Vec<OwnedFd> =
                        listener.take_if(|_| rank == 0).into_iter().collect();
                    self.here.start(rank, size, '@', &sockets, command)?;
                }
                Some(index) => {
                    let variables = variables.map(|(name, value)| (name.to_string(), value));
                    self.others[index].send(&Order::Start(rank, variables.into()));
                }
            }
            self.ranks[rank].is_running = true;
        }
        Ok(())
    }

    /// Where ranks of host `from` reach `host`; None is this one.
    fn address_of(&self, host: Option<usize>, from: Option<usize>) -> String {
        match host {
            Some(index) => self.others[index].address(),
            None => {
                let other = self.others.get(from.unwrap_or(0));
                let launcher = other.and_then(|other| other.greeting().launcher);
                launcher.unwrap_or_else(host_name)
            }
        }
    }

    /// Kills ranks that stay stopped, or of which none shows progress.
    fn kill_silent(&mut self) {
        // Ranks that wait for a stopped one have time to meet the one that comes for it.
        let (now, limit) = (self.now, self.timeout.saturating_mul(4).max(SLOW));
        let roster = self.elastic.as_ref().map(|elastic| &elastic.roster);
        if (self.here).kill_stopped(&self.program, now, self.timeout, roster) && roster.is_none() {
            self.first_failure.get_or_insert(EXIT_PEER_LOST);
            self.kill(limit);
        }
        if let Some(elastic) = &mut self.elastic
            && elastic.kill_silent(now, limit)
        {
            let (program, limit) = (&self.program, Seconds(limit));
            print_line(&format!(
                "{program}: no rank has shown progress for {limit} or longer: all are killed; help: find out \
                 what stopped them (SIGSTOP, a debugger, a stuck disk or GPU)\n"
            ));
        }
    }

    /// Sends all ranks a signal.
    pub(super) fn signal(&mut self, signal: c_int) {
        self.here.signal(signal);
        self.others
            .iter_mut()
            .for_each(|other| other.send(&Order::Signal(signal)));
    }

    /// Ranks that are left after `limit` are killed.
    pub(super) fn end_within(&mut self, limit: Duration) {
        let end_by = Instant::now() + limit;
        if self.end_by.is_none_or(|(earlier, _)| end_by < earlier) {
            self.end_by = Some((end_by, limit));
        }
    }

    /// Takes note of what has happened. Whether any ranks are left.
    pub(super) fn goes_on(&mut self) -> bool {
        self.now = self.waited.after(PERIOD);
        for (rank, status) in self.here.collect() {
            self.has_ended(rank, status);
        }
        if let Err(error) = self.let_in() {
            print_line(&format!("{}: {error}\n", self.program));
        }
        while let Ok((number, news)) = self.news.try_recv() {
            let Some(index) = self.other_of(number) else {
                continue;
            };
            let is_elastic = self.elastic.is_some();
            if is_elastic && self.others[index].is_lost && !matches!(news, News::Ready(_)) {
                if let News::Refused(why) = news
                    && self.others[index].refusal != why
                {
                    let (program, error) = (&self.program, self.others[index].refused(&why));
                    print_line(&format!("{program}: {error}\n"));
                    self.others[index].refusal = why;
                }
                continue;
            }
            match news {
                // Its ranks may live until its agent counts this process as lost.
                News::Gone if is_elastic => continue,
                News::Alive(time) => self.others[index].send(&Order::Heard(time)),
                News::Signal(signal) => self.asked_by = Some(signal),
                News::Host(state) => {
                    if let Some(elastic) = &mut self.elastic {
                        elastic.hear(index + 1, state);
                    }
                }
                News::Ended(rank, status) => {
                    let is_its = |it: &Rank| it.other == Some(index);
                    if self.ranks.get(rank).is_some_and(is_its) {
                        self.has_ended(rank, ExitStatus::from_raw(status));
                    }
                }
                News::Gone => self.lost(index, "the connection to it was lost"),
                News::Refused(why) => self.lost(index, &why),
                News::Ready(greeting) => self.is_back(index, greeting),
                News::Printed(_) => {}
            }
            self.others[index].heard = self.now;
        }
        self.start_waiting();
        self.arbitrate();
        self.kill_silent();
        if let Some((_, limit)) = self.end_by.take_if(|(by, _)| Instant::now() >= *by) {
            match self.has_killed {
                false => self.kill(limit),
                // Where it does no good, a host is out of reach.
                true => {
                    (0..self.others.len()).for_each(|index| self.lost(index, "it does not answer"))
                }
            }
        }
        self.ranks.iter().any(|rank| rank.is_running)
    }

    /// Whether the job continues without lost ranks, and has done its work.
    fn is_done(&self) -> bool {
        let roster = self.elastic.as_ref().map(|elastic| &elastic.roster);
        roster.is_some_and(|roster| roster.over() == Some(0))
    }

    /// A rank has ended.
    fn has_ended(&mut self, rank: usize, status: ExitStatus) {
        self.ranks[rank].is_running = false;
        // Those that this process kills are not a cause.
        if self.has_killed || self.continue_without(rank, status) {
            return;
        }
        let signal = status.signal().map(of_signal);
        let mut code = match self.is_done() {
            // How a rank ends after the job has done its work does not matter.
            true => Some(0),
            false => signal.or(status.code().map(|code| code as u8)),
        };
        let goes_on = (self.elastic.as_ref()).is_some_and(|it| it.roster.over().is_none());
        let is_killed = status.signal().is_some_and(|it| !STOPS.contains(&it));
        if goes_on && is_killed {
            // The last rank was killed.
            code = Some(EXIT_PEER_LOST);
            let help = "resume the run from its last checkpoint";
            print_line(&format!(
                "{}: no rank is left; help: {help}\n",
                self.program
            ));
        }
        self.end_within(match code {
            Some(0) => self.timeout,
            // Another rank may still save.
            Some(EXIT_STOPPED) => self.grace,
            _ => ENDING,
        });
        let is_cause = match self.first_failure {
            None => code != Some(0),
            // Others may see the end of a killed rank before this process does.
            Some(EXIT_PEER_LOST) => signal.is_some() && code == signal,
            Some(_) => false,
        };
        if is_cause {
            // A rank that is killed while the job ends has not made it end.
            let over = self.elastic.as_ref().and_then(|it| it.roster.over());
            self.first_failure = over.filter(|&code| code > 0).or(code);
        }
    }

    /// A host has come again, and its ranks are started.
    fn is_back(&mut self, index: usize, greeting: Greeting) {
        self.others[index].is_ready(greeting);
        self.others[index].is_lost = false;
        let (program, name) = (&self.program, &self.others[index].name);
        print_line(&format!("{program}: {name} has come: starting its ranks\n"));
        self.seat(index);
        let ranks = self.ranks.iter().enumerate();
        let may_come = |rank| self.elastic.as_ref().is_some_and(|it| !it.stays_out(rank));
        let of_host = ranks.filter(|(rank, it)| it.other == Some(index) && may_come(*rank));
        let how = format!("was on {}", self.others[index].name);
        for rank in of_host.map(|(rank, _)| rank).collect::<Vec<_>>() {
            if self.door.is_none() {
                self.start_again(rank, None, &how, "");
            } else if let Err(error) = self.start_seat(rank) {
                print_line(&format!("{}: {error}\n", self.program));
            }
        }
    }

    /// A host is lost, and with it its ranks that run.
    fn lost(&mut self, index: usize, why: &str) {
        if self.elastic.is_some() {
            self.others[index].is_lost = true;
            self.others[index].leave();
        }
        let of_host = self.ranks.iter_mut().enumerate();
        let mut lost = Vec::new();
        for (rank, it) in of_host.filter(|(_, rank)| rank.other == Some(index)) {
            if std::mem::take(&mut it.is_running) {
                lost.push(rank);
            }
        }
        if lost.is_empty() {
            return;
        }
        let (program, host, lost) = (&self.program, &self.others[index].name, Ranks(&lost));
        print_line(&format!("{program}: host {host}, with {lost}: {why}\n"));
        if let Some(elastic) = &mut self.elastic {
            lost.0.iter().for_each(|&rank| elastic.cut_off(rank));
            if elastic.roster.over().is_none() {
                let lost = lost.0.to_vec();
                self.replace(index, lost);
                if self.ranks.iter().any(|rank| rank.is_running) {
                    return;
                }
            }
        }
        if !self.is_done() {
            self.first_failure.get_or_insert(EXIT_PEER_LOST);
        }
        self.end_within(ENDING);
    }

    /// Starts the lost ranks of a host on a spare one, if there is one with room for them.
    fn replace(&mut self, index: usize, lost: Vec<usize>) {
        let restarts = self.elastic.as_ref().is_some_and(Elastic::restarts);
        let may_start = restarts && self.stopped_by.is_none();
        let has_room = |&(spare, room): &(usize, usize)| {
            may_start && room >= lost.len() && !self.others[spare].is_lost
        };
        let Some(found) = self.spares.iter().position(has_room) else {
            return;
        };
        let (spare, _) = self.spares.remove(found);
        lost.iter()
            .for_each(|&rank| self.ranks[rank].other = Some(spare));
        self.seat(spare);
        let [how, on_host] = [index, spare].map(|host| &self.others[host].name);
        let (how, on_host) = (format!("was on {how}"), format!(" on {on_host}"));
        for rank in lost {
            self.start_again(rank, None, &how, &on_host);
        }
    }

    /// Kills the ranks that are left after `limit`.
    fn kill(&mut self, limit: Duration) {
        // After a failure other ranks have named the missing ones; after success none is missing.
        if self.first_failure.is_none() && !self.is_done() {
            let all = self.ranks.iter().enumerate();
            let left: Vec<usize> = all
                .filter(|(_, rank)| rank.is_running)
                .map(|(rank, _)| rank)
                .collect();
            let (program, ranks, limit) = (&self.program, Ranks(&left), Seconds(limit));
            let note = match self.stopped_by {
                Some(_) => ": killed",
                None => {
                    " of another's end: killed; help: find out what stopped it (SIGSTOP, a debugger, \
                     a stuck disk or GPU)"
                }
            };
            print_line(&format!(
                "{program}: {ranks} did not end within {limit}{note}\n"
            ));
            self.first_failure = Some(self.stopped_by.map_or(EXIT_PEER_LOST, of_signal));
        }
        self.has_killed = true;
        self.signal(libc::SIGKILL);
        self.end_within(ENDING);
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.others.iter_mut().for_each(Remote::leave);
        let started = Instant::now();
        while started.elapsed() < LEAVING && !self.others.iter_mut().all(Remote::has_left) {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Task {
    pub(super) fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments);
        command
    }
}

/// The variables of this process that ranks of other hosts get.
fn passed_variables() -> Vec<(String, String)> {
    let is_passed = |name: &str| {
        PASSED.iter().any(|start| name.starts_with(start)) || PASSED_NAMES.contains(&name)
    };
    let texts = std::env::vars_os();
    let texts = texts
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    texts.filter(|(name, _)| is_passed(name)).collect()
}
