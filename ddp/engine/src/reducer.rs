//! Sums gradients over the ranks while the backward pass is still running; under ZeRO-1 gathers values while the forward pass is.
//!
//! A bucket (`plan.rs`) starts the moment the last gradient in it is written, and in the plan's order, which is the same on
//! all ranks. `join` waits for all. Meanwhile layers below still compute: on the CPU a thread of its own reduces (`lane/host.rs`), which
//! sleeps while it waits for other ranks, so that it pays even where it shares a core with the layers (the waiting is hidden, if not
//! the work); on a GPU a stream of its own (`lane/device.rs`).
//!
//! ZeRO-1: each rank owns a slice of every bucket. It gets the sums of its slices alone, keeps the optimizer's memory for them alone,
//! and updates them alone. At the start of the next step the values are gathered again, bucket by bucket in the order in which the
//! forward pass comes to them, and a layer's first use of a parameter waits for the buckets that it is in (`Listener::needed`).

mod lane;
pub mod plan;

use std::cell::Cell;
use std::ops::Range;
use std::time::{Duration, Instant};

use ddp_comm::{Group, World};
use ddp_kernels::{DType, Tensor, ops};

use self::lane::{Job, Lane};
use self::plan::{Bucket, BucketSizes};
use crate::error::{Error, Result};
use crate::faults::{self, Place};
use ddp_nn::optim::Optimizer;
use ddp_nn::params::{ParamId, Parameter, Params};
use ddp_nn::pass::Listener;

/// How gradients are reduced.
#[derive(Clone, Copy, Debug)]
pub struct ReducerOptions {
    /// How large buckets may be.
    pub sizes: BucketSizes,
    /// What travels: F32, or BF16 (half the bytes; each rank's gradients are rounded before they are added, and the sum again).
    pub dtype: DType,
    /// Whether reductions run beside the backward pass: on a thread of their own, or on a GPU on a stream of their own.
    pub overlap: bool,
    /// ZeRO-1: whether each rank owns a slice of every bucket, and has the optimizer's memory for that alone.
    pub zero: bool,
}

impl ReducerOptions {
    /// How many ranks of `ranks` share the trained part: what [`Model::with_shares`](ddp_nn::models::Model::with_shares) is to know.
    pub fn shares(&self, ranks: usize) -> usize {
        if self.zero { ranks } else { 1 }
    }
}

impl Default for ReducerOptions {
    /// Buckets of 4 MB that travel in f32, reduced while backward runs.
    fn default() -> ReducerOptions {
        ReducerOptions {
            sizes: BucketSizes::of_bytes(4_000_000),
            dtype: DType::F32,
            overlap: true,
            zero: false,
        }
    }
}

ddp_kernels::choices! {
    /// Whether gradients are reduced during the backward pass.
    #[derive(Default)]
    pub enum Overlap {
        /// If there are several ranks
        #[default]
        Auto = "auto",
        /// Always
        On = "on",
        /// Never
        Off = "off",
    }
}

/// Whether to reduce beside the backward pass: by default wherever there is another rank.
pub fn overlaps(wanted: Overlap, world: &World) -> bool {
    match wanted {
        Overlap::On => true,
        Overlap::Off => false,
        Overlap::Auto => world.size() > 1,
    }
}

/// When a bucket was reduced, for timelines: times since the step began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketTime {
    /// When its last gradient was written.
    pub ready: Duration,
    /// When its reduction began.
    pub started: Duration,
    /// When its reduction was done.
    pub done: Duration,
}

/// What reducing cost in one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReduceTime {
    /// The time all of it took, from each one's beginning to its end.
    pub busy: Duration,
    /// The time that the layers and `join` had to wait for them: what forward and backward did not hide.
    pub exposed: Duration,
}

/// The reducer of one rank.
#[derive(Debug)]
pub struct Reducer {
    buckets: Vec<Bucket>,
    /// From a parameter's number to the buckets its elements are in.
    buckets_of: Vec<Range<usize>>,
    /// How many gradients each bucket still waits for.
    waiting: Vec<usize>,
    /// The next bucket to start.
    next: usize,
    lane: Lane,
    group: Group,
    /// The gradients by bucket, f32.
    parts: Vec<Tensor>,
    /// The elements of the arenas that this rank owns: a slice of each bucket under ZeRO-1, else all in one.
    owned: Vec<Range<usize>>,
    /// Whether the ranks own slices.
    is_shared: bool,
    /// Whether layers read rounded copies of the values.
    reads_copies: bool,
    /// By bucket, under ZeRO-1: whether this step's layers have waited for its values.
    waited: Vec<Cell<bool>>,
    /// Whether this rank's values may be old outside of its slices.
    is_stale: bool,
    /// How long layers have waited in this step.
    wait: Cell<Duration>,
    ready_at: Vec<Instant>,
    began: Instant,
    last: ReduceTime,
}

