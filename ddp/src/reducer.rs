//! Sums gradients over the ranks while the backward pass is still running.
//!
//! A bucket (`plan.rs`) starts the moment the last gradient in it is written, and in the plan's order, which is the same on
//! all ranks. `join` waits for all. A thread of its own reduces (`lane.rs`) while layers below still compute. It sleeps while it
//! waits for other ranks, so that it pays even where it shares a core with the layers: the waiting is hidden, if not the work.

pub mod lane;
pub mod plan;

use std::ops::Range;
use std::time::{Duration, Instant};

use ddp_comm::{Group, World};
use ddp_kernels::stream::Stream;
use ddp_kernels::{DType, Tensor, ops};

use self::lane::{Job, Lane};
use self::plan::{Bucket, BucketSizes};
use crate::config::Overlap;
use crate::error::{Error, Result};
use crate::faults::{self, Place};
use crate::nn::pass::Listener;
use crate::params::{ParamId, Parameter, Params};

/// How gradients are reduced.
#[derive(Clone, Copy, Debug)]
pub struct ReducerOptions {
    /// How large buckets may be.
    pub sizes: BucketSizes,
    /// What travels: F32, or BF16 (half the bytes; each rank's gradients are rounded before they are added, and the sum again).
    pub dtype: DType,
    /// Whether a thread of its own reduces while backward runs.
    pub overlap: bool,
}

impl Default for ReducerOptions {
    /// Buckets of 4 MB that travel in f32, reduced while backward runs.
    fn default() -> ReducerOptions {
        ReducerOptions { sizes: BucketSizes::of_bytes(4_000_000), dtype: DType::F32, overlap: true }
    }
}

/// Whether to reduce on a thread of its own while backward runs: by default wherever there is another rank.
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
    /// The time all reductions took, from each one's beginning to its end.
    pub busy: Duration,
    /// The time that `join` had to wait: what backward did not hide.
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
    /// The gradients by bucket, f32.
    parts: Vec<Tensor>,
    ready_at: Vec<Instant>,
    began: Instant,
    last: ReduceTime,
}

impl Reducer {
    /// A reducer for the gradients of `params` over `group`.
    pub fn new(params: &Params, group: Group, options: ReducerOptions) -> Result<Reducer> {
        let trained: Vec<_> = params.list().iter().filter(|p| params.gradient(p.id).is_some()).collect();
        let ranges: Vec<_> = trained.iter().map(|p| p.range.clone()).collect();
        let layer_of = |p: &Parameter| p.name.rsplit_once('.').map_or(String::new(), |(layer, _)| layer.to_string());
        let layers: Vec<usize> = trained.chunk_by(|a, b| layer_of(a) == layer_of(b)).map(<[_]>::len).collect();
        let buckets = plan::plan(&ranges, &layers, options.sizes);
        let count = trained.iter().map(|p| p.id.0 + 1).max().unwrap_or(0);
        let mut buckets_of = vec![0..0; count];
        for (place, parameter) in trained.iter().enumerate() {
            let first = buckets.partition_point(|bucket| bucket.parameters.end <= place);
            let last = buckets.partition_point(|bucket| bucket.parameters.start <= place);
            buckets_of[parameter.id.0] = first..last;
        }
        let gradients = params.gradients();
        let part = |(index, bucket): (usize, &Bucket)| -> Result<Tensor> {
            Ok(gradients.slice(bucket.range.clone())?.named(&format!("gradients, bucket {index}")))
        };
        let parts = buckets.iter().enumerate().map(part).collect::<Result<Vec<_>>>()?;
        let jobs = parts.iter().map(|part| job_for(part, options.dtype)).collect::<Result<Vec<_>>>()?;
        let stream = Stream::default_of(gradients.device())?;
        let now = Instant::now();
        Ok(Reducer {
            waiting: vec![0; buckets.len()],
            next: 0,
            lane: Lane::new(group, stream, jobs, options.overlap)?,
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

    /// Whether a thread of its own reduces while backward runs.
    pub fn overlaps(&self) -> bool {
        self.lane.has_thread()
    }

    /// The plan as text, for the handshake: ranks with different plans would wait for each other for ever.
    pub fn plan_text(&self) -> String {
        let line = |bucket: &Bucket| format!("{}..{}\n", bucket.range.start, bucket.range.end);
        self.buckets.iter().map(line).collect()
    }

    /// Begins a step: no gradient is complete.
    pub fn begin(&mut self) {
        self.next = 0;
        self.began = Instant::now();
        self.waiting.iter_mut().zip(&self.buckets).for_each(|(waiting, bucket)| *waiting = bucket.parameters.len());
    }

    /// Begins a step that is launched as a whole: its work is none of this thread's, and so nothing here is told of it.
    pub fn begin_replay(&mut self) -> Result<()> {
        self.last = ReduceTime::default();
        self.began = Instant::now();
        // What tests of how a job ends ask for happens on the host: before the work that it was asked for in.
        [Place::Forward, Place::Reduction, Place::Optimizer].into_iter().try_for_each(faults::at)
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
            self.lane.start_bucket(self.next)?;
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
                got: format!("bucket {} of {} still waiting", self.next, self.buckets.len()),
                way_out: "A layer's backward calls pass.finished for each of its parameters.".into(),
            });
        }
        let joined = Instant::now();
        self.lane.join()?;
        self.last = ReduceTime { busy: self.lane.busy(), exposed: joined.elapsed() };
        Ok(())
    }

    /// What the last step's reductions cost.
    pub fn last_time(&self) -> ReduceTime {
        self.last
    }

    /// When each bucket of the last step was ready, started and done.
    pub fn timeline(&self) -> Vec<BucketTime> {
        let since = |at: Instant| at.saturating_duration_since(self.began);
        let times = self.lane.bucket_times().into_iter().zip(&self.ready_at);
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
    fn ready(&mut self, parameter: ParamId) -> Result<()> {
        for bucket in self.buckets_of[parameter.0].clone() {
            assert!(self.waiting[bucket] > 0, "a gradient was completed twice in one step");
            self.waiting[bucket] -= 1;
            if self.waiting[bucket] == 0 {
                self.ready_at[bucket] = Instant::now();
            }
        }
        self.start_complete()
    }

    /// Reduces a small tensor (losses and counts) with the gradients, in the order of the calls: before the bucket that
    /// comes next.
    fn reduce(&mut self, tensor: &Tensor) -> Result<()> {
        self.lane.start(tensor.clone())
    }
}

/// The job that reduces `part`, through a narrower copy if less is to travel.
fn job_for(part: &Tensor, dtype: DType) -> Result<Job> {
    if dtype == part.dtype() {
        return Ok(Job::plain(part.clone()));
    }
    let narrow = Tensor::empty(&[part.count()], dtype, part.device())?;
    Ok(Job::narrowed(part.clone(), narrow.named(part.name().unwrap_or("gradients"))))
}
