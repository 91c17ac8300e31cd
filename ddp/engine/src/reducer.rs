//! Sums gradients over the ranks while backward continues, and under ZeRO gathers values while
//! forward continues.
//!
//! A bucket (`plan.rs`) starts when its last gradient is complete, in the order of the plan, which
//! is the same on all ranks. `join` waits for all. Meanwhile backward continues: on the CPU a
//! separate thread reduces (`host_queue.rs`), which sleeps while it waits for other ranks; on a GPU
//! a separate stream does (`device_queue.rs`).
//!
//! ZeRO: each rank owns a slice of every bucket. It gets the sums of its slices, keeps the
//! optimizer's moments for them, and updates them. The next step starts by gathering the values,
//! bucket by bucket in the order in which forward uses them, and a layer's first use of a parameter
//! waits for its buckets (`Listener::needed`).
//!
//! ZeRO-2: backward writes gradients to memory that later buckets use again once a bucket is
//! reduced (`Listener::writes`). So every micro-batch is reduced (a round), and its sums are added.

mod device_queue;
mod host_queue;
mod job;
mod listener;
mod options;
pub mod plan;
mod reduced;

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ddp_comm::Group;
use ddp_kernels::stream::Stream;
use ddp_kernels::trace::{self, Label, Lane};
use ddp_kernels::{Device, Tensor, ops};
use ddp_nn::optim::Optimizer;
use ddp_nn::params::Params;

use self::device_queue::DeviceQueue;
use self::host_queue::HostQueue;
use self::job::{CommJob, CommQueue};
pub(crate) use self::options::SHARDS_MAX;
pub use self::options::{Overlap, ReducerOptions, check_ranks, overlaps, owned};
use self::options::{check_shards, jobs, plan_of, trained};
use self::plan::Bucket;
use self::reduced::Reduced;
use crate::error::{Error, Result};

/// The optimizer waits for reductions.
const WAIT: Label = Label::new(Lane::Waiting, "wait for reductions");
/// Layers wait for gathered values.
const WAIT_VALUES: Label = Label::new(Lane::Waiting, "wait for values");

/// How long the reductions of a step took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReduceTime {
    /// The sum of their durations.
    pub busy: Duration,
    /// How long layers and `join` waited for them: the part that did not overlap.
    pub exposed: Duration,
}

/// The reducer of one rank.
#[derive(Debug)]
pub struct Reducer {
    buckets: Vec<Bucket>,
    /// By parameter: the buckets that contain its elements.
    buckets_of: Vec<Range<usize>>,
    /// By bucket: how many gradients are not complete.
    waiting: Vec<usize>,
    /// The next bucket to start.
    next: usize,
    queue: Box<dyn CommQueue>,
    group: Group,
    device: Device,
    /// By bucket: its gradients, and how they are summed.
    sums: Vec<Arc<Reduced>>,
    /// See `owned`.
    owned: Vec<Range<usize>>,
    /// Whether ranks own slices.
    is_shared: bool,
    /// Whether values are gathered besides the bf16 copies of them that layers read.
    gathers_masters: bool,
    /// With ZeRO-2.
    windows: Option<BucketWindows>,
    pub(crate) options: ReducerOptions,
    /// The job that gives all ranks the buffers of rank 0, if there are any.
    buffers: Option<usize>,
    /// By bucket, under ZeRO: whether layers have waited for its values in this step.
    waited: Vec<Cell<bool>>,
    /// Whether this rank's values may be outdated outside its slices, or its buffers its own.
    is_stale: bool,
    /// How long layers have waited in this step.
    wait: Cell<Duration>,
    last: ReduceTime,
}

/// Memory of gradients that is used again.
#[derive(Debug)]
struct BucketWindows {
    /// By bucket: its window.
    of_bucket: Vec<usize>,
    /// By window: its last bucket, and the number of its memory.
    all: Vec<(usize, usize)>,
    /// By number of the memory: the round and the window that used it last.
    used: RefCell<Vec<Option<(u64, usize)>>>,
    /// A round is a backward.
    round: u64,
    /// An error of `writes`, which `ready` reports.
    failed: RefCell<Option<Error>>,
}

