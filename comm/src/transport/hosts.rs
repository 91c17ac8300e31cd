//! Collectives across hosts: shared memory within a host, and sockets between the leaders, which
//! are the first ranks of the hosts.
//!
//! A reduction passes along the hosts as a chain: a leader adds the result of the host before it to
//! its own elements, then its host reduces. So sums add in rank order and are bit-identical to
//! those of a single host. The last host sends the result to all.

use std::ops::Range;
use std::sync::Mutex;
use std::time::Duration;

use ddp_kernels::{DType, Device, Tensor, ops, panics};

use crate::collective::{Call, Collective, Operation, Partials, Reduce, Sum};
use crate::error::{Error, Result};
use crate::transport::messages::Members;
use crate::transport::placement::{Placement, find};
use crate::transport::shared::Shared;
use crate::transport::tcp::MESSAGE_BYTES_MAX;
use ddp_kernels::sums::{self, Sources};

/// Additional time for waits that begin when all ranks of a host have arrived, so that the error
/// reported first is that of the ranks that know who is missing: the host's own ranks, then its
/// leader, then the ranks that wait for their leader. On a busy machine a leader may take seconds
/// to report: with 2 s here a rank that waited for it could be first, and a leader that works was
/// taken for hung.
const LEADER_GRACE: Duration = Duration::from_millis(500);
const LOCAL_GRACE: Duration = Duration::from_millis(5000);

/// All ranks, seen from one of them. Hosts are in rank order.
#[derive(Debug)]
pub(crate) struct Hosts {
    placement: Placement,
    local: Shared,
    /// The leaders, on a leader.
    leaders: Option<Members>,
    everyone: Members,
    /// Memory that calls use again.
    scratch: [Mutex<Option<Tensor>>; 2],
}

impl Hosts {
    /// `local` is this host's ranks, `everyone` all ranks.
    pub(crate) fn new(local: Shared, everyone: Members, placement: Placement) -> Hosts {
        let ranks = placement.hosts.iter().flatten().copied();
        assert!(ranks.eq(0..everyone.size()) && placement.hosts.len() > 1);
        let leaders = everyone.among(placement.hosts.iter().map(|ranks| ranks[0]).collect());
        Hosts {
            placement,
            local,
            leaders,
            everyone,
            scratch: Default::default(),
        }
    }

    /// Scratch tensor `number` (0 or 1) with `count` elements, reused by later calls.
    fn scratch(&self, number: usize, count: usize, dtype: DType) -> Result<Tensor> {
        let mut kept = panics::lock(&self.scratch[number]);
        let is_fit = |it: &Tensor| it.dtype() == dtype && it.count() >= count;
        let tensor = match kept.take().filter(is_fit) {
            Some(tensor) => tensor,
            None => Tensor::zeros(&[count], dtype, Device::Cpu)?,
        };
        Ok(kept.insert(tensor).slice(0..count)?)
    }

