use std::time::Duration;

use ddp_kernels::DType;
use ddp_kernels::ops::{self, Activation};
use ddp_nn::Mse;
use ddp_nn::models::{Mlp, Model};
use ddp_nn::optim::Rule;

use super::*;
use crate::elastic::slices::tests::{batch, numbers, sliced};
use crate::step::Stage;

fn plan(progress: &[Option<RankProgress>]) -> Regroup {
    let of = |progress: &Option<RankProgress>| RankReport {
        progress: *progress,
        ..RankReport::default()
    };
    Regroup::of(&progress.iter().map(of).collect::<Vec<_>>())
}

/// A run after `step` steps, with values and moments of which all elements are `number`.
fn run_after(world: &World, step: u64, number: f64) -> RankRun {
    let model = Mlp {
        hidden: vec![5],
        outputs: 4,
        activation: Activation::Relu,
        dropout: 0.0,
    };
    let layers = Box::new(model.layers());
    let model = Model::new(layers, &[6], DType::F32, Device::Cpu, 3, &|_| false).unwrap();
    let built = Step::builder(model, Mse, Rule::adamw())
        .build(world)
        .unwrap();
    let mut rank_run = RankRun::new(built, None, true);
    for tensor in state(&rank_run) {
        ops::fill_into(&tensor, number).unwrap();
    }
    rank_run.totals.steps = step;
    rank_run.totals.samples = 10 * step;
    rank_run.totals.saved = step;
    rank_run.totals.line = (step, format!("line {step}"));
    rank_run
}

fn state(run: &RankRun) -> Vec<Tensor> {
    let stages = run.step.stages().iter();
    let of_stage = |stage: &Stage| {
        let moments = stage
            .optimizer()
            .moments()
            .map(|(_, moment)| moment.clone());
        moments
            .chain([stage.model().params.values().clone()])
            .collect::<Vec<_>>()
    };
    stages.flat_map(of_stage).collect()
}

#[test]
fn ranks_that_are_behind_or_new_get_the_state_of_the_one_that_is_furthest() {
    // Rank 3 is new; then two are, and no other is behind.
    for steps in [[6, 7, 7, 0], [7, 7, 0, 0]] {
        get_the_state(steps);
    }
}

fn get_the_state(steps: [u64; 4]) {
    let worlds = World::threads(4, Some(5), Duration::from_secs(60)).unwrap();
    let at = |step| RankProgress {
        steps: step,
        saved: step,
        ..RankProgress::default()
    };
    let progress = |step: u64| (step > 0).then(|| at(step));
    let plan = plan(&steps.map(progress));
    let run = |world: World| {
        let step = steps[world.rank()];
        let mut rank_run = run_after(&world, step, step as f64);
        let group = world.group("main").unwrap();
        rank_run.share_progress(&world, &group, &plan).unwrap();
        rank_run.give_state(&group).unwrap();
        for tensor in state(&rank_run) {
            assert_eq!(tensor.to_vec::<f32>().unwrap(), vec![7.0; tensor.count()]);
        }
        assert_eq!(rank_run.report().progress, Some(at(7)));
        let totals = &rank_run.totals;
        assert_eq!((totals.samples, &*totals.line.1), (70, "line 7"));
    };
    std::thread::scope(|scope| {
        worlds
            .into_iter()
            .for_each(|world| _ = scope.spawn(|| run(world)));
    });
}

#[test]
fn a_rank_counts_an_update_that_it_makes_without_the_others() {
    let worlds = World::threads(2, Some(4), Duration::from_secs(60)).unwrap();
    let run = |world: World| {
        let mut rank_run = RankRun::new(sliced(&world, Rule::muon()), None, true);
        rank_run.make_ready(&world, Vec::new());
        // Not before all ranks have their slices, or one knows that they do.
        assert!(rank_run.report().has.is_none() && rank_run.report().ready.is_some());
        rank_run.advance().unwrap();
        let main = world.group("main").unwrap();
        rank_run.take_step(&batch(&world, 0), 0.1, &main).unwrap();
        assert_eq!((rank_run.totals.steps, rank_run.totals.samples), (1, 4));
        let has = |run: &RankRun| numbers(&run.step, run.slices.as_ref().unwrap());
        let before = has(&rank_run);

        let prepare = |run: &mut RankRun| {
            let slices = run.slices.as_mut().unwrap();
            slices.prepare(&mut run.step, &batch(&world, 1));
        };
        // No rank has made the update.
        prepare(&mut rank_run);
        rank_run.stay().unwrap();
        assert!(has(&rank_run) == before && rank_run.totals.steps == 1);
        // Another one has.
        prepare(&mut rank_run);
        assert_eq!(rank_run.report().ready.map(|it| it.steps), Some(2));
        rank_run.advance().unwrap();
        assert!(has(&rank_run) != before);
        assert_eq!((rank_run.totals.steps, rank_run.totals.samples), (2, 8));
        assert!(rank_run.report().ready.is_none());
    };
    std::thread::scope(|scope| {
        worlds
            .into_iter()
            .for_each(|it| _ = scope.spawn(|| run(it)))
    });
}
