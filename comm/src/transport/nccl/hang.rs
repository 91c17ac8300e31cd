//! Errors of calls that hang or do not match: which call it is, where it stands in its graph, and
//! where the other ranks are.

use super::common::Common;
use super::compare::{self, CallDifference};
use crate::error::{CHECK_RANKS, Error, Problem, RankList, Remedy, Seconds};
use crate::transport::shared::{CHANNELS, COLLECTIVES, Marks, PAIRS};

/// The kinds of calls of each lane.
const KINDS: [&str; 2] = ["collective", "send or receive"];

/// What a watch reads: the progress marks of all ranks of its host, by local rank.
pub(super) struct View<'a> {
    pub(super) common: &'a Common,
    pub(super) mine: &'a Marks,
    pub(super) others: &'a [(usize, Marks)],
}

impl View<'_> {
    /// A rank's name for one of its calls, and the one rank that the call is with.
    fn name(&self, local_rank: usize, key: u32) -> (String, Option<usize>) {
        let name = self.common.pages.name_of(local_rank, key);
        name.unwrap_or_else(|| (format!("a call of group {}", self.common.group), None))
    }

    /// The call that the device is in, for an error whose origin NCCL does not report.
    pub(super) fn current_call(&self) -> String {
        let mut lanes = self.mine.lanes.iter();
        match lanes.find(|marks| marks.current().is_some()) {
            Some(marks) => self.name(self.common.local_rank(), marks.call).0,
            None => format!("group {}, between calls", self.common.group),
        }
    }

    /// The error of two ranks that made different collectives.
    pub(super) fn out_of_step(&self, difference: &CallDifference) -> Error {
        let common = self.common;
        let CallDifference { peer, mine, theirs } = *difference;
        let (ours, _) = self.name(common.local_rank(), mine.call);
        let (number, group, place) = (mine.number, common.group, in_graph(mine.place));
        let theirs = if difference.is_older() {
            "the same call after different ones".into()
        } else {
            self.name(peer, theirs.call).0
        };
        Error::OutOfStep {
            call: format!("{ours}, collective number {number} of group {group}{place}"),
            peer: self.rank(peer),
            theirs,
        }
    }

    /// The error of a call of `lane` that takes too long, and the missing ranks, as far as
    /// they are known.
    pub(super) fn late(&self, lane: usize) -> (Error, Vec<usize>) {
        let common = self.common;
        let now = self.mine.lanes[lane];
        let (call, peer) = self.name(common.local_rank(), now.call);
        let is_current = |mark: &&_| number_of(mark) == now.begun;
        let place = match lane {
            COLLECTIVES => self
                .mine
                .ring
                .iter()
                .find(is_current)
                .map_or(0, |mark| mark.place),
            _ => 0,
        };
        // For a send or receive: the ranks it may be with. Which call they are in is unknown.
        let may_be_peer = |other: &usize| peer.is_none_or(|peer| self.rank(*other) == peer);
        let is_idle = |other: &usize| self.marks(*other).lanes[PAIRS].current().is_none();
        let (asked, missing): (Vec<usize>, Vec<usize>) = match lane {
            PAIRS => {
                let others = self.others.iter().map(|(other, _)| *other);
                let asked: Vec<usize> = others.filter(may_be_peer).collect();
                let missing = asked.iter().copied().filter(is_idle).collect();
                (asked, missing)
            }
            _ => {
                let missing = compare::missing(self.mine, self.others);
                (missing.clone(), missing)
            }
        };
        let ranks: Vec<usize> = missing.iter().map(|&other| self.rank(other)).collect();
        let names_ranks = !ranks.is_empty() && (lane == COLLECTIVES || peer.is_some());
        let within = Seconds(common.timeout());
        let mut reason = match peer {
            _ if names_ranks => format!("{} did not arrive within {within}", RankList(&ranks)),
            Some(peer) if asked.is_empty() => {
                format!("rank {peer} did not arrive within {within}")
            }
            _ => format!("not done within {within}"),
        };
        for other in asked {
            reason += &format!(". {}", self.whereabouts(other, lane));
        }
        let has_all = lane == COLLECTIVES && missing.is_empty();
        let help = match (has_all, common.knows_all()) {
            (true, true) => {
                "all ranks entered the call but it makes no progress: NCCL_DEBUG=INFO shows what \
                 NCCL does, nvidia-smi -q the GPUs"
            }
            _ => CHECK_RANKS,
        };
        if !common.knows_all() {
            let known = if has_all {
                "All ranks of this host arrived; "
            } else {
                ""
            };
            reason += &format!(". {known}nothing is known of other hosts");
        }
        let (kind, number) = (KINDS[lane], now.begun);
        let action = format!(
            "{call}, {kind} number {number} on the device{}",
            in_graph(place)
        );
        let missing = if names_ranks { ranks } else { Vec::new() };
        (hang(action, reason, help), missing)
    }

    /// The error of a call of NCCL that does not return.
    pub(super) fn host_is_stuck(&self) -> Error {
        let common = self.common;
        let activity = common
            .failure
            .board
            .activity(common.local_rank(), common.pages.channel());
        let call = activity.map_or_else(|| self.current_call(), |call| call.to_string());
        let others = common
            .others()
            .map(|(other, _)| self.whereabouts(other, COLLECTIVES));
        let others: Vec<String> = others.collect();
        let within = Seconds(common.timeout());
        let reason = format!("NCCL did not return within {within}. {}", others.join(". "));
        hang(call, reason, CHECK_RANKS)
    }

    /// Where another rank is, on its device and on its host, for a call of `lane`.
    fn whereabouts(&self, other: usize, lane: usize) -> String {
        let state = |index: usize| {
            let (marks, kind) = (self.marks(other).lanes[index], KINDS[index]);
            let name = || self.name(other, marks.call).0;
            let number = marks.begun;
            match marks.current() {
                Some(_) => Some(format!("in {}, {kind} number {number}", name())),
                None if number != 0 && index == lane => {
                    Some(format!("past {}, {kind} number {number}", name()))
                }
                None => None,
            }
        };
        let or = |states: Vec<String>, none: &str| {
            if states.is_empty() {
                return none.to_string();
            }
            states.join(" and ")
        };
        let device = or(
            [COLLECTIVES, PAIRS].into_iter().filter_map(state).collect(),
            "at the start",
        );
        let board = &self.common.failure.board;
        let calls = (0..CHANNELS).filter_map(|channel| board.activity(other, channel));
        let calls = calls
            .filter(|call| call.in_progress)
            .map(|call| call.to_string());
        let (host, rank) = (or(calls.collect(), "no call"), self.rank(other));
        format!("Rank {rank}: its device is {device}; its host is in {host}")
    }

    /// The global rank of a rank of this host.
    fn rank(&self, local_rank: usize) -> usize {
        self.common.failure.local_ranks()[local_rank]
    }

    /// The marks of another rank of this host.
    fn marks(&self, other: usize) -> &Marks {
        let mut others = self.others.iter();
        let found = others.find(|(local_rank, _)| *local_rank == other);
        &found.expect("a rank of this host").1
    }
}

fn number_of(mark: &ddp_kernels::progress::ReportedWork) -> u32 {
    mark.number
}

fn hang(action: String, reason: String, help: &str) -> Error {
    Error::Hang(Problem::new(action, reason, help).with_remedy(Remedy::LongerTimeout))
}

/// The position of a call in its graph, if it is in one.
fn in_graph(position: u32) -> String {
    match position {
        0 => String::new(),
        _ => format!(" (number {position} of its graph)"),
    }
}
