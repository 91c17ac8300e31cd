//! Ranks of several hosts: within a host through shared memory, between the first ranks of the hosts, their leaders, through
//! MPI.
//!
//! A reduction goes along the hosts as a chain: a leader puts what the hosts before it made in front of its own elements,
//! then its host reduces. So the order is that of the ranks, and the bits are those of one host, whatever the hosts are.
//! The result comes back along the chain. Large tensors go in pieces, so that all hosts work at the same time.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use ddp_kernels::{DType, Tensor};

use crate::collective::{Call, Collective, Operation, Reduce};
use crate::error::{Error, Result};
use crate::mpi::{MESSAGE_BYTES_MAX, Mpi};
use crate::shared::Shared;
use crate::sums::{self, Sources};

/// Which ranks are on which host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Placement {
    /// The ranks of each host, ascending; hosts in the order of their first ranks.
    pub(crate) hosts: Vec<Vec<usize>>,
    /// This rank's host, and its place there.
    pub(crate) host: usize,
    pub(crate) local_rank: usize,
}

impl Placement {
    /// The placement of ranks of which those with the same key share a host, seen from `rank`.
    pub(crate) fn new(keys: &[&str], rank: usize) -> Placement {
        let mut hosts: Vec<Vec<usize>> = Vec::new();
        for (other, key) in keys.iter().enumerate() {
            match hosts.iter_mut().find(|ranks| keys[ranks[0]] == *key) {
                Some(ranks) => ranks.push(other),
                None => hosts.push(vec![other]),
            }
        }
        Placement::of(hosts, rank)
    }

    /// Each rank by itself.
    pub(crate) fn apart(size: usize, rank: usize) -> Placement {
        Placement::of((0..size).map(|rank| vec![rank]).collect(), rank)
    }

    fn of(hosts: Vec<Vec<usize>>, rank: usize) -> Placement {
        let place = hosts.iter().enumerate().find_map(|(host, ranks)| Some((host, ranks.binary_search(&rank).ok()?)));
        let (host, local_rank) = place.expect("every rank is on a host");
        Placement { hosts, host, local_rank }
    }

    /// The ranks of this host.
    pub(crate) fn here(&self) -> &[usize] {
        &self.hosts[self.host]
    }

    /// The ranks of all other hosts.
    pub(crate) fn elsewhere(&self) -> Vec<usize> {
        let others = self.hosts.iter().enumerate().filter(|(host, _)| *host != self.host);
        others.flat_map(|(_, ranks)| ranks.iter().copied()).collect()
    }

    /// Whether each host has the ranks that follow those of the host before it.
    pub(crate) fn is_in_order(&self) -> bool {
        self.hosts.iter().flatten().copied().eq(0..self.hosts.iter().map(Vec::len).sum())
    }

    /// The host of a rank, and its place there.
    fn find(&self, rank: usize) -> (usize, usize) {
        let Placement { host, local_rank, .. } = Placement::of(self.hosts.clone(), rank);
        (host, local_rank)
    }

    fn last(&self) -> usize {
        self.hosts.len() - 1
    }
}

/// Waits that begin when all ranks of a host have come give the others this much longer, so that the error heard first is
/// that of those who know who is missing: the host's own ranks, then its leader, then those who wait for the leader.
const LEADER_PATIENCE: Duration = Duration::from_millis(500);
const LOCAL_PATIENCE: Duration = Duration::from_millis(2000);

/// All ranks, seen from one of them. Hosts are in order.
#[derive(Debug)]
pub(crate) struct Hosts {
    placement: Placement,
    local: Shared,
    /// The leaders, on a leader.
    leaders: Option<Mpi>,
    everyone: Mpi,
}

impl Hosts {
    /// `local` is this host's ranks, `everyone` all ranks.
    pub(crate) fn new(local: Shared, everyone: Mpi, placement: Placement) -> Hosts {
        assert!(placement.is_in_order() && placement.hosts.len() > 1);
        let leaders = everyone.among(placement.hosts.iter().map(|ranks| ranks[0]).collect());
        Hosts { placement, local, leaders, everyone }
    }