    /// Returns when all ranks have come to the same call, as far as a rank can know: it continues
    /// alone only if its next step waits for its leader.
    fn meet<'a>(&self, call: &Call<'a>) -> Result<Met<'a>> {
        self.local.barrier(call)?;
        let with_grace = |grace: Duration| Call {
            timeout: call.timeout.saturating_add(grace),
            // Of the sums of a host: see `sum_along`.
            sum: Sum::Transport,
            ..*call
        };
        let met = Met {
            leader: with_grace(LEADER_GRACE),
            local: with_grace(LOCAL_GRACE),
        };
        if let Some(leaders) = &self.leaders {
            leaders.meet(&met.leader)?;
        }
        Ok(met)
    }

    fn run_one(&self, call: &Call<'_>) -> Result<()> {
        match call.operation {
            Operation::Send { to } => {
                self.pair(call, to, |to| Operation::Send { to }, call.tensor())
            }
            Operation::Receive { from } => self.pair(
                call,
                from,
                |from| Operation::Receive { from },
                call.tensor(),
            ),
            Operation::AllReduce(reduce) | Operation::ReduceScatter(reduce) => {
                let met = self.meet(call)?;
                match call.sum {
                    Sum::Transport => self.reduce(&met, call.tensor(), reduce),
                    Sum::Tree(partials) => self.sum_along(&met, call.tensor(), partials),
                }
            }
            Operation::AllGather => self.all_gather(&self.meet(call)?, call.tensor()),
            Operation::Broadcast { root } => {
                let (met, tensor) = (self.meet(call)?, call.tensor());
                let (host, root) = find(&self.placement.hosts, root);
                if self.placement.host == host {
                    let operation = Operation::Broadcast { root };
                    self.local.part(&met.local, operation, tensor)?;
                }
                self.spread(&met, tensor, host)
            }
            Operation::Barrier => self.local.barrier(&self.meet(call)?.local),
        }
    }

    fn all_gather(&self, met: &Met<'_>, tensor: &Tensor) -> Result<()> {
        let flat = tensor.flatten()?;
        let each = flat.count() / self.size();
        let block = |host: usize| -> Result<Tensor> {
            let ranks = &self.placement.hosts[host];
            let first = ranks[0] * each;
            Ok(flat.slice(first..first + ranks.len() * each)?)
        };
        let own = block(self.placement.host)?;
        self.local.part(&met.local, Operation::AllGather, &own)?;
        let mut hosts = 0..self.placement.hosts.len();
        hosts.try_for_each(|host| self.spread(met, &block(host)?, host))
    }

    /// Every rank's `tensor` becomes the reduction over all ranks.
    fn reduce(&self, met: &Met<'_>, tensor: &Tensor, reduce: Reduce) -> Result<()> {
        let (flat, last) = (tensor.flatten()?, self.placement.hosts.len() - 1);
        // bf16 is added in f32 and rounded once.
        if tensor.dtype() != DType::BF16 {
            self.reduce_along(met, &flat, reduce)?;
            return self.spread(met, &flat, last);
        }
        let wide = self.scratch(0, flat.count(), DType::F32)?;
        ops::cast_into(&wide, &flat)?;
        self.reduce_along(met, &wide, reduce)?;
        self.spread(met, &wide, last)?;
        Ok(ops::cast_into(&flat, &wide)?)
    }

    /// Every rank's `tensor` becomes the sum in the order of a tree. Each host makes the sums that
    /// its ranks can make, and the leaders complete them: each the sums of a part of the elements.
    fn sum_along(&self, met: &Met<'_>, tensor: &Tensor, partials: Partials<'_>) -> Result<()> {
        let (flat, tree) = (tensor.flatten()?, partials.tree);
        let count = flat.count();
        let own = tree.given_by(self.rank());
        // The tensor gets the result, so it cannot also hold what is summed.
        let rows = self.scratch(0, own * count, flat.dtype())?;
        let given = partials.rows.count();
        rows.slice(0..given)?.copy_from(&partials.rows.flatten()?)?;
        if given < rows.count() {
            rows.slice(given..rows.count())?.copy_from(&flat)?;
        }
        let sums_of = |ranks: &[usize]| tree.sums_of(ranks[0]..ranks[0] + ranks.len());
        let here = sums_of(self.placement.here());
        let made = self.scratch(1, here.len() * count, flat.dtype())?;
        for (number, order) in here.iter().enumerate() {
            let sum = made.slice(number * count..(number + 1) * count)?;
            let partials = Partials {
                rows: &rows,
                order,
                tree,
            };
            let call = Call {
                sum: Sum::Tree(partials),
                ..met.local
            };
            let operation = Operation::AllReduce(Reduce::Sum);
            self.local.part(&call, operation, &sum)?;
        }
        if let Some(leaders) = &self.leaders {
            let of_hosts = self
                .placement
                .hosts
                .iter()
                .map(|ranks| sums_of(ranks).len());
            let order = tree.order_of(&self.placement.hosts);
            let given: Vec<usize> = of_hosts.collect();
            met.leader.with_bytes(&made, |made| {
                met.leader.with_bytes_mut(&flat, |bytes| {
                    leaders.sum_along(&met.leader, bytes, made, (&given, &order), flat.dtype())
                })
            })?;
        }
        let operation = Operation::Broadcast { root: 0 };
        self.local.part(&met.local, operation, &flat)
    }

    /// `flat` becomes the reduction over the ranks up to this host, piece by piece: hosts work at
    /// the same time. On the last host it is the reduction over all ranks.
    fn reduce_along(&self, met: &Met<'_>, flat: &Tensor, reduce: Reduce) -> Result<()> {
        let (host, last) = (self.placement.host, self.placement.hosts.len() - 1);
        for range in pieces(flat) {
            let piece = flat.slice(range)?;
            if let Some(leaders) = self.leaders.as_ref().filter(|_| host > 0) {
                leaders.receive(&met.leader, (host - 1, piece.bytes()), |before| {
                    add_before(&met.leader, before, &piece, reduce)
                })?;
            }
            self.local
                .part(&met.local, Operation::AllReduce(reduce), &piece)?;
            if let Some(leaders) = self.leaders.as_ref().filter(|_| host < last) {
                met.leader
                    .with_bytes(&piece, |bytes| leaders.send(&met.leader, host + 1, bytes))?;
            }
        }
        Ok(())
    }

    /// `tensor` of every rank becomes what it is on `host`.
    fn spread(&self, met: &Met<'_>, tensor: &Tensor, host: usize) -> Result<()> {
        if let Some(leaders) = &self.leaders {
            met.leader.with_bytes_mut(tensor, |bytes| {
                leaders.broadcast_bytes(&met.leader, bytes, host)
            })?;
        }
        if self.placement.host != host {
            let root = 0;
            self.local
                .part(&met.local, Operation::Broadcast { root }, tensor)?;
        }
        Ok(())
    }

    /// Sends to or receives from `peer`, which may be on this host.
    fn pair(
        &self,
        call: &Call<'_>,
        peer: usize,
        operation: fn(usize) -> Operation,
        tensor: &Tensor,
    ) -> Result<()> {
        let (host, local_rank) = find(&self.placement.hosts, peer);
        if host != self.placement.host {
            return self.everyone.pair(call, tensor);
        }
        let operation = operation(local_rank);
        let local = Call { operation, ..*call };
        let sent = self.local.part(&local, operation, tensor);
        sent.map_err(|error| in_terms_of(call, error))
    }
}

