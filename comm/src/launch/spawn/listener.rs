//! An elastic job whose processes something else starts: Slurm's `srun`, pods, or whatever sets
//! `RANK` and `WORLD_SIZE`. Process 0 is the launcher; the others are its agents, which connect to
//! it over TCP. An agent that is started again keeps its number.

use std::fs::File;
use std::io::Read;
use std::net::{IpAddr, TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::time::Duration;

use super::agent;
use super::place::JobPlace;
use crate::error::{Error, Result};
use crate::launch::stop;
use crate::rendezvous::Rendezvous;
use crate::transport::frames::{Frames, SealedWriter};
use crate::transport::tcp::{self, Acceptor};

/// The most bytes of a message of the hello.
const BYTES_MAX: usize = 1024;

/// Serves the launcher of the processes that meet at `place`, until it is gone. Waits for it for
/// `limit`. Returns the exit code. Call it while the process has one thread.
pub fn serve_at(place: &JobPlace, limit: Duration) -> Result<u8> {
    let Rendezvous { host, ports, .. } = &place.0;
    let addresses = || {
        let of_port = |&port: &u16| (host.as_str(), port).to_socket_addrs().ok();
        ports.iter().filter_map(of_port).flatten().collect()
    };
    // While nothing is started, they end this process.
    stop::hear();
    let (at, key) = (place.0.address(), place.key()?);
    let joined = tcp::connect(0, addresses, &at, &key, BYTES_MAX, limit)?;
    let lost = |error| Error::setup("serve the launcher", error, "start this process again");
    let (orders, news) = joined.frames.into_streams().map_err(lost)?;
    Ok(agent::serve_from(orders, Some(news)))
}

/// Where the launcher lets agents in.
pub(super) struct AgentListener {
    listener: Acceptor,
    place: Rendezvous,
}

/// An agent that has come.
pub(super) struct Agent {
    /// The number of its process.
    pub(super) number: usize,
    pub(super) news: Box<dyn Read + Send>,
    pub(super) orders: SealedWriter<File>,
    pub(super) address: IpAddr,
}

impl AgentListener {
    pub(super) fn open(place: &JobPlace) -> Result<AgentListener> {
        let socket = tcp::listen(&place.0)?;
        Ok(AgentListener {
            listener: Acceptor::new(socket, place.key()?, BYTES_MAX)?,
            place: place.0.clone(),
        })
    }

    /// The agents that have come since the last call.
    pub(super) fn come(&mut self) -> Result<Vec<Agent>> {
        let expected: Vec<usize> = (1..self.place.size).collect();
        let joined = self.listener.come(&expected)?.into_iter();
        Ok(joined
            .filter_map(|joined| Agent::of(joined.rank, joined.frames).ok())
            .collect())
    }

    /// How agents reach the launcher.
    pub(super) fn host(&self) -> String {
        self.place.host.clone()
    }

    /// The error of agents that have not come within `limit`.
    pub(super) fn too_late(&self, missing: &[usize], limit: Duration) -> Error {
        self.listener
            .too_late(missing, limit, &self.place.address())
    }
}

impl Agent {
    fn of(number: usize, frames: Frames) -> std::io::Result<Agent> {
        let (news, orders) = frames.into_streams()?;
        let stream = TcpStream::from(OwnedFd::from(orders.0.try_clone()?));
        let address = stream.peer_addr()?.ip().to_canonical();
        Ok(Agent {
            number,
            news: Box::new(news),
            orders,
            address,
        })
    }
}
