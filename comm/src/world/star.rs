//! How ranks meet over sockets: rank 0 has one to every other rank. It collects a value of each and
//! sends all values to all.

use std::net::{TcpListener, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use super::between_hosts::misses;
use super::meeting::{ACTION, Meeting, Network, Numbers};
use super::options::Options;
use crate::error::{Cause, Error, Problem, RankList, Result, Seconds};
use crate::launcher::{patience, stopped_note};
use crate::membership::client::{self, Client};
use crate::rendezvous::Rendezvous;
use crate::transport::frames::{Frames, wait_for};
use crate::transport::placement::Placement;
use crate::transport::tcp::{self, Acceptor, JobKey, Secret};

/// The most bytes of a value.
const VALUE_BYTES_MAX: usize = 64 << 10;
/// How long rank 0 may take to tell the others that it gives up, and to report it.
const REFUSAL_MAX: Duration = Duration::from_millis(300);
/// When a rank has ended, a launcher ends the others within this time (3 s for our own).
const RELIEF: Duration = Duration::from_secs(4);

/// The ranks, seen from one of them. Dropped, it closes its sockets.
#[derive(Debug)]
pub(super) struct Star {
    numbers: Numbers,
    /// On rank 0 the sockets to ranks 1, 2 …; on others that to rank 0.
    sockets: Vec<Frames>,
    timeout: Duration,
    /// In an elastic job.
    client: Option<Arc<Client>>,
    /// None if this job cannot be on several hosts.
    network: Option<Network>,
}

impl Star {
    /// Ranks of one host that the launcher has connected.
    pub(super) fn on_one_host(
        (rank, size): (usize, usize),
        sockets: Vec<OwnedFd>,
        client: Option<Arc<Client>>,
        options: &Options,
    ) -> Result<Star> {
        let (expected, got) = (if rank == 0 { size - 1 } else { 1 }, sockets.len());
        if got != expected {
            let reason = format!("expected {expected} sockets from the launcher, got {got}");
            let help = "raise the limit on open files (ulimit -n)";
            return Err(Error::Limit(Problem::new(ACTION, reason, help)));
        }
        let frames = |it| Frames::new(it, VALUE_BYTES_MAX);
        let frames: std::io::Result<_> = sockets.into_iter().map(frames).collect();
        let frames = frames.map_err(|error| Error::setup(ACTION, error, "start the job again"))?;
        let star = Star::new(rank, size, frames, options.timeout);
        Ok(Star { client, ..star })
    }

    fn new(rank: usize, size: usize, sockets: Vec<Frames>, timeout: Duration) -> Star {
        Star {
            numbers: Numbers::new(rank, size),
            sockets,
            timeout,
            client: None,
            network: None,
        }
    }

    /// Ranks that meet at this place, where rank 0 has perhaps inherited a `listener`.
    pub(super) fn over_tcp(
        place: Rendezvous,
        listener: Option<TcpListener>,
        (secret, client): (Secret, Option<Arc<Client>>),
        options: &Options,
    ) -> Result<Star> {
        let (rank, limit) = (place.rank, options.timeout);
        let key = JobKey::new(&place.job, secret.clone(), rank, place.size).with(client.clone());
        let joined = if rank == 0 {
            let socket = listener.map_or_else(|| tcp::listen(&place), Ok)?;
            let mut listener = Acceptor::new(socket, key, VALUE_BYTES_MAX)?;
            let others: Vec<usize> = (1..place.size).collect();
            let gathered = listener.gather(&others, limit, &place.address());
            listener.joined.sort_by_key(|joined| joined.rank);
            if let Err(error) = gathered {
                let error = misses(&client, listener.missing(&others), limit, error);
                let joined = listener.joined.into_iter();
                let mut sockets: Vec<Frames> = joined.map(|it| it.frames).collect();
                tell_reason(&mut sockets, &error);
                return Err(error);
            }
            listener.joined
        } else {
            let addresses = || {
                let of_port = |&port: &u16| (place.host.as_str(), port).to_socket_addrs().ok();
                place.ports.iter().filter_map(of_port).flatten().collect()
            };
            let (at, limit) = (place.address(), limit.saturating_add(patience(rank)));
            vec![tcp::connect(
                0,
                addresses,
                &at,
                &key,
                VALUE_BYTES_MAX,
                limit,
            )?]
        };
        let joined = joined.into_iter().map(|it| (it.frames, it.address));
        let (sockets, addresses) = joined.unzip();
        let star = Star::new(rank, place.size, sockets, options.timeout);
        let network = Some(Network {
            job: place.job,
            secret,
            // Of this end of each socket: `network` chooses.
            addresses,
            client: client.clone(),
        });
        Ok(Star {
            client,
            network,
            ..star
        })
    }

    /// Rank 0's part: the values of all ranks, which it sends to all.
    fn collect(&mut self, mine: Vec<u8>, limit: Duration) -> Result<Vec<Vec<u8>>> {
        let mut came: Vec<Option<Vec<u8>>> = vec![None; self.sockets.len()];
        let client = self.client.clone();
        let has_come = wait_for(limit, &mut self.sockets, |sockets| {
            for (value, socket) in came.iter_mut().zip(sockets) {
                *value = value.take().or_else(|| socket.take());
                if value.is_none() && socket.is_closed() {
                    return Some(false);
                }
            }
            if client::check(&client).is_err() {
                return Some(false);
            }
            came.iter().all(Option::is_some).then_some(true)
        });
        if has_come != Some(true) {
            client::check(&client)?;
            return Err(self.refuse(&came, has_come.is_some(), limit));
        }
        let all = came.into_iter().flatten();
        let all: Vec<Vec<u8>> = std::iter::once(mine).chain(all).collect();
        for socket in &mut self.sockets {
            // No reason to give up.
            socket.queue(b"");
            all.iter().for_each(|value| socket.queue(value));
        }
        // A rank that has ended is missing in the next exchange, or to the watch.
        wait_for(self.timeout, &mut self.sockets, |sockets| {
            let mut all = sockets.iter();
            all.all(|it| it.is_sent() || it.is_closed()).then_some(())
        });
        Ok(all)
    }

    /// Tells all ranks who is missing: those that have ended, or those that are late.
    fn refuse(&mut self, came: &[Option<Vec<u8>>], have_ended: bool, limit: Duration) -> Error {
        let is_missing = |rank: &usize| {
            let index = rank - 1;
            came[index].is_none() && (!have_ended || self.sockets[index].is_closed())
        };
        let missing: Vec<usize> = (1..=came.len()).filter(is_missing).collect();
        let error = if have_ended {
            let reason = format!("{} ended before all ranks had met", RankList(&missing));
            let help = "look above for its error; the kernel's log (dmesg) shows crashes and kills";
            Error::setup(ACTION, reason, help)
        } else {
            let (missing, within) = (RankList(&missing), Seconds(limit));
            let note = stopped_note();
            Error::too_late(
                ACTION,
                format!("{missing} did not come within {within}{note}"),
            )
        };
        tell_reason(&mut self.sockets, &error);
        if have_ended && self.client.is_some() {
            return Error::of_peer(Cause::of_generation(error.to_string()));
        }
        misses(&self.client, missing, limit, error)
    }

    /// The part of the other ranks.
    fn tell(&mut self, mine: &[u8], limit: Duration) -> Result<Vec<Vec<u8>>> {
        let (size, rank) = (self.numbers.order.len(), self.numbers.came_as);
        self.sockets[0].queue(mine);
        let (mut answers, mut has_ended) = (Vec::new(), false);
        let client = self.client.clone();
        let limit_here = limit.saturating_add(patience(rank));
        let done = wait_for(limit_here, &mut self.sockets, |sockets| {
            while answers.len() < 1 + size
                && let Some(answer) = sockets[0].take()
            {
                answers.push(answer);
                if answers.first().is_some_and(|reason| !reason.is_empty()) {
                    break;
                }
            }
            has_ended = sockets[0].is_closed() || client::check(&client).is_err();
            let is_refused = answers.first().is_some_and(|reason| !reason.is_empty());
            (is_refused || answers.len() == 1 + size || has_ended).then_some(())
        });
        if client.is_some() && answers.len() < 1 + size {
            // The launcher ends no rank: they meet again.
            let reason = "rank 0 did not bring the ranks together";
            return Err(Error::of_peer(Cause::of_generation(reason.into())));
        }
        match answers.first() {
            Some(reason) if !reason.is_empty() => {
                // Rank 0 reports it first: the end of this rank makes the launcher end it.
                std::thread::sleep(REFUSAL_MAX);
                let reason = String::from_utf8_lossy(reason);
                Err(Error::too_late(ACTION, reason.into()).reported_by_rank_0())
            }
            Some(_) if answers.len() == 1 + size => Ok(answers.split_off(1)),
            _ if done.is_none() => {
                // Rank 1 reports it first, or else rank 2, and then the launcher ends the others.
                // Without a launcher they end soon after, however many they are.
                std::thread::sleep(RELIEF * (rank - 1).min(2) as u32);
                let reason = format!("rank 0 did not come within {}", Seconds(limit));
                Err(Error::too_late(ACTION, reason + &stopped_note()))
            }
            _ => {
                // The launcher, which sees it too, is about to end this rank.
                std::thread::sleep(REFUSAL_MAX.max(patience(rank.saturating_sub(1))));
                let help = "look above for its error; the kernel's log (dmesg) shows crashes";
                let reason = "rank 0 ended before all ranks had met";
                Err(Error::setup(ACTION, reason, help))
            }
        }
    }
}

impl Meeting for Star {
    fn numbers(&mut self) -> &mut Numbers {
        &mut self.numbers
    }

    fn timeout(&self) -> Duration {
        self.timeout
    }

    fn exchange_within(&mut self, value: &Value, limit: Duration) -> Result<Vec<Value>> {
        let mut mine = value.to_string().into_bytes();
        if mine.len() > VALUE_BYTES_MAX {
            mine = b"null".to_vec();
        }
        let values = match self.numbers.came_as {
            0 => self.collect(mine, limit)?,
            _ => self.tell(&mine, limit)?,
        };
        let values = values.iter();
        Ok(values
            .map(|it| serde_json::from_slice(it).unwrap_or_default())
            .collect())
    }

    fn check_hosts(&self, placement: &Placement) -> Result<()> {
        if self.network.is_some() {
            return Ok(());
        }
        let count = placement.hosts.len();
        let reason = format!("the ranks cannot share memory: they seem to be on {count} hosts");
        let help = "start the ranks of one job in one PID namespace of one host";
        Err(Error::setup(ACTION, reason, help))
    }

    /// Other hosts reach this rank at its end of the connection to rank 0; the ranks of rank 0's
    /// host at the address to which the other hosts connected.
    fn network(&mut self, placement: &Placement) -> Result<Network> {
        let network = self.network.take();
        let mut network = network.expect("hosts were checked before, and connect once");
        let met = match self.numbers.came_as {
            0 => (placement.elsewhere().first()).map(|&rank| self.numbers.order[rank] - 1),
            _ => Some(0),
        };
        let met = met.map(|socket| network.addresses[socket].to_canonical());
        let all = self.exchange(&json!(met))?;
        let chosen = if placement.host == 0 { 0 } else { self.rank() };
        let address = serde_json::from_value(all[chosen].clone()).ok();
        let help = "give MASTER_ADDR as an address that all hosts reach";
        let address = address.ok_or_else(|| Error::setup(ACTION, "this host has no address", help));
        network.addresses = vec![address?];
        Ok(network)
    }
}

/// Tells all ranks that have come why the job ends.
fn tell_reason(sockets: &mut [Frames], error: &Error) {
    let text = error.to_string();
    for socket in &mut *sockets {
        socket.queue(&text.as_bytes()[..text.floor_char_boundary(VALUE_BYTES_MAX)]);
    }
    wait_for(REFUSAL_MAX, sockets, |sockets| {
        let mut all = sockets.iter();
        all.all(|it| it.is_sent() || it.is_closed()).then_some(())
    });
}

#[cfg(test)]
mod tests;
