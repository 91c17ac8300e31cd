//! A bucket is reduced while lower layers still compute: compares the trace of its reductions with
//! when the layers computed. It is a separate program, because a process records one trace.

mod support;

use std::sync::{Arc, Barrier, Condvar, Mutex};
use std::time::{Duration, Instant};

use crate::support::training::{on_ranks, quietly};
use ddp::Result;
use ddp::data::Batch;
use ddp::models::Model;
use ddp::nn::{CrossEntropy, CustomOp, Linear, Module, Scope, Sequential, Var};
use ddp::optim::{Optimizer, Rule};
use ddp::reducer::ReducerOptions;
use ddp::reducer::plan::BucketSizes;
use ddp::step::{Step, StepOptions};
use ddp_comm::World;
use ddp_kernels::trace::{self, Lane};
use ddp_kernels::{DType, Device, Random, Tensor};

/// How long the lowest layer's backward takes. It sleeps, like a host whose device computes, so the
/// test does not depend on the number of cores.
const SLOW: Duration = Duration::from_millis(60);
/// On a busy machine a bucket may take longer than that: the longest that a test waits for it.
const PATIENCE: Duration = Duration::from_secs(60);

/// When the slow backwards of both ranks ended, by step.
#[derive(Debug, Default)]
struct BackwardEnds {
    all: Mutex<Vec<Instant>>,
    of_both: Condvar,
}

impl BackwardEnds {
    /// One has ended. Waits for that of the other rank, which may have failed.
    fn add(&self) {
        let mut all = self.all.lock().unwrap();
        all.push(Instant::now());
        self.of_both.notify_one();
        let is_alone = |all: &mut Vec<Instant>| all.len() % 2 == 1;
        drop(self.of_both.wait_timeout_while(all, PATIENCE, is_alone));
    }
}

/// A linear layer whose backward takes long.
#[derive(Clone, Debug)]
struct Slow {
    inner: Linear,
    takes: Duration,
    ends: Arc<BackwardEnds>,
}

impl Module for Slow {
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
        let y = self.inner.forward(m, x);
        m.custom(Arc::new(self.clone()), &[&y])
    }
}

impl CustomOp for Slow {
    fn shape(&self, inputs: &[Vec<usize>]) -> ddp::nn::Result<Vec<usize>> {
        Ok(inputs[0].clone())
    }
    fn forward(&self, x: &[&Tensor], out: &Tensor) -> ddp::nn::Result<()> {
        Ok(out.copy_from(x[0])?)
    }
    fn backward(
        &self,
        _: &[&Tensor],
        [_, dy]: [&Tensor; 2],
        dx: &[&Tensor],
    ) -> ddp::nn::Result<()> {
        // Sleep: this backward takes time, of which no bucket above may need any.
        std::thread::sleep(self.takes);
        self.ends.add();
        Ok(dx[0].copy_from(dy)?)
    }
}

/// When something began and ended.
type Times = (Instant, Instant);

/// Of a step of both ranks: by bucket when their reductions ran, and when the first and the last of
/// their slow backwards ended. A trace does not tell ranks apart, so each backward waits for both
/// ends: a reduction that follows its own rank's begins after both.
#[derive(Debug)]
struct Timeline {
    buckets: Vec<Vec<Times>>,
    first_backward_end: Instant,
    last_backward_end: Instant,
}

/// One test at a time records a trace.
static TURN: Mutex<()> = Mutex::new(());

