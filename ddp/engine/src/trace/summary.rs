//! What a trace says: which part of a step takes longest, and which ranks are late.

use std::collections::{BTreeMap, BTreeSet};

use ddp_kernels::trace::Lane;

use super::spans::{RankTrace, TracedSpan};
use crate::setting::GRAPH;

/// A rank is late in a step if the others wait for it longer than this part of a step.
const LATE_PART: f64 = 0.05;
/// The most ranks that are named.
const NAMED_MAX: usize = 8;

/// A trace in a few numbers. Shares are parts of the time that is traced.
#[derive(Debug, PartialEq)]
pub(super) struct Summary {
    steps: BTreeSet<u64>,
    step_ns: f64,
    /// What the layers' thread or stream does, the largest part first.
    parts: Vec<(String, f64)>,
    /// What happens beside that.
    beside: Vec<(String, f64)>,
    /// None if no rank's arrival is known.
    late: Option<Vec<Late>>,
    bound_ns: i64,
    missed: u64,
}

/// A rank for which the others wait.
#[derive(Debug, PartialEq)]
pub(super) struct Late {
    pub(super) rank: usize,
    /// How late it is in each step in which it is late.
    pub(super) by_ns: BTreeMap<u64, i64>,
}

impl Summary {
    pub(super) fn of(ranks: &[RankTrace]) -> Summary {
        let all = || {
            ranks
                .iter()
                .flat_map(|rank| rank.spans.iter().map(move |span| (rank, span)))
        };
        let steps = all().filter(|(_, span)| span.lane == Lane::Step);
        let steps: BTreeSet<u64> = steps.map(|(_, span)| span.step).collect();
        let total_ns: i64 = ranks.iter().map(traced_ns).sum();
        let (mut parts, mut beside) = (BTreeMap::new(), BTreeMap::new());
        for (rank, span) in all() {
            let name = rank.name(span);
            let aside = is_beside(span.lane, name);
            let map = if aside { &mut beside } else { &mut parts };
            let length_ns = span.end_ns - span.begin_ns;
            for (part, sign) in part_of(span.lane, name) {
                *map.entry(part.to_string()).or_insert(0) += sign * length_ns;
            }
        }
        let shares = |parts: BTreeMap<String, i64>| {
            let share = |ns: i64| ns.max(0) as f64 / total_ns.max(1) as f64;
            let parts = parts.into_iter().map(|(name, ns)| (name, share(ns)));
            let mut parts: Vec<_> = parts.collect();
            parts.sort_by(|a, b| b.1.total_cmp(&a.1));
            parts
        };
        let step_ns = total_ns as f64 / (ranks.len().max(1) * steps.len().max(1)) as f64;
        let bound_ns = ranks.iter().map(|rank| rank.bound_ns).max().unwrap_or(0);
        Summary {
            late: late(ranks, &steps, (LATE_PART * step_ns) as i64),
            steps,
            step_ns,
            parts: shares(parts),
            beside: shares(beside),
            bound_ns,
            missed: ranks.iter().map(|rank| rank.missed).sum(),
        }
    }

    /// For people.
    pub(super) fn lines(&self) -> Vec<String> {
        let (Some(first), Some(last)) = (self.steps.first(), self.steps.last()) else {
            return vec!["trace: no step was traced".into()];
        };
        let known: f64 = self.parts.iter().map(|(_, share)| share).sum();
        let other = ("other".to_string(), 1.0 - known);
        let parts: Vec<_> = self.parts.iter().cloned().chain([other]).collect();
        let list = |parts: &[(String, f64)]| -> String {
            let large = parts.iter().filter(|(_, share)| *share >= 0.005);
            let text = |(name, share): &(String, f64)| format!("{name} {:.0}%", share * 100.0);
            large.map(text).collect::<Vec<_>>().join(", ")
        };
        let (step_ms, parts) = (self.step_ns / 1e6, list(&parts));
        let steps = format!("trace of steps {first} to {last}");
        let mut lines = vec![format!("{steps}: {step_ms:.2} ms a step, of which {parts}")];
        if let Some((part, _)) = self.parts.first() {
            let beside = Some(list(&self.beside)).filter(|list| !list.is_empty());
            let beside = beside.map(|list| format!("; beside it: {list}"));
            let beside = beside.unwrap_or_default();
            lines.push(format!("the largest part is {part}{beside}"));
        }
        lines.extend(self.late_lines());
        if self.missed > 0 {
            let why = "spans did not fit into the trace: its last steps are incomplete";
            lines.push(format!("{} {why}", self.missed));
        }
        lines
    }

