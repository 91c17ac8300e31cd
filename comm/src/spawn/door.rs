//! A job that continues without lost ranks, and whose processes something else starts: Slurm's
//! `srun`, pods, or whatever sets `RANK` and `WORLD_SIZE`. The process with number 0 is the
//! launcher; the others are its agents, which come to it over TCP. One that is started again comes
//! back with the number it had.

use std::fs::File;
use std::io::{Cursor, Read};
use std::net::{IpAddr, TcpStream, ToSocketAddrs};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use super::agent;
use super::hosts::Host;
use crate::error::{Error, Result};
use crate::frames::Frames;
use crate::launcher::{Launch, Launcher};
use crate::rendezvous::{Lookup, Rendezvous};
use crate::tcp::{self, Guests, Pass, Secret};

/// The most bytes of a message of the hello.
const BYTES_MAX: usize = 1024;

/// This process among those of such a job, and where they meet.
#[derive(Clone, Debug)]
pub struct Place(Rendezvous);

impl Place {
    /// By this process's variables. The error names the launcher if it ends all processes when one
    /// is lost.
    pub fn of_this_process() -> Result<Place, String> {
        Place::of(&|name| std::env::var(name).ok())
    }

    fn of(lookup: Lookup<'_>) -> Result<Place, String> {
        let launch = Launch::detect(lookup).map_err(|error| error.to_string())?;
        let launcher = launch
            .or_else(|| Launch::of_mpi(lookup))
            .map(|it| it.launcher);
        let found = match launcher {
            Some(Launcher::Variables) => Rendezvous::of_torch(lookup),
            Some(Launcher::Slurm) => Rendezvous::of_slurm(lookup),
            other => {
                return Err(format!(
                    "{} ends all ranks when one is lost",
                    match other {
                        Some(Launcher::Torchrun) => "torchrun",
                        Some(Launcher::OpenMpi) => "Open MPI's mpirun",
                        _ => "the MPI launcher",
                    }
                ));
            }
        };
        let place = found.map_err(|error| error.to_string())?;
        let place = place.ok_or("its variables do not say which rank this is")?;
        let hosts = lookup("SLURM_STEP_NUM_NODES").and_then(|count| count.parse::<usize>().ok());
        let is_one_on_each = match launcher {
            Some(Launcher::Slurm) => hosts == Some(place.size),
            _ => place.local_size.is_none_or(|count| count == 1),
        };
        match is_one_on_each {
            true => Ok(Place(place)),
            false => Err("it has started several processes on a host; help: start one on each, with --ranks N for its ranks".into()),
        }
    }

    /// Whether this process is the launcher.
    pub fn is_first(&self) -> bool {
        self.0.rank == 0
    }

    /// The hosts of the job, each with so many ranks.
    pub fn hosts(&self, ranks: usize) -> Vec<Host> {
        let name = |number| match number {
            0 => "localhost".into(),
            _ => format!("process {number}"),
        };
        let host = |number| Host {
            name: name(number),
            ranks,
            is_spare: false,
        };
        (0..self.0.size).map(host).collect()
    }

    /// What these processes recognise each other by.
    fn pass(&self) -> Result<Pass> {
        let secret = Secret::read(&|name| std::env::var(name).ok())?;
        let (job, rank, size) = (format!("agents {}", self.0.job), self.0.rank, self.0.size);
        Ok(Pass::new(&job, secret, rank, size))
    }

    /// Serves the launcher, which has `limit` to be there, until it is gone. Returns the exit code.
    /// Call it while the process has one thread.
    pub fn serve(&self, limit: Duration) -> Result<u8> {
        let Rendezvous { host, ports, .. } = &self.0;
        let addresses = || {
            let of_port = |&port: &u16| (host.as_str(), port).to_socket_addrs().ok();
            ports.iter().filter_map(of_port).flatten().collect()
        };
        let (at, pass) = (self.0.address(), self.pass()?);
        let joined = tcp::connect(0, addresses, &at, &pass, BYTES_MAX, limit)?;
        let lost = |error| Error::setup("serve the launcher", error, "start this process again");
        let (socket, received) = joined.frames.into_parts().map_err(lost)?;
        // SAFETY: both descriptors are open; what standard output was before is not used again.
        unsafe { libc::dup2(socket.as_raw_fd(), libc::STDOUT_FILENO) };
        Ok(agent::serve_from(Cursor::new(received).chain(socket), true))
    }
}