impl Reducer {
    /// A reducer for the gradients of `params` over `group`.
    pub fn new(params: &Params, group: Group, options: ReducerOptions) -> Result<Reducer> {
        let shares = options.shares(group.size());
        if !params.shares().is_multiple_of(shares) {
            return Err(Error::Usage(format!(
                "ZeRO-1 with {shares} ranks: expected a model laid out for as many shares, got one for {}. Make it with \
                 Model::with_shares(…, reducer_options.shares({shares}))",
                params.shares()
            )));
        }
        let trained: Vec<_> = trained(params);
        let buckets = plan_of(&trained, options, shares);
        let count = trained.iter().map(|p| p.id.0 + 1).max().unwrap_or(0);
        let mut buckets_of = vec![0..0; count];
        for (place, parameter) in trained.iter().enumerate() {
            let first = buckets.partition_point(|bucket| bucket.parameters.end <= place);
            let last = buckets.partition_point(|bucket| bucket.parameters.start <= place);
            buckets_of[parameter.id.0] = first..last;
        }
        let gradients = params.gradients();
        let part = |(index, bucket): (usize, &Bucket)| -> Result<Tensor> {
            Ok(gradients
                .slice(bucket.range.clone())?
                .named(&format!("gradients, bucket {index}")))
        };
        let parts = buckets
            .iter()
            .enumerate()
            .map(part)
            .collect::<Result<Vec<_>>>()?;
        let jobs = jobs(params, &buckets, &parts, &group, options)?;
        let now = Instant::now();
        Ok(Reducer {
            waiting: vec![0; buckets.len()],
            next: 0,
            lane: Lane::new(group.clone(), gradients.device(), jobs, options.overlap)?,
            owned: owned(params, &group, options),
            is_shared: shares > 1,
            reads_copies: params.dtype() != params.master_dtype(),
            waited: vec![Cell::new(true); buckets.len()],
            is_stale: false,
            wait: Cell::new(Duration::ZERO),
            group,
            parts,
            ready_at: vec![now; buckets.len()],
            buckets,
            buckets_of,
            began: now,
            last: ReduceTime::default(),
        })
    }

    /// The plan.
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// The ranks that it reduces over.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// The elements of the gradients' arena that this rank gets the sums of and whose values it updates, in ascending order: a slice
    /// of each bucket under ZeRO-1, else all in one range.
    pub fn owned(&self) -> &[Range<usize>] {
        &self.owned
    }

    /// Whether the ranks own slices: ZeRO-1, and more than one rank.
    pub fn is_shared(&self) -> bool {
        self.is_shared
    }

    /// Refuses an optimizer that updates anything else than what this rank owns.
    pub fn check_optimizer(&self, optimizer: &Optimizer) -> Result<()> {
        if optimizer.owned().eq(self.owned.iter().cloned()) {
            return Ok(());
        }
        let (expected, got): (usize, usize) = (
            self.owned.iter().map(Range::len).sum(),
            optimizer.owned().map(|r| r.len()).sum(),
        );
        Err(Error::Usage(format!(
            "the optimizer: expected one for what rank {} owns ({expected} elements), got one for {got} elements. Make it with \
             Optimizer::of_rank, from the same group and options as the reducer",
            self.group.rank()
        )))
    }

    /// Whether communication runs beside the layers.
    pub fn overlaps(&self) -> bool {
        self.lane.overlaps()
    }

    /// The plan as text, for the handshake: ranks with different plans would wait for each other for ever.
    pub fn plan_text(&self) -> String {
        let line = |bucket: &Bucket| format!("{}..{}\n", bucket.range.start, bucket.range.end);
        let slices = self
            .is_shared
            .then(|| format!("{} slices each\n", self.group.size()));
        self.buckets.iter().map(line).chain(slices).collect()
    }