impl BucketWindows {
    fn of(params: &Params, buckets: &[Bucket]) -> Option<BucketWindows> {
        let (mut of_bucket, mut all, mut slots) = (Vec::new(), Vec::new(), 0);
        for (index, window) in params.windows()?.enumerate() {
            let mut rest = buckets[of_bucket.len()..].iter();
            let count = rest.position(|bucket| bucket.range.start >= window.range.end);
            let end = count.map_or(buckets.len(), |count| of_bucket.len() + count);
            of_bucket.resize(end, index);
            all.push((end - 1, window.slot));
            slots = slots.max(window.slot + 1);
        }
        Some(BucketWindows {
            of_bucket,
            all,
            used: RefCell::new(vec![None; slots]),
            round: 0,
            failed: RefCell::default(),
        })
    }
}

impl Reducer {
    /// A reducer for the gradients of `params` over `group`.
    pub fn new(params: &Params, group: Group, options: ReducerOptions) -> Result<Reducer> {
        if let Some(shards) = options.shards {
            check_shards(params, &group, shards)?;
        }
        let shares = options.shares(group.size());
        if shares > params.shares() {
            return Err(Error::Usage(format!(
                "ZeRO-{} with {shares} ranks: expected a model laid out for as many shares, got one \
                 for {}; help: make it with Model::with_shares(…, reducer_options.sharing(rank, \
                 {shares}))",
                options.zero,
                params.shares()
            )));
        }
        if (options.zero == 2 && shares > 1) != params.windows().is_some() {
            return Err(Error::Usage(format!(
                "ZeRO-{} with {shares} ranks: expected a model that was made for it, got one for \
                 another stage; help: make it with Model::with_shares(…, reducer_options.sharing(rank, {shares}))",
                options.zero
            )));
        }
        let trained: Vec<_> = trained(params.list());
        let buckets = plan_of(params.list(), params.device(), options, shares);
        let count = trained.iter().map(|p| p.id.0 + 1).max().unwrap_or(0);
        let mut buckets_of = vec![0..0; count];
        for (place, parameter) in trained.iter().enumerate() {
            let first = buckets.partition_point(|bucket| bucket.parameters.end <= place);
            let last = buckets.partition_point(|bucket| bucket.parameters.start <= place);
            buckets_of[parameter.id.0] = first..last;
        }
        let (sums, mut jobs) = jobs(params, &buckets, &group, options)?;
        let shared_buffers = params.buffers()?.filter(|_| group.size() > 1);
        let buffers = shared_buffers.map(|buffers| {
            jobs.push(CommJob::Broadcast(buffers));
            jobs.len() - 1
        });
        let device = params.device();
        let (queue_group, overlap) = (group.clone(), options.overlap);
        let queue: Box<dyn CommQueue> = match device {
            Device::Cpu => Box::new(HostQueue::new(queue_group, jobs, overlap)?),
            Device::Cuda(_) => Box::new(DeviceQueue::new(queue_group, device, jobs, overlap)?),
        };
        Ok(Reducer {
            waiting: vec![0; buckets.len()],
            next: 0,
            queue,
            owned: owned(params, &group, options),
            is_shared: shares > 1,
            gathers_masters: params.dtype() != params.master_dtype() && !params.is_divided(),
            windows: BucketWindows::of(params, &buckets),
            sums,
            options,
            buffers,
            waited: vec![Cell::new(true); buckets.len()],
            is_stale: shares > 1,
            wait: Cell::new(Duration::ZERO),
            group,
            device,
            buckets,
            buckets_of,
            last: ReduceTime::default(),
        })
    }

    /// The plan of buckets.
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// The ranks that it reduces over.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// The elements of the gradients' arena of which this rank gets the sums, and whose values it
    /// updates, in ascending order: a slice of each bucket under ZeRO, otherwise all.
    pub fn owned(&self) -> &[Range<usize>] {
        &self.owned
    }

    /// Whether the ranks own slices: ZeRO, and more than one rank.
    pub fn is_shared(&self) -> bool {
        self.is_shared
    }

    /// Whether memory of gradients is used again within a backward: ZeRO-2.
    pub fn frees_gradients(&self) -> bool {
        self.windows.is_some()
    }

    /// Refuses an optimizer of other elements than this rank owns.
    pub(crate) fn check_optimizer(&self, optimizer: &Optimizer) -> Result<()> {
        if optimizer.owned().eq(self.owned.iter().cloned()) {
            return Ok(());
        }
        let (expected, got): (usize, usize) = (
            self.owned.iter().map(Range::len).sum(),
            optimizer.owned().map(|r| r.len()).sum(),
        );
        Err(Error::Usage(format!(
            "the optimizer: expected one for what rank {} owns ({expected} elements), got one for {got} elements; \
             help: make it with Optimizer::of_slices(…, &reducer::owned(…))",
            self.group.rank()
        )))
    }

