//! Where ranks meet when a launcher without MPI started them: according to the variables of
//! torchrun, which others set too (Kubeflow), or those of Slurm.

use crate::error::{Error, Result};
use crate::identity::RANKS_MAX;

/// A lookup of environment variables.
pub(crate) type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// How many ports are tried where the first may be taken.
const PORTS: u16 = 8;
/// Slurm's jobs use ports from this one on, below those that the system gives out by itself.
const SLURM_PORTS: std::ops::Range<u64> = 20_000..32_000;

/// A rank's place in its job, and where rank 0 waits for the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rendezvous {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    /// How many ranks this host has, if the launcher says so.
    pub(crate) local_size: Option<usize>,
    /// The name or address of rank 0's host.
    pub(crate) host: String,
    /// Rank 0 listens on the first of these that is free.
    pub(crate) ports: Vec<u16>,
    /// The same text on all ranks of a job, and another in other jobs.
    pub(crate) job: String,
    pub(crate) is_of_torchrun: bool,
}

impl Rendezvous {
    /// By `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`; None without the first two.
    pub(crate) fn of_torch(lookup: Lookup<'_>) -> Result<Option<Rendezvous>> {
        if lookup("RANK").is_none() || lookup("WORLD_SIZE").is_none() {
            return Ok(None);
        }
        let (rank, size) = place(lookup, "RANK", "WORLD_SIZE")?;
        let mut meeting = Rendezvous {
            rank,
            size,
            local_size: number(lookup, "LOCAL_WORLD_SIZE").ok(),
            host: String::new(),
            ports: Vec::new(),
            job: String::new(),
            is_of_torchrun: lookup("TORCHELASTIC_RUN_ID").is_some(),
        };
        if size == 1 {
            return Ok(Some(meeting));
        }
        let host = lookup("MASTER_ADDR").filter(|host| !host.trim().is_empty());
        let expected = "the name or address of rank 0's host";
        meeting.host = host.ok_or_else(|| Error::launch("MASTER_ADDR", expected, "none"))?;
        let text = lookup("MASTER_PORT").unwrap_or_default();
        let port = text.trim().parse().ok().filter(|&port: &u16| port > 0);
        let expected = "a free port of rank 0's host, from 1 to 65535";
        let got = || Error::launch("MASTER_PORT", expected, format!("{text:?}"));
        let port = port.ok_or_else(got)?;
        // torchrun's own store listens on that port.
        let is_taken = lookup("TORCHELASTIC_USE_AGENT_STORE").as_deref() == Some("True");
        meeting.ports = if is_taken {
            (1..=PORTS)
                .map(|step| port.checked_add(step).unwrap_or(port - step))
                .collect()
        } else {
            vec![port]
        };
        let [run, restart] = ["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"]
            .map(|name| lookup(name).unwrap_or_default());
        meeting.job = format!("torch {run} {restart} {port} {size}");
        Ok(Some(meeting))
    }

    /// By the variables of a job step; None outside of one with several tasks.
    pub(crate) fn of_slurm(lookup: Lookup<'_>) -> Result<Option<Rendezvous>> {
        let tasks = number(lookup, "SLURM_STEP_NUM_TASKS").unwrap_or(1);
        // mpirun starts one process a host through Slurm, and these start the ranks.
        let is_under_mpirun = lookup("OMPI_COMM_WORLD_RANK").is_some();
        if tasks < 2 || lookup("SLURM_PROCID").is_none() || is_under_mpirun {
            return Ok(None);
        }
        let (rank, size) = place(lookup, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")?;
        let nodes = lookup("SLURM_STEP_NODELIST").unwrap_or_default();
        let expected = "the names of hosts, such as node[1-4]";
        let wrong = || Error::launch("SLURM_STEP_NODELIST", expected, format!("{nodes:?}"));
        let host = first_host(&nodes).ok_or_else(wrong)?;
        let [job, step] =
            ["SLURM_JOB_ID", "SLURM_STEP_ID"].map(|name| lookup(name).unwrap_or_default());
        let (job_number, step_number) = (job.parse().unwrap_or(0u64), step.parse().unwrap_or(0u64));
        let ports = SLURM_PORTS.end - SLURM_PORTS.start - u64::from(PORTS);
        let mixed = job_number
            .wrapping_mul(7919)
            .wrapping_add(step_number.wrapping_mul(31));
        let first = (SLURM_PORTS.start + mixed % ports) as u16;
        let nodes = number(lookup, "SLURM_STEP_NUM_NODES").ok();
        Ok(Some(Rendezvous {
            rank,
            size,
            local_size: (nodes == Some(1)).then_some(size),
            host,
            ports: (first..first + PORTS).collect(),
            job: format!("slurm {job} {step} {size}"),
            is_of_torchrun: false,
        }))
    }

    /// Whether all ranks are known to be on this host.
    pub(crate) fn is_on_one_host(&self) -> bool {
        self.local_size == Some(self.size)
    }

    /// `10.0.0.1:29500`, or `10.0.0.1:29501 to 29508`.
    pub(crate) fn address(&self) -> String {
        match self.ports[..] {
            [first, .., last] => format!("{}:{first} to {last}", self.host),
            [port] => format!("{}:{port}", self.host),
            [] => self.host.clone(),
        }
    }
}

/// This rank and the number of ranks.
fn place(lookup: Lookup<'_>, rank: &str, size: &str) -> Result<(usize, usize)> {
    let (own, count) = (number(lookup, rank)?, number(lookup, size)?);
    if !(1..=RANKS_MAX).contains(&count) {
        let expected = format!("a whole number from 1 to {RANKS_MAX}");
        return Err(Error::launch(size, &expected, count));
    }
    if own < count {
        return Ok((own, count));
    }
    let expected = format!("a number below that of the ranks ({size}={count})");
    Err(Error::launch(rank, &expected, own))
}

fn number(lookup: Lookup<'_>, name: &str) -> Result<usize> {
    let text = lookup(name).unwrap_or_default();
    let number = text.trim().parse().ok();
    number.ok_or_else(|| Error::launch(name, "a number", format!("{text:?}")))
}

/// The first host of a list such as `rack1-node[03-10,12],other`.
fn first_host(list: &str) -> Option<String> {
    let (mut host, mut rest) = (String::new(), list.trim());
    while let Some(end) = rest.find([',', '[']) {
        host += &rest[..end];
        if rest[end..].starts_with(',') {
            rest = "";
            break;
        }
        let (inside, after) = rest[end + 1..].split_once(']')?;
        host += inside.split([',', '-']).next()?;
        rest = after;
    }
    host += rest;
    (!host.is_empty() && !host.contains([']', ' '])).then_some(host)
}

#[cfg(test)]
mod tests;