    /// Begins a step: no gradient is complete. Under ZeRO-1 the values are gathered from now on, in every step alike, so that a captured
    /// step holds it too.
    pub fn begin(&mut self) -> Result<()> {
        self.next = 0;
        self.began = Instant::now();
        self.waiting
            .iter_mut()
            .zip(&self.buckets)
            .for_each(|(waiting, bucket)| *waiting = bucket.parameters.len());
        self.wait.set(Duration::ZERO);
        if self.is_shared {
            self.is_stale = true;
            for bucket in (0..self.buckets.len()).rev() {
                self.waited[bucket].set(false);
                self.lane.start(self.read_gather(bucket))?;
            }
        }
        Ok(())
    }

    /// The job that gathers a bucket of what layers read.
    fn read_gather(&self, bucket: usize) -> usize {
        self.buckets.len() + bucket
    }

    /// The job that gathers a bucket of the values themselves: what layers read, unless that is a rounded copy.
    fn value_gather(&self, bucket: usize) -> usize {
        self.read_gather(bucket)
            + if self.reads_copies {
                self.buckets.len()
            } else {
                0
            }
    }

    /// Makes the values whole on this rank: for evaluation, hashes, saving. All ranks call it together, and if they are whole already
    /// nobody does anything. A step begins with it by itself.
    pub fn gather_all(&mut self, params: &Params) -> Result<()> {
        if !std::mem::take(&mut self.is_stale) {
            return Ok(());
        }
        (0..self.buckets.len())
            .try_for_each(|bucket| self.lane.start(self.value_gather(bucket)))?;
        self.lane.join()?;
        Ok(params.refresh(0..params.gradients().count())?)
    }

    /// Sums a small tensor over the ranks, after all that was started, and waits for it.
    pub fn sum(&mut self, tensor: &Tensor) -> Result<()> {
        let started = Instant::now();
        self.lane.start_sum(tensor)?;
        self.lane.join()?;
        self.last.busy += self.lane.busy();
        self.last.exposed += started.elapsed();
        Ok(())
    }

    /// Begins a step that is launched as a whole: its work is none of this thread's, and so nothing here is told of it.
    pub fn begin_replay(&mut self) -> Result<()> {
        self.last = ReduceTime::default();
        self.began = Instant::now();
        self.is_stale = self.is_shared;
        // What tests of how a job ends ask for happens on the host: before the work that it was asked for in.
        [Place::Forward, Place::Reduction, Place::Optimizer]
            .into_iter()
            .try_for_each(faults::at)
    }

    /// Forgets what was begun of a step: it begins again.
    pub fn abandon(&mut self) {
        self.lane.abandon();
    }

    /// A rank without rows: its gradients are zero, and complete.
    pub fn all_ready_with_zeros(&mut self) -> Result<()> {
        self.parts.iter().try_for_each(ops::zero)?;
        let now = Instant::now();
        self.ready_at.fill(now);
        self.waiting.fill(0);
        self.start_complete()
    }

    fn start_complete(&mut self) -> Result<()> {
        while self.next < self.buckets.len() && self.waiting[self.next] == 0 {
            self.lane.start(self.next)?;
            self.next += 1;
        }
        Ok(())
    }

    /// Waits until all gradients are sums over the ranks.
    pub fn join(&mut self) -> Result<()> {
        if self.next < self.buckets.len() {
            return Err(Error::Model {
                layer: "model".into(),
                expected: "every trained parameter's gradient to be finished in backward".into(),
                got: format!(
                    "bucket {} of {} still waiting",
                    self.next,
                    self.buckets.len()
                ),
                help: "a layer's backward must call pass.finished for each of its parameters"
                    .into(),
            });
        }
        let joined = Instant::now();
        self.lane.join()?;
        self.last = ReduceTime {
            busy: self.lane.busy(),
            exposed: self.wait.get() + joined.elapsed(),
        };
        Ok(())
    }

    /// What the last step's reductions cost.
    pub fn last_time(&self) -> ReduceTime {
        self.last
    }

    /// When each bucket of the last step was ready, started and done; none where only a device knows.
    pub fn timeline(&self) -> Vec<BucketTime> {
        let since = |at: Instant| at.saturating_duration_since(self.began);
        let times = self.lane.times().into_iter().zip(&self.ready_at);
        times
            .map(|((started, done), &ready)| BucketTime {
                ready: since(ready),
                started: since(started),
                done: since(done),
            })
            .collect()
    }

