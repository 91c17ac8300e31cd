//! After a non-finite loss or gradient the model and the optimizer's moments stay unchanged on all
//! ranks, and the rank that has the bad rows reports it.

use crate::support::random::uniform;
use crate::support::training::{Case, bits, cpu, on_ranks, quietly};
use ddp::Result;
use ddp::data::{Batch, sampler};
use ddp::optim::Rule;
use ddp_comm::World;
use ddp_kernels::DType;

const STEPS: u64 = 6;

/// Which number spoils a target of which rank in which step (counted from 1).
#[derive(Clone, Copy, Debug)]
struct Spoiled {
    value: f32,
    rank: usize,
    step: u64,
}

/// What a rank saw: after each step the bits of values and moments, at the end the two flags.
type Seen = (Vec<Vec<u32>>, Option<u64>, Option<u64>);

fn run(world: &World, case: &Case, rows: u64, spoiled: &[Spoiled]) -> Result<Seen> {
    let mut step = case.step(world)?;
    let mine = sampler::share(&(0..rows), world.rank(), world.size());
    let count = (mine.end - mine.start) as usize;
    let mut after = Vec::new();
    for number in 1..=STEPS {
        let draw = |stream: u64, width: u64| -> Vec<f32> {
            let rows = mine.clone().map(|row| row + 1000 * number);
            rows.flat_map(|row| (0..width).map(move |at| uniform(stream, row * width + at)))
                .collect()
        };
        let (x, mut targets) = (draw(1, 6), draw(2, 4));
        for bad in spoiled
            .iter()
            .filter(|bad| bad.rank == world.rank() && bad.step == number)
        {
            targets[0] = bad.value;
        }
        let batch = Batch::new(
            number - 1,
            0,
            rows,
            mine.start,
            cpu(&x, &[count, 6]),
            cpu(&targets, &[count, 4]),
            2,
        );
        step.run(&batch, 0.01)?;
        let mut seen = bits(&step.stages()[0].model().params)?;
        for (_, moment) in step.stages()[0].optimizer().moments() {
            seen.extend(moment.to_vec::<f32>()?.iter().map(|value| value.to_bits()));
        }
        after.push(seen);
    }
    let report = step.report()?;
    Ok((after, report.bad_step, report.own_bad_step))
}

fn check(case: &Case, ranks: usize, rows: u64, spoiled: &[Spoiled]) {
    let first = spoiled.iter().map(|bad| bad.step).min().unwrap();
    let seen = on_ranks(ranks, Some(1), |world| run(world, case, rows, spoiled));
    for (rank, (after, bad_step, own)) in seen.iter().enumerate() {
        let what = format!("rank {rank} of {ranks}, {spoiled:?}");
        assert_eq!(*bad_step, Some(first), "{what}");
        let expected = spoiled
            .iter()
            .filter(|bad| bad.rank == rank)
            .map(|bad| bad.step)
            .min();
        assert_eq!(*own, expected, "{what}");
        assert_eq!(after, &seen[0].0, "{what}: replicas differ");
        for step in 1..STEPS {
            let stayed = after[step as usize] == after[step as usize - 1];
            assert_eq!(stayed, step + 1 >= first, "{what}: after step {}", step + 1);
        }
        let finite = after
            .iter()
            .flatten()
            .all(|&bits| f32::from_bits(bits).is_finite());
        assert!(finite, "{what}: something that is not finite was kept");
    }
}

fn case() -> Case {
    Case {
        rule: Rule::adamw(),
        ..Case::regression(64, uniform)
    }
}

#[test]
fn from_a_loss_that_is_no_number_on_nothing_changes_on_any_rank() {
    quietly();
    for value in [f32::NAN, f32::INFINITY, 3e38] {
        let bad = Spoiled {
            value,
            rank: 1,
            step: 3,
        };
        for (clip_norm, overlap, reduce_dtype, rule) in [
            (0.0, true, DType::F32, Rule::adamw()),
            (0.0, true, DType::F32, Rule::muon()),
            (0.0, false, DType::F32, Rule::adamw()),
            (0.5, true, DType::F32, Rule::adamw()),
            (0.5, true, DType::BF16, Rule::adamw()),
        ] {
            check(
                &Case {
                    clip_norm,
                    overlap,
                    reduce_dtype,
                    rule,
                    ..case()
                },
                3,
                9,
                &[bad],
            );
        }
    }
}

#[test]
fn the_first_bad_step_counts_whoever_is_bad_later() {
    quietly();
    let later = Spoiled {
        value: f32::NAN,
        rank: 0,
        step: 5,
    };
    check(
        &case(),
        3,
        9,
        &[
            Spoiled {
                value: f32::NAN,
                rank: 2,
                step: 3,
            },
            later,
        ],
    );
}

#[test]
fn ranks_without_rows_stop_with_the_others() {
    quietly();
    // Two rows for three ranks: the first has none.
    check(
        &case(),
        3,
        2,
        &[Spoiled {
            value: f32::NAN,
            rank: 2,
            step: 3,
        }],
    );
}

#[test]
fn a_gradient_that_overflows_under_a_finite_loss_is_kept_out_of_the_model() {
    quietly();
    // The loss is 1e36 or so, finite; a feature of 1e30 makes the weight's gradient infinite.
    let one = Case {
        hidden: vec![],
        ..case()
    };
    for clip_norm in [0.0, 1.0] {
        let case = Case {
            clip_norm,
            ..one.clone()
        };
        let seen = on_ranks(2, None, |world| {
            let mut step = case.step(world)?;
            let mut x = vec![0.5f32; 6];
            x[0] = if world.rank() == 1 { 1e30 } else { 0.5 };
            let far = [1e18f32, -1e18, 1e18, -1e18];
            // A weight of 0 on the large feature keeps the loss finite.
            let weight = step.stages()[0].model().params.find("0.weight")?.id;
            step.stages()[0]
                .model()
                .params
                .value(weight)
                .with_slice_mut(|w: &mut [f32]| w.fill(0.0))?;
            let before = bits(&step.stages()[0].model().params)?;
            let first = world.rank() as u64;
            let mut after = Vec::new();
            for number in 0..3 {
                let (x, far) = (cpu(&x, &[1, 6]), cpu(&far, &[1, 4]));
                step.run(&Batch::new(number, 0, 2, first, x, far, 1), 0.01)?;
                let report = step.report()?;
                assert_eq!((report.bad_step, report.own_bad_step), (Some(1), None));
                assert!(number > 0 || report.stats.loss().is_finite(), "{report:?}");
                after.push(bits(&step.stages()[0].model().params)?);
            }
            Ok((before, after))
        });
        for (before, after) in &seen {
            // The norm finds it before the update. Without, the update leaves out what is not
            // finite, and is the last.
            assert_eq!(
                after[0] == *before,
                clip_norm > 0.0,
                "clipping at {clip_norm}"
            );
            assert!(
                after[1] == after[0] && after[2] == after[0],
                "clipping at {clip_norm}"
            );
            let finite = |&bits: &u32| f32::from_bits(bits).is_finite();
            assert!(after[0].iter().all(finite), "clipping at {clip_norm}");
            assert_eq!(*after, seen[0].1, "replicas differ");
        }
    }
}
