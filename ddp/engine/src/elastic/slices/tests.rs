//! Slices that survive the loss of a rank.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use ddp_comm::World;
use ddp_data::sampler::Shards;
use ddp_kernels::DType;
use ddp_kernels::ops::Activation;
use ddp_nn::Mse;
use ddp_nn::models::{Mlp, Model};
use ddp_nn::optim::Rule;
use proptest::prelude::*;

use super::*;
use crate::reducer::plan::BucketSizes;
use crate::step::{StageSpec, StepOptions};

/// The most ranks of these tests.
const RANKS_MAX: usize = 5;

fn step_options() -> StepOptions {
    let reducer = ReducerOptions {
        sizes: Some(BucketSizes::of_bytes(20_000)),
        zero: 1,
        backup_distance: 1,
        ..ReducerOptions::default()
    };
    StepOptions {
        reducer,
        ..StepOptions::default()
    }
}

/// A small model whose slices survive the loss of a rank of `world`.
pub(crate) fn sliced(world: &World, rule: Rule) -> Step {
    let (options, group) = (step_options(), world.group("gradients").unwrap());
    let mlp = Mlp {
        hidden: vec![70, 60, 30],
        outputs: 4,
        activation: Activation::Relu,
        dropout: 0.0,
    };
    let shares = options.reducer.shares(RANKS_MAX);
    let layers = Box::new(mlp.layers());
    let frozen = |name: &str| name.starts_with("2.");
    let model = Model::with_shares(layers, &[6], DType::F32, Device::Cpu, 3, &frozen, shares);
    let model = model.unwrap();
    let slicing = options.reducer.slicing(0, [group.rank(), group.size()]);
    let ranges = options.reducer.ranges(&model.params, slicing);
    let [owned, kept] = &ranges;
    let optimizer = Optimizer::of_groups(rule, &[], &model.params, [owned, kept]).unwrap();
    let part = StageSpec {
        model,
        optimizer,
        group,
    };
    Step::of_agreeing(vec![part], Arc::new(Mse), &options).unwrap()
}

/// This rank's rows of the batch of step `step`, from 0.
pub(crate) fn batch(world: &World, step: u64) -> Batch {
    let (rank, ranks) = (world.rank() as u64, world.size() as u64);
    let numbers = |columns: usize, factor: f32| {
        let first = (rank + 7 * step) as f32;
        let numbers: Vec<f32> = (0..2 * columns)
            .map(|at| (first + factor * at as f32).sin())
            .collect();
        Tensor::from_slice(&numbers, &[2, columns], Device::Cpu).unwrap()
    };
    Batch::new(
        step,
        0,
        2 * ranks,
        2 * rank,
        numbers(6, 0.7),
        numbers(4, 1.3),
        2,
    )
    .in_shards(Shards::of_rank(world.size(), world.rank(), world.size()))
}

impl Slices {
    /// As `take_step`, up to where this rank waits for the others.
    pub(crate) fn prepare(&mut self, step: &mut Step, batch: &Batch) {
        step.prepare(batch, 0.1).unwrap();
        self.rows = batch.rows;
        self.state.make_ready(NextVersion::Update);
    }
}

/// Slices of a new run.
pub(crate) fn begun(step: &mut Step, generation: u64) -> Slices {
    let mut slices = Slices::of(step).unwrap();
    slices.make_ready(step, generation, Vec::new());
    slices.advance(step).unwrap();
    slices
}

/// Values of what this rank has, then moments.
pub(crate) fn numbers(step: &Step, slices: &Slices) -> Vec<Vec<f32>> {
    let stage = &step.stages()[0];
    let values = stage.model().params.trained_values();
    let ranges = ranges(step, slices).into_iter();
    let values = ranges.map(|range| values.slice(range).unwrap());
    let moments = stage
        .optimizer()
        .all_moments()
        .map(|(_, moment)| moment.clone());
    let all = values.chain(moments);
    all.map(|tensor| tensor.to_vec().unwrap()).collect()
}

/// The elements that this rank has.
fn ranges(step: &Step, slices: &Slices) -> Vec<Range<usize>> {
    let slicing = slices.state.slicing().unwrap();
    options(step)
        .ranges(&step.stages()[0].model().params, slicing)
        .concat()
}

/// The value of an element, and its moments.
fn value(element: usize) -> f32 {
    0.5 + element as f32
}

fn moment(element: usize, which: usize) -> f32 {
    0.25 - element as f32 + 100_000.0 * which as f32
}