    fn late_lines(&self) -> Vec<String> {
        let Some(late) = &self.late else {
            return vec![format!(
                "captured steps do not show which ranks are late; help: trace with {GRAPH} off"
            )];
        };
        let bound_ms = self.bound_ns as f64 / 1e6;
        if late.is_empty() {
            return vec![format!(
                "no rank is late by more than {:.0}% of a step (clocks agree within {bound_ms:.3} ms)",
                LATE_PART * 100.0
            )];
        }
        let late = late.iter().take(NAMED_MAX);
        let late = late.map(|one| one.line(self.steps.len(), bound_ms));
        late.collect()
    }
}

impl Late {
    fn line(&self, steps: usize, bound_ms: f64) -> String {
        let Late { rank, by_ns } = self;
        let (late, sum) = (by_ns.len(), by_ns.values().sum::<i64>());
        let mean_ms = sum as f64 / late.max(1) as f64 / 1e6;
        let worst = by_ns.iter().max_by_key(|(_, ns)| **ns);
        let worst = worst.map_or((0, 0.0), |(step, ns)| (*step, *ns as f64 / 1e6));
        let how = if late * 2 >= steps {
            "steadily late"
        } else {
            "late in passing"
        };
        format!(
            "rank {rank} is {how}: in {late} of {steps} steps, by {mean_ms:.2} ms on average, \
             {:.2} ms in step {} (clocks agree within {bound_ms:.3} ms)",
            worst.1, worst.0
        )
    }
}

/// Whether work of a lane runs beside the layers.
fn is_beside(lane: Lane, name: &str) -> bool {
    matches!(lane, Lane::Data | Lane::Reductions | Lane::Copies) || name == "write checkpoint"
}

/// The part of a step that a span is counted in, and what it is taken out of.
fn part_of(lane: Lane, name: &str) -> Vec<(&str, i64)> {
    match (lane, name) {
        (Lane::Step, _) => Vec::new(),
        // Inside of a forward.
        (_, "wait for values") => vec![(name, 1), (Lane::Forward.name(), -1)],
        (Lane::Waiting, _) => vec![(name, 1)],
        (Lane::Evaluation, _) if name != "evaluate" => Vec::new(),
        _ => vec![(lane.name(), 1)],
    }
}

/// From the first span of a rank's layers to the last.
fn traced_ns(rank: &RankTrace) -> i64 {
    let is_in_step = |span: &&TracedSpan| !is_beside(span.lane, rank.name(span));
    let spans = || rank.spans.iter().filter(is_in_step);
    let begin = spans().map(|span| span.begin_ns).min().unwrap_or(0);
    let end = spans().map(|span| span.end_ns).max().unwrap_or(0);
    end - begin
}

/// The ranks that complete their gradients later than the others, by more than `least_ns` and the
/// bound of their clocks. None if the trace does not show when gradients were complete.
fn late(ranks: &[RankTrace], steps: &BTreeSet<u64>, least_ns: i64) -> Option<Vec<Late>> {
    let arrivals: Vec<BTreeMap<u64, i64>> = ranks.iter().map(arrivals).collect();
    if arrivals.iter().all(BTreeMap::is_empty) {
        return None;
    }
    let bound_ns = ranks.iter().map(|rank| rank.bound_ns).max().unwrap_or(0);
    let by_ns = |rank: usize, step: u64| {
        let own = arrivals[rank].get(&step)?;
        let others = arrivals.iter().enumerate();
        let others = others.filter(|(other, _)| *other != rank);
        let others = others.filter_map(|(_, at)| at.get(&step).copied());
        let mut others: Vec<i64> = others.collect();
        others.sort_unstable();
        let by_ns = own - others.get(others.len() / 2)?;
        (by_ns > least_ns.max(2 * bound_ns)).then_some((step, by_ns))
    };
    let late = (0..ranks.len()).map(|rank| Late {
        rank,
        by_ns: steps.iter().filter_map(|&step| by_ns(rank, step)).collect(),
    });
    let mut late: Vec<Late> = late.filter(|one| !one.by_ns.is_empty()).collect();
    late.sort_by_key(|one| std::cmp::Reverse(one.by_ns.values().sum::<i64>()));
    Some(late)
}

/// When a rank had completed its gradients, by step.
fn arrivals(rank: &RankTrace) -> BTreeMap<u64, i64> {
    let mut ends: BTreeMap<u64, i64> = BTreeMap::new();
    let is_backward = |span: &&TracedSpan| span.lane == Lane::Backward;
    for span in rank.spans.iter().filter(is_backward) {
        let end = ends.entry(span.step).or_insert(i64::MIN);
        *end = (*end).max(span.end_ns);
    }
    ends
}