/// A call to which all ranks have come: as a leader waits, and as ranks wait for a leader.
struct Met<'a> {
    leader: Call<'a>,
    local: Call<'a>,
}

/// `flat` in pieces that fit a message.
fn pieces(flat: &Tensor) -> impl Iterator<Item = Range<usize>> + use<> {
    let (count, each) = (flat.count(), MESSAGE_BYTES_MAX / flat.dtype().bytes());
    let starts = (0..count).step_by(each);
    starts.map(move |start| start..count.min(start + each))
}

/// `piece` becomes the reduction of `before` and itself, in this order.
fn add_before(call: &Call<'_>, before: &[u8], piece: &Tensor, reduce: Reduce) -> Result<()> {
    call.with_bytes_mut(piece, |own| {
        assert_eq!(before.len(), own.len());
        let sources = Sources {
            first: before.as_ptr(),
            stride_bytes: own.len(),
            ranks: 2,
            mine: 1,
        };
        // SAFETY: the first of two is `before`, as long as `own`, and the second is `own` itself.
        unsafe { sums::reduce(piece.dtype(), reduce, own, sources) };
        Ok(())
    })
}

/// An error of a call in the rank numbers of one host, as one of the call that the user made.
fn in_terms_of(call: &Call<'_>, mut error: Error) -> Error {
    if let Error::Timeout { call: text, .. } | Error::OutOfStep { call: text, .. } = &mut error {
        *text = call.to_string();
    }
    error
}

impl Collective for Hosts {
    fn check_ranks(&self) -> Result<()> {
        self.local.check_ranks()
    }

    fn transport(&self) -> &'static str {
        "shared memory and tcp"
    }

    fn rank(&self) -> usize {
        self.placement.here()[self.placement.local_rank]
    }

    fn size(&self) -> usize {
        self.everyone.size()
    }

    fn run(&self, calls: &[Call<'_>]) -> Result<()> {
        calls.iter().try_for_each(|call| self.run_one(call))
    }
}

#[cfg(test)]
mod tests;