/// A step of Slow, Linear, Linear, one bucket each, on two ranks. The slow backward takes `takes`.
fn timeline(overlap: bool, takes: Duration) -> Timeline {
    let (both, ends) = (Barrier::new(2), Arc::default());
    let began = Mutex::new(None);
    let run = |world: &World| step_twice(world, overlap, takes, &both, &began, &ends);
    on_ranks(2, None, run);
    let recorded = trace::stop().unwrap();
    assert_eq!(recorded.missed, 0);
    let began = began.into_inner().unwrap().expect("a trace was begun");
    let of_bucket = |bucket: usize| {
        let of_it = recorded
            .spans
            .iter()
            .filter(|span| span.label.lane == Lane::Reductions && span.label.index == Some(bucket));
        let times: Vec<Times> = of_it
            .map(|span| (began + span.begin, began + span.end))
            .collect();
        assert_eq!(times.len(), 2, "one a rank");
        times
    };
    let ends = ends.all.lock().unwrap();
    let [_, _, first_backward_end, last_backward_end] = ends[..] else {
        panic!("expected two steps of two ranks, got {ends:?}")
    };
    Timeline {
        buckets: (0..3).map(of_bucket).collect(),
        first_backward_end,
        last_backward_end,
    }
}

/// Two steps on this rank, of which the trace has the second: threads are started and memory is
/// made in the first.
fn step_twice(
    world: &World,
    overlap: bool,
    takes: Duration,
    both: &Barrier,
    began: &Mutex<Option<Instant>>,
    ends: &Arc<BackwardEnds>,
) -> Result<()> {
    let slow = Slow {
        inner: Linear::new(64),
        takes,
        ends: ends.clone(),
    };
    let layers = Sequential::new()
        .then(slow)
        .then(Linear::new(64))
        .then(Linear::new(10));
    let model = Model::new(Box::new(layers), &[64], DType::F32, Device::Cpu, 1, &|_| {
        false
    })?;
    let optimizer = Optimizer::new(Rule::adamw(), &model.params)?;
    // A layer has a weight of 4096 elements and a bias of 64: no bucket has room for two.
    let sizes = BucketSizes {
        first_elements: 2048,
        elements: 5120,
        cuts_parameters: true,
    };
    let reducer = ReducerOptions {
        sizes: Some(sizes),
        overlap,
        ..ReducerOptions::default()
    };
    let options = StepOptions {
        reducer,
        clip_norm: 0.0,
        seed: 0,
        ..StepOptions::default()
    };
    let mut step = Step::new(
        model,
        Box::new(CrossEntropy::default()),
        optimizer,
        world.group("gradients")?,
        &options,
    )?;
    let mut random = Random::new(world.rank() as u64);
    let x = Tensor::randn(&[8, 64], DType::F32, Device::Cpu, &mut random)?;
    let targets = Tensor::randint(10, &[8], DType::I64, Device::Cpu, &mut random)?;
    let first = 8 * world.rank() as u64;
    for number in 0..2 {
        both.wait();
        if number == 1 && world.rank() == 0 {
            *began.lock().unwrap() = Some(trace::start(&[], 1000)?);
        }
        both.wait();
        step.run(
            &Batch::new(number, 0, 16, first, x.clone(), targets.clone(), 8),
            1e-3,
        )?;
    }
    Ok(())
}

#[test]
fn buckets_of_upper_layers_are_reduced_while_the_lowest_still_computes() {
    quietly();
    let _turn = TURN.lock().unwrap();
    let mut takes = SLOW;
    loop {
        let timeline = timeline(true, takes);
        let mut upper = timeline.buckets[..2].iter().flatten();
        let are_done_before = upper.all(|(_, end)| *end < timeline.first_backward_end);
        if !are_done_before && takes < PATIENCE {
            takes = (4 * takes).min(PATIENCE);
            continue;
        }
        assert!(are_done_before, "{timeline:?}");
        let mut lowest = timeline.buckets[2].iter();
        let waits = lowest.all(|(started, _)| *started >= timeline.last_backward_end);
        assert!(
            waits,
            "the lowest layer's bucket waits for it: {timeline:?}"
        );
        return;
    }
}

#[test]
fn without_overlap_all_buckets_are_reduced_after_the_backward() {
    quietly();
    let _turn = TURN.lock().unwrap();
    let timeline = timeline(false, SLOW);
    let mut all = timeline.buckets.iter().flatten();
    let are_after = all.all(|(started, _)| *started >= timeline.last_backward_end);
    assert!(are_after, "{timeline:?}");
}