    /// Returns when all ranks have come to this call and want the same, as far as a rank can know: it goes on alone only
    /// where the next step makes it wait for its leader.
    fn meet<'a>(&self, call: &Call<'a>) -> Result<Later<'a>> {
        self.local.barrier(call)?;
        let later = Later {
            leader: Call { timeout: call.timeout.saturating_add(LEADER_PATIENCE), ..*call },
            local: Call { timeout: call.timeout.saturating_add(LOCAL_PATIENCE), ..*call },
        };
        if let Some(leaders) = &self.leaders {
            leaders.meet(&later.leader)?;
        }
        Ok(later)
    }

    /// Each piece of `flat` becomes the reduction of what the ranks up to this host hold; that of all on the last host.
    fn reduce_along(&self, later: &Later<'_>, flat: &Tensor, reduce: Reduce) -> Result<()> {
        let host = self.placement.host;
        for range in pieces(flat) {
            let piece = flat.slice(range)?;
            if let Some(leaders) = self.leaders.as_ref().filter(|_| host > 0) {
                let before = leaders.exchange(&later.leader, &[], &[(host - 1, piece.bytes())])?;
                put_before(&later.leader, &before[0], &piece, reduce)?;
            }
            self.local.all_reduce(&later.local, &piece, reduce)?;
            if let Some(leaders) = self.leaders.as_ref().filter(|_| host < self.placement.last()) {
                leaders.exchange(&later.leader, &[(host + 1, bytes(&later.leader, &piece)?)], &[])?;
            }
        }
        Ok(())
    }

    /// Each piece of `flat` becomes what it is on the last host.
    fn bring_back(&self, later: &Later<'_>, flat: &Tensor) -> Result<()> {
        let (host, last) = (self.placement.host, self.placement.last());
        for range in pieces(flat) {
            let piece = flat.slice(range)?;
            if let Some(leaders) = &self.leaders {
                if host < last {
                    fill(
                        &later.leader,
                        &piece,
                        &leaders.exchange(&later.leader, &[], &[(host + 1, piece.bytes())])?[0],
                    )?;
                }
                if host > 0 {
                    leaders.exchange(&later.leader, &[(host - 1, bytes(&later.leader, &piece)?)], &[])?;
                }
            }
            if host < last {
                self.local.broadcast(&later.local, &piece, 0)?;
            }
        }
        Ok(())
    }

    /// Each host's part of `flat` becomes what it is on the last host.
    fn hand_out(&self, later: &Later<'_>, flat: &Tensor) -> Result<()> {
        let (host, last) = (self.placement.host, self.placement.last());
        if host == last {
            for (to, leaders) in (0..last).flat_map(|to| self.leaders.as_ref().map(|leaders| (to, leaders))) {
                let block = flat.slice(self.block(flat, to))?;
                for range in pieces(&block) {
                    leaders.exchange(&later.leader, &[(to, bytes(&later.leader, &block.slice(range)?)?)], &[])?;
                }
            }
            return Ok(());
        }
        let block = flat.slice(self.block(flat, host))?;
        for range in pieces(&block) {
            let piece = block.slice(range)?;
            if let Some(leaders) = &self.leaders {
                fill(&later.leader, &piece, &leaders.exchange(&later.leader, &[], &[(last, piece.bytes())])?[0])?;
            }
            self.local.broadcast(&later.local, &piece, 0)?;
        }
        Ok(())
    }

    /// The elements of `flat` that are the slices of a host's ranks.
    fn block(&self, flat: &Tensor, host: usize) -> Range<usize> {
        let each = flat.count() / self.size();
        let ranks = &self.placement.hosts[host];
        ranks[0] * each..(ranks[0] + ranks.len()) * each
    }

    /// Every host's part of `flat` comes to all hosts.
    fn share_blocks(&self, later: &Later<'_>, flat: &Tensor) -> Result<()> {
        let host = self.placement.host;
        let blocks: Vec<Tensor> = (0..self.placement.hosts.len())
            .map(|host| Ok(flat.slice(self.block(flat, host))?))
            .collect::<Result<_>>()?;
        let cuts: Vec<Vec<Range<usize>>> = blocks.iter().map(|block| pieces(block).collect()).collect();
        for round in 0..cuts.iter().map(Vec::len).max().unwrap_or(0) {
            let piece = |host: usize| cuts[host].get(round).map(|range| blocks[host].slice(range.clone())).transpose();
            let others: Vec<usize> = (0..blocks.len()).filter(|&other| other != host).collect();
            if let Some(leaders) = &self.leaders {
                let mine = piece(host)?.map(|piece| bytes(&later.leader, &piece)).transpose()?;
                let sends: Vec<(usize, Arc<[u8]>)> =
                    mine.iter().flat_map(|mine| others.iter().map(|&other| (other, Arc::clone(mine)))).collect();
                let mut theirs = Vec::new();
                for &other in &others {
                    theirs.extend(piece(other)?.map(|piece| (other, piece)));
                }
                let receives: Vec<(usize, usize)> =
                    theirs.iter().map(|(other, piece)| (*other, piece.bytes())).collect();
                let received = leaders.exchange(&later.leader, &sends, &receives)?;
                theirs.iter().zip(received).try_for_each(|((_, piece), bytes)| fill(&later.leader, piece, &bytes))?;
            }
            for other in others {
                if let Some(piece) = piece(other)? {
                    self.local.broadcast(&later.local, &piece, 0)?;
                }
            }
        }
        Ok(())
    }

    /// Runs `body` on the elements as they are reduced: in f32 for bf16 and f16. What it made becomes `part` of `tensor`.
    fn in_wide(&self, tensor: &Tensor, part: Range<usize>, body: impl FnOnce(&Tensor) -> Result<()>) -> Result<()> {
        let flat = tensor.flatten()?;
        if !matches!(tensor.dtype(), DType::BF16 | DType::F16) {
            return body(&flat);
        }
        let wide = flat.to_dtype(DType::F32)?;
        body(&wide)?;
        flat.slice(part.clone())?.copy_from(&wide.slice(part)?.to_dtype(tensor.dtype())?)?;
        Ok(())
    }
}

