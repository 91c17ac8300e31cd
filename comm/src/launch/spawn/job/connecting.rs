//! Connecting a job to its other hosts, before it starts and when one is there again.

use std::time::Duration;

use super::Job;
use crate::error::Result;
use crate::launch::spawn::agent::{AgentOrder, News, Setup};
use crate::launch::spawn::listener::AgentListener;
use crate::launch::spawn::remote::{Remote, text_of};
use crate::launch::spawn::task::VERSION;
use crate::launcher::{HOST_ADDRESSES, JOB_NUMBER};
use crate::membership::decide::hosts::{ANSWER_MAX, refused};
use crate::membership::decide::{JobEvent, STOPS, silence};
use crate::say::print_line;
use crate::transport::tcp::SECRET;

/// How long agents that others start may take to come, at least.
const GATHERING_MAX: Duration = Duration::from_secs(60);
/// Beginnings and names of variables that ranks of other hosts get, too.
const PASSED: [&str; 7] = ["DDP_", "NCCL_", "CUDA_", "RUST_", "FI_", "OFI_", "UCX_"];
const PASSED_NAMES: [&str; 4] = ["PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX"];

impl Job {
    /// Starts an agent on each of the other hosts, or waits for those that others start.
    pub(in crate::launch::spawn) fn connect(&mut self) -> Result<()> {
        let place = self.task.place.as_ref();
        self.listener = place.map(AgentListener::open).transpose()?;
        let names = self.state.hosts[1..].iter().map(|host| host.name.clone());
        let names: Vec<String> = names.collect();
        self.connections = names.len();
        for (index, name) in names.into_iter().enumerate() {
            let (setup, sender) = (self.setup()?, self.sender.clone());
            let other = match &self.listener {
                None => Remote::connect(&name, index, &self.task, setup, sender)?,
                Some(_) => Remote::absent(name, index),
            };
            self.others.push(other);
        }
        Ok(())
    }

    fn setup(&self) -> Result<Setup> {
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
            size: self.state.ranks.len(),
            grace: self.state.rules.grace,
            silence: (self.task.losses).map(|_| silence(self.state.rules.timeout)),
        })
    }

    /// Looks which agents have come that others start.
    pub(super) fn look_for_agents(&mut self) -> Result<()> {
        let Some(listener) = &mut self.listener else {
            return Ok(());
        };
        let mut result = Ok(());
        for agent in listener.come()? {
            let connection = self.connections;
            self.connections += 1;
            let came = JobEvent::AgentCame {
                host: agent.number,
                connection,
                address: agent.address,
            };
            self.agents.insert(connection, agent);
            // After an error the others that have come are still looked at.
            result = result.and(self.handle(came));
        }
        result
    }

    /// Lets an agent in. After an error its connection is closed.
    pub(super) fn let_in(&mut self, index: usize, connection: usize) -> Result<()> {
        let agent = self.agents.remove(&connection);
        let (setup, sender) = (self.setup()?, self.sender.clone());
        if let (Some(listener), Some(agent)) = (&self.listener, agent) {
            let launcher = listener.host();
            self.others[index] = Remote::of_agent(agent, connection, launcher, setup, sender)?;
        }
        Ok(())
    }

    /// An agent has ended before ranks were started: another one may come.
    fn agent_is_gone(&mut self, index: usize) {
        self.others[index].leave();
        self.happens_later(JobEvent::AgentGone(self.others[index].number));
    }

    /// Starts an agent again on a host that was lost.
    pub(super) fn call(&mut self, index: usize) -> Result<()> {
        let number = self.connections;
        self.connections += 1;
        let (setup, sender) = (self.setup()?, self.sender.clone());
        let name = self.others[index].name.clone();
        self.others[index] = Remote::connect(&name, number, &self.task, setup, sender)?;
        Ok(())
    }

    /// The index of the host whose news have this number. None if it has come again since.
    pub(super) fn other_of(&self, number: usize) -> Option<usize> {
        self.others.iter().position(|other| other.number == number)
    }

    /// Whether all other hosts have answered. An error if one cannot start ranks; the others that
    /// cannot are printed.
    pub(in crate::launch::spawn) fn are_all_ready(&mut self, waited: Duration) -> Result<bool> {
        self.look_for_agents()?;
        while let Ok((number, news)) = self.news.try_recv() {
            let Some(index) = self.other_of(number) else {
                continue;
            };
            let other = &mut self.others[index];
            match news {
                News::Ready(greeting) => other.is_ready(greeting),
                News::Refused(why) => other.answer = Some(Err(refused(&other.name, &why))),
                News::Alive(time) => other.send(&AgentOrder::Heard(time)),
                News::Signal(signal) => {
                    self.asked = Some(signal).filter(|it| STOPS.contains(it)).or(self.asked);
                }
                News::Gone if self.listener.is_some() => self.agent_is_gone(index),
                News::Gone if other.answer.is_none() => {
                    other.answer = Some(Err(other.why_no_answer(&self.task)));
                }
                News::Gone
                | News::Ended(..)
                | News::Said(..)
                | News::Stopped(..)
                | News::Printed(_) => {}
            }
        }
        let others = self.others.iter_mut().enumerate();
        let mut silent = others.filter(|(_, other)| other.answer.is_none());
        let limit = match &self.task.place {
            None => ANSWER_MAX,
            Some(_) => self.state.rules.timeout.max(GATHERING_MAX),
        };
        match (waited > limit, &self.listener) {
            (true, Some(listener)) => {
                let missing: Vec<usize> = silent.map(|(index, _)| index + 1).collect();
                if !missing.is_empty() {
                    return Err(listener.too_late(&missing, limit));
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
}

/// The variables of this process that ranks of other hosts get.
fn passed_variables() -> Vec<(String, String)> {
    // The job's own have other values, and its secret is made of that variable.
    let is_passed = |name: &str| {
        let is_of_job = [SECRET, JOB_NUMBER, HOST_ADDRESSES].contains(&name);
        let is_known = PASSED.iter().any(|start| name.starts_with(start));
        (is_known && !is_of_job) || PASSED_NAMES.contains(&name)
    };
    let texts = std::env::vars_os();
    let texts = texts
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    texts.filter(|(name, _)| is_passed(name)).collect()
}
