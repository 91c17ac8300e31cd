//! One launch of an executable graph: which of its nodes are done, which may run, and what they
//! know.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::{Executable, Plan};
use crate::event::{Completion, Record};
use crate::nccl::Flight;
use crate::race::{Actor, Clock};
use crate::stream::Operation;
use crate::work::{HostFunction, Work};

/// What a node does in this launch.
#[derive(Clone)]
pub(crate) enum Step {
    Work(Arc<dyn Work>),
    Nccl(Arc<Flight>),
    Host(HostFunction),
    Record(Arc<Record>),
    /// None if the event was never recorded.
    Wait(Option<Arc<Record>>),
    Hang,
}

/// Where a launch stands.
pub(crate) struct Launch {
    pub(crate) executable: usize,
    plan: Arc<Plan>,
    actors: Vec<Actor>,
    /// Of this launch, one per node.
    pub(crate) operations: Vec<Arc<Operation>>,
    pub(crate) steps: Vec<Step>,
    /// For each node, how many dependencies are not done.
    missing: Vec<usize>,
    ready: BTreeSet<usize>,
    /// What the stream knew when the launch began, and when.
    begun: Option<(Clock, u64)>,
    /// What each node knew at its end, and when.
    ends: Vec<Option<(Clock, u64)>>,
    unfinished: usize,
    /// The end of the previous launch of the same executable.
    previous: Option<Arc<Record>>,
    pub(crate) end: Arc<Record>,
}

impl Launch {
    /// The next launch of the executable with this number. It ends at `end`.
    pub(crate) fn new(
        (number, executable): (usize, &mut Executable),
        operations: Vec<Arc<Operation>>,
        steps: Vec<Step>,
        end: Arc<Record>,
    ) -> Self {
        executable.pending += 1;
        let plan = executable.plan.clone();
        let missing: Vec<usize> = plan
            .nodes
            .iter()
            .map(|node| node.dependencies.len() + usize::from(node.after.is_some()))
            .collect();
        let without = missing.iter().enumerate().filter(|(_, count)| **count == 0);
        Self {
            executable: number,
            actors: executable.actors.clone(),
            operations,
            ready: without.map(|(node, _)| node).collect(),
            missing,
            begun: None,
            ends: vec![None; steps.len()],
            unfinished: steps.len(),
            steps,
            previous: executable.latest.replace(end.clone()),
            end,
            plan,
        }
    }

    /// Its records are at the place of its entry.
    pub(crate) fn queued_at(&self, sequence: u64) {
        self.end.queued_at(sequence);
        for step in &self.steps {
            match step {
                Step::Record(record) => record.queued_at(sequence),
                Step::Nccl(flight) => flight.end.queued_at(sequence),
                _ => {}
            }
        }
    }

    /// What may run now: `None` if the launch itself must begin, else nodes.
    pub(crate) fn ready(&self) -> impl Iterator<Item = Option<usize>> {
        let begins = self.begun.is_none()
            && self
                .previous
                .as_ref()
                .is_none_or(|previous| previous.is_complete());
        let nodes = self
            .ready
            .iter()
            .copied()
            .filter(|node| self.begun.is_some() && self.can_run(*node));
        begins.then_some(None).into_iter().chain(nodes.map(Some))
    }

    fn can_run(&self, node: usize) -> bool {
        match &self.steps[node] {
            Step::Wait(Some(record)) => record.is_complete(),
            Step::Hang => false,
            Step::Nccl(flight) => flight.can_run(),
            Step::Work(_) | Step::Host(_) | Step::Record(_) | Step::Wait(None) => true,
        }
    }

    /// Records elsewhere that this launch cannot end without.
    pub(crate) fn waits(&self) -> impl Iterator<Item = &Arc<Record>> {
        let waits = self.steps.iter().filter_map(|step| {
            if let Step::Wait(Some(record)) = step {
                Some(record)
            } else {
                None
            }
        });
        self.previous.iter().chain(waits)
    }

    /// Its pieces of NCCL work.
    pub(crate) fn flights(&self) -> impl Iterator<Item = &Arc<Flight>> {
        self.steps.iter().filter_map(|step| {
            if let Step::Nccl(flight) = step {
                Some(flight)
            } else {
                None
            }
        })
    }

    /// Puts a taken node back.
    pub(crate) fn put_back(&mut self, node: usize) {
        self.ready.insert(node);
    }

    pub(crate) fn is_internal(&self, node: usize) -> bool {
        self.plan.nodes[node].is_internal
    }

    pub(crate) fn is_host_function(&self, node: usize) -> bool {
        matches!(self.steps[node], Step::Host(_))
    }

    /// The launch begins: `clock` and `time_ns` are the stream's.
    pub(crate) fn begin(&mut self, clock: Clock, time_ns: u64) {
        self.begun = Some((clock, time_ns));
    }

    pub(crate) fn is_over(&self) -> bool {
        self.begun.is_some() && self.unfinished == 0
    }

    /// Takes `node` for running: its actor, what it must know before it runs, and the earliest
    /// time.
    pub(crate) fn take(&mut self, node: usize) -> (Actor, Vec<Clock>, u64) {
        self.ready.remove(&node);
        let (clock, mut time_ns) = self.begun.clone().expect("nodes run after the beginning");
        let dependencies = &self.plan.nodes[node].dependencies;
        let mut known = Vec::with_capacity(dependencies.len() + 1);
        if dependencies.is_empty() {
            known.push(clock);
            // The launch before ordered earlier events, even if this stream did not know them.
            if let Some(previous) = self
                .previous
                .as_ref()
                .and_then(|previous| previous.completion())
            {
                known.push(previous.clock.clone());
                time_ns = time_ns.max(previous.time_ns);
            }
        }
        for dependency in dependencies {
            let (clock, end_ns) = self.ends[*dependency]
                .as_ref()
                .expect("dependencies are done");
            known.push(clock.clone());
            time_ns = time_ns.max(*end_ns);
        }
        (self.actors[self.plan.chain_of[node]], known, time_ns)
    }

    /// `node` is done.
    pub(crate) fn finish(&mut self, node: usize, clock: Clock, time_ns: u64) {
        self.ends[node] = Some((clock, time_ns));
        self.unfinished -= 1;
        for &dependent in &self.plan.dependents[node] {
            self.missing[dependent] -= 1;
            if self.missing[dependent] == 0 {
                self.ready.insert(dependent);
            }
        }
    }

    /// What the stream knows once all nodes are done, and when: the last nodes know what the others
    /// do.
    pub(crate) fn results(&self) -> (Vec<Clock>, u64) {
        let leaves = self.plan.leaves.iter();
        let ends: Vec<&(Clock, u64)> = leaves
            .filter_map(|node| self.ends[*node].as_ref())
            .collect();
        let time_ns = ends.iter().map(|(_, time_ns)| *time_ns).max().unwrap_or(0);
        (
            ends.into_iter().map(|(clock, _)| clock.clone()).collect(),
            time_ns,
        )
    }

    /// All nodes are done, and the stream knows `clock`.
    pub(crate) fn complete(&self, clock: Clock, time_ns: u64) {
        self.end.complete(Completion { clock, time_ns });
    }

    /// It will never be done.
    pub(crate) fn abandon(&self) {
        self.end.abandon();
        for step in &self.steps {
            match step {
                Step::Record(record) => record.abandon(),
                Step::Nccl(flight) => flight.abandon(),
                _ => {}
            }
        }
    }
}