/// The trained elements of ranges, without padding.
fn trained(step: &Step, ranges: &[Range<usize>]) -> Vec<Range<usize>> {
    let params = step.stages()[0].model().params.list().iter();
    let trained: Vec<_> = params.filter(|p| p.is_trained()).collect();
    let part = |of: &Range<usize>, p: &Range<usize>| of.start.max(p.start)..of.end.min(p.end);
    let parts = ranges
        .iter()
        .flat_map(|range| trained.iter().map(move |p| part(range, &p.range)));
    parts.filter(|part| !part.is_empty()).collect()
}

/// Fills what this rank has with numbers that follow from the element, and all else with -1.
fn fill(step: &Step, slices: &Slices) {
    let stage = &step.stages()[0];
    let params = &stage.model().params;
    for tensor in stage.optimizer().all_moments().map(|(_, moment)| moment) {
        ops::fill_into(tensor, -1.0).unwrap();
    }
    ops::fill_into(params.trained_values(), -1.0).unwrap();
    for part in trained(step, &ranges(step, slices)) {
        let numbers: Vec<f32> = part.clone().map(value).collect();
        let of = |numbers: &[f32]| Tensor::from_slice(numbers, &[part.len()], Device::Cpu).unwrap();
        let values = params.trained_values().slice(part.clone()).unwrap();
        values.copy_from(&of(&numbers)).unwrap();
        let moments = stage.optimizer().moments_of(params, &part).unwrap();
        for (which, tensor) in moments.iter().enumerate() {
            let numbers: Vec<f32> = part.clone().map(|it| moment(it, which)).collect();
            tensor.copy_from(&of(&numbers)).unwrap();
        }
    }
}

fn check(step: &Step, slices: &Slices) {
    let stage = &step.stages()[0];
    let params = &stage.model().params;
    let values = params.trained_values().to_vec::<f32>().unwrap();
    for part in trained(step, std::slice::from_ref(&(0..values.len()))) {
        for element in part {
            assert_eq!(values[element], value(element), "element {element}");
        }
    }
    for part in trained(step, &ranges(step, slices)) {
        let moments = stage.optimizer().moments_of(params, &part).unwrap();
        assert!(!moments.is_empty());
        for (which, tensor) in moments.iter().enumerate() {
            let numbers = tensor.to_vec::<f32>().unwrap();
            let expected: Vec<f32> = part.clone().map(|it| moment(it, which)).collect();
            assert_eq!(numbers, expected, "moment {which} of {part:?}");
        }
    }
}

/// `ranks` ranks lose some, and others join them. Each then has its new slices.
fn divide_anew(rule: Rule, ranks: usize, lost: &[usize], joined: usize) {
    let timeout = Duration::from_secs(60);
    let left: Vec<usize> = (0..ranks).filter(|rank| !lost.contains(rank)).collect();
    let size = left.len() + joined;
    let mut now: Vec<_> = World::threads(size, Some(1), timeout).unwrap();
    let mut before: Vec<_> = World::threads(ranks, Some(2), timeout)
        .unwrap()
        .into_iter()
        .map(Some)
        .collect();
    let run = |before: Option<World>, now: Option<World>| {
        let mut held = None;
        let run = before.map(|before| {
            let mut step = sliced(&before, rule);
            let slices = begun(&mut step, 1);
            fill(&step, &slices);
            held = slices.state.slicing();
            (step, slices)
        });
        let Some(now) = now else {
            return;
        };
        let (mut step, mut slices) = run.map_or_else(
            || (sliced(&now, rule), Slices::default()),
            |(mut step, slices)| {
                let group = now.group("gradients").unwrap();
                step.regroup(vec![group], &step_options()).unwrap();
                (step, slices)
            },
        );
        let main = now.group("main").unwrap();
        let slicings = crate::exchange::gather(&now, &held).unwrap();
        assert!(Slicing::are_whole(&slicings));
        let optimizers = slice_anew(&mut step, &main, &slicings).unwrap();
        slices.make_ready(&step, 2, optimizers);
        assert_eq!(slices.state.slicing(), held, "not before all have theirs");
        slices.advance(&mut step).unwrap();
        check(&step, &slices);
    };
    std::thread::scope(|scope| {
        for world in now.drain(left.len()..) {
            scope.spawn(|| run(None, Some(world)));
        }
        for (rank, now) in left.iter().zip(now) {
            let before = before[*rank].take();
            scope.spawn(|| run(before, Some(now)));
        }
        for before in before {
            scope.spawn(|| run(before, None));
        }
    });
}

#[test]
fn slices_are_divided_anew_for_any_number_of_ranks() {
    for rule in [Rule::adamw(), Rule::sgd(0.9), Rule::muon()] {
        for (ranks, lost, joined) in [
            (2, &[1][..], 0),
            (1, &[], 1),
            (1, &[], 4),
            (3, &[0], 0),
            (3, &[], 0),
            (5, &[1, 3], 0),
            (4, &[0, 2], 3),
            (5, &[4], 1),
        ] {
            divide_anew(rule, ranks, lost, joined);
        }
    }
}