    /// Into how many shards each batch is cut, if the bits are the same on any number of ranks.
    pub fn shards(&self) -> Option<usize> {
        self.options.shards
    }

    /// Bytes of partial sums over shards, besides the gradients: this rank's, and on a GPU what
    /// arrives from the others.
    pub(crate) fn partial_sum_bytes(&self) -> usize {
        let lengths = self.buckets.iter().map(|bucket| bucket.range.len());
        let (all, longest) = (lengths.clone().sum(), lengths.max().unwrap_or(0));
        let of = (self.group.rank(), self.group.size(), self.device);
        self.options.partial_sum_bytes(of, all, longest)
    }

    /// Bytes of gradients, and of partial sums, that this rank gives for the sums of a step.
    pub(crate) fn given_bytes(&self) -> usize {
        self.sums.iter().map(|sum| sum.given_bytes()).sum()
    }

    /// Keeps the gradients of shard `index` of this rank, which is not its last: they are complete,
    /// or zeros for a shard without rows.
    pub(crate) fn close_shard(&mut self, index: usize, has_rows: bool) -> Result<()> {
        if self.frees_gradients() {
            // Each bucket was kept when it was complete.
            return if has_rows { Ok(()) } else { self.add_zeros() };
        }
        for sum in &self.sums {
            if !has_rows {
                ops::zero(&sum.gradients)?;
            }
            sum.close_shard(index)?;
        }
        Ok(())
    }

    /// Ends its thread, after the ranks have lost one.
    pub(crate) fn halt(&mut self) {
        self.queue.halt();
    }

    /// Whether communication overlaps with layers.
    pub fn overlaps(&self) -> bool {
        self.queue.overlaps()
    }

    /// The plan as text, for the handshake: ranks with different plans would deadlock.
    pub(crate) fn plan_text(&self) -> String {
        let line = |bucket: &Bucket| format!("{}..{}\n", bucket.range.start, bucket.range.end);
        let ranks = self.is_shared.then(|| self.group.size());
        let slices = ranks.map(|ranks| format!("{ranks} slices each\n"));
        let shards = self.shards().map(|shards| format!("{shards} shards\n"));
        let lines = self.buckets.iter().map(line);
        lines.chain(slices).chain(shards).collect()
    }

    /// Begins a step: no gradient is complete, and buffers are those of rank 0. Under ZeRO-1 starts
    /// gathering the values, in every step alike, so that a captured step contains it too.
    pub fn begin(&mut self) -> Result<()> {
        self.queue.begin();
        self.sums.iter().for_each(|sum| sum.begin());
        self.begin_round();
        self.wait.set(Duration::ZERO);
        self.is_stale = self.is_shared || self.buffers.is_some();
        if let Some(job) = self.buffers {
            self.queue.start(job, !self.buckets.is_empty())?;
            self.queue.wait_for(job)?;
        }
        if self.is_shared {
            for bucket in (0..self.buckets.len()).rev() {
                self.waited[bucket].set(false);
                self.queue.start(self.read_gather(bucket), true)?;
            }
        }
        Ok(())
    }

    /// Begins a backward, with ZeRO-2 one of several in a step: no gradient is complete.
    pub(crate) fn begin_round(&mut self) {
        self.next = 0;
        for (waiting, bucket) in self.waiting.iter_mut().zip(&self.buckets) {
            *waiting = bucket.parameters.len();
        }
        if let Some(windows) = &mut self.windows {
            windows.round += 1;
        }
    }

    /// Waits until the memory of a window's gradients is free.
    fn take_window(&self, windows: &BucketWindows, window: usize) -> Result<()> {
        let (now, slot) = ((windows.round, window), windows.all[window].1);
        let before = windows.used.borrow_mut()[slot].replace(now);
        let Some((round, before)) = before.filter(|before| *before != now) else {
            return Ok(());
        };
        let last = windows.all[before].0;
        if round == windows.round && last >= self.next {
            return Err(Error::Usage(format!(
                "ZeRO-2: expected layers that complete gradients in the order of their parameters, got \
                 some that write bucket {} before bucket {last} is complete; help: use ZeRO-1, or \
                 larger buckets",
                windows.all[window].0
            )));
        }
        trace::record_on(self.device, WAIT, || self.queue.wait_for(last))
    }

    /// The job that gathers what layers read of a bucket.
    fn read_gather(&self, bucket: usize) -> usize {
        self.buckets.len() + bucket
    }

    /// The job that gathers the values of a bucket, or bf16 copies if ranks have divided these.
    fn value_gather(&self, bucket: usize) -> usize {
        self.read_gather(bucket) + usize::from(self.gathers_masters) * self.buckets.len()
    }

