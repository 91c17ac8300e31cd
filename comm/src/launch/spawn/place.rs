//! An elastic job whose processes something else starts: which of them this one is, and where they
//! meet.

use super::hosts::ListedHost;
use crate::error::{Error, Problem, Result};
use crate::launcher::{Launch, Launcher};
use crate::rendezvous::{Lookup, Rendezvous};
use crate::transport::tcp::{JobKey, SECRET, Secret};

/// Which process of such a job this one is, and where they meet.
#[derive(Clone, Debug)]
pub struct JobPlace(pub(super) Rendezvous);

impl JobPlace {
    /// Reads this process's variables. The error names the launcher if it ends all processes when
    /// one is lost.
    pub fn of_this_process() -> Result<JobPlace, String> {
        JobPlace::of(&|name| std::env::var(name).ok())
    }

    fn of(lookup: Lookup<'_>) -> Result<JobPlace, String> {
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
        if is_one_on_each {
            Ok(JobPlace(place))
        } else {
            Err("it has started several processes on a host".into())
        }
    }

    /// Whether this process is the launcher.
    pub fn is_first(&self) -> bool {
        self.0.rank == 0
    }

    /// The hosts of the job, with the number of ranks on each.
    pub fn hosts(&self, ranks: usize) -> Vec<ListedHost> {
        let name = |number| match number {
            0 => "localhost".into(),
            _ => format!("process {number}"),
        };
        let host = |number| ListedHost {
            name: name(number),
            ranks,
            is_spare: false,
        };
        (0..self.0.size).map(host).collect()
    }

    /// What these processes recognise each other by. Agents start what their launcher orders, so
    /// they need a secret on every network.
    pub(super) fn key(&self) -> Result<JobKey> {
        let secret = Secret::read(&|name| std::env::var(name).ok())?;
        if secret.is_open() {
            let reason = format!("{SECRET}=none would let anybody on the network give them orders");
            let help = format!(
                "give all processes the same {SECRET}, such as `openssl rand -hex 32` prints"
            );
            return Err(Error::Launch(Problem::new(
                "connect agents to their launcher",
                reason,
                help,
            )));
        }
        let (job, rank, size) = (format!("agents {}", self.0.job), self.0.rank, self.0.size);
        Ok(JobKey::new(&job, secret, rank, size))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(variables: &str) -> Result<(usize, usize, String), String> {
        let pairs = variables.split(' ').filter_map(|pair| pair.split_once('='));
        let pairs: Vec<(&str, &str)> = pairs.collect();
        let value = |name: &str| pairs.iter().find(|pair| pair.0 == name);
        let found = JobPlace::of(&|name| value(name).map(|pair| pair.1.to_string()));
        found.map(|JobPlace(it)| (it.rank, it.size, it.host))
    }

    #[test]
    fn processes_are_one_on_each_host_and_their_launcher_lets_them_live() {
        let variables = "RANK=1 WORLD_SIZE=3 MASTER_ADDR=a MASTER_PORT=9";
        let slurm = "SLURM_PROCID=2 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NODELIST=n[1-4]";
        assert_eq!(place(variables), Ok((1, 3, "a".into())));
        let one = format!("{slurm} SLURM_STEP_NUM_NODES=4");
        assert_eq!(place(&one), Ok((2, 4, "n1".into())));
        for (wrong, expected) in [
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
            assert!(error.contains(expected), "{wrong}: {error}");
        }
    }
}