#[test]
fn a_step_that_is_prepared_is_completed_without_the_others_or_taken_again() {
    for rule in [Rule::adamw(), Rule::sgd(0.9), Rule::muon()] {
        let worlds = World::threads(3, Some(3), Duration::from_secs(60)).unwrap();
        let run = |world: World| {
            let mut step = sliced(&world, rule);
            let mut slices = begun(&mut step, 1);
            let main = world.group("main").unwrap();
            let take = |step: &mut Step, slices: &mut Slices, number| {
                slices.take_step(step, &batch(&world, number), 0.1, &main)
            };
            take(&mut step, &mut slices, 0).unwrap();
            let before = numbers(&step, &slices);

            // No rank has made the update.
            let second = batch(&world, 1);
            slices.prepare(&mut step, &second);
            assert_eq!(slices.versions(1)[1].map(|it| it.steps), Some(2));
            slices.go_back(&step).unwrap();
            assert!(slices.versions(1)[1].is_none() && numbers(&step, &slices) == before);
            // Nothing is undone that has not begun.
            slices.go_back(&step).unwrap();
            assert!(numbers(&step, &slices) == before);

            // Another one has.
            slices.prepare(&mut step, &second);
            assert_eq!(slices.advance(&mut step).unwrap(), Some(6));
            let after = numbers(&step, &slices);
            assert!(after != before);
            slices.go_back(&step).unwrap();
            assert!(numbers(&step, &slices) == after);

            // The same bits without a disturbance.
            let mut other = sliced(&world, rule);
            let mut others = begun(&mut other, 1);
            for number in [0, 1] {
                take(&mut other, &mut others, number).unwrap();
            }
            assert!(numbers(&other, &others) == after);

            // A GPU that has not decided the step has not prepared it.
            for (decided, is_ready) in [(2, false), (3, true)] {
                slices.prepare(&mut step, &second);
                slices.check_prepared(2, decided);
                assert_eq!(slices.versions(2)[1].is_some(), is_ready);
                slices.go_back(&step).unwrap();
            }

            // Owner and backup have the same: all that a rank has is what it gets from the others.
            let own = numbers(&step, &slices);
            let slicings = crate::exchange::gather(&world, &slices.state.slicing()).unwrap();
            for rank in 0..3 {
                let mut held = slicings.clone();
                held[rank] = None;
                let optimizers = slice_anew(&mut step, &main, &held).unwrap();
                slices.make_ready(&step, 1, optimizers);
                slices.advance(&mut step).unwrap();
                assert!(numbers(&step, &slices) == own, "rank {rank}");
            }
        };
        std::thread::scope(|scope| {
            worlds
                .into_iter()
                .for_each(|it| _ = scope.spawn(|| run(it)))
        });
    }
}

proptest! {
    #[test]
    fn each_element_is_moved_once_from_a_rank_that_has_it(
        held in prop::collection::vec(prop::collection::vec((0usize..40, 1usize..9), 0..5), 1..5),
        wanted in prop::collection::vec(prop::collection::vec((0usize..40, 1usize..9), 0..5), 1..5),
    ) {
        let ranges = |all: Vec<Vec<(usize, usize)>>| -> Vec<Vec<Range<usize>>> {
            let of = |(start, length)| start..start + length;
            all.into_iter().map(|one| one.into_iter().map(of).collect()).collect()
        };
        let (held, wanted) = (ranges(held), ranges(wanted));
        let has = |ranges: &[Range<usize>], at| ranges.iter().any(|range| range.contains(&at));
        let moves = moves(&held, &wanted);
        for (to, ranges) in wanted.iter().enumerate() {
            for at in 0..50 {
                let to_it = moves.iter().filter(|it| it.to == to && it.range.contains(&at));
                let from: Vec<usize> = to_it.map(|it| it.from).collect();
                let is_held = held.iter().any(|ranges| has(ranges, at));
                prop_assert_eq!(from.len(), usize::from(has(ranges, at) && is_held));
                for from in from {
                    prop_assert!(has(&held[from], at));
                    let itself = held.get(to).is_some_and(|ranges| has(ranges, at));
                    prop_assert!(!itself || from == to);
                }
            }
        }
        for it in moves {
            let within = |ranges: &[Range<usize>]| {
                ranges.iter().any(|of| of.start <= it.range.start && it.range.end <= of.end)
            };
            prop_assert!(within(&held[it.from]) && within(&wanted[it.to]));
        }
    }
}
