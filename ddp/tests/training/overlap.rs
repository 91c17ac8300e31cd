//! A bucket is reduced while lower layers still compute, and not earlier: compares the reducer's
//! timeline with that of the layers.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::support::training::{on_ranks, quietly};
use ddp::Result;
use ddp::data::Batch;
use ddp::models::Model;
use ddp::nn::{CrossEntropy, CustomOp, Linear, Module, Scope, Sequential, Var};
use ddp::optim::{Optimizer, Rule};
use ddp::reducer::plan::BucketSizes;
use ddp::reducer::{BucketTime, ReducerOptions};
use ddp::step::{Step, StepOptions};
use ddp_comm::World;
use ddp_kernels::{DType, Device, Random, Tensor};

/// How long the lowest layer's backward takes. It sleeps, like a host whose device computes, so the
/// test does not depend on the number of cores.
const SLOW: Duration = Duration::from_millis(60);
/// On a busy machine a bucket may take longer than that: the longest that a test waits for it.
const PATIENCE: Duration = Duration::from_secs(60);

/// A linear layer whose backward takes long, and is remembered.
#[derive(Clone, Debug)]
struct Slow {
    inner: Linear,
    takes: Duration,
    backward: Arc<Mutex<Option<(Instant, Instant)>>>,
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
        let started = Instant::now();
        // Sleep: this backward takes time, of which no bucket above may need any.
        std::thread::sleep(self.takes);
        *self.backward.lock().unwrap() = Some((started, Instant::now()));
        Ok(dx[0].copy_from(dy)?)
    }
}

/// One step of Slow, Linear, Linear, one bucket each, on this rank: the timeline, and when the slow
/// backward ran, which takes `takes`.
fn timeline(
    world: &World,
    overlap: bool,
    takes: Duration,
) -> Result<(Vec<BucketTime>, [Instant; 2])> {
    let backward = Arc::new(Mutex::new(None));
    let slow = Slow {
        inner: Linear::new(64),
        takes,
        backward: backward.clone(),
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
    // Threads are started and memory is made in the first step: the second is looked at.
    for number in 0..2 {
        step.run(
            &Batch::new(number, 0, 16, first, x.clone(), targets.clone(), 8),
            1e-3,
        )?;
    }
    let (from, to) = backward.lock().unwrap().expect("it ran");
    Ok((step.stages()[0].reducer().timeline(), [from, to]))
}

#[test]
fn buckets_of_upper_layers_are_reduced_while_the_lowest_still_computes() {
    quietly();
    let mut takes = SLOW;
    let ranks = loop {
        let ranks = on_ranks(2, None, move |world| timeline(world, true, takes));
        let is_done_before = |(buckets, [_, to]): &(Vec<BucketTime>, [Instant; 2])| {
            buckets[..2].iter().all(|bucket| bucket.done < *to)
        };
        if ranks.iter().all(is_done_before) || takes >= PATIENCE {
            break ranks;
        }
        takes = (4 * takes).min(PATIENCE);
    };
    for (rank, (buckets, [from, to])) in ranks.into_iter().enumerate() {
        assert_eq!(buckets.len(), 3, "{buckets:?}");
        for bucket in &buckets[..2] {
            assert!(
                bucket.ready <= from,
                "rank {rank}: the layers above were through: {bucket:?}, {from:?}"
            );
            assert!(bucket.started >= bucket.ready, "rank {rank}: {bucket:?}");
            assert!(
                bucket.done < to,
                "rank {rank}: {bucket:?}, and the backward continued to {to:?}"
            );
        }
        assert!(
            buckets[2].ready >= to,
            "rank {rank}: the lowest layer's bucket waits for it"
        );
        assert!(buckets[2].done >= buckets[2].started && buckets[2].started >= buckets[2].ready);
    }
}

#[test]
fn without_overlap_all_buckets_are_reduced_after_the_backward() {
    quietly();
    for (buckets, [_, to]) in on_ranks(2, None, |world| timeline(world, false, SLOW)) {
        assert!(
            buckets.iter().all(|bucket| bucket.started >= to),
            "{buckets:?}, {to:?}"
        );
    }
}