/// A call after all have come to it: as a leader waits, and as those wait who depend on a leader.
struct Later<'a> {
    leader: Call<'a>,
    local: Call<'a>,
}

/// `flat` in pieces that fit a message.
fn pieces(flat: &Tensor) -> impl Iterator<Item = Range<usize>> + use<> {
    let (count, each) = (flat.count(), MESSAGE_BYTES_MAX / flat.dtype().bytes());
    (0..count).step_by(each).map(move |start| start..count.min(start + each))
}

fn bytes(call: &Call<'_>, piece: &Tensor) -> Result<Arc<[u8]>> {
    call.lend(piece, |bytes| Ok(Arc::from(bytes)))
}

fn fill(call: &Call<'_>, piece: &Tensor, source: &[u8]) -> Result<()> {
    call.lend_mut(piece, |bytes| {
        bytes.copy_from_slice(source);
        Ok(())
    })
}

/// `piece` becomes the reduction of `before` and itself, in this order.
fn put_before(call: &Call<'_>, before: &[u8], piece: &Tensor, reduce: Reduce) -> Result<()> {
    call.lend_mut(piece, |own| {
        assert_eq!(before.len(), own.len());
        let sources = Sources { first: before.as_ptr(), stride_bytes: own.len(), ranks: 2, mine: 1 };
        // SAFETY: the first of two is `before`, of the length of `own`, and the second `own` itself.
        unsafe { sums::reduce(piece.dtype(), reduce, own, sources) };
        Ok(())
    })
}

/// An error of a call that was made in the numbers of one host, as one of the call that the user made.
fn in_words_of(call: &Call<'_>, mut error: Error) -> Error {
    if let Error::Timeout { call: told, .. } | Error::OutOfStep { call: told, .. } = &mut error {
        *told = call.to_string();
    }
    error
}