    /// When the last step began, to compare other times with the timeline.
    pub fn began(&self) -> Instant {
        self.began
    }
}

impl Listener for Reducer {
    /// The gradient of `parameter` is complete on this rank: starts every bucket that thereby is.
    fn ready(&mut self, parameter: ParamId) -> ddp_nn::Result<()> {
        for bucket in self.buckets_of[parameter.0].clone() {
            assert!(
                self.waiting[bucket] > 0,
                "a gradient was completed twice in one step"
            );
            self.waiting[bucket] -= 1;
            if self.waiting[bucket] == 0 {
                self.ready_at[bucket] = Instant::now();
            }
        }
        Ok(self.start_complete()?)
    }

    /// Reduces a small tensor (losses and counts) with the gradients, in the order of the calls: before the bucket that
    /// comes next.
    fn reduce(&mut self, tensor: &Tensor) -> ddp_nn::Result<()> {
        Ok(self.lane.start_sum(tensor)?)
    }

    /// Waits for the values of `parameter`, once a step for each bucket it is in.
    fn needed(&self, parameter: ParamId) -> ddp_nn::Result<()> {
        // Frozen parameters and buffers are in none.
        for bucket in self.buckets_of.get(parameter.0).cloned().unwrap_or(0..0) {
            if !self.waited[bucket].replace(true) {
                let started = Instant::now();
                self.lane.wait_for(self.read_gather(bucket))?;
                self.wait.set(self.wait.get() + started.elapsed());
            }
        }
        Ok(())
    }
}

/// What is trained, in the order of the arenas.
fn trained(params: &Params) -> Vec<&Parameter> {
    params.list().iter().filter(|p| p.is_trained()).collect()
}

/// The plan of buckets for a trained part that so many ranks share.
fn plan_of(trained: &[&Parameter], options: ReducerOptions, shares: usize) -> Vec<Bucket> {
    let ranges: Vec<_> = trained.iter().map(|p| p.range.clone()).collect();
    let layer_of = |p: &Parameter| {
        p.name
            .rsplit_once('.')
            .map_or(String::new(), |(layer, _)| layer.to_string())
    };
    let layers: Vec<usize> = trained
        .chunk_by(|a, b| layer_of(a) == layer_of(b))
        .map(<[_]>::len)
        .collect();
    plan::plan(&ranges, &layers, options.sizes, plan::grain(shares))
}

/// The elements of the gradients' arena of `params` that this rank of `group` owns: see [`Reducer::owned`].
pub fn owned(params: &Params, group: &Group, options: ReducerOptions) -> Vec<Range<usize>> {
    match options.shares(group.size()) {
        1 => std::iter::once(0..params.gradients().count()).collect(),
        shares => {
            let buckets = plan_of(&trained(params), options, shares);
            buckets
                .iter()
                .map(|bucket| bucket.slice(group.rank(), shares))
                .collect()
        }
    }
}

/// A reduction for each bucket; and, where the ranks share them, a gather of what layers read of each, and of its values where layers read
/// rounded copies.
fn jobs(
    params: &Params,
    buckets: &[Bucket],
    parts: &[Tensor],
    group: &Group,
    options: ReducerOptions,
) -> Result<Vec<Job>> {
    let shares = options.shares(group.size());
    let mut jobs = Vec::new();
    for (bucket, part) in buckets.iter().zip(parts) {
        jobs.push(match shares {
            1 => Job::sum(part.clone(), options.dtype)?,
            _ => {
                let own = bucket.slice(group.rank(), shares);
                let own = own.start - bucket.range.start..own.end - bucket.range.start;
                Job::sum_slice(part.clone(), own, options.dtype)?
            }
        });
    }
    if shares > 1 {
        for (index, bucket) in buckets.iter().enumerate() {
            let values = params.read_arena().slice(bucket.range.clone())?;
            jobs.push(Job::Gather(
                values.named(&format!("values, bucket {index}")),
            ));
        }
        if params.dtype() != params.master_dtype() {
            for (index, bucket) in buckets.iter().enumerate() {
                let values = params.values().slice(bucket.range.clone())?;
                jobs.push(Job::Gather(
                    values.named(&format!("masters, bucket {index}")),
                ));
            }
        }
    }
    Ok(jobs)
}