/// Where the launcher lets agents in.
pub(super) struct Door {
    guests: Guests,
    place: Rendezvous,
    /// Those whose predecessor may still run.
    waiting: Vec<Guest>,
}

/// An agent that has come.
pub(super) struct Guest {
    /// The number of its process.
    pub(super) number: usize,
    pub(super) socket: File,
    pub(super) address: IpAddr,
}

impl Door {
    pub(super) fn open(place: &Place) -> Result<Door> {
        let listener = tcp::listen(&place.0)?;
        Ok(Door {
            guests: Guests::new(listener, place.pass()?, BYTES_MAX)?,
            place: place.0.clone(),
            waiting: Vec::new(),
        })
    }

    /// The agents that have come and for which `is_free` says that their number is free.
    pub(super) fn guests(&mut self, is_free: impl Fn(usize) -> bool) -> Result<Vec<Guest>> {
        let expected: Vec<usize> = (1..self.place.size).collect();
        for joined in self.guests.come(&expected)? {
            let (number, Ok(guest)) = (joined.rank, Guest::of(joined.rank, joined.frames)) else {
                continue;
            };
            if !is_free(number) {
                tracing::warn!(
                    "process {number} came again, from {}: it waits until the first one is lost",
                    guest.address
                );
            }
            self.waiting.retain(|other| other.number != number);
            self.waiting.push(guest);
        }
        let free = self.waiting.extract_if(.., |guest| is_free(guest.number));
        Ok(free.collect())
    }

    /// How agents reach the launcher.
    pub(super) fn host(&self) -> String {
        self.place.host.clone()
    }

    /// The error of agents that have not come within `limit`.
    pub(super) fn too_late(&self, missing: &[usize], limit: Duration) -> Error {
        self.guests.too_late(missing, limit, &self.place.address())
    }
}

impl Guest {
    fn of(number: usize, frames: Frames) -> std::io::Result<Guest> {
        let (socket, _) = frames.into_parts()?;
        let stream = TcpStream::from(OwnedFd::from(socket));
        let address = stream.peer_addr()?.ip().to_canonical();
        Ok(Guest {
            number,
            socket: File::from(OwnedFd::from(stream)),
            address,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(variables: &str) -> Result<(usize, usize, String), String> {
        let pairs = variables.split(' ').filter_map(|pair| pair.split_once('='));
        let pairs: Vec<(&str, &str)> = pairs.collect();
        let value = |name: &str| pairs.iter().find(|pair| pair.0 == name);
        let found = Place::of(&|name| value(name).map(|pair| pair.1.to_string()));
        found.map(|Place(it)| (it.rank, it.size, it.host))
    }

    #[test]
    fn processes_are_one_on_each_host_and_their_launcher_lets_them_live() {
        let variables = "RANK=1 WORLD_SIZE=3 MASTER_ADDR=a MASTER_PORT=9";
        let slurm = "SLURM_PROCID=2 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NODELIST=n[1-4]";
        assert_eq!(place(variables), Ok((1, 3, "a".into())));
        let one = format!("{slurm} SLURM_STEP_NUM_NODES=4");
        assert_eq!(place(&one), Ok((2, 4, "n1".into())));
        for (wrong, told) in [
            (
                format!("{variables} LOCAL_WORLD_SIZE=3"),
                "several processes on a host",
            ),
            (
                format!("{slurm} SLURM_STEP_NUM_NODES=2"),
                "several processes on a host",
            ),
            (
                format!("{variables} TORCHELASTIC_RUN_ID=a"),
                "torchrun ends all",
            ),
            (
                "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2".into(),
                "mpirun ends all",
            ),
        ] {
            let error = place(&wrong).unwrap_err();
            assert!(error.contains(told), "{wrong}: {error}");
        }
    }
}