impl Collective for Hosts {
    fn transport(&self) -> &'static str {
        "shared memory and mpi"
    }

    fn rank(&self) -> usize {
        self.placement.here()[self.placement.local_rank]
    }

    fn size(&self) -> usize {
        self.everyone.size()
    }

    fn all_reduce(&self, call: &Call<'_>, tensor: &Tensor, reduce: Reduce) -> Result<()> {
        let later = self.meet(call)?;
        self.in_wide(tensor, 0..tensor.count(), |flat| {
            self.reduce_along(&later, flat, reduce)?;
            self.bring_back(&later, flat)
        })
    }

    fn reduce_scatter(&self, call: &Call<'_>, tensor: &Tensor, reduce: Reduce) -> Result<()> {
        let later = self.meet(call)?;
        let each = tensor.count() / self.size();
        self.in_wide(tensor, self.rank() * each..(self.rank() + 1) * each, |flat| {
            self.reduce_along(&later, flat, reduce)?;
            self.hand_out(&later, flat)
        })
    }

    fn all_gather(&self, call: &Call<'_>, tensor: &Tensor) -> Result<()> {
        let later = self.meet(call)?;
        let flat = tensor.flatten()?;
        self.local.all_gather(&later.local, &flat.slice(self.block(&flat, self.placement.host))?)?;
        self.share_blocks(&later, &flat)
    }

    fn broadcast(&self, call: &Call<'_>, tensor: &Tensor, root: usize) -> Result<()> {
        let later = self.meet(call)?;
        let (root_host, root_place) = self.placement.find(root);
        if self.placement.host == root_host {
            self.local.broadcast(&later.local, tensor, root_place)?;
        }
        if let Some(leaders) = &self.leaders {
            call.lend_mut(tensor, |bytes| leaders.broadcast_bytes(&later.leader, bytes, root_host))?;
        }
        if self.placement.host != root_host {
            self.local.broadcast(&later.local, tensor, 0)?;
        }
        Ok(())
    }

    fn send(&self, call: &Call<'_>, tensor: &Tensor, to: usize) -> Result<()> {
        match self.placement.find(to) {
            (host, place) if host == self.placement.host => {
                let here = Call { operation: Operation::Send { to: place }, ..*call };
                self.local.send(&here, tensor, place).map_err(|error| in_words_of(call, error))
            }
            _ => self.everyone.send(call, tensor, to),
        }
    }

    fn receive(&self, call: &Call<'_>, tensor: &Tensor, from: usize) -> Result<()> {
        match self.placement.find(from) {
            (host, place) if host == self.placement.host => {
                let here = Call { operation: Operation::Receive { from: place }, ..*call };
                self.local.receive(&here, tensor, place).map_err(|error| in_words_of(call, error))
            }
            _ => self.everyone.receive(call, tensor, from),
        }
    }

    fn barrier(&self, call: &Call<'_>) -> Result<()> {
        let later = self.meet(call)?;
        self.local.barrier(&later.local)
    }
}

#[cfg(test)]
mod tests {
    use std::panic::Location;

    use super::*;

    #[test]
    fn ranks_of_one_key_are_one_host() {
        let placement = Placement::new(&["b", "b", "a", "b"], 3);
        assert_eq!(placement, Placement { hosts: vec![vec![0, 1, 3], vec![2]], host: 0, local_rank: 2 });
        assert_eq!((placement.here(), placement.elsewhere()), (&[0, 1, 3][..], vec![2]));
        assert!(!placement.is_in_order());
        assert_eq!(placement.find(2), (1, 0));
    }

    #[test]
    fn hosts_that_follow_each_other_are_in_order() {
        assert!(Placement::new(&["a", "a", "b"], 0).is_in_order());
        assert!(Placement::apart(3, 1).is_in_order());
        assert_eq!(Placement::apart(3, 1).here(), [1]);
    }

    #[test]
    fn a_prefix_comes_first() {
        // 2²⁴ + 1 is no f32: the order of the sum shows.
        let own = Tensor::from_slice(&[1.0f32, f32::NAN], &[2], ddp_kernels::Device::Cpu).unwrap();
        let before: Vec<u8> = [16_777_216.0f32, 1.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        let (stream, site) =
            (ddp_kernels::stream::Stream::default_of(ddp_kernels::Device::Cpu).unwrap(), Location::caller());
        let (operation, timeout) = (Operation::AllReduce(Reduce::Sum), Duration::from_secs(1));
        let call = Call { operation, tensor: Some(&own), stream: &stream, sequence: 0, timeout, group: "main", site };
        put_before(&call, &before, &own, Reduce::Sum).unwrap();
        assert_eq!(own.to_vec::<f32>().unwrap()[0], 16_777_216.0);
        put_before(&call, &before, &own, Reduce::Max).unwrap();
        assert!(own.to_vec::<f32>().unwrap()[1].is_nan());
    }
}