    /// Makes the values current on this rank and buffers those of rank 0, for evaluation, hashes
    /// and saving. All ranks call it together. Does nothing if they are current. Steps gather by
    /// themselves.
    pub(crate) fn gather_all(&mut self, params: &Params) -> Result<()> {
        if !std::mem::take(&mut self.is_stale) {
            return Ok(());
        }
        let shared = (0..self.buckets.len()).filter(|_| self.is_shared);
        let gathers = shared.map(|bucket| self.value_gather(bucket));
        let mut jobs = gathers.chain(self.buffers);
        jobs.try_for_each(|job| self.queue.start(job, false))?;
        self.queue.join()?;
        if self.is_shared && self.gathers_masters {
            return Ok(params.refresh(params.trained_part())?);
        }
        Ok(())
    }

    /// Copies all masters of `params` to `target` (A) in host memory, if there is one. Where ranks
    /// have divided them, all call it together, between steps.
    pub fn copy_masters(&self, params: &Params, target: Option<&Tensor>) -> Result<()> {
        let copy = |range: Range<usize>, from: &Tensor| match target {
            Some(target) => Ok(target.slice(range)?.copy_from(from)?),
            None => Ok(()),
        };
        if !params.is_divided() {
            return copy(0..params.arena_count(), params.values());
        }
        let longest = self.buckets.iter().map(|bucket| bucket.range.len()).max();
        let all = Tensor::empty(&[longest.unwrap_or(0)], params.master_dtype(), self.device)?;
        let (stream, all) = (Stream::current(self.device)?, all.named("masters"));
        for (bucket, own) in self.buckets.iter().zip(&self.owned) {
            let (range, start) = (bucket.range.clone(), bucket.range.start);
            let part = all.slice(0..range.len())?;
            let mine = part.slice(own.start - start..own.end - start)?;
            mine.copy_from(&params.values_of(own.clone())?)?;
            self.group.all_gather(&part, &stream)?;
            copy(range, &part)?;
        }
        let rest = params.trained_part().end..params.arena_count();
        copy(rest.clone(), &params.values_of(rest)?)
    }

    /// Starts the sum of a small tensor over the ranks, such as losses and counts. On a GPU it goes
    /// with the next bucket.
    pub fn reduce(&mut self, tensor: &Tensor) -> Result<()> {
        self.queue.start_sum(tensor)
    }

    /// Sums a small tensor over the ranks, after all that was started, and waits for it.
    pub fn sum(&mut self, tensor: &Tensor) -> Result<()> {
        let started = Instant::now();
        self.queue.start_sum(tensor)?;
        self.queue.join()?;
        self.last.busy += self.queue.busy();
        self.last.exposed += started.elapsed();
        Ok(())
    }

    /// Begins a step that is launched as a graph, so that only the device knows its progress.
    pub(crate) fn begin_launch(&mut self) {
        self.last = ReduceTime::default();
        self.is_stale = self.is_shared || self.buffers.is_some();
    }

    /// Completes all gradients with zeros, for a rank without rows.
    pub(crate) fn add_zeros(&mut self) -> Result<()> {
        self.begin_round();
        self.waiting.fill(0);
        while self.next < self.buckets.len() {
            if let Some(windows) = &self.windows {
                self.take_window(windows, windows.of_bucket[self.next])?;
            }
            ops::zero(&self.sums[self.next].gradients)?;
            self.start_next()?;
        }
        Ok(())
    }

    /// Starts the sum of the next bucket.
    fn start_next(&mut self) -> Result<()> {
        let is_followed = self.next + 1 < self.buckets.len();
        self.queue.start(self.next, is_followed)?;
        self.next += 1;
        Ok(())
    }

    /// Waits until all gradients are sums over the ranks.
    pub fn join(&mut self) -> Result<()> {
        if self.next < self.buckets.len() {
            return Err(Error::Usage(format!(
                "model: expected complete gradients of all trained parameters after backward, got \
                 an incomplete bucket {} of {}; help: run the backward of the whole \
                 model",
                self.next,
                self.buckets.len()
            )));
        }
        let joined = Instant::now();
        trace::record_on(self.device, WAIT, || self.queue.join())?;
        self.last = ReduceTime {
            busy: self.queue.busy(),
            exposed: self.wait.get() + joined.elapsed(),
        };
        Ok(())
    }

    /// How long the last step's reductions took.
    pub fn last_time(&self) -> ReduceTime {
        self.last
    }
}
