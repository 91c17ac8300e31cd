//! A bucket is reduced while lower layers still compute: compares the trace of its reductions with
//! when the layers computed. A process records one trace at a time: this is a program of its own.

mod support;

use std::sync::{Arc, Barrier, Mutex};
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

/// A linear layer whose backward takes long, and whose end is remembered.
#[derive(Clone, Debug)]
struct Slow {
    inner: Linear,
    takes: Duration,
    backward_end: Arc<Mutex<Option<Instant>>>,
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
        *self.backward_end.lock().unwrap() = Some(Instant::now());
        Ok(dx[0].copy_from(dy)?)
    }
}

/// When something began and ended.
type Times = (Instant, Instant);

/// Of a step of both ranks: by bucket when their reductions ran, and when their slow backwards
/// ended. Sorted: which rank a reduction is of is not recorded.
struct Timeline {
    buckets: Vec<Vec<Times>>,
    backward_ends: Vec<Instant>,
}

/// One test at a time records a trace.
static TURN: Mutex<()> = Mutex::new(());

/// A step of Slow, Linear, Linear, one bucket each, on two ranks. The slow backward takes `takes`.
fn timeline(overlap: bool, takes: Duration) -> Timeline {
    let both = Barrier::new(2);
    let began = Mutex::new(None);
    let run = |world: &World| step_twice(world, overlap, takes, &both, &began);
    let mut backward_ends = on_ranks(2, None, run);
    let recorded = trace::stop().unwrap();
    assert_eq!(recorded.missed, 0);
    let began = began.into_inner().unwrap().expect("a trace was begun");
    let of_bucket = |bucket: usize| {
        let of_it = recorded
            .spans
            .iter()
            .filter(|span| span.label.lane == Lane::Reductions && span.label.index == Some(bucket));
        let mut times: Vec<Times> = of_it
            .map(|span| (began + span.begin, began + span.end))
            .collect();
        assert_eq!(times.len(), 2, "one a rank");
        times.sort();
        times
    };
    backward_ends.sort();
    Timeline {
        buckets: (0..3).map(of_bucket).collect(),
        backward_ends,
    }
}

/// Two steps on this rank, of which the trace has the second: threads are started and memory is
/// made in the first. When the slow backward of the second one ended.
fn step_twice(
    world: &World,
    overlap: bool,
    takes: Duration,
    both: &Barrier,
    began: &Mutex<Option<Instant>>,
) -> Result<Instant> {
    let backward_end = Arc::new(Mutex::new(None));
    let slow = Slow {
        inner: Linear::new(64),
        takes,
        backward_end: backward_end.clone(),
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
    Ok(backward_end.lock().unwrap().expect("it ran"))
}

#[test]
fn buckets_of_upper_layers_are_reduced_while_the_lowest_still_computes() {
    quietly();
    let _turn = TURN.lock().unwrap();
    let mut takes = SLOW;
    loop {
        let Timeline {
            buckets,
            backward_ends,
        } = timeline(true, takes);
        let mut upper = buckets[..2].iter().flatten();
        let are_done_before = upper.all(|(_, end)| *end < backward_ends[0]);
        if !are_done_before && takes < PATIENCE {
            takes = (4 * takes).min(PATIENCE);
            continue;
        }
        assert!(are_done_before, "{buckets:?}, {backward_ends:?}");
        for ((started, _), end) in buckets[2].iter().zip(&backward_ends) {
            assert!(started >= end, "the lowest layer's bucket waits for it");
        }
        return;
    }
}

#[test]
fn without_overlap_all_buckets_are_reduced_after_the_backward() {
    quietly();
    let _turn = TURN.lock().unwrap();
    let Timeline {
        buckets,
        backward_ends,
    } = timeline(false, SLOW);
    for bucket in &buckets {
        for ((started, _), end) in bucket.iter().zip(&backward_ends) {
            assert!(started >= end, "{buckets:?}, {backward_ends:?}");
        }
    }
}
