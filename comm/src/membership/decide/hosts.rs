//! Hosts that are lost and hosts that come back.

use std::net::IpAddr;
use std::time::Duration;

use super::{Decision, ENDING, JobAction, SILENCE_MARGIN, silence};
use crate::error::{EXIT_PEER_LOST, Error, Problem, RankList, Seconds};

const CUT_OFF: &str = "its host was cut off";
/// How long other hosts may take to answer.
pub(crate) const ANSWER_MAX: Duration = Duration::from_secs(30);
/// How often a lost host is called.
const CALLED_EVERY: Duration = Duration::from_secs(5);

/// The error of a host whose agent cannot do what it was told.
pub(crate) fn refused(host: &str, why: &str) -> Error {
    let (reason, help) = why
        .split_once("; help: ")
        .unwrap_or((why, "look at that host"));
    Error::Launch(Problem::new(format!("start ranks on {host}"), reason, help))
}

impl Decision<'_> {
    pub(super) fn lose_silent_hosts(&mut self) {
        let limit = silence(self.state.rules.timeout) + SILENCE_MARGIN;
        for host in 1..self.state.hosts.len() {
            let it = &self.state.hosts[host];
            if self.state.rules.is_elastic && !it.is_lost && self.now - it.heard > limit {
                self.host_lost(host, &format!("it was silent for {}", Seconds(limit)));
            }
        }
    }

    pub(super) fn host_gone(&mut self, host: usize) {
        let it = &mut self.state.hosts[host];
        it.may_answer = false;
        if !self.state.rules.is_elastic {
            return self.host_lost(host, "the connection to it was lost");
        }
        // Its ranks may live until their agent counts this process as lost.
        if it.is_lost && self.state.rules.hosts_come {
            it.agent = None;
            let why = "its agent has ended".into();
            self.actions.push(JobAction::Leave(host, why));
        }
    }

    pub(super) fn host_refused(&mut self, host: usize, why: String) {
        let it = &mut self.state.hosts[host];
        it.may_answer = false;
        if !it.is_lost || !self.state.rules.is_elastic {
            return self.host_lost(host, &why);
        }
        if it.refusal != why {
            let line = refused(&it.name, &why).to_string();
            it.refusal = why;
            self.print(line);
        }
    }

    /// Calls lost hosts whose ranks could be started again.
    pub(super) fn call_lost_hosts(&mut self) {
        let is_left = self.state.restarted < self.state.rules.restarts;
        if self.state.rules.hosts_come || !is_left || !self.may_start() {
            return;
        }
        for host in 1..self.state.hosts.len() {
            let has_ranks = self.state.ranks.iter().any(|rank| rank.host == host);
            let it = &mut self.state.hosts[host];
            // A call that is under way may take longer.
            let wait = if it.may_answer {
                ANSWER_MAX
            } else {
                CALLED_EVERY
            };
            if it.is_lost && has_ranks && self.now >= it.heard.max(it.called) + wait {
                (it.called, it.may_answer) = (self.now, true);
                let why = "it was lost, and its ranks may be started again";
                self.actions.push(JobAction::Call { host, why });
            }
        }
    }

    pub(super) fn host_lost(&mut self, host: usize, why: &str) {
        self.state.hosts[host].is_lost = true;
        self.state.hosts[host].agent = None;
        self.actions.push(JobAction::Leave(host, why.into()));
        let lost = self.state.ranks_of(host);
        if lost.is_empty() {
            return;
        }
        let name = self.state.hosts[host].name.clone();
        self.print(format!("host {name}, with {}: {why}", RankList(&lost)));
        for &rank in &lost {
            self.state.ranks[rank].due = None;
            if let Some(it) = &mut self.state.ranks[rank].process {
                it.killed = None;
            }
            self.remove(rank, CUT_OFF.into());
        }
        self.end_done();
        if self.state.rules.is_elastic {
            if self.state.ends.is_none() {
                self.replace(&name, lost);
            }
            if self.state.has_ranks() {
                return;
            }
        }
        if !self.state.is_done() {
            let said = self.state.ends.unwrap_or(EXIT_PEER_LOST);
            self.state.failure.get_or_insert(said);
        }
        self.end_within(ENDING);
    }

    pub(super) fn may_start(&self) -> bool {
        self.state.stop.is_none() && self.state.ends.is_none()
    }

    /// Starts the lost ranks of host `name` on a spare one, if one has room for them.
    pub(super) fn replace(&mut self, name: &str, lost: Vec<usize>) {
        let is_left = self.state.restarted < self.state.rules.restarts;
        let mut spares = self.state.hosts.iter_mut().enumerate();
        let found =
            spares.find(|(_, it)| !it.is_lost && it.spare.is_some_and(|room| room >= lost.len()));
        let Some((spare, it)) = found.filter(|_| is_left && self.state.stop.is_none()) else {
            return;
        };
        it.spare = None;
        let (how, on_host) = (format!("was on {name}"), format!(" on {}", it.name));
        for rank in lost {
            self.state.ranks[rank].host = spare;
            self.start_again(rank, None, &how, &on_host);
        }
    }

    /// Of several agents of one number the first is let in, and the last one waits.
    pub(super) fn agent_came(&mut self, host: usize, connection: usize, address: IpAddr) {
        let it = &mut self.state.hosts[host];
        let is_free = it.agent.is_none();
        if let Some((connection, from)) = it.waiting.replace((connection, address)) {
            let why = "another one with its number has come";
            self.actions.push(JobAction::TurnAway { connection, why });
            self.print(format!(
                "process {host} came again, from {address}: the one from {from} that waited is \
                 turned away; help: give each process its own number (RANK)"
            ));
        } else if !is_free {
            self.print(format!(
                "process {host} came again, from {address}: it waits until the first one is lost"
            ));
        }
    }

    pub(super) fn let_agents_in(&mut self) {
        let hosts = self.state.hosts.iter_mut().enumerate();
        for (host, it) in hosts.filter(|(_, it)| it.agent.is_none()) {
            if let Some((connection, _)) = it.waiting.take() {
                it.agent = Some(connection);
                self.actions.push(JobAction::LetIn {
                    host,
                    connection,
                    why: "no other agent has its number",
                });
            }
        }
    }

    pub(super) fn host_came(&mut self, host: usize, address: Option<IpAddr>) {
        let it = &mut self.state.hosts[host];
        (it.is_lost, it.address, it.heard) = (false, address, self.now);
        (it.may_answer, it.refusal) = (false, String::new());
        let how = format!("was on {}", it.name);
        if !self.may_start() {
            return;
        }
        self.print(format!(
            "{} has come: starting its ranks",
            self.state.hosts[host].name
        ));
        for rank in 0..self.state.ranks.len() {
            let it = &self.state.ranks[rank];
            if it.host != host || it.comes() || it.stays_out {
                continue;
            }
            if self.state.rules.hosts_come {
                self.start(rank, "its host has come");
            } else {
                self.start_again(rank, None, &how, "");
            }
        }
    }
}
